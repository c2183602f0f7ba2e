"""The decoder of the Qwen3, Qwen2 and Llama families, in Flax NNX.

What differs between families (norms on q and k, biases, rotary scaling, tied embeddings) is data in `ModelConfig`.
The module is used three ways, which share every layer and differ in how attention finds its context:

- `model(tokens)`: dense causal attention over whole sequences, for training and evaluation;
- `model.paged(...)` with chunks of prompts: prefill into a paged KV cache;
- `model.paged(...)` with one token a row: decode.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxllm.layers.attention import causal_attention
from jaxllm.layers.linear import Embedding, Linear, silu_gate
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rotary import rotate, rotation
from jaxllm.models.config import ModelConfig
from jaxllm.models.rope import rope_frequencies

Cache = TypeVar("Cache")
Rotation = tuple[Float[Array, "*positions half"], Float[Array, "*positions half"]]


Attend = Callable[[int | Int[Array, ""], Array, Array, Array, Cache], tuple[Array, Cache]]
"""How attention finds its context: (layer, q, k, v, cache) -> (output, new cache).

`q [..., heads, head_dim]`, `k` and `v [..., kv_heads, head_dim]`; the output has the shape of `q`.
"""


def attend_densely(layer: int | Int[Array, ""], q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
    """Causal attention over the sequence itself, without a cache."""
    return causal_attention(q, k, v), cache


class SelfAttention(nnx.Module):
    """Projections, optional RMSNorm on q and k per head (Qwen3), rotary embedding, output projection."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, dim = config.hidden_size, config.head_dim
        q_size, kv_size, bias = (
            config.num_attention_heads * dim,
            config.num_key_value_heads * dim,
            config.attention_bias,
        )
        self.q_proj = Linear(hidden, q_size, bias=bias, dtype=dtype, rngs=rngs)
        self.k_proj = Linear(hidden, kv_size, bias=bias, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(hidden, kv_size, bias=bias, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(q_size, hidden, bias=config.attention_output_bias, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(dim, eps=config.rms_norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, eps=config.rms_norm_eps, dtype=dtype) if config.qk_norm else None
        self.head_dim = dim

    def __call__(
        self,
        x: Float[Array, "*batch hidden"],
        angles: Rotation,
        layer: int | Int[Array, ""],
        attend: Attend[Cache],
        cache: Cache,
        queries: Int[Array, "wanted"] | None = None,
    ) -> tuple[Float[Array, "*asking hidden"], Cache]:
        """Attention of one layer.

        Args:
            x: normalised hidden states.
            angles: cosine and sine of the tokens' positions.
            layer: which.
            attend: how attention finds its context.
            cache: where.
            queries: of `x [tokens, hidden]`, the tokens whose output is wanted; K and V are computed of all.
        """
        out, cache = attend(layer, *self.project(x, angles, queries), cache)
        return self.o_proj(out.reshape(*out.shape[:-2], -1)), cache

    @property
    def head_norms(self) -> tuple[Float[Array, "head_dim"], Float[Array, "head_dim"]] | None:
        """Weights of the norms on q and k; None where the family has none."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm.weight[...], self.k_norm.weight[...]

    def project(
        self, x: Float[Array, "*batch hidden"], angles: Rotation, queries: Int[Array, "wanted"] | None = None
    ) -> tuple[Array, Array, Array]:
        """q, k and v, by heads, q and k normed and rotated; arguments as above."""
        asking, asking_angles = (
            (x, angles) if queries is None else (x[queries], (angles[0][queries], angles[1][queries]))
        )
        q, k, v = (
            proj(source).reshape(*source.shape[:-1], -1, self.head_dim)
            for proj, source in ((self.q_proj, asking), (self.k_proj, x), (self.v_proj, x))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, *asking_angles), rotate(k, *angles), v


class MLP(nnx.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        hidden, mlp, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, mlp, bias=bias, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(hidden, mlp, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(mlp, hidden, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch hidden"]:
        """`down(silu(gate(x)) * up(x))`."""
        return self.down_proj(self.activated(x))

    def activated(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch mlp"]:
        """`silu(gate(x)) * up(x)`."""
        return silu_gate(self.gate_proj(x), self.up_proj(x))


class DecoderLayer(nnx.Module):
    """Pre-norm residual block: attention, then MLP."""

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        norm = {"eps": config.rms_norm_eps, "dtype": dtype}
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.self_attn = SelfAttention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        self.mlp = MLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "*batch hidden"],
        angles: Rotation,
        layer: int | Int[Array, ""],
        attend: Attend[Cache],
        cache: Cache,
        queries: Int[Array, "wanted"] | None = None,
    ) -> tuple[Float[Array, "*asking hidden"], Cache]:
        """One block; see `SelfAttention` for the arguments."""
        attended, cache = self.self_attn(self.input_layernorm(x), angles, layer, attend, cache, queries)
        return self.behind_attention(x if queries is None else x[queries], attended), cache

    def behind_attention(
        self, x: Float[Array, "*batch hidden"], projected: Float[Array, "*batch hidden"]
    ) -> Float[Array, "*batch hidden"]:
        """The rest of the block: residual of the attention's projected output, and MLP."""
        x = x + projected
        return x + self.mlp(self.post_attention_layernorm(x))


Block = Callable[[DecoderLayer, Array, Rotation, Int[Array, ""], Cache], tuple[Array, Cache]]
"""How a whole block is run: (module, x, angles, layer, cache) -> (x, new cache)."""


def block_with[Cache](attend: Attend[Cache]) -> Block[Cache]:
    """A block run as it is written here; `attend` says how attention finds its context."""

    def run(
        layer: DecoderLayer, x: Array, angles: Rotation, index: Int[Array, ""], cache: Cache
    ) -> tuple[Array, Cache]:
        return layer(x, angles, index, attend, cache)

    return run


class Decoder(nnx.Module):
    """Token embedding, `num_hidden_layers` blocks, final norm, output layer.

    Args:
        config: shapes; `runtime_config` of a checkpoint's where it lies on a mesh.
        dtype: of parameters and activations. Norm statistics, rotations, softmax and logits are float32 in any case.
        rngs: for random initialisation; parameters of a checkpoint replace it.
    """

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: Int[Array, "*batch tokens"]) -> Float[Array, "*batch tokens vocab"]:
        """Logits after every token, dense causal attention. Differentiable; call it under your own `jax.jit`.

        Sequences of different lengths are padded on the right: no token sees those after it.
        """
        return self.logits(self.norm(self.hidden_states(tokens)[-1]))

    def hidden_states(self, tokens: Int[Array, "*batch tokens"]) -> list[Float[Array, "*batch tokens hidden"]]:
        """The embedding and the output of every block, `num_hidden_layers + 1` arrays, before the final norm."""
        angles = self.angles(jnp.arange(tokens.shape[-1]))
        states = [self.embed_tokens(tokens)]
        for index in range(len(self.layers)):
            states.append(self.block(index, states[-1], angles))
        return states

    def block(
        self, index: int, x: Float[Array, "*batch tokens hidden"], angles: Rotation
    ) -> Float[Array, "*batch tokens hidden"]:
        """One block with dense causal attention."""
        return self.layers[index](x, angles, index, attend_densely, None)[0]

    def paged(
        self,
        tokens: Int[Array, "tokens"],
        positions: Int[Array, "tokens"],
        run_block: Block[Cache],
        cache: Cache,
        wanted: tuple[Int[Array, "wanted"], Attend[Cache]] | None = None,
    ) -> tuple[Float[Array, "asking hidden"], Cache]:
        """Normalised hidden states of a step's tokens, and the cache with their keys and values.

        Args:
            tokens: flattened tokens of all rows.
            positions: their positions in their sequences.
            run_block: how a block of all tokens is run: `block_with` what writes K and V and attends over the pages
                (`jaxllm.engine.attention`), or by other means (`jaxllm.engine.large_batch`).
            cache: the paged KV cache.
            wanted: the tokens whose hidden states are returned, where not all are, and how these attend in the last
                block, which then computes nothing but K and V of the others.
        """
        angles = self.angles(positions)
        x = self.embed_tokens(tokens)
        graphdef = nnx.graphdef(self.layers[0])

        # Traced and lowered once for all layers: for 28 of them that takes seconds, and threads cannot share it.
        @jax.jit
        def block(state: Any, index: Int[Array, ""], x: Array, cache: Any) -> tuple[Array, Any]:
            return run_block(nnx.merge(graphdef, state), x, angles, index, cache)

        blocks = list(enumerate(self.layers))
        for index, layer in blocks if wanted is None else blocks[:-1]:
            x, cache = block(nnx.state(layer), jnp.int32(index), x, cache)
        if wanted is not None:
            (index, layer), (queries, attend_last) = blocks[-1], wanted
            x, cache = layer(x, angles, index, attend_last, cache, queries)
        return self.norm(x), cache

    def logits(self, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Scores of every token in float32, from normalised hidden states."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).logits(hidden)

    def angles(self, positions: Int[Array, "*batch"]) -> Rotation:
        """Cosine and sine of the rotary angles at `positions`."""
        return rotation(positions, *rope_frequencies(self.config.rope, self.config.head_dim))
