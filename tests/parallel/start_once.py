"""One process of a start of an engine whose host has so much free memory as is said; started by `test_warm_starts`.

Arguments: checkpoint folder, blocks of the KV cache that fit, port of process 0, number of processes, this process.
Prints, in JSON, what came of it.
"""

import json
import sys

import jax

from jaxllm.memory import device
from jaxllm.memory.views import DriverView

BLOCK = 2 * 2 * 16 * 2 * 32 * 4  # K and V, 2 layers, 16 tokens, 2 heads of 32, float32


def main(folder: str, fitting: str, port: str, count: str, index: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    seen: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rpartition("/")[2]))
    if int(count) > 1:
        from jaxllm.parallel import distributed

        distributed.start(f"localhost:{port}", int(count), int(index), timeout_seconds=60)
    free = 10 * int(fitting) * BLOCK // int(count) + 100  # of which a tenth is for the cache, and a block divided
    device.host_view = lambda: DriverView(source="made up", total=1 << 40, free=free)

    from jaxllm import LLM, SamplingParams

    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 1024, "kvcache_block_size": 16}
    sizes["enforce_eager"] = int(count) > 1  # programs of several processes take long to compile
    llm = LLM(folder, dtype="float32", tensor_parallel_size=int(count), **sizes)
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    report = llm.memory_report
    print(
        json.dumps(
            {
                "blocks": report.num_kvcache_blocks,
                "fitting": report.fitting_blocks,
                "bound_by": report.bound_by,
                "notes": report.notes,
                "compiled": seen.count("cache_misses"),
                "from the cache": seen.count("cache_hits"),
                "tokens": output.outputs[0].token_ids,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
