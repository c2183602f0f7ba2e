"""`python -m jaxllm`: which commands there are."""

from jaxllm.version import __version__

print(f"""jaxllm {__version__}: LLM inference in JAX. Commands, each with --help:

  python -m jaxllm.generate   text from a prompt
  python -m jaxllm.compare    a checkpoint beside the PyTorch reference, layer by layer
  python -m jaxllm.convert    a checkpoint into an Orbax folder, and back
  python -m jaxllm.plan       the KV cache that fits on a card, without the card
  python -m jaxllm.bench      benchmarks""")
