"""Choosing tokens from logits, on the device.

`sampler` chooses, `logprobs` reports; on the host `variant` says what a batch needs and `packing` makes numbers of a
request's parameters. May import JAX, in `sampler` the sampling kernel and, in `packing`, `sampling_params`; `variant`
imports nothing.
"""
