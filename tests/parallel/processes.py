"""One of several processes that run a model together; started by `test_distributed`.

Arguments: task, port, number of processes, this process, checkpoint folder, file for results.
"""

import json
import sys
import time
from pathlib import Path

import jax

from jaxllm.parallel import distributed


def main(task: str, port: str, count: str, index: str, folder: str, results: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1 if task == "serve" else 2)
    distributed.start(f"localhost:{port}", int(count), int(index), heartbeat_seconds=4, timeout_seconds=60)
    if task == "die":
        print("started", flush=True)
        while True:  # the others wait in a collective when one is killed, or between two
            distributed.smallest(1)
            time.sleep(0.01)
    task_of = {"together": together, "serve": serve}[task]
    Path(f"{results}.{index}").write_text(json.dumps(task_of(folder)))


def serve(folder: str) -> dict[str, object]:
    """An engine over all devices of all processes; only process 0 says what is to be generated."""
    from every_field import OPTIONS, generated, requests

    from jaxllm import LLM

    llm = LLM(folder, tensor_parallel_size=jax.device_count(), **OPTIONS)
    prompts, params = requests() if jax.process_index() == 0 else ([[1]], None)
    return {"outputs": generated(llm, prompts, params), "preemptions": llm.stats.scheduler.preemptions}


def together(folder: str) -> dict[str, object]:
    import numpy as np

    from jaxllm.checkpoint import load_parameters, resolve
    from jaxllm.models.params import parameter_specs, runtime_config
    from jaxllm.models.weights import Weights
    from jaxllm.parallel.placement import Placement

    index, count = jax.process_index(), jax.process_count()
    said = {"text": "für Prozess 0 " * 1000, "ids": [1, 2, 3]} if index == 0 else None
    received = distributed.broadcast(said)
    tokens = np.asarray(distributed.broadcast([5, 17, 123, 9, 256, 77, 31, 2] if index == 0 else [0]), np.int32)

    placement = Placement.of(jax.make_mesh((2 * count,), ("tensor",)))
    checkpoint = resolve(folder)
    size = placement.tensor_parallel_size
    arrays = load_parameters(checkpoint, parameter_specs(checkpoint.config, size), placement, "float32")
    weights = Weights.of(runtime_config(checkpoint.config, size), "float32", arrays)
    run = jax.jit(
        lambda leaves, tokens: weights.with_leaves(leaves).model()(tokens).argmax(-1),
        out_shardings=placement.replicated,
    )
    chosen = np.asarray(run(weights.leaves, placement.put(tokens[None])))
    local = sum(shard.data.nbytes for leaf in weights.leaves for shard in leaf.addressable_shards)
    return {
        "received": len(received["text"]) if received else None,
        "smallest": distributed.smallest(100 - index),
        "chosen": chosen.tolist(),
        "local bytes": local,
        "bytes": weights.nbytes,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
