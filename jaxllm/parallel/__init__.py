"""Devices as a mesh, and processes as one engine.

`placement` says which mesh axis plays which part and derives every sharding; `mesh` makes the engine's own mesh, with
axes called `data` and `tensor` (one device is a 1x1 mesh); `distributed` joins processes. May import JAX only.
"""
