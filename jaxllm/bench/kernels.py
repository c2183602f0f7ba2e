"""Speed of the Pallas kernels over a grid of shapes, beside cuDNN, plain jnp and the machine's ceilings."""

import json
import math
from collections.abc import Sequence

from jaxllm import cli

DESCRIPTION = """Measure every kernel of kernels_pallas over a grid of shapes on an NVIDIA Hopper GPU.

Each line tells a shape, the microseconds of one layer, the TB/s or TFLOP/s reached, their share of a large copy's or
matrix product's in the same run, and what cuDNN, XLA or plain jnp take for the same work, where they can do it. All
launches run inside one device program, so that the host is no part of the figures."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    parser = cli.parser("bench kernels", DESCRIPTION)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="a few shapes of each kernel, in about two minutes")
    sizes.add_argument("--tune", action="store_true", help="several tuning parameters instead of many shapes")
    sizes.add_argument("--missed", action="store_true", help="only shapes where attention missed what is wanted")
    parser.add_argument("--kernel", action="append", metavar="NAME", help="only this kernel; may be repeated")
    parser.add_argument(
        "--limit", type=float, default=math.inf, metavar="SECONDS", help="for each kernel, then leave out the rest"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    with cli.exit_codes():
        import jax

        from kernels_pallas import bench

        unknown = sorted(set(args.kernel or ()) - set(bench.KERNELS))
        if unknown:
            raise ValueError(f"--kernel {unknown[0]}: no such kernel; there are {', '.join(bench.KERNELS)}")
        if jax.default_backend() != "gpu":
            raise ValueError(f"the default device is {jax.default_backend()}; the kernels need an NVIDIA Hopper GPU")
        selection = next((name for name in ("quick", "tune", "missed") if vars(args)[name]), "full")
        kernels = tuple(args.kernel or bench.KERNELS)
        if args.json:
            print(json.dumps(bench.run(selection, kernels, tell=lambda line: None, limit=args.limit)))
        else:
            bench.run(selection, kernels, tell=lambda line: print(line, flush=True), limit=args.limit)
    return cli.OK
