"""What is computed between two layers' attention, as phases in which thread blocks go in step."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from kernels_pallas.interlayer.config import FEATURES, HEAD_DIM, TOKENS, InterlayerShape
from kernels_pallas.interlayer.product import Features, Phase, Scratch, Tiles, product_phase
from kernels_pallas.warpgroup import Ref

LAYOUT = plgpu.Layout.WGMMA

HALF = FEATURES // 2

AT_ONCE = 4096
"""Numbers of several tokens that a thread block sums at the same time: 32 registers a thread."""


class Inputs(NamedTuple):
    """Operands in device memory; None for those of a half that is not part of the launch, and for absent norms."""

    counter: Ref  # of the barrier
    x: Ref  # [tokens, hidden]
    norm: Ref  # [hidden]: of the next layer's input, or of the model's output
    attended: Ref = None  # [tokens, heads * head_dim]
    o: Ref = None  # from here on `WeightsBehind`
    mlp_norm: Ref = None
    gate: Ref = None
    up: Ref = None
    down: Ref = None
    cos: Ref = None  # [tokens, head_dim / 2], float32
    sin: Ref = None
    q: Ref = None  # from here on `WeightsBefore`
    k: Ref = None
    v: Ref = None
    q_norm: Ref = None
    k_norm: Ref = None


class Outputs(NamedTuple):
    """Results, and what passes from phase to phase; None for what there is none of."""

    normed: Ref  # [tokens, hidden]: of the state, either one in turn
    x: Ref = None  # [tokens, hidden]: the state before the next layer
    middle: Ref = None  # [tokens, hidden]: the state before the MLP
    activation: Ref = None  # [tokens, mlp]
    attended_parts: Ref = None  # [splits, tokens, hidden], float32
    mlp_parts: Ref = None
    q: Ref = None  # [tokens, heads * head_dim]
    k: Ref = None  # [tokens, kv_heads * head_dim]
    v: Ref = None
    head_parts: Ref = None  # [splits, tokens, features of q, k and v], float32, where there are several

    @staticmethod
    def of(shape: InterlayerShape) -> "Outputs":
        """Shapes and dtypes."""
        struct, tokens, hidden = jax.ShapeDtypeStruct, shape.tokens, shape.hidden
        q_size, kv_size = shape.heads * HEAD_DIM, shape.kv_heads * HEAD_DIM
        state = struct((tokens, hidden), shape.dtype)
        outputs = Outputs(normed=state)
        if shape.behind:
            outputs = outputs._replace(
                x=state,
                middle=state,
                activation=struct((tokens, shape.mlp), shape.dtype),
                attended_parts=struct((shape.splits(q_size), tokens, hidden), jnp.float32),
                mlp_parts=struct((shape.splits(shape.mlp), tokens, hidden), jnp.float32),
            )
        if shape.before:
            q, kv = (struct((tokens, size), shape.dtype) for size in (q_size, kv_size))
            outputs = outputs._replace(q=q, k=kv, v=kv)
            if shape.head_splits > 1:
                parts = struct((shape.head_splits, tokens, q_size + 2 * kv_size), jnp.float32)
                outputs = outputs._replace(head_parts=parts)
        return outputs


def phases(shape: InterlayerShape, block: jax.Array, inputs: Inputs, outputs: Outputs, scratch: Scratch) -> list[Phase]:
    """What a block does, in turn."""
    product = functools.partial(product_phase, shape, block, scratch)
    norm = functools.partial(_add_and_norm, shape, block, normed=outputs.normed)
    if shape.behind:
        found = [
            _to_hidden(shape, product, inputs.attended, inputs.o, outputs.attended_parts),
            Phase(lambda: norm(inputs.x, inputs.mlp_norm, outputs.attended_parts, outputs.middle)),
            _gate_and_up(shape, inputs, outputs, product),
            _to_hidden(shape, product, outputs.activation, inputs.down, outputs.mlp_parts),
            Phase(lambda: norm(outputs.middle, inputs.norm, outputs.mlp_parts, outputs.x)),
        ]
    else:
        found = [Phase(lambda: norm(inputs.x, inputs.norm))]
    if shape.before:
        found += _queries_keys_values(shape, block, inputs, outputs, product)
    return found


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
        HALF,
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
    part = shape.gate_features
    along = -(-shape.mlp // part)
    overlap = along * part - shape.mlp  # of the last tile and the one before, whose results it leaves alone

    def first_feature(tile: jax.Array) -> jax.Array:
        return pl.multiple_of(jnp.minimum(tile // shape.token_tiles * part, shape.mlp - part), 8)

    tiles = Tiles(
        shape.token_tiles * along,
        shape.hidden,
        part,
        outputs.normed,
        weights=lambda tile: [(True, [(ref, first_feature(tile)) for ref in (inputs.gate, inputs.up)])],
        first_token=functools.partial(_first_token, shape),
    )

    def store(tile: jax.Array, products: tuple[jax.Array, jax.Array], _: Any) -> None:
        gate, up = products
        activation = (gate / (1 + jnp.exp(-gate)) * up).astype(shape.dtype)
        last = tile // shape.token_tiles == along - 1

        def put(skipped: int) -> None:
            features = pl.ds(pl.multiple_of(first_feature(tile) + skipped, 8), part - skipped)
            outputs.activation.at[pl.ds(_first_token(shape, tile), TOKENS), features][...] = activation[:, skipped:]

        if overlap:
            pl.when(last)(functools.partial(put, overlap))
            pl.when(jnp.logical_not(last))(functools.partial(put, 0))
        else:
            put(0)

    return product(tiles, store)


def _queries_keys_values(
    shape: InterlayerShape, block: jax.Array, inputs: Inputs, outputs: Outputs, product: Callable[..., Phase]
) -> list[Phase]:
    """q, k and v of the next layer, a head a tile; q and k normed and rotated.

    Where there are few heads for the multiprocessors, columns are cut into parts, and another phase sums these.
    """
    heads, kv_heads, splits = shape.heads, shape.kv_heads, shape.head_splits
    count = shape.token_tiles * (heads + 2 * kv_heads)

    def head_of(tile: jax.Array) -> jax.Array:
        return lax.rem(tile, jnp.int32(count)) // shape.token_tiles

    def kinds(tile: jax.Array) -> list[tuple[jax.Array, jax.Array, Ref, Ref]]:
        """Of q, k and v: whether the tile is of it, which of its heads; its weights, its output."""
        head = head_of(tile)
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
        splits * count,
        shape.hidden // splits,
        HALF,
        outputs.normed,
        weights=lambda tile: [(wanted, halves(weights, head)) for wanted, head, weights, _ in kinds(tile)],
        first_token=functools.partial(_first_token, shape),
        first_column=lambda tile: tile // count * (shape.hidden // splits),
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

    def finish(tile: jax.Array, products: tuple[jax.Array, jax.Array], others: tuple[Any, ...]) -> None:
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

    if outputs.head_parts is None:
        return [product(tiles, finish, meanwhile)]
    parts = outputs.head_parts

    def place(tile: jax.Array, half: int) -> tuple[Any, Any]:
        first = pl.multiple_of(head_of(tile) * HEAD_DIM + half * HALF, HALF)
        return pl.ds(_first_token(shape, tile), TOKENS), pl.ds(first, HALF)

    def store(tile: jax.Array, products: tuple[jax.Array, jax.Array], _: Any) -> None:
        for half, value in enumerate(products):
            parts.at[tile // count, *place(tile, half)][...] = value

    def sum_and_finish(tile: jax.Array) -> None:
        others = meanwhile(tile)
        left, right = (
            functools.reduce(
                jnp.add,
                [
                    plgpu.load(parts.at[split, *place(tile, half)], layout=LAYOUT, optimized=False)
                    for split in range(splits)
                ],
            )
            for half in range(2)
        )
        finish(tile, (left, right), others)

    def run() -> None:
        for turn in range(-(-count // shape.blocks)):
            tile = block + turn * shape.blocks
            pl.when(tile < count)(functools.partial(sum_and_finish, tile))

    return [product(tiles, store), Phase(run)]


def _add_and_norm(
    shape: InterlayerShape,
    block: jax.Array,
    before: Ref,
    weight: Ref,
    parts: Ref | None = None,
    after: Ref | None = None,
    *,
    normed: Ref,
) -> None:
    """`after = before + sum of parts`, where there are any, and its RMSNorm; a token at a time."""
    layout = plgpu.Layout.WG_STRIDED((shape.hidden,), vec_size=4)

    def read(ref: Ref) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def finish(token: jax.Array, total: jax.Array) -> None:
        state = total.astype(shape.dtype)
        if after is not None:
            after.at[token][...] = state
        wide = state.astype(jnp.float32)
        factor = lax.rsqrt(jnp.sum(wide * wide) * (1 / shape.hidden) + shape.eps)
        normed.at[token][...] = (wide * factor * read(weight)).astype(shape.dtype)

    tokens = [block + turn * shape.blocks for turn in range(-(-shape.tokens // shape.blocks))]
    for several in itertools.batched(tokens, max(1, AT_ONCE // shape.hidden)):
        totals = []
        for token in several:  # all reads before all writes, which they would wait for
            there = jnp.minimum(token, shape.tokens - 1)
            terms = [] if parts is None else [read(parts.at[part, there]) for part in range(parts.shape[0])]
            totals.append(functools.reduce(jnp.add, [*terms, read(before.at[there])]))
        for token, total in zip(several, totals, strict=True):
            pl.when(token < shape.tokens)(functools.partial(finish, token, total))


def _first_token(shape: InterlayerShape, tile: jax.Array) -> jax.Array:
    return pl.multiple_of(lax.rem(tile, jnp.int32(shape.token_tiles)) * TOKENS, TOKENS)
