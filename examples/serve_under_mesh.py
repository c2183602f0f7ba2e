"""How do I generate on a mesh of mine? Takes a checkpoint folder, or the demo model.

On a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=6 gives six devices to try it with: two replicas of the demo
model on three devices each.
"""

import sys

import jax

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoint import resolve
from jaxllm.models.params import tensor_parallel_sizes


def main(model: str) -> None:
    """Divide the model over as many devices as it can be divided among, and have replicas of it on the others."""
    count = jax.device_count()
    size = max(n for n in tensor_parallel_sizes(resolve(model).config) if count % n == 0)
    mesh = jax.make_mesh((count // size, size), ("replica", "model"))
    with jax.set_mesh(mesh):  # as in a program that computes on this mesh anyway
        llm = LLM(
            model,
            mesh=mesh,
            tensor_axis="model",
            data_axis="replica",
            max_num_seqs=4,
            max_model_len=512,
            enforce_eager=True,
        )
        for output in llm.generate(["The sea is", "Once upon a time"], SamplingParams(temperature=0, max_tokens=20)):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    runner = llm.engine.runner
    print(f"{runner.spec.placement}: KV cache as {runner.kv.sharding.spec}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
