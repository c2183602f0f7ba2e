"""Who owns which part of the KV cache.

`block_pool` counts references to blocks, `prefix` finds blocks that already hold wanted content, `kv_array` says how
the array itself looks. The first two are plain Python and import nothing but each other, so that the scheduler can be
tested, and run, without a device.
"""
