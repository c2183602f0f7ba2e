"""Sums over GPUs that reach each other's memory, inside a kernel.

Each device writes its numbers into the mailboxes of the others, and waits until theirs are in its own. What is sent
travels with the turn's number in one word of 64 bits, so that whoever sees the one sees the other, and nothing else has
to be awaited: the protocol of NCCL for small messages ("LL"). A turn uses the half of the mailbox that the turn before
did not: no device begins a turn before it has what the others sent in the last one, which they did after they had read
what was sent in the one before it. (Launches of one device must not overlap for that, and every turn must have a word
for each device.) Sums have the same bits on all devices.

Where a mailbox has the address 0, nothing is sent and nothing awaited: the first run of a program is a dry one, since
what the driver loads into one GPU may have to wait for another, and that one must not wait for the first.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Int32

from kernels_pallas.warpgroup import Ref

MAX_PEERS = 8

WORDS = 2 + 2 * MAX_PEERS
"""Of what a kernel is told (`links`): its device, the number of the first turn, where the mailboxes are."""

LINE = 8
"""Bytes of a word in a mailbox."""

PATIENCE = 60 * 10**9
"""Nanoseconds that a thread waits for a word before it gives its device, and with it the process, up."""

SCALAR = plgpu.Layout.WG_SPLAT()

SEND = """{
    .reg .pred there;
    .reg .b64 line;
    setp.ne.s64 there, $3, 0;
    mov.b64 line, {$1, $2};
    @there st.relaxed.sys.global.b64 [$0], line;
}"""

LOOK = """{
    .reg .pred there;
    .reg .b64 line;
    mov.b64 line, 0;
    setp.ne.s64 there, $3, 0;
    @there ld.relaxed.sys.global.b64 line, [$2];
    mov.b64 {$0, $1}, line;
}"""
"""A word as it is: its number, and its turn."""

WAIT = """{{
    .reg .pred early, late, dry;
    .reg .b64 line, begun, now;
    .reg .b32 number, turn;
    mov.b32 number, $1;
    setp.eq.s32 early, $2, $4;
    @early bra DONE;
    setp.eq.s64 dry, $5, 0;
    @dry bra DONE;
    mov.u64 begun, %globaltimer;
AGAIN:
    ld.relaxed.sys.global.b64 line, [$3];
    mov.b64 {{number, turn}}, line;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begun;
    setp.gt.u64 late, now, {patience};
    @late trap;
    setp.ne.s32 early, turn, $4;
    @early bra AGAIN;
DONE:
    mov.b32 $0, number;
}}"""
"""The number of a word once it has its turn, from what was seen of it before."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turn:
    """The next turn, or the first of several, for a kernel.

    Attributes:
        links: as `links_of`.
        number: of the turn, counted from the first of `links`; turns follow each other without a gap.
        peers: devices.
        lines: words of the longest message of any turn, the same in all kernels that use the mailboxes.
    """

    links: Int32[jax.Array, "words"]
    number: Int32[jax.Array, ""]
    peers: int = dataclasses.field(metadata={"static": True})
    lines: int = dataclasses.field(metadata={"static": True})

    @property
    def operands(self) -> list[jax.Array]:
        """For `Exchange` in the kernel."""
        return [self.links, self.number[None]]

    def check(self, lines: int) -> None:
        """ValueError if a message of so many words does not fit."""
        if lines > self.lines:
            raise ValueError(f"a message has {lines} words; the mailboxes are for {self.lines}. Make lines larger.")


def mailbox_bytes(peers: int, lines: int) -> int:
    """Bytes of a device's mailbox for messages of up to `lines` words: two turns of every device."""
    return 2 * peers * lines * LINE


