"""Benchmarks and measurements, each a command that makes its table again: `python -m jaxllm.bench.X`.

May import everything; nothing imports them.
"""
