"""One of several processes that run an engine together; started by `test_four_processes`.

Arguments: checkpoint folder, file for results. Who is who stands in the variables of a cluster manager.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax

from jaxllm.parallel import distributed

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 6,  # of which four requests need up to 12: preemption
    "enforce_eager": True,
    "skip_tokenizer_init": True,
}
PROMPTS = [[(7 * i * i + 3 * j) % 300 for j in range(18 + 3 * i)] for i in range(5)]
PROMPTS += [PROMPTS[4], PROMPTS[2] + [5]]
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


def main(folder: str, results: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    distributed.start(heartbeat_seconds=4, timeout_seconds=100)
    serve(folder, f"{results}.{jax.process_index()}")


def serve(folder: str, results: str) -> None:
    """Generate, write what came of it, and generate on until somebody ends it."""
    import jaxllm.engine.spec
    from jaxllm import LLM, SamplingParams
    from jaxllm.sampling.variant import SamplerVariant

    first = jax.process_index() == 0
    said = distributed.broadcast({"text": "für Prozess 0 " * 1000, "ids": [1, 2, 3]} if first else None)
    # No more of a sampler than greedy requests need: a third of the time to compile.
    options: dict[str, Any] = {"samplers": ((SamplerVariant(suppress=True), 16),)}
    jaxllm.engine.spec.shape_options = lambda platform: dict(options)
    llm = LLM(folder, mesh=jax.make_mesh((jax.process_count(),), ("tensor",)), **OPTIONS)
    greedy = SamplingParams(**GREEDY)

    def tokens() -> list[list[int]]:
        outputs = llm.generate(PROMPTS if first else [], greedy if first else None, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    generated = tokens()
    llm.sleep()
    llm.wake()
    leaves = llm.engine.runner.weights.leaves
    written = {
        "tokens": generated,
        "after wake": tokens(),
        "received": len(said["text"]),
        "smallest": distributed.smallest(100 - jax.process_index()),
        "preemptions": llm.stats.scheduler.preemptions,
        "prefix hits": llm.stats.scheduler.prefix_hit_tokens,
        "local bytes": sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards),
        "bytes": llm.engine.runner.weights.nbytes,
    }
    Path(f"{results}.partial").write_text(json.dumps(written))
    Path(f"{results}.partial").rename(results)
    while True:
        tokens()


if __name__ == "__main__":
    main(*sys.argv[1:])
