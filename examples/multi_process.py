"""How do I run one model over several processes? This file starts them on this machine's CPU.

On a cluster, your launcher starts one process per host instead, and each does what `work` does; under Slurm, Open MPI
or Kubernetes `distributed.start()` needs no arguments.
"""

import socket
import subprocess
import sys

import jax

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoint import resolve
from jaxllm.models.params import tensor_parallel_sizes
from jaxllm.parallel import distributed


def work(model: str, count: int, index: int, coordinator: str) -> None:
    """One of `count` processes with one device each. All make the same calls; the prompts of process 0 count.

    They meet at `coordinator`, an address of process 0.

    The model is divided among as many devices as it can be; where that is not all of them, there are replicas of it.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    distributed.start(coordinator, count, index)
    size = max(n for n in tensor_parallel_sizes(resolve(model).config) if count % n == 0)
    mesh = jax.make_mesh((count // size, size), ("replica", "tensor"))
    llm = LLM(
        model,
        mesh=mesh,
        tensor_axis="tensor",
        data_axis="replica",
        max_num_seqs=4,
        max_model_len=512,
        num_kvcache_blocks=64,
        enforce_eager=True,
    )
    prompts = ["The sea is", "Once upon a time"] if index == 0 else []
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False):
        if index == 0:
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}", flush=True)


def main(model: str, count: int) -> int:
    """Start the processes; the largest exit code."""
    with socket.create_server(("localhost", 0)) as server:
        coordinator = f"localhost:{server.getsockname()[1]}"  # free now, and most probably a moment later
    arguments = [[sys.executable, __file__, model, str(count), str(index), coordinator] for index in range(count)]
    children = [subprocess.Popen(each) for each in arguments]
    return max(abs(child.wait()) for child in children)


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    number = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    if len(sys.argv) > 3:
        work(name, number, int(sys.argv[3]), sys.argv[4])
    else:
        sys.exit(main(name, number))
