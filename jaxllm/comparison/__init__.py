"""Our forward pass beside that of transformers (PyTorch), part by part.

- `prompts`: what both sides read;
- `reference`: the PyTorch side, which leaves plain NumPy arrays and is gone before our weights are loaded;
- `ours`: our parts, run on our own and on the reference's inputs, and the engine's continuations;
- `metrics`: differences, in NumPy alone; `verdict`: tolerances, and what exceeds them; `report`: text and JSON.

May import everything below the commands. Only `reference` imports torch, and only when it runs.
"""
