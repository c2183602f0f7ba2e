"""What the kernel between two attentions can run, and how its projections are cut into tiles."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from kernels_pallas.hopper import SHARED_MEMORY_ALIGNMENT, SHARED_MEMORY_PER_BLOCK

TOKENS = 64
"""Tokens of a tile: wgmma multiplies 64 rows at a time."""

FEATURES = 128
"""Features of a tile, in two parts of 64: halves of a head, or neighbours. Tiles of gate and up are as wide as it takes
to have one for each multiprocessor."""

WIDEST = 192
"""Features of a tile at most: 32 KiB are loaded for 64 columns of it, and there is room for seven times as much."""

COLUMNS = 64
"""Columns of operands that lie in a row of shared memory."""

MOST_COLUMNS = 2 * COLUMNS
"""Columns of a step at most: with half as many a layer of Qwen3-8B took 7 % longer at 64 tokens (H200)."""

HEAD_DIM = 128
"""The head size the kernel knows, that of a tile."""

MOST_STAGES = 12
"""Steps of a thread block in flight; no more than its shared memory holds."""

FEWEST_COLUMNS = 1024
"""Columns into which a projection to heads is not cut further: parts are written, and read by another phase."""


@dataclasses.dataclass(frozen=True)
class InterlayerShape:
    """Static sizes of a launch.

    Attributes:
        tokens: a multiple of 64.
        hidden: features of the model's state.
        mlp: features of the MLP.
        heads: query heads.
        kv_heads: KV heads.
        multiprocessors: of the GPU.
        eps: of the norms.
        dtype: of activations and weights.
        behind: whether what follows a layer's attention is part of it.
        before: whether what precedes a layer's attention is.
    """

    tokens: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    multiprocessors: int
    eps: float
    dtype: jnp.dtype
    behind: bool = True
    before: bool = True

    @property
    def step(self) -> int:
        """Columns of a tile's operands that are loaded and multiplied at a time."""
        columns = math.gcd(self.hidden, self.mlp, self.heads * HEAD_DIM) if self.behind else self.hidden
        return math.gcd(MOST_COLUMNS, columns)

    @property
    def blocks(self) -> int:
        """Thread blocks, one on each multiprocessor, all of which run at the same time."""
        return self.multiprocessors

    @property
    def stages(self) -> int:
        """Steps of a thread block in flight."""
        step = (self.widest + TOKENS) * self.step * self.dtype.itemsize
        return min(MOST_STAGES, (SHARED_MEMORY_PER_BLOCK - SHARED_MEMORY_ALIGNMENT) // step)

    @property
    def widest(self) -> int:
        """Features of the widest tile."""
        return max(FEATURES, 2 * self.gate_features)

    @property
    def gate_features(self) -> int:
        """Features of gate, and of up, in a tile: so that all blocks have equally many tiles, as few as can be."""
        turns, features = 1, WIDEST
        while features * 2 > WIDEST:
            tiles = max(1, turns * self.blocks // self.token_tiles)  # along the features
            features = _round_up(-(-self.mlp // tiles), 8)
            turns += 1
        return features

    @property
    def token_tiles(self) -> int:
        """Tiles along the tokens."""
        return self.tokens // TOKENS

    def splits(self, columns: int, *, outputs: int | None = None, fewest: int = COLUMNS) -> int:
        """Parts into which the columns of a projection are cut, so that its tiles fill the GPU.

        Args:
            columns: it is a sum over.
            outputs: features it has; default `hidden`.
            fewest: columns of a part.
        """
        tiles = self.token_tiles * ((outputs or self.hidden) // FEATURES)
        parts = 1
        while (
            tiles * parts * 2 <= self.multiprocessors
            and columns % (parts * 2 * self.step) == 0
            and columns // (parts * 2) >= fewest
        ):
            parts *= 2
        return parts

    @property
    def head_splits(self) -> int:
        """Parts into which the columns of the projections to q, k and v are cut."""
        outputs = (self.heads + 2 * self.kv_heads) * HEAD_DIM
        return self.splits(self.hidden, outputs=outputs, fewest=FEWEST_COLUMNS)

    @property
    def phases(self) -> int:
        """Phases of the kernel."""
        return (5 if self.behind else 1) + (0 if not self.before else 1 if self.head_splits == 1 else 2)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def refusal(*, hidden: int, mlp: int, heads: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot run with these sizes; None if it can."""
    if head_dim != HEAD_DIM:
        return f"head_dim is {head_dim}; the kernel between attentions knows {HEAD_DIM}"
    if dtype != jnp.bfloat16:
        return f"the model's dtype is {dtype}; the kernel between attentions takes bfloat16"
    for name, value, multiple in (("hidden_size", hidden, 512), ("intermediate_size", mlp, COLUMNS)):
        if value % multiple:
            return f"{name} is {value}; the kernel between attentions takes multiples of {multiple}"
    if heads % kv_heads:
        return f"{heads} query heads are no multiple of {kv_heads} KV heads"
    return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightsBehind:
    """Weights of a layer behind its attention, `[out, in]` as checkpoints store them.

    Attributes:
        o: output projection, `[hidden, heads * head_dim]`.
        mlp_norm: of the MLP's input, `[hidden]`.
        gate: `[mlp, hidden]`.
        up: likewise.
        down: `[hidden, mlp]`.
    """

    o: jax.Array
    mlp_norm: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightsBefore:
    """Weights of a layer before its attention, likewise.

    Attributes:
        norm: of the layer's input, `[hidden]`.
        q: its projections, `[heads * head_dim, hidden]`.
        k: `[kv_heads * head_dim, hidden]`.
        v: likewise.
        q_norm: norms of its heads, `[head_dim]`, or None.
        k_norm: given if `q_norm` is.
    """

    norm: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None


def check_weights(shape: InterlayerShape, weights: dict[str, jax.Array | None]) -> None:
    """ValueError unless all that are there have the shapes and dtype of a model of these sizes."""
    hidden, mlp, q_size, kv_size = shape.hidden, shape.mlp, shape.heads * HEAD_DIM, shape.kv_heads * HEAD_DIM
    expected = {
        "o": (hidden, q_size), "mlp_norm": (hidden,), "gate": (mlp, hidden), "up": (mlp, hidden), "down": (hidden, mlp),
        "norm": (hidden,), "q": (q_size, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden), "q_norm": (HEAD_DIM,),
        "k_norm": (HEAD_DIM,),
    }  # fmt: skip
    for name, value in weights.items():
        if value is not None and (value.shape != expected[name] or value.dtype != shape.dtype):
            raise ValueError(
                f"{name} is {value.dtype}{list(value.shape)}; expected {shape.dtype}{list(expected[name])}"
            )
    if (weights.get("q_norm") is None) != (weights.get("k_norm") is None):
        raise ValueError("one of q_norm and k_norm is given; expected both or none")
