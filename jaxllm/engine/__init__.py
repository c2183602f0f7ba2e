"""Requests to tokens: scheduling, packing, compiled programs, the loop over them.

May import everything of `jaxllm` below it: models, cache, memory, sampling, text, checkpoint, parallel, layers.
"""
