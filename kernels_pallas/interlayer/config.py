"""What the kernel between two attentions can run, and how its projections are cut into tiles."""

import dataclasses

import jax
import jax.numpy as jnp

TOKENS = 64
"""Tokens of a tile: wgmma multiplies 64 rows at a time."""

FEATURES = 128
"""Features of a tile, in two parts of 64: gate and up, or the halves of a head, or neighbours."""

STEP = 64
"""Columns of a tile's operands that are loaded and multiplied at a time."""

HEAD_DIM = 128
"""The head size the kernel knows, that of a tile."""

STEPS_IN_FLIGHT = 8
"""Of a multiprocessor, all that its shared memory holds; two thread blocks have half of them each."""

FEW_TOKENS = 128
"""Up to so many tokens the products have no more tiles than there are multiprocessors, and one thread block on each is
faster (H200, Qwen3-0.6B); beyond, two."""


def blocks_per_multiprocessor(tokens: int) -> int:
    """Thread blocks on a multiprocessor."""
    return 1 if tokens <= FEW_TOKENS else 2


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
    """

    tokens: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    multiprocessors: int
    eps: float
    dtype: jnp.dtype

    @property
    def blocks(self) -> int:
        """Thread blocks, all of which run at the same time."""
        return self.multiprocessors * blocks_per_multiprocessor(self.tokens)

    @property
    def stages(self) -> int:
        """Steps of a thread block in flight."""
        return STEPS_IN_FLIGHT // blocks_per_multiprocessor(self.tokens)

    @property
    def token_tiles(self) -> int:
        """Tiles along the tokens."""
        return self.tokens // TOKENS

    def splits(self, columns: int) -> int:
        """Parts into which the columns of a projection back to `hidden` are cut, so that its tiles fill the GPU."""
        tiles = self.token_tiles * (self.hidden // FEATURES)
        parts = 1
        while tiles * parts * 2 <= self.multiprocessors and columns % (parts * 2 * STEP) == 0:
            parts *= 2
        return parts


def refusal(*, hidden: int, mlp: int, heads: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot run with these sizes; None if it can."""
    if head_dim != HEAD_DIM:
        return f"head_dim is {head_dim}; the kernel between attentions knows {HEAD_DIM}"
    if dtype != jnp.bfloat16:
        return f"the model's dtype is {dtype}; the kernel between attentions takes bfloat16"
    for name, value, multiple in (("hidden_size", hidden, 512), ("intermediate_size", mlp, STEP)):
        if value % multiple:
            return f"{name} is {value}; the kernel between attentions takes multiples of {multiple}"
    if heads % kv_heads:
        return f"{heads} query heads are no multiple of {kv_heads} KV heads"
    return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerWeights:
    """Weights behind the attention of one layer and before that of the next, `[out, in]` as checkpoints store them.

    Attributes:
        o: output projection, `[hidden, heads * head_dim]`.
        mlp_norm: of the MLP's input, `[hidden]`.
        gate: `[mlp, hidden]`.
        up: likewise.
        down: `[hidden, mlp]`.
        norm: of the next layer's input, `[hidden]`.
        q: its projections, `[heads * head_dim, hidden]`.
        k: `[kv_heads * head_dim, hidden]`.
        v: likewise.
        q_norm: norms of its heads, `[head_dim]`, or None.
        k_norm: given if `q_norm` is.
    """

    o: jax.Array
    mlp_norm: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    norm: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None

    def check(self, *, hidden: int, mlp: int, heads: int, kv_heads: int, dtype: jnp.dtype) -> None:
        """ValueError unless all have the shapes and dtype of a model of these sizes."""
        q_size, kv_size = heads * HEAD_DIM, kv_heads * HEAD_DIM
        expected = {
            "o": (hidden, q_size), "mlp_norm": (hidden,), "gate": (mlp, hidden), "up": (mlp, hidden),
            "down": (hidden, mlp), "norm": (hidden,), "q": (q_size, hidden), "k": (kv_size, hidden),
            "v": (kv_size, hidden), "q_norm": (HEAD_DIM,), "k_norm": (HEAD_DIM,),
        }  # fmt: skip
        for name, shape in expected.items():
            value = getattr(self, name)
            if value is not None and (value.shape != shape or value.dtype != dtype):
                raise ValueError(f"{name} is {value.dtype}{list(value.shape)}; expected {dtype}{list(shape)}")
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("one of q_norm and k_norm is given; expected both or none")
