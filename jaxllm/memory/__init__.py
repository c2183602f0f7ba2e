"""How many KV-cache blocks fit: measured, budgeted to the byte, and shown.

- `units`, `views`, `budget` (of one device), `cache_size` (of all together), `earlier` (as in the start before),
  `predict`, `planner`, `cards`, `picture`, `report`: plain Python, no JAX, so that the planner is quick and the
  arithmetic is tested with made-up statistics;
- `device` reads the driver and JAX's allocator, `pool` sets the allocator's size, `warmup` measures what programs need
  while they run, `sizing` decides with all of them, `verify` checks the decision, `notes` says what a user should know.

May import `jaxllm.models` (shapes) and `jaxllm.config`, never the engine.
"""
