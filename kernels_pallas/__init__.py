"""The kernels of jaxllm, written in Pallas for Mosaic GPU (NVIDIA Hopper).

One folder a kernel: `reference.py` (jnp, any device), `mosaic_gpu.py` (the kernel), `config.py` (its tuning parameters,
which check themselves), `tuned.py` (measured values, as data) and `bench.py`.

- `paged_decode`: one to four query tokens per row over KV pages, split over the context where rows are few or uneven.
- `ragged_prefill`: chunks of many rows, each anywhere in its context, over the same pages.
- `kv_write`: the step's K and V into their slots, in place.
- `rope_write`: the same with norms and rotary embedding of q and k, in one pass over a prefill step's projections.
- `swiglu`: both projections of many tokens' MLP and the activation, in one matrix product.
- `small_batch`: the projections of 8 to 32 tokens, fused with norms, rotary embedding, KV write and activation.
- `interlayer`: all between two layers' attention for 64 to 512 tokens, in one launch.
- `sample`: a token for each row of logits, by the row's own parameters.

The KV array is `[layers, 2, num_blocks, kv_heads, block_size, head_dim]`, K at index 0 of dimension 1. Kernels take
the whole array and the layer's index as an operand: no layer is ever copied, and all layers share one compiled kernel.
Under tensor parallelism they run inside `jax.shard_map(..., check_vma=False)` on the local heads; jax 0.11 refuses
references with varying axes, by which the cache is written in place.

Operands must lie at multiples of 256 bytes. XLA's allocations do; a contiguous static slice of another array, which XLA
passes on without a copy, does if it starts at such a multiple of bytes.

`python -m kernels_pallas.selftest` runs each against its reference, `python -m kernels_pallas.bench` measures them.
This package imports jax and nothing of `jaxllm`.
"""
