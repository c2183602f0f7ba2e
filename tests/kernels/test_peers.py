"""Sums over devices inside kernels, on GPUs; and what a CPU can tell of them: addresses, and what is lowered."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernels.attention_cases import relative_error

from jaxllm.parallel.mailboxes import Mailboxes
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.placement import Placement
from kernels_pallas.interlayer import WeightsBefore, WeightsBehind, interlayer, interlayer_reference
from kernels_pallas.peers import MAX_PEERS, Exchange, Turn, halves_of, links_of, mailbox_bytes
from kernels_pallas.small_batch import project_residual

FEATURES, OUT, TURNS = 1024, 768, 50
LINES = 32 * OUT


def chained(mesh):
    """`TURNS` layers of one weight, each adding a projection divided among the devices to what it is given."""

    def local(x, weights, residual, norm, told):
        links = links_of(jax.lax.axis_index("tensor"), told[0], told[1:])
        peers = jax.lax.axis_size("tensor")

        def layer(turn, state):
            weight = weights[turn % weights.shape[0]]
            y, source = project_residual(x, weight, state[0], norm, turn=Turn(links, turn, peers, LINES))
            return y, source.scaled, source.sum_squares

        y, source = project_residual(x, weights[0], residual, norm, turn=Turn(links, jnp.int32(0), peers, LINES))
        state = jax.lax.fori_loop(1, TURNS, layer, (y, source.scaled, source.sum_squares))
        return jax.tree.map(lambda part: part[None], state)  # of each device

    divided = P(None, "tensor")
    specs = (divided, P(None, None, "tensor"), P(), P(), P())
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("tensor"), check_vma=False))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 16, 32])
def test_devices_add_up_as_float64_does(tokens):
    devices = min(jax.device_count(), 2)  # one writes into its own mailbox
    placement = Placement.of(make_mesh(devices))
    mailboxes, run = Mailboxes(placement, LINES), chained(placement.mesh)
    rng = np.random.default_rng(tokens)

    def draw(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.bfloat16)

    x, norm, residual = draw(tokens, FEATURES), draw(OUT), draw(tokens, OUT)
    weights = draw(4, OUT, FEATURES, scale=FEATURES**-0.5)
    runs = [run(x, weights, residual, norm, mailboxes.take(TURNS)) for _ in range(20)]
    first = jax.tree.map(np.asarray, runs[0])
    for again in runs[1:]:  # whoever comes first: equal bits
        jax.tree.map(np.testing.assert_array_equal, first, jax.tree.map(np.asarray, again))
    for part in first:
        np.testing.assert_array_equal(part[0], part[-1])
    wide = [np.asarray(value.astype(jnp.float32), np.float64) for value in (x, weights, residual)]
    want = wide[2]
    for turn in range(TURNS):
        want = want + wide[0] @ wide[1][turn % 4].T
    assert relative_error(first[0][0].astype(np.float64), want) < 1.5e-2  # rounded to bfloat16 at each turn


@pytest.mark.gpu
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize(("peers", "rank"), [(2, 0), (2, 1), (8, 5)])
def test_a_device_finds_what_others_have_sent_and_sends_its_own(peers, rank, narrow):
    """On one GPU: arrays stand for the mailboxes, and NumPy for the other devices."""
    size, turn, lines = 512, 7, 1024
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=4 if narrow else 1)
    rng = np.random.default_rng(peers)
    numbers = rng.integers(-99, 100, (peers, size)).astype(np.float32)  # as bfloat16, too, they are exact
    words = numbers.astype(ml_dtypes.bfloat16).view(np.uint32) if narrow else numbers.view(np.uint32)
    boxes = np.zeros((peers, 2, peers, lines, 2), np.uint32)  # of each device: half, sender, word; number and turn
    for sender in range(peers):
        if sender != rank:
            boxes[rank, turn % 2, sender, : words.shape[1]] = np.stack(
                [words[sender], np.full_like(words[0], turn)], -1
            )
    mailboxes = [jax.device_put(box) for box in boxes]
    addresses = halves_of([box.unsafe_buffer_pointer() for box in mailboxes])

    def kernel(x_ref, links_ref, number_ref, out_ref):
        exchange = Exchange(links_ref, number_ref, peers, lines, layout, narrow)
        value = plgpu.load(x_ref, layout=layout, optimized=False)
        out_ref[...] = exchange.sum(value, plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout))

    @jax.jit
    def run(x, addresses):
        links = links_of(jnp.int32(rank), jnp.int32(turn - 3), addresses)
        return plgpu.kernel(
            kernel, out_type=jax.ShapeDtypeStruct((size,), jnp.float32), grid=(1,), grid_names=("block",),
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True), kernel_name="exchange",
        )(x, links, jnp.full(1, 3, jnp.int32))  # fmt: skip

    np.testing.assert_array_equal(run(numbers[rank], addresses), numbers.sum(axis=0))
    for device, box in enumerate(np.asarray(jnp.stack(mailboxes))):
        sent = box[turn % 2, rank, : words.shape[1]]
        if device != rank or peers > 2:  # of two, none sends to itself
            np.testing.assert_array_equal(sent[:, 0], words[rank])
            assert (sent[:, 1] == turn).all()
        assert not box[1 - turn % 2].any()
    dry = run(numbers[rank], np.zeros_like(addresses))
    np.testing.assert_array_equal(dry, numbers[rank] if peers == 2 else np.zeros(size))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 256])
def test_devices_add_up_between_attentions(tokens):
    """In bfloat16, twice a launch: 20 runs of ten launches have equal bits, on all devices."""
    devices = min(jax.device_count(), 2)
    placement = Placement.of(make_mesh(devices))
    hidden, mlp, heads, kv_heads = 1024, 1536, 8, 4
    lines = tokens * hidden // 2
    mailboxes, rng = Mailboxes(placement, lines), np.random.default_rng(tokens)

    def draw(*shape):
        return jnp.asarray(shape[-1] ** -0.5 * rng.standard_normal(shape), jnp.bfloat16)

    wide = heads * 128
    behind = WeightsBehind(
        o=draw(hidden, wide), mlp_norm=1 + draw(hidden), gate=draw(mlp, hidden), up=draw(mlp, hidden),
        down=draw(hidden, mlp),
    )  # fmt: skip
    before = WeightsBefore(
        norm=1 + draw(hidden), q=draw(wide, hidden), k=draw(kv_heads * 128, hidden), v=draw(kv_heads * 128, hidden)
    )
    attended, x = 10 * draw(tokens, heads, 128), 10 * draw(tokens, hidden)
    angles = rng.uniform(0, 6.3, (tokens, 64))
    cos, sin = (jnp.asarray(part, jnp.float32) for part in (np.cos(angles), np.sin(angles)))

    def local(attended, x, behind, before, told):
        links = links_of(jax.lax.axis_index("tensor"), told[0], told[1:])
        counter = jnp.zeros(1, jnp.int32) + jnp.minimum(told[0], 0)

        def launch(index, state):
            x, _ = state
            turn = Turn(links, 2 * index, devices, lines)
            return interlayer(attended, x, behind, before, cos, sin, counter, eps=1e-6, turn=turn)

        qkv = (jnp.zeros_like(attended), *(jnp.zeros_like(attended[:, : kv_heads // devices]),) * 2)
        x, qkv = jax.lax.fori_loop(0, 10, launch, (x, qkv))
        return x[None], qkv

    rows, columns, whole = P("tensor"), P(None, "tensor"), P()
    specs = (
        columns, whole, WeightsBehind(o=columns, mlp_norm=whole, gate=rows, up=rows, down=columns),
        WeightsBefore(norm=whole, q=rows, k=rows, v=rows), whole,
    )  # fmt: skip
    run = jax.jit(
        jax.shard_map(local, mesh=placement.mesh, in_specs=specs, out_specs=(rows, (columns,) * 3), check_vma=False)
    )
    runs = [jax.tree.map(np.asarray, run(attended, x, behind, before, mailboxes.take(20))) for _ in range(20)]
    for again in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, runs[0], again)
    (states, heads_of_all), want = runs[0], x
    np.testing.assert_array_equal(states[0], states[-1])
    for _ in range(10):
        want, want_heads = interlayer_reference(attended, want, behind, before, cos, sin, eps=1e-6)
    for got, expected in zip((states[0], *heads_of_all), (want, *want_heads), strict=True):
        expected = np.asarray(expected.astype(jnp.float32), np.float64)
        assert relative_error(got.astype(np.float64), expected) < 4e-2  # each rounded at every operation, ten times


def test_an_address_travels_in_two_halves():
    addresses = [0x7F12_3456_789A_BC00, 0x0000_0002_8000_0100]
    halves = halves_of(addresses)
    assert halves.dtype == np.int32 and halves.shape == (2 * MAX_PEERS,)
    words = [int(half) % 2**32 for half in halves]
    assert [low + (high << 32) for low, high in zip(words[::2], words[1::2], strict=True)] == addresses + [0] * 6


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="there are 9 mailboxes; kernels know up to 8"):
        halves_of([1] * 9)
    turn = Turn(jnp.zeros(2 + 2 * MAX_PEERS, jnp.int32), jnp.int32(0), 2, lines=8 * OUT - 1)
    x, weight = jnp.zeros((8, FEATURES), jnp.bfloat16), jnp.zeros((OUT, FEATURES), jnp.bfloat16)
    with pytest.raises(ValueError, match=f"a message has {8 * OUT} words; the mailboxes are for {8 * OUT - 1}"):
        project_residual(x, weight, x[:, :OUT], weight[:, 0], turn=turn)


def test_mailboxes_count_turns_and_know_where_they_are():
    placement = Placement.of(make_mesh(4))
    mailboxes = Mailboxes(placement, 40)
    shards = mailboxes._array.addressable_shards
    assert {shard.data.nbytes for shard in shards} == {mailbox_bytes(4, 40)}
    told = [mailboxes.take(6) for _ in range(3)]
    assert [words[0] for words in told] == [2, 8, 14]  # never 0, which an empty mailbox has
    by_device = {shard.device: shard.data.unsafe_buffer_pointer() for shard in shards}
    want = halves_of([by_device[device] for device in placement.mesh.devices.flat])
    for words in told:
        np.testing.assert_array_equal(words[1:], want)
    mailboxes._turn = 2**32 - 2
    assert [int(mailboxes.take(4)[0]) % 2**32 for _ in range(2)] == [2**32 - 2, 2]


def test_sums_lower_for_cuda():
    struct = jax.ShapeDtypeStruct
    arguments = [
        struct((8, FEATURES), jnp.bfloat16), struct((4, OUT, FEATURES), jnp.bfloat16), struct((8, OUT), jnp.bfloat16),
        struct((OUT,), jnp.bfloat16), struct((1 + 2 * MAX_PEERS,), jnp.int32),
    ]  # fmt: skip
    text = chained(make_mesh(2)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "project_residual" in text and "st.relaxed.sys.global.b64" in text and "@late trap" in text
