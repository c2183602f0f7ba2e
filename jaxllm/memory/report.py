"""What the engine tells about its memory: one record, two log lines, JSON, a bar, a picture."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxllm.memory import picture
from jaxllm.memory.budget import DeviceBudget
from jaxllm.memory.earlier import EARLIER
from jaxllm.memory.units import format_bytes

PICTURES = (".svg", ".png", ".json")


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """What one compiled program needs on a device beside weights and KV cache, in bytes.

    Attributes:
        name: as `decode[512]`.
        static: from the compiler: temporaries + outputs - outputs that alias inputs.
        measured: what the allocator's peak rose by when it ran; None where that was not measured.
        naive: what `peak - in use` said in its place; None likewise.
        serving: `static` of the program compiled for the real cache, which may have been tuned differently; None where
            the program itself is a serving one, or none was compiled yet.
    """

    name: str
    static: int
    measured: int | None = None
    naive: int | None = None
    serving: int | None = None

    @property
    def transient(self) -> int:
        """The largest of what is known."""
        return max(self.static, self.measured or 0, self.serving or 0)

    @property
    def disagreement(self) -> float:
        """How far measured and static lie apart, relative to the larger; 0 where one is missing."""
        if not self.measured:
            return 0.0
        return abs(self.static - self.measured) / max(self.static, self.measured)


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """How the KV cache got its size, and what it took. Sizes in bytes per device.

    Attributes:
        platform: "gpu", "cpu", ...
        source: where the driver's view came from.
        budgets: one per device of the mesh.
        programs: what was measured, the largest last.
        num_kvcache_blocks: blocks of each replica in the cache.
        block_size: tokens per block.
        block_bytes: bytes of a block on one device.
        kv_cache_dtype: of the numbers in it.
        bound_by: what limits the number of blocks.
        device: index in `budgets` of the device that decides.
        max_model_len: most tokens of a request.
        data_parallel_size: replicas of the model.
        predicted_weights: from the model's shapes.
        predicted_activations: estimate from the model's shapes.
        outside_pool: bytes of this process outside the pool once all programs were loaded; None where unknown.
        measured_programs_seconds: time spent waiting, weights being loaded, for the programs that are measured.
        other_programs: how many of the programs that serve were made meanwhile.
        measure_seconds: time that measuring and sizing took then.
        startup_seconds: time from loading to ready.
        notes: what a user should know: caps that bind, disagreements, a cache that was shrunk.
    """

    platform: str
    source: str
    budgets: tuple[DeviceBudget, ...]
    programs: tuple[ProgramReport, ...]
    num_kvcache_blocks: int
    block_size: int
    block_bytes: int
    kv_cache_dtype: str
    bound_by: str
    device: int
    max_model_len: int
    data_parallel_size: int = 1
    predicted_weights: int | None = None
    predicted_activations: int | None = None
    outside_pool: int | None = None
    measured_programs_seconds: float = 0.0
    other_programs: int = 0
    measure_seconds: float = 0.0
    startup_seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def budget(self) -> DeviceBudget:
        """The budget of the device that decides."""
        return self.budgets[self.device]

    @property
    def fitting_blocks(self) -> int:
        """Blocks that there is room for in the budgets, whatever is made of it.

        All requests may need fewer, programs of an earlier start may be made for fewer; a number that the user set is
        not held against the budgets.
        """
        return min(budget.num_blocks for budget in self.budgets)

    @property
    def kv_array_bytes(self) -> int:
        """Bytes of the cache on one device."""
        return self.num_kvcache_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache holds, over all replicas."""
        return self.data_parallel_size * self.num_kvcache_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Requests of `max_model_len` tokens that fit at once, over all replicas."""
        return self.data_parallel_size * concurrency(self.num_kvcache_blocks, self.block_size, self.max_model_len)

    def lines(self) -> tuple[str, str]:
        """What a user wants to know at start-up, in two lines."""
        replicas = f"{self.data_parallel_size} x " if self.data_parallel_size > 1 else ""
        return (
            f"KV cache: {self.num_tokens:,} tokens ({replicas}{self.num_kvcache_blocks:,} blocks of {self.block_size}, "
            f"{format_bytes(self.kv_array_bytes)} of {self.kv_cache_dtype} per device; bound by {self.bound_by})",
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: {self.max_concurrency:.2f}x",
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, in JSON's types."""
        derived = ("fitting_blocks", "kv_array_bytes", "num_tokens", "max_concurrency")
        programs = [dataclasses.asdict(program) | {"transient": program.transient} for program in self.programs]
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived} | {"programs": programs}

    def bars(self) -> list[picture.Bar]:
        """One bar per device."""
        return [
            picture.Bar.of(
                budget.name,
                other=budget.non_framework,
                weights=budget.weights,
                activations=budget.activations,
                kv_cache=self.kv_array_bytes,
                limit=budget.limit,
                total=budget.total,
            )
            for budget in self.budgets
        ]

    def text(self, width: int = 72) -> str:
        """The two lines, the bars, what was measured, and the notes."""
        parts = [*self.lines(), *(picture.terminal(bar, width) for bar in self.bars())]
        if self.programs:
            parts.append(f"{'program':<16}{'compiler':>12}{'measured':>12}{'serving':>12}{'peak - in use':>15}")
            for p in self.programs:
                sizes = (p.static, p.measured, p.serving, p.naive)
                cells = ["-" if size is None else format_bytes(size) for size in sizes]
                parts.append(f"{p.name:<16}{cells[0]:>12}{cells[1]:>12}{cells[2]:>12}{cells[3]:>15}")
        if self.bound_by == EARLIER:
            parts.append(
                f"{self.fitting_blocks:,} blocks fit; programs for {self.num_kvcache_blocks:,} are there already"
            )
        if self.predicted_activations is not None and self.predicted_weights is not None:
            parts.append(
                f"predicted from shapes: weights {format_bytes(self.predicted_weights)}, "
                f"activations {format_bytes(self.predicted_activations)}"
            )
        if self.startup_seconds is not None:
            parts.append(
                f"measuring took {self.measure_seconds:.1f} s, waiting for its programs "
                f"{self.measured_programs_seconds:.1f} s, in which {self.other_programs} others were made, of "
                f"{self.startup_seconds:.1f} s of start-up; its share: {self.measuring_cost:.1f} s"
            )
        return "\n".join([*parts, *(f"note: {note}" for note in self.notes)])

    @property
    def measuring_cost(self) -> float:
        """Seconds that measuring added to the start: itself, and its programs' share of the wait for them.

        Programs that serve would take their time anyway, so those that were made meanwhile count like those measured.
        """
        measured = sum(program.measured is not None for program in self.programs)  # others serve
        share = measured / (measured + self.other_programs) if measured else 0.0
        return self.measure_seconds + share * self.measured_programs_seconds

    def save(self, path: Path) -> None:
        """Write a picture (.svg, .png) or the numbers (.json), by the file's suffix.

        Raises:
            ValueError: for another suffix, or for .png without Pillow.
        """
        check_picture(path)
        if path.suffix == ".json":
            path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        elif path.suffix == ".svg":
            path.write_text(picture.svg(self.bars()), encoding="utf-8")
        else:
            picture.write_png(self.bars(), path)


def check_picture(path: Path) -> None:
    """Raises ValueError for a file that `MemoryReport.save` cannot write; for commands, before they load a model."""
    if path.suffix not in PICTURES:
        raise ValueError(
            f"--memory-report {path}: the file must end in one of {', '.join(PICTURES)}; to show the report in the "
            "terminal, put --memory-report after the prompts"
        )


def concurrency(num_blocks: int, block_size: int, max_model_len: int) -> float:
    """Requests of `max_model_len` tokens that `num_blocks` blocks hold: each takes whole blocks."""
    return num_blocks / -(-max_model_len // block_size)
