"""What is computed between two layers' attention, as phases in which thread blocks go in step."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.interlayer.config import FEATURES, HEAD_DIM, TOKENS, InterlayerShape
from kernels_pallas.interlayer.product import HALF, Features, Phase, Scratch, Tiles, product_phase
from kernels_pallas.warpgroup import Ref

LAYOUT = plgpu.Layout.WGMMA


class Inputs(NamedTuple):
    """Operands in device memory; the weights are those of `LayerWeights`."""

    counters: Ref  # of the barriers
    attended: Ref  # [tokens, heads * head_dim]
    x: Ref  # [tokens, hidden]
    cos: Ref  # [tokens, head_dim / 2], float32
    sin: Ref
    o: Ref
    mlp_norm: Ref
    gate: Ref
    up: Ref
    down: Ref
    norm: Ref
    q: Ref
    k: Ref
    v: Ref
    q_norm: Ref | None = None
    k_norm: Ref | None = None


class Outputs(NamedTuple):
    """Results, and what passes from phase to phase."""

    x: Ref  # [tokens, hidden]: the state before the next layer
    q: Ref  # [tokens, heads * head_dim]
    k: Ref  # [tokens, kv_heads * head_dim]
    v: Ref
    middle: Ref  # [tokens, hidden]: the state before the MLP
    normed: Ref  # [tokens, hidden]: of either state
    activation: Ref  # [tokens, mlp]
    attended_parts: Ref  # [splits, tokens, hidden], float32
    mlp_parts: Ref

    @staticmethod
    def of(shape: InterlayerShape) -> "Outputs":
        """Shapes and dtypes."""
        struct, tokens, hidden = jax.ShapeDtypeStruct, shape.tokens, shape.hidden
        state = struct((tokens, hidden), shape.dtype)
        kv = struct((tokens, shape.kv_heads * HEAD_DIM), shape.dtype)
        q_size = shape.heads * HEAD_DIM
        return Outputs(
            x=state,
            q=struct((tokens, q_size), shape.dtype),
            k=kv,
            v=kv,
            middle=state,
            normed=state,
            activation=struct((tokens, shape.mlp), shape.dtype),
            attended_parts=struct((shape.splits(q_size), tokens, hidden), jnp.float32),
            mlp_parts=struct((shape.splits(shape.mlp), tokens, hidden), jnp.float32),
        )


def phases(shape: InterlayerShape, block: jax.Array, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> list[Phase]:
    """What a block does, in turn."""
    product = functools.partial(product_phase, shape, block, scratch)
    sum_and_norm = functools.partial(_add_and_norm, shape, block, normed=outputs.normed)
    return [
        _to_hidden(shape, product, inputs.attended, inputs.o, outputs.attended_parts),
        Phase(lambda: sum_and_norm(outputs.attended_parts, inputs.x, outputs.middle, inputs.mlp_norm)),
        _gate_and_up(shape, inputs, outputs, product),
        _to_hidden(shape, product, outputs.activation, inputs.down, outputs.mlp_parts),
        Phase(lambda: sum_and_norm(outputs.mlp_parts, outputs.middle, outputs.x, inputs.norm)),
        _queries_keys_values(shape, inputs, outputs, product),
    ]


PHASES = 6


def _to_hidden(shape: InterlayerShape, product: Callable[..., Phase], source: Ref, weights: Ref, parts: Ref) -> Phase:
    """A projection to the model's state, its columns cut into parts that are summed in the next phase."""
    columns, splits = weights.shape[1], parts.shape[0]
    count = shape.token_tiles * (shape.hidden // FEATURES)

    def first_feature(tile: jax.Array) -> jax.Array:
        return pl.multiple_of(lax.rem(tile, jnp.int32(count)) // shape.token_tiles * FEATURES, FEATURES)

    def halves(tile: jax.Array) -> Features:
        feature = first_feature(tile)
        return [(weights, feature), (weights, pl.multiple_of(feature + HALF, HALF))]

    tiles = Tiles(
        splits * count,
        columns // splits,
        source,
        weights=lambda tile: [(True, halves(tile))],
        first_token=functools.partial(_first_token, shape),
        first_column=lambda tile: tile // count * (columns // splits),
    )

    def store(tile: jax.Array, products: tuple[jax.Array, jax.Array], _: Any) -> None:
        tokens = pl.ds(_first_token(shape, tile), TOKENS)
        for index, value in enumerate(products):
            features = pl.ds(pl.multiple_of(first_feature(tile) + index * HALF, HALF), HALF)
            parts.at[tile // count, tokens, features][...] = value

    return product(tiles, store)


def _gate_and_up(shape: InterlayerShape, inputs: Inputs, outputs: Outputs, product: Callable[..., Phase]) -> Phase:
    """The first half of the MLP; the same features of gate and up lie in one tile."""

    def first_feature(tile: jax.Array) -> jax.Array:
        return pl.multiple_of(tile // shape.token_tiles * HALF, HALF)

    tiles = Tiles(
        shape.token_tiles * (shape.mlp // HALF),
        shape.hidden,
        outputs.normed,
        weights=lambda tile: [(True, [(ref, first_feature(tile)) for ref in (inputs.gate, inputs.up)])],
        first_token=functools.partial(_first_token, shape),
    )

    def store(tile: jax.Array, products: tuple[jax.Array, jax.Array], _: Any) -> None:
        gate, up = products
        target = outputs.activation.at[pl.ds(_first_token(shape, tile), TOKENS), pl.ds(first_feature(tile), HALF)]
        target[...] = (gate / (1 + jnp.exp(-gate)) * up).astype(shape.dtype)

    return product(tiles, store)


def _queries_keys_values(
    shape: InterlayerShape, inputs: Inputs, outputs: Outputs, product: Callable[..., Phase]
) -> Phase:
    """q, k and v of the next layer, a head a tile; q and k normed and rotated."""
    heads, kv_heads = shape.heads, shape.kv_heads

    def kinds(tile: jax.Array) -> list[tuple[jax.Array, jax.Array, Ref, Ref]]:
        """Of q, k and v: whether the tile is of it, which of its heads; its weights, its output."""
        head = tile // shape.token_tiles
        is_q, is_v = head < heads, head >= heads + kv_heads
        is_k = jnp.logical_not(jnp.logical_or(is_q, is_v))
        return [
            (is_q, head, inputs.q, outputs.q),
            (is_k, head - heads, inputs.k, outputs.k),
            (is_v, head - heads - kv_heads, inputs.v, outputs.v),
        ]

    def halves(weights: Ref, head: jax.Array) -> Features:
        first = pl.multiple_of(head * HEAD_DIM, HEAD_DIM)
        return [(weights, first), (weights, pl.multiple_of(first + HALF, HALF))]

    tiles = Tiles(
        shape.token_tiles * (heads + 2 * kv_heads),
        shape.hidden,
        outputs.normed,
        weights=lambda tile: [(wanted, halves(weights, head)) for wanted, head, weights, _ in kinds(tile)],
        first_token=functools.partial(_first_token, shape),
    )

    def meanwhile(tile: jax.Array) -> tuple[Any, ...]:
        tokens = pl.ds(_first_token(shape, tile), TOKENS)
        cos, sin = (plgpu.load(ref.at[tokens], layout=LAYOUT, optimized=False) for ref in (inputs.cos, inputs.sin))
        if inputs.q_norm is None or inputs.k_norm is None:
            return cos, sin, None
        of_q, of_k = (
            [
                plgpu.load(ref.at[pl.ds(first, HALF)], layout=LAYOUT.reduce(0), optimized=False).astype(jnp.float32)
                for first in (0, HALF)
            ]
            for ref in (inputs.q_norm, inputs.k_norm)
        )
        chosen = kinds(tile)[0][0].astype(jnp.float32)
        return cos, sin, [q * chosen + k * (1 - chosen) for q, k in zip(of_q, of_k, strict=True)]

    def store(tile: jax.Array, products: tuple[jax.Array, jax.Array], others: tuple[Any, ...]) -> None:
        (cos, sin, norms), (left, right) = others, products
        tokens = pl.ds(_first_token(shape, tile), TOKENS)
        queries, keys, values = kinds(tile)

        def put(kind: tuple[jax.Array, jax.Array, Ref, Ref], *halves: jax.Array) -> None:
            wanted, head, _weights, target = kind

            @pl.when(wanted)
            def _write() -> None:
                for place, value in enumerate(halves):
                    first = pl.multiple_of(head * HEAD_DIM + place * HALF, HALF)
                    target.at[tokens, pl.ds(first, HALF)][...] = value.astype(shape.dtype)

        put(values, left, right)
        if norms is not None:
            mean = (left * left + right * right).sum(axis=1) * (1 / HEAD_DIM)
            factor = lax.broadcast_in_dim(lax.rsqrt(mean + shape.eps), left.shape, [0])
            weights = [lax.broadcast_in_dim(norm, left.shape, [1]) for norm in norms]
            left, right = (value * factor * weight for value, weight in zip((left, right), weights, strict=True))
        rotated = left * cos - right * sin, right * cos + left * sin
        put(queries, *rotated)
        put(keys, *rotated)

    return product(tiles, store, meanwhile)


def _add_and_norm(
    shape: InterlayerShape,
    block: jax.Array,
    parts: Ref,
    before: Ref,
    after: Ref,
    weight: Ref,
    *,
    normed: Ref,
) -> None:
    """`after = before + sum of parts`, and its RMSNorm; a token at a time."""
    layout = plgpu.Layout.WG_STRIDED((shape.hidden,), vec_size=4)

    def read(ref: Ref) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    for turn in range(-(-shape.tokens // shape.blocks)):
        token = block + turn * shape.blocks

        @pl.when(token < shape.tokens)
        def _(token: jax.Array = token) -> None:
            total = functools.reduce(jnp.add, [read(parts.at[part, token]) for part in range(parts.shape[0])])
            state = (total + read(before.at[token])).astype(shape.dtype)
            after.at[token][...] = state
            wide = state.astype(jnp.float32)
            factor = lax.rsqrt(jnp.sum(wide * wide) * (1 / shape.hidden) + shape.eps)
            normed.at[token][...] = (wide * factor * read(weight)).astype(shape.dtype)


def _first_token(shape: InterlayerShape, tile: jax.Array) -> jax.Array:
    return pl.multiple_of(lax.rem(tile, jnp.int32(shape.token_tiles)) * TOKENS, TOKENS)
