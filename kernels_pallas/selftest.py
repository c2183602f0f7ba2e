"""Runs each kernel on a small input against its reference: `python -m kernels_pallas.selftest`.

Compiled where the default device is a Hopper GPU, in Pallas's GPU interpreter elsewhere. Prints a line a kernel; the
exit code is 0 if all agree. `run()` is for callers that want to know before they choose these kernels, such as an
engine on a combination of jax and device that nobody has tested.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from kernels_pallas.hopper import KVLayout
from kernels_pallas.interlayer import (
    WeightsBefore,
    WeightsBehind,
    before_attention,
    before_reference,
    behind_attention,
    behind_reference,
    interlayer,
    interlayer_reference,
)
from kernels_pallas.kv_write import kv_write, kv_write_reference
from kernels_pallas.paged_decode import DecodeConfig, paged_decode, paged_decode_reference, paged_decode_write
from kernels_pallas.ragged_prefill import plan_prefill, ragged_prefill, ragged_prefill_reference
from kernels_pallas.ragged_prefill.tuned import TUNED as PREFILL_CONFIGS
from kernels_pallas.rope_write import rope_write, rope_write_reference
from kernels_pallas.sample import sample_tokens, sample_tokens_reference
from kernels_pallas.small_batch import (
    QKVWeights,
    StreamConfig,
    gate_up,
    gate_up_reference,
    normed_input,
    project_reference,
    project_residual,
    qkv_project,
    qkv_project_reference,
    rms_norm_reference,
)
from kernels_pallas.swiglu import SwigluConfig, swiglu, swiglu_reference

TOLERANCE = 8e-3
"""Allowed ||kernel - reference|| / ||reference|| in bfloat16, whose rounding alone is 2e-3."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of one kernel: its relative error (NaN where it failed), what was raised if anything, and the seconds."""

    kernel: str
    error: float
    raised: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the kernel ran and agrees with its reference."""
        return self.raised is None and self.error <= TOLERANCE

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "FAILED"
        detail = self.raised or f"relative error {self.error:.1e}"
        return f"{self.kernel:18s} {verdict:6s} {detail} ({self.seconds:.1f} s)"


def run(interpret: plgpu.InterpretGPUParams | None = None) -> Iterator[Outcome]:
    """Check each kernel in turn; `interpret` runs them in the interpreter, which no GPU is needed for.

    Interpreted on a machine of few cores, jax needs `jax_num_cpu_devices` of five or more (see `main`).
    """
    for kernel, check in (
        ("kv_write", _check_write),
        ("paged_decode", _check_decode),
        ("paged_decode_write", _check_decode_write),
        ("ragged_prefill", _check_prefill),
        ("rope_write", _check_rope),
        ("swiglu", _check_swiglu),
        ("small_batch", _check_small_batch),
        ("interlayer", _check_interlayer),
        ("sample", _check_sample),
    ):
        begin = time.perf_counter()
        error, raised = float("nan"), None
        try:
            error = check(interpret)
        except Exception as exception:  # any failure to trace, compile or run is what this looks for
            raised = f"{type(exception).__name__}: {str(exception).splitlines()[0] if str(exception) else ''}"
        yield Outcome(kernel, error, raised, time.perf_counter() - begin)


def main() -> int:
    """Print the outcomes; 0 if every kernel agrees with its reference."""
    # The interpreter runs each warpgroup in a thread of the CPU client's pool, which has one per core or device. The
    # sampling kernel's four wait for one another and for the thread that started them: with four they would for ever.
    jax.config.update("jax_num_cpu_devices", 8)
    device = jax.devices()[0]
    compiled = device.platform == "gpu" and float(getattr(device, "compute_capability", "0")) >= 9.0
    print(f"{device.device_kind}, jax {jax.__version__}: {'compiled' if compiled else 'in the interpreter'}")
    outcomes = []
    for outcome in run(None if compiled else plgpu.InterpretGPUParams()):
        print(outcome, flush=True)
        outcomes.append(outcome)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def _cache(lengths: list[int], block_size: int) -> tuple[jax.Array, jax.Array]:
    """A cache of two layers and the rows' tables; slots without a token hold NaN."""
    rng = np.random.default_rng(0)
    needed = [-(-length // block_size) for length in lengths]
    kv = np.full((2, 2, sum(needed) + 1, 2, block_size, 128), np.nan, np.float32)
    tables = np.full((len(lengths), max(needed) + 1), 2**30, np.int32)
    free = iter(rng.permutation(sum(needed)))
    for row, length in enumerate(lengths):
        for index in range(needed[row]):
            used = min(block_size, length - index * block_size)
            tables[row, index] = next(free)
            kv[1, :, tables[row, index], :, :used] = rng.standard_normal((2, 2, used, 128))
    return jnp.asarray(kv, jnp.bfloat16), jnp.asarray(tables)


def _relative_error(got: jax.Array, want: jax.Array) -> float:
    a, b = (np.asarray(x.astype(jnp.float32), np.float64) for x in (got, want))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def _check_write(interpret: plgpu.InterpretGPUParams | None) -> float:
    kv = jnp.zeros((2, 2, 4, 2, 16, 128), jnp.bfloat16)
    k, v = jax.random.normal(jax.random.key(0), (2, 6, 2, 128), jnp.bfloat16)
    slots = jnp.array([63, 0, 17, 64, 40, 2**31 - 1], jnp.int32)
    write: Callable[..., jax.Array] = jax.jit(lambda *args: kv_write(args[0], 1, *args[1:], interpret=interpret))
    return _relative_error(write(kv, k, v, slots), kv_write_reference(kv, 1, k, v, slots))


def _check_rope(interpret: plgpu.InterpretGPUParams | None) -> float:
    kv = jnp.zeros((2, 2, 4, 2, 16, 128), jnp.bfloat16)
    projected = jax.random.normal(jax.random.key(0), (18, 8, 128), jnp.bfloat16)
    angles = jnp.arange(18.0)[:, None] * jnp.ones((64,)) / 3
    slots = jnp.array([63, 0, 17, 64, 40, 2**31 - 1, *range(20, 32)], jnp.int32)
    norm = jnp.full((128,), 0.5, jnp.bfloat16)
    arguments = ((projected,), jnp.cos(angles), jnp.sin(angles), kv, 1, slots)
    q, kv = rope_write(*arguments, norms=(norm, norm), interpret=interpret)
    want_q, want_kv = rope_write_reference(*arguments, norms=(norm, norm))
    return max(_relative_error(q, want_q), _relative_error(kv, want_kv))


def _check_swiglu(interpret: plgpu.InterpretGPUParams | None) -> float:
    """With tokens left over behind the last whole tile."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = 3 * jax.random.normal(keys[0], (136, 256), jnp.bfloat16)
    gate, up = (jax.random.normal(key, (64, 256), jnp.bfloat16) / 16 for key in keys[1:])
    got = swiglu(x, gate, up, config=SwigluConfig(columns=64), interpret=interpret)
    return _relative_error(got, swiglu_reference(x, gate, up))


def _check_interlayer(interpret: plgpu.InterpretGPUParams | None) -> float:
    """All three launches on few multiprocessors, so that each does several tiles."""
    behind_sizes = {"o": (512, 256), "mlp_norm": (512,), "gate": (64, 512), "up": (64, 512), "down": (512, 64)}
    before_sizes = {
        "norm": (512,), "q": (256, 512), "k": (128, 512), "v": (128, 512), "q_norm": (128,), "k_norm": (128,)
    }  # fmt: skip
    keys = iter(jax.random.split(jax.random.key(0), len(behind_sizes) + len(before_sizes) + 3))

    def draw(*shape: int, scale: float = 1.0) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape, jnp.bfloat16)

    behind = WeightsBehind(**{name: draw(*shape, scale=shape[-1] ** -0.5) for name, shape in behind_sizes.items()})
    before = WeightsBefore(**{name: draw(*shape, scale=shape[-1] ** -0.5) for name, shape in before_sizes.items()})
    angles = jax.random.uniform(next(keys), (64, 64), maxval=6.3)
    attended, x, (cos, sin) = draw(64, 2, 128), draw(64, 512, scale=3), (jnp.cos(angles), jnp.sin(angles))
    options: dict[str, Any] = {"eps": 1e-6, "multiprocessors": 4, "interpret": interpret}
    counter = jnp.zeros(1, jnp.int32)
    got = (
        interlayer(attended, x, behind, before, cos, sin, counter, **options),
        before_attention(x, before, cos, sin, counter, **options),
        behind_attention(attended, x, behind, before.norm, counter, **options),
    )
    want = (
        interlayer_reference(attended, x, behind, before, cos, sin, eps=1e-6),
        before_reference(x, before, cos, sin, eps=1e-6),
        behind_reference(attended, x, behind, before.norm, eps=1e-6),
    )
    return float(np.max(jax.tree.leaves(jax.tree.map(_relative_error, got, want))))


def _check_decode(interpret: plgpu.InterpretGPUParams | None) -> float:
    """Rows whole, and cut into so many pieces that they are merged in two levels; several tokens; a float8 cache."""
    lengths = jnp.array([0, 1, 950, 16], jnp.int32)
    kv, tables = _cache(lengths.tolist(), 16)
    q = jax.random.normal(jax.random.key(0), (4, 3, 4, 128), jnp.bfloat16)
    whole, cut = DecodeConfig(min_piece=2048), DecodeConfig(min_piece=64, wave=48)
    errors = []
    for queries, cache, config in (
        (q[:, 0], kv, whole),
        (q, kv, cut),
        (q[:, 0], kv.astype(jnp.float8_e4m3fn), cut),
    ):
        arguments = (queries, cache, 1, tables, lengths)
        kernel = functools.partial(paged_decode, scale=0.1, config=config, interpret=interpret)
        got, _ = jax.jit(kernel)(*arguments)
        want, _ = paged_decode_reference(*arguments, scale=0.1)
        errors.append(_relative_error(got, want))
    return float(np.max(errors))


def _check_decode_write(interpret: plgpu.InterpretGPUParams | None) -> float:
    """The newest tokens are NaN in the cache until they are written; into a float8 cache from 16 bits."""
    lengths = [1, 150, 16]
    written, tables = _cache(lengths, 16)
    rows, last = np.arange(len(lengths)), np.array(lengths) - 1
    blocks, slots = np.asarray(tables)[rows, last // 16], last % 16
    k, v = (written[1, part, blocks, :, slots] for part in range(2))
    q = jax.random.normal(jax.random.key(0), (3, 4, 128), jnp.bfloat16)
    where = (1, tables, jnp.array(lengths, jnp.int32))
    config = DecodeConfig(min_piece=64, wave=24)
    kernel = functools.partial(paged_decode_write, scale=0.1, config=config, interpret=interpret)
    errors = []
    for complete in (written, written.astype(jnp.float8_e4m3fn)):
        before = complete.at[1, :, blocks, :, slots].set(jnp.nan)
        got, _, kv = jax.jit(kernel)(q, k, v, before, *where)
        want, _ = paged_decode_reference(q, complete, *where, scale=0.1)
        as_numbers = (jnp.nan_to_num(cache.astype(jnp.float32)) for cache in (kv, complete))
        errors += [_relative_error(got, want), _relative_error(*as_numbers)]
    return float(np.max(errors))


def _check_prefill(interpret: plgpu.InterpretGPUParams | None) -> float:
    lengths = [1, 80, 30]
    kv, tables = _cache(lengths, 16)
    q = jax.random.normal(jax.random.key(0), (40, 4, 128), jnp.bfloat16)
    cu = jnp.array([0, 1, 20, 40], jnp.int32)
    arguments = (q, kv, 1, tables, jnp.array(lengths, jnp.int32), cu)
    config = dataclasses.replace(PREFILL_CONFIGS[128], blocks=3)  # fewer than units, so that each does several
    plan = plan_prefill(
        arguments[4],
        cu,
        num_tokens=40,
        heads=4,
        kv=KVLayout.of(kv),
        max_context=tables.shape[1] * 16,
        decode_config=DecodeConfig(min_piece=64, wave=24),
    )
    kernel = functools.partial(ragged_prefill, scale=0.1, config=config, interpret=interpret)
    errors = []
    for cache in (kv, kv.astype(jnp.float8_e4m3fn)):
        arguments = (q, cache, *arguments[2:])
        got = jax.jit(kernel)(*arguments, plan=plan)
        errors.append(_relative_error(got, ragged_prefill_reference(*arguments, scale=0.1)))
    return float(np.max(errors))


def _check_sample(interpret: plgpu.InterpretGPUParams | None) -> float:
    """The share of rows whose token is another."""
    logits = 3 * jax.random.normal(jax.random.key(0), (6, 1100), jnp.float32)
    temperature, top_k = jnp.array([0, 1, 1, 2, 0.7, 1], jnp.float32), jnp.array([0, 0, 3, 50, 20, 0])
    top_p, min_p = jnp.array([1, 1, 1, 0.9, 0.3, 0.05], jnp.float32), jnp.array([0, 0, 0, 0, 0, 0.01], jnp.float32)
    keys = jax.random.bits(jax.random.key(1), (6, 2), jnp.uint32)
    suppressed = jnp.argmax(logits, axis=1)[:, None].at[1:].set(2**30)
    arguments = (logits, temperature, top_k, top_p, min_p, keys, suppressed, np.arange(1100) < 1050)
    same = sample_tokens(*arguments, interpret=interpret) == sample_tokens_reference(*arguments)
    return float(1 - jnp.mean(same))


def _check_small_batch(interpret: plgpu.InterpretGPUParams | None) -> float:
    """A layer without attention, q taking the place of its output; heads of q, k and v whole, and in three pieces."""
    hidden, mlp, heads, kv_heads, dim = 256, 64, 2, 1, 128
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns), jnp.bfloat16) * columns**-0.5

    q, k, v = matrix(heads * dim, hidden), matrix(kv_heads * dim, hidden), matrix(kv_heads * dim, hidden)
    o, gate, up, down = matrix(hidden, heads * dim), matrix(mlp, hidden), matrix(mlp, hidden), matrix(hidden, mlp)
    x, norm, head_norm = 16 * matrix(8, hidden), jnp.full((hidden,), 0.5, jnp.bfloat16), jnp.ones((dim,), jnp.bfloat16)
    weights = QKVWeights(q=q, k=k, v=v, q_norm=head_norm, k_norm=head_norm)
    angles = jnp.arange(8.0)[:, None] * jnp.ones((dim // 2,)) / 3
    slots = jnp.array([3, 9, 0, 31, 12, 13, 32, 2**30], jnp.int32)
    cache = jnp.zeros((2, 2, 2, kv_heads, 16, dim), jnp.bfloat16)
    cached = (jnp.cos(angles), jnp.sin(angles), cache, 1, slots)

    source = normed_input(x, norm)
    cut = StreamConfig(splits=1, step=64, pieces=3)
    cut_queries, cut_kv = qkv_project(source, weights, *cached, eps=1e-6, config=cut, interpret=interpret)
    queries, kv = qkv_project(source, weights, *cached, eps=1e-6, interpret=interpret)
    y, source = project_residual(queries.reshape(8, -1), o, x, norm, interpret=interpret)
    y, _ = project_residual(
        gate_up(source, gate, up, eps=1e-6, interpret=interpret), down, y, norm, interpret=interpret
    )

    want_q, want_kv = qkv_project_reference(rms_norm_reference(x, norm, 1e-6), weights, *cached, eps=1e-6)
    want = x + project_reference(want_q.reshape(8, -1), o)
    activation = gate_up_reference(rms_norm_reference(want, norm, 1e-6), gate, up)
    want = want + project_reference(activation, down)
    pairs = ((kv, want_kv), (cut_queries, want_q), (cut_kv, want_kv), (y, want))
    return float(np.max([_relative_error(*pair) for pair in pairs]))


if __name__ == "__main__":
    sys.exit(main())
