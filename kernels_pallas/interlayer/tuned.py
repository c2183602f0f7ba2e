"""Tuning parameters of the kernel between attentions, as measured on an H200 (`kernels_pallas/EXPERIMENTS.md`)."""


def most_columns(tokens: int, hidden: int) -> int:
    """Columns of a step at most: few where the work of a thread block is only a few steps."""
    return 64 if tokens <= 128 and hidden <= 1024 else 128
