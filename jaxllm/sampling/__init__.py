"""Choosing tokens from logits, on the device.

May import JAX only.
"""
