"""Devices as a mesh.

Axes are called `data` and `tensor`; one device is a 1x1 mesh. May import JAX only.
"""
