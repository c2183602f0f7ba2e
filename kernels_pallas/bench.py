"""Measures every kernel against the ceilings of the same run: `python -m kernels_pallas.bench [--json FILE]`.

Needs an NVIDIA Hopper GPU. `--quick` measures a few shapes of each kernel, `--tune` compares tuning parameters, and
`--missed` measures the shapes at which attention missed what is wanted of it.
"""

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax

from kernels_pallas.hopper import MULTIPROCESSORS
from kernels_pallas.interlayer import bench as interlayer
from kernels_pallas.kv_write import WriteConfig
from kernels_pallas.kv_write import bench as kv_write
from kernels_pallas.paged_decode import DecodeConfig
from kernels_pallas.paged_decode import bench as paged_decode
from kernels_pallas.paged_decode import points as decode_points
from kernels_pallas.ragged_prefill import PrefillConfig
from kernels_pallas.ragged_prefill import bench as ragged_prefill
from kernels_pallas.rope_write import bench as rope_write
from kernels_pallas.sample import bench as sample
from kernels_pallas.small_batch import bench as small_batch
from kernels_pallas.swiglu import bench as swiglu
from kernels_pallas.timing import copy_bandwidth, matmul_rate

QUICK = (
    decode_points.QUICK,
    ragged_prefill.POINTS[:7],
    kv_write.POINTS[1:2],
    small_batch.QUICK,
    rope_write.QUICK,
    swiglu.QUICK,
    interlayer.QUICK,
    sample.QUICK,
)
FULL = (
    decode_points.FULL,
    ragged_prefill.POINTS,
    kv_write.POINTS,
    small_batch.POINTS,
    rope_write.POINTS,
    swiglu.POINTS,
    interlayer.POINTS,
    sample.POINTS,
)
TUNE = (
    tuple(
        decode_points.Point(256, 1024, kv_dtype=dtype, cudnn=False, config=config)
        for dtype in ("bfloat16", "float8_e4m3fn")
        for config in (
            DecodeConfig(step=64, stages=2, min_piece=1024),
            DecodeConfig(step=64, stages=3, min_piece=1024),
            DecodeConfig(step=128, stages=2, min_piece=1024),
        )
    )
    + tuple(
        decode_points.Point(rows, lengths, cudnn=False, config=DecodeConfig(waves=waves, one_wave=0, min_piece=piece))
        for rows, lengths, piece in (
            (1, 131072, 128),
            (8, 4096, 128),
            (8, 32768, 128),
            (8, 131072, 128),
            (64, 4096, 1024),
            (64, 32768, 1024),
            (256, ("log-uniform", 32768), 1024),
        )
        for waves in (1, 2, 4, 8)
    )
    + tuple(
        decode_points.Point(
            rows, lengths, kv_dtype="float8_e4m3fn", cudnn=False, config=DecodeConfig(wave=places * MULTIPROCESSORS)
        )
        for rows, lengths in ((1, 32768), (8, 1024), (8, 4096), (8, 32768))
        for places in (3, 4)
    ),
    tuple(
        ragged_prefill.Point(rows, tokens, config=config)
        for rows, tokens in ((64, 256), (16, 1024), (1, 16384))
        for config in (
            PrefillConfig(),
            PrefillConfig(alternate=False),
            PrefillConfig(step=64, stages=4),
        )
    ),
    tuple(
        kv_write.Point(tokens, config=WriteConfig(tokens=size, blocks=blocks))
        for tokens in (256, 2048)
        for size, blocks in ((4, 132), (8, 132), (8, 528))
    ),
    small_batch.TUNE,
    rope_write.TUNE,
    swiglu.TUNE,
    interlayer.POINTS,
    (),
)


MISSED = (decode_points.MISSED, ragged_prefill.MISSED, (), (), (), (), (), ())
SELECTIONS = {"quick": QUICK, "full": FULL, "tune": TUNE, "missed": MISSED}
KERNELS = (
    "paged_decode",
    "ragged_prefill",
    "kv_write",
    "small_batch",
    "rope_write",
    "swiglu",
    "interlayer",
    "sample",
)


def run(
    selection: str,
    kernels: Sequence[str] = KERNELS,
    tell: Callable[[str], None] = print,
    limit: float = math.inf,
) -> dict[str, Any]:
    """Measure a selection of shapes.

    Args:
        selection: "quick" for a few shapes of each kernel, "full" for all, "tune" for several tuning parameters,
            "missed" for those where attention missed what is wanted.
        kernels: which kernels.
        tell: called with a line for each result as soon as it is measured.
        limit: seconds for each kernel; what was not measured by then is left out, which is told.

    Returns:
        The device, the ceilings of this run (bytes and floating-point operations a second), and for each kernel a list
        of results by name of column, one for each shape; ready for JSON.
    """
    copy, matmul = copy_bandwidth(), matmul_rate()
    device = jax.devices()[0].device_kind
    tell(f"{device}: copy {copy / 1e12:.2f} TB/s, matmul {matmul / 1e12:.0f} TFLOP/s")
    selected = SELECTIONS[selection]
    decode, prefill, write, small, rope, gated, between, draws = selected
    measured: dict[str, Generator[dict[str, Any]]] = {
        "paged_decode": paged_decode.measure(decode, copy),
        "ragged_prefill": ragged_prefill.measure(prefill, matmul),
        "kv_write": kv_write.measure(write, copy),
        "small_batch": small_batch.measure(small, copy),
        "rope_write": rope_write.measure(rope, copy),
        "swiglu": swiglu.measure(gated, matmul),
        "interlayer": interlayer.measure(between, copy),
        "sample": sample.measure(draws, copy),
    }
    results: dict[str, Any] = {"device": device, "copy": copy, "matmul": matmul}
    for name in (name for name, points in zip(KERNELS, selected, strict=True) if points and name in kernels):
        begin = time.perf_counter()
        by_point: dict[str, dict[str, Any]] = {}
        tell(name)
        for result in measured[name]:
            point = str(result["point"])
            by_point.setdefault(point, {}).update(result)
            columns = [f"{key} {_shown(value)}" for key, value in result.items() if key != "point"]
            tell(f"  {point:32s} {', '.join(columns)}")
            if time.perf_counter() - begin > limit:
                tell(f"  stopped after {limit:.0f} s")
                measured[name].close()
                break
        results[name] = list(by_point.values())
        tell(f"  ({time.perf_counter() - begin:.0f} s)")
    return results


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per measured shape; `argv` are the command's arguments; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kernels_pallas.bench", description=__doc__)
    parser.add_argument("--json", help="also write the results to this file")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="a few shapes of each kernel")
    sizes.add_argument("--tune", action="store_true", help="several tuning parameters instead of many shapes")
    sizes.add_argument("--missed", action="store_true", help="shapes where attention missed what is wanted")
    parser.add_argument("--kernel", choices=KERNELS, help="only this kernel")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for each kernel, then stop")
    arguments = parser.parse_args(argv)
    if jax.default_backend() != "gpu":
        print(f"the default device is {jax.default_backend()}; this benchmark needs an NVIDIA GPU", file=sys.stderr)
        return 2
    selection = next((name for name in ("quick", "tune", "missed") if vars(arguments)[name]), "full")
    kernels = KERNELS if arguments.kernel is None else (arguments.kernel,)
    results = run(selection, kernels, functools.partial(print, flush=True), arguments.limit)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
