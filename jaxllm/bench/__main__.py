"""`python -m jaxllm.bench NAME`: run one benchmark; `python -m jaxllm.bench NAME --help` tells its options."""

import sys
from importlib import import_module

BENCHMARKS = {
    "throughput": "many requests at once, in tokens per second, beside other engines",
    "latency": "time of a decode step by batch size, beside the limit of the memory bandwidth",
    "prefill": "prompt tokens per second, beside the limit of the matrix units",
    "tensor_parallel": "one model on one device and on several: tokens, memory, speed, all-reduces",
    "mesh": "an engine on a caller's mesh and arrays: step time beside none, memory, sleep and wake under load",
    "sampler": "choosing tokens, alone and as a share of a decode step, by what requests ask for",
    "startup": "time until an engine is ready, with an empty and a filled cache of compiled programs",
    "kernels": "the attention and projection kernels over a grid of shapes, beside cuDNN and plain jnp",
    "memory": "the measured KV-cache capacity against the truth, on a GPU",
}


def main(argv: list[str] | None = None) -> int:
    """Dispatch to the benchmark's own `main`; the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] not in BENCHMARKS:
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        lines = ["usage: python -m jaxllm.bench NAME [options]", ""]
        lines += [f"  {name:15} {text}" for name, text in BENCHMARKS.items()]
        if not asked:
            lines += ["", f"error: there is no benchmark {arguments[0]!r}" if arguments else "error: name a benchmark"]
        print("\n".join(lines), file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    return int(import_module(f"jaxllm.bench.{arguments[0]}").main(arguments[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
