"""Checkpoints: what a model name means, its config, its tensors, its tokenizer, and strict loading onto a mesh.

`resolve` turns a folder, a .gguf file, a hub id or "smollm2" into a `Checkpoint`; `load_parameters` puts its tensors on
the devices. May import `jaxllm.models` (config and parameter records) and nothing above it.
"""

from jaxllm.checkpoint.checkpoint import Checkpoint, CheckpointError, LazyTensor
from jaxllm.checkpoint.load import check_tensors, load_parameters
from jaxllm.checkpoint.resolve import resolve

__all__ = ["Checkpoint", "CheckpointError", "LazyTensor", "check_tensors", "load_parameters", "resolve"]
