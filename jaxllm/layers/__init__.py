"""Building blocks of a decoder: linear, norm, rotary, and attention as plain functions over arrays.

May import JAX, Flax and `kernels_pallas`; nothing else of `jaxllm`.
"""