def links_of(rank: jax.Array, first_turn: jax.Array, addresses: jax.Array) -> Int32[jax.Array, "words"]:
    """What kernels are told.

    Args:
        rank: of the device among its peers.
        first_turn: number of the first of the turns that are counted from here.
        addresses: int32 `[2 * MAX_PEERS]`, of the mailboxes by rank: the lower and the upper half of each.
    """
    return jnp.concatenate([jnp.stack([rank, first_turn]).astype(jnp.int32), addresses])


def halves_of(addresses: list[int]) -> Int32[np.ndarray, "halves"]:
    """`addresses` of `links_of`; of peers that there are not, 0.

    Raises:
        ValueError: if there are more than `MAX_PEERS`.
    """
    if len(addresses) > MAX_PEERS:
        raise ValueError(f"there are {len(addresses)} mailboxes; kernels know up to {MAX_PEERS}. Use fewer devices.")
    padded = np.asarray([*addresses, *[0] * (MAX_PEERS - len(addresses))], np.uint64)
    return padded.view(np.int32)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """In a kernel: numbers of the same places on all devices, each of which runs the same kernel.

    The thread blocks of a device wait for those of the same index on the others: where there are more than run at the
    same time, they must start in the order of their indices, as they do.

    Attributes:
        links: as of `Turn`, in device memory.
        number: of the kernel's first turn.
        peers: as of `Turn`.
        lines: as of `Turn`.
        layout: of the numbers in registers.
        narrow: whether they are sent as bfloat16, two in a word. Registers hold four neighbours each then.
    """

    links: Ref
    number: Ref
    peers: int
    lines: int
    layout: Any
    narrow: bool = False

    def send(self, value: jax.Array, place: jax.Array, turn: int = 0) -> None:
        """Send float32 `value` to all, the number at int32 `place` of the message each, in a turn of the kernel's."""

        @plgpu.inline_mgpu(arg_types=(self.layout, self.layout, *self._scalar_types))
        def emit(_: object, value: FragmentedArray, place: FragmentedArray, *scalars: FragmentedArray) -> None:
            where = _Addresses(self, scalars)
            for index, register in np.ndenumerate(value.registers):
                line = self._line(place.registers[index])
                for nth, word in enumerate(self._words(register)):
                    for base in where.sent_to:
                        told = (_at(base, line, nth), word, where.turn, where.first)
                        utils.inline_ptx(SEND, *told, has_side_effects=True)

        emit(value, place, *self._scalars(turn))

    def receive(self, value: jax.Array, place: jax.Array, turn: int = 0) -> jax.Array:
        """The sum over all devices, once they have sent; `value` and the rest as for `send`."""

        @plgpu.inline_mgpu(
            arg_types=(self.layout, self.layout, *self._scalar_types),
            return_type=plgpu.ShapeDtypeStruct(value.shape, jnp.float32, layout=self.layout),
        )
        def emit(
            _: object, value: FragmentedArray, place: FragmentedArray, *scalars: FragmentedArray
        ) -> FragmentedArray:
            where, i32 = _Addresses(self, scalars), ir.IntegerType.get_signless(32)
            look = functools.partial(utils.inline_ptx, LOOK, result_types=(i32, i32), has_side_effects=True)
            text = WAIT.format(patience=PATIENCE)
            wait = functools.partial(utils.inline_ptx, text, result_types=i32, has_side_effects=True)
            own = {index: self._words(register) for index, register in np.ndenumerate(value.registers)}
            seen = {}  # All are looked at before one is waited for: they may be there, and each look takes its time.
            for index, words in own.items():
                line = self._line(place.registers[index])
                for base, nth in itertools.product(where.read_at, range(len(words))):
                    address = _at(base, line, nth)
                    seen[index, base, nth] = *look(address, where.first), address
            sums = np.empty_like(value.registers)
            for index, words in own.items():
                register_type = value.registers[index].type
                terms = [self._numbers(words, register_type)] if self.peers == 2 else []
                for base in where.read_at:
                    found = [wait(*seen[index, base, nth], where.turn, where.first) for nth in range(len(words))]
                    terms.append(self._numbers(found, register_type))
                sums[index] = functools.reduce(arith.addf, terms)
            return FragmentedArray(_registers=sums, _layout=value.layout, _is_signed=None)

        return emit(value, place, *self._scalars(turn))

    def sum(self, value: jax.Array, place: jax.Array, turn: int = 0) -> jax.Array:
        """Both."""
        self.send(value, place, turn)
        return self.receive(value, place, turn)

    @property
    def _scalar_types(self) -> list[Any]:
        return [SCALAR] * (2 + 2 * self.peers)

    def _scalars(self, turn: int) -> list[jax.Array]:
        rank, first = self.links[0], self.links[1]
        return [rank, first + self.number[0] + turn, *(self.links[2 + half] for half in range(2 * self.peers))]

    def _line(self, place: ir.Value) -> ir.Value:
        """The word that a register's first number is in."""
        first = vector.extract(place, [], [0])
        return arith.shrui(first, utils.c(1, first.type)) if self.narrow else first

    def _words(self, register: ir.Value) -> list[ir.Value]:
        i32 = ir.IntegerType.get_signless(32)
        if not self.narrow:
            return [utils.bitcast(vector.extract(register, [], [0]), i32)]
        narrow = arith.truncf(ir.VectorType.get((4,), ir.BF16Type.get()), register)
        both = vector.bitcast(ir.VectorType.get((2,), i32), narrow)
        return [vector.extract(both, [], [nth]) for nth in range(2)]

    def _numbers(self, words: list[ir.Value], register_type: ir.Type) -> ir.Value:
        if not self.narrow:
            return vector.broadcast(register_type, utils.bitcast(words[0], ir.F32Type.get()))
        both = vector.from_elements(ir.VectorType.get((2,), words[0].type), words)
        return arith.extf(register_type, vector.bitcast(ir.VectorType.get((4,), ir.BF16Type.get()), both))


class _Addresses:
    """Where a device's words of a turn go, and where those of the others come; with two, no device sends to itself.

    `first` is the address of the first mailbox, 0 in a dry run.
    """

    def __init__(self, exchange: Exchange, scalars: tuple[FragmentedArray, ...]):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        rank, self.turn, *halves = (scalar.registers.item() for scalar in scalars)
        peers = exchange.peers

        def wide(x: ir.Value) -> ir.Value:
            return arith.extui(i64, x)

        def chosen(which: ir.Value) -> ir.Value:
            found = mailboxes[0]
            for peer in range(1, peers):
                found = arith.select(
                    arith.cmpi(arith.CmpIPredicate.eq, which, utils.c(peer, i32)), mailboxes[peer], found
                )
            return found

        def behind(mailbox: ir.Value, sender: ir.Value) -> ir.Value:
            """Where the words of a sender begin."""
            side = arith.andi(self.turn, utils.c(1, i32))
            index = arith.addi(arith.muli(side, utils.c(peers, i32)), sender)
            return arith.addi(mailbox, arith.muli(wide(index), utils.c(exchange.lines * LINE, i64)))

        mailboxes = [
            arith.ori(wide(low), arith.shli(wide(high), utils.c(32, i64)))
            for low, high in zip(halves[::2], halves[1::2], strict=True)
        ]
        self.first = mailboxes[0]
        partners = [utils.c(peer, i32) for peer in range(peers)]
        if peers == 2:
            partners = [arith.subi(utils.c(1, i32), rank)]
        self.sent_to = [behind(chosen(partner), rank) for partner in partners]
        self.read_at = [behind(chosen(rank), partner) for partner in partners]


def _at(base: ir.Value, line: ir.Value, nth: int) -> ir.Value:
    """The address of the nth word behind a line."""
    i64 = ir.IntegerType.get_signless(64)
    offset = arith.muli(arith.extui(i64, line), utils.c(LINE, i64))
    return arith.addi(arith.addi(base, offset), utils.c(nth * LINE, i64))
