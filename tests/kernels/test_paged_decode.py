import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernels.attention_cases import Case, make_case, relative_error, solve

from kernels_pallas.paged_decode import (
    DecodeConfig,
    paged_decode,
    paged_decode_reference,
    paged_decode_write,
    plan_decode,
)
from kernels_pallas.paged_decode.window import lies_in_tiles, window_rows

# Rounding of the output to bfloat16 alone is 2e-3 of it; float16 has three more bits.
TOLERANCE = {np.dtype(ml_dtypes.bfloat16): 6e-3, np.dtype(np.float16): 1e-3}


def arguments(case: Case) -> tuple:
    return (
        jnp.asarray(case.q),
        jnp.asarray(case.kv),
        case.layer,
        jnp.asarray(case.block_tables),
        jnp.asarray(case.context_lens),
    )


def assert_solves(case: Case, out: jax.Array, lse: jax.Array) -> None:
    want, want_lse = solve(case)
    assert relative_error(out, want) < TOLERANCE[case.q.dtype]
    assert np.array_equal(np.isneginf(lse), np.isneginf(want_lse))
    finite = np.isfinite(want_lse)
    np.testing.assert_allclose(np.asarray(lse)[finite], want_lse[finite], atol=2e-3)


WHOLE = DecodeConfig(min_piece=2**20)
CUT = DecodeConfig(min_piece=64, wave=24)

MANY_PIECES = DecodeConfig(min_piece=64, wave=40)
MANY_PIECES_OF_TWO = DecodeConfig(min_piece=64, wave=120)

CASES = {
    # lengths around a block (16) and around a step (64), padding rows between them
    "lengths": (dict(context_lens=[0, 1, 15, 16, 17, 63, 64, 65, 0]), WHOLE),
    "cut": (dict(context_lens=[0, 1, 300, 130]), CUT),
    "one row cut": (dict(context_lens=[200], block_size=64, heads=8), CUT),
    "merged in two levels": (dict(context_lens=[900, 1100], block_size=64, heads=2, kv_heads=1), MANY_PIECES),
    "shared pages": (dict(context_lens=[70, 70, 40], shared_blocks=2), WHOLE),
    "group of 5": (dict(context_lens=[33, 80], heads=10), WHOLE),
    "group of 3, head_dim 64": (dict(context_lens=[33, 80, 7], heads=9, kv_heads=3, head_dim=64), CUT),
    "group of 16, head_dim 256": (dict(context_lens=[20, 70], heads=16, kv_heads=1, head_dim=256), WHOLE),
    "no group, block 128": (dict(context_lens=[129, 5], heads=2, block_size=128), WHOLE),
    "block 256, steps of 128": (
        dict(context_lens=[300, 257], block_size=256, kv_heads=1),
        DecodeConfig(step=128, min_piece=128, wave=8),
    ),
    "three stages": (dict(context_lens=[290, 1]), DecodeConfig(stages=3, min_piece=2**20)),
    "float16": (dict(context_lens=[40, 17], dtype=np.float16, block_size=32), WHOLE),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name, execute):
    sizes, config = CASES[name]
    case = make_case(**sizes)
    out, lse = execute(paged_decode, *arguments(case), scale=case.scale, config=config)
    assert_solves(case, out, lse)


# Tokens, sizes and configuration. A step ends between a row's tokens (64 to 66), a piece holds but the last of them
# (129 and 193), and a row has fewer than there are (1 to 3).
SEVERAL = {
    "lengths, shared pages": (4, dict(context_lens=[0, 1, 3, 64, 65, 66], shared_blocks=2), WHOLE),
    "cut, no group, head_dim 64": (2, dict(context_lens=[193, 1, 129], heads=2, head_dim=64, block_size=64), CUT),
    "group of 5": (3, dict(context_lens=[33, 2], heads=10), WHOLE),
    "group of 16, head_dim 256, cut": (
        4,
        dict(context_lens=[130], heads=16, kv_heads=1, head_dim=256, block_size=128),
        CUT,
    ),
    "float8": (4, dict(context_lens=[2, 130], heads=6, kv_dtype=ml_dtypes.float8_e4m3fn), CUT),
}


def several(name: str) -> tuple[Case, tuple, DecodeConfig]:
    """A case of several tokens a row, the arguments with the tokens in a dimension of their own, and the config."""
    tokens, sizes, config = SEVERAL[name]
    rows = len(sizes["context_lens"])
    case = make_case(**sizes, q_lens=[tokens] * rows)
    q, *others = arguments(case)
    return case, (q.reshape(rows, tokens, *q.shape[1:]), *others), config


@pytest.mark.parametrize("name", SEVERAL)
def test_several_tokens_equal_float64(name, execute):
    case, args, config = several(name)
    out, lse = execute(paged_decode, *args, scale=case.scale, config=config)
    assert_solves(case, out.reshape(case.q.shape), lse.reshape(case.q.shape[:2]))


def test_a_group_is_read_in_tiles_only_where_it_never_crosses_into_one_more():
    for group in range(1, 17):
        starts = range(0, 64 * group, group)
        tiles = {(start + group - 1) // 8 - start // 8 + 1 for start in starts}
        assert window_rows(group) == 8 * min(tiles)
        assert lies_in_tiles(group) == (len(tiles) == 1)
    assert window_rows(5, tokens=3) == 16 and not lies_in_tiles(8, tokens=2)


def test_reference_of_several_tokens_equals_float64():
    case, args, _ = several("lengths, shared pages")
    out, lse = paged_decode_reference(*args, scale=case.scale)
    assert_solves(case, out.reshape(case.q.shape), lse.reshape(case.q.shape[:2]))


QUANTIZED = {
    "lengths": (dict(context_lens=[0, 1, 64, 90], heads=4), WHOLE),
    "cut, head_dim 64": (dict(context_lens=[200, 15], heads=3, kv_heads=1, head_dim=64, block_size=64), CUT),
    "head_dim 256": (dict(context_lens=[70], heads=2, kv_heads=1, head_dim=256, block_size=32), WHOLE),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_float8_cache_equals_float64(name, execute):
    sizes, config = QUANTIZED[name]
    case = make_case(**sizes, kv_dtype=ml_dtypes.float8_e4m3fn)
    scales = dict(k_scale=jnp.float32(0.5), v_scale=3.0)
    out, lse = execute(paged_decode, *arguments(case), scale=2 * case.scale, config=config, **scales)
    assert_solves(case, out / 3, lse)
    out, lse = paged_decode_reference(*arguments(case), scale=2 * case.scale, **scales)
    assert_solves(case, out / 3, lse)


WRITES = {
    "lengths": (dict(context_lens=[0, 1, 16, 17, 64, 65, 190]), WHOLE),
    "cut, block 64": (dict(context_lens=[300, 1, 129, 0], block_size=64), CUT),
    "float8": (dict(context_lens=[70, 64, 150], kv_dtype=ml_dtypes.float8_e4m3fn, heads=2), CUT),
    "group of 3": (dict(context_lens=[70, 0, 130], heads=6), CUT),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_the_newest_token_first(name, execute):
    sizes, config = WRITES[name]
    case = make_case(**sizes)
    before = case.kv.copy()
    k = np.full((len(case.context_lens), *case.kv.shape[3::2]), np.nan, case.kv.dtype)
    v = k.copy()
    for row, length in enumerate(case.context_lens):
        if length:
            block, slot = case.block_tables[row, (length - 1) // case.kv.shape[4]], (length - 1) % case.kv.shape[4]
            k[row], v[row] = case.kv[case.layer, :, block, :, slot]
            before[case.layer, :, block, :, slot] = np.nan
    out, lse, kv = execute(
        paged_decode_write, jnp.asarray(case.q), jnp.asarray(k), jnp.asarray(v), jnp.asarray(before),
        *arguments(case)[2:], scale=case.scale, config=config,
    )  # fmt: skip
    assert_solves(case, out, lse)
    assert np.array_equal(np.asarray(kv).view(np.uint8), case.kv.view(np.uint8))


QUANTIZED_WRITES = {
    "lengths": (dict(context_lens=[0, 1, 16, 17, 64, 65, 128]), WHOLE),
    "cut, block 64": (dict(context_lens=[300, 1, 129, 0], block_size=64, heads=2), CUT),
    "float16, one row of narrow heads": (
        dict(context_lens=[65], head_dim=64, heads=3, kv_heads=1, dtype=np.float16),
        WHOLE,
    ),
    "head_dim 256": (dict(context_lens=[70, 64], heads=2, kv_heads=1, head_dim=256, block_size=32), WHOLE),
}


@pytest.mark.parametrize("name", QUANTIZED_WRITES)
def test_quantizes_the_newest_token(name, execute):
    """Written is values / scale in float32, rounded once by ml_dtypes; K and V of rows of padding are NaN."""
    sizes, config = QUANTIZED_WRITES[name]
    case = make_case(**sizes, kv_dtype=ml_dtypes.float8_e4m3fn)
    case = dataclasses.replace(case, scale=case.scale / 256)  # else K of 448 would make weights of zeros and a one
    scales = np.array([0.25, 0.007], np.float32)  # K's a power of two, so that ties are exact
    factors = scales[:, None, None, None]
    rows, (kv_heads, head_dim) = len(case.context_lens), case.kv.shape[3::2]
    rng = np.random.default_rng(1)
    new = 2 * rng.standard_normal((2, rows, kv_heads, head_dim))
    # Beyond 448; the smallest float8, 2^-9, and ties beside it; ties of larger ones; what becomes zero; negative zero.
    new[..., :8] = 449, -500, 464, 1e4, -np.inf, 2**-9, -(2**-9), 3 * 2**-10
    new[..., 8:16] = 2**-10, -(2**-10), 5 * 2**-10, 1.0625, -1.1875, 1e-6, 0.0, -0.0
    new = (new * factors).astype(case.q.dtype)
    stored = np.clip(new.astype(np.float32) / factors, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    before = case.kv.copy()
    for row, length in enumerate(case.context_lens):
        if length:
            block, slot = case.block_tables[row, (length - 1) // case.kv.shape[4]], (length - 1) % case.kv.shape[4]
            case.kv[case.layer, :, block, :, slot] = stored[:, row]
            before[case.layer, :, block, :, slot] = np.nan
        else:
            new[:, row] = np.nan
    out, lse, kv = execute(
        paged_decode_write, jnp.asarray(case.q), *jnp.asarray(new), jnp.asarray(before), *arguments(case)[2:],
        scale=case.scale / float(scales[0]), config=config, k_scale=jnp.float32(scales[0]), v_scale=float(scales[1]),
    )  # fmt: skip
    assert np.array_equal(np.asarray(kv).view(np.uint8), case.kv.view(np.uint8))
    assert_solves(case, out.astype(jnp.float32) / scales[1], lse)


def test_refuses_new_tokens_of_other_dtypes():
    case = make_case([20], kv_dtype=ml_dtypes.float8_e4m3fn)
    q, *where = arguments(case)
    k = jnp.zeros((1, 2, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"k is float16.*both in float8_e4m3fn or bfloat16"):
        paged_decode_write(q, k.astype(jnp.float16), k.astype(jnp.float16), *where, scale=1.0)
    with pytest.raises(ValueError, match=r"v is float8_e4m3fn.*both in float8_e4m3fn or bfloat16"):
        paged_decode_write(q, k, k.astype(jnp.float8_e4m3fn), *where, scale=1.0)
    with pytest.raises(ValueError, match=r"k is float8_e4m3fn.*both in bfloat16"):
        paged_decode_write(q, *[k.astype(jnp.float8_e4m3fn)] * 2, where[0].astype(q.dtype), *where[1:], scale=1.0)


@pytest.mark.parametrize("name", ["lengths", "group of 3, head_dim 64", "float16"])
def test_reference_equals_float64(name):
    case = make_case(**CASES[name][0])
    assert_solves(case, *paged_decode_reference(*arguments(case), scale=case.scale))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_random_cases(seed, tokens):
    rng = np.random.default_rng(seed)
    rows, kv_heads = int(rng.integers(1, 40)), int(rng.choice([1, 2, 8]))
    lengths = np.exp(rng.uniform(0, np.log(5000), rows)).astype(int) * (rng.random(rows) > 0.1)
    case = make_case(
        lengths,
        q_lens=[tokens] * rows,
        heads=kv_heads * int(rng.choice([1, 2, 4, 5, 7, 8])),
        kv_heads=kv_heads,
        head_dim=int(rng.choice([64, 128, 256])),
        block_size=int(rng.choice([16, 32, 64, 128, 256])),
        dtype=np.float16 if seed % 3 == 0 else ml_dtypes.bfloat16,
        seed=seed,
    )
    call = jax.jit(lambda *args: paged_decode(*args, scale=case.scale))
    q, *others = arguments(case)
    out, lse = call(q if tokens == 1 else q.reshape(rows, tokens, *q.shape[1:]), *others)
    assert_solves(case, out.reshape(case.q.shape), lse.reshape(case.q.shape[:2]))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [2, 8, 16])
def test_error_is_no_larger_than_cudnn(heads):
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    lengths = [1000, 17, 512, 64]
    case = make_case(lengths, heads=heads, kv_heads=2, block_size=64, layers=1, layer=0)
    want, _ = solve(case)
    q, kv, layer, tables, lens = arguments(case)
    ours, _ = jax.jit(lambda *args: paged_decode(*args, scale=case.scale))(q, kv, layer, tables, lens)
    # cuDNN wants the pages its tables can name, no more, and finite ones.
    width = tables.shape[1]
    own = jnp.asarray(
        np.random.default_rng(0).permutation(len(lengths) * width).reshape(len(lengths), width), jnp.int32
    )
    pages = jnp.zeros((2, len(lengths) * width, *kv.shape[3:]), kv.dtype)
    pages = pages.at[:, own].set(jnp.nan_to_num(kv[0][:, jnp.clip(tables, 0, kv.shape[2] - 1)]))
    table = own[:, None, :, None]
    theirs = paged_attention(
        q[:, :, None], *pages, jnp.ones_like(lens), lens, table, table,
        scale=case.scale, mask_type=MaskType.PADDING, qkv_layout="BNTH",
    )[:, :, 0]  # fmt: skip
    assert relative_error(ours, want) <= 1.02 * relative_error(theirs, want)


SEVERAL_WAVES = DecodeConfig(wave=80, waves=4, one_wave=64, min_piece=64)


@pytest.mark.parametrize("config", [CUT, WHOLE, SEVERAL_WAVES])
@pytest.mark.parametrize("rows", [1, 5, 19, 40])
def test_a_plan_covers_every_context_once(rows, config):
    rng = np.random.default_rng(rows)
    lengths = (np.exp(rng.uniform(0, np.log(9000), rows)).astype(np.int32)) * (rng.random(rows) > 0.2)
    plan = plan_decode(jnp.asarray(lengths, jnp.int32), kv_heads=4, max_context=9000, config=config)
    covered = [np.zeros(length, int) for length in lengths]
    records = np.asarray(plan.items).T
    sizes = []
    for item, (row, token, first, items, piece, context) in enumerate(records):
        if items == 0:
            continue
        begin = (item - first) * piece
        assert token == row and begin % config.step == 0 and context == lengths[row]
        covered[row][begin : begin + piece] += 1
        assert (records[first : first + items, 0] == row).all()
        sizes.append(min(piece, context))
    assert all((times == 1).all() for times in covered)
    assert set(records[records[:, 3] > 0, 0]) == set(range(rows))
    assert sizes == sorted(sizes, reverse=True)


def items_of(lengths: list[int], max_context: int, **config: int) -> np.ndarray:
    """Pieces of each row, with 8 KV heads."""
    plan = plan_decode(
        jnp.array(lengths, jnp.int32), kv_heads=8, max_context=max_context, config=DecodeConfig(**config)
    )
    rows, pieces = np.asarray(plan.items)[[0, 3]]
    used = pieces[pieces > 0]
    assert (np.bincount(rows[pieces > 0], minlength=len(lengths))[rows[pieces > 0]] == used).all()  # none is left out
    return np.bincount(rows[pieces > 0], minlength=len(lengths))


def test_pieces_of_one_wave_fit_into_it():
    rng = np.random.default_rng(0)
    for rows in (1, 2, 3, 7, 8, 10, 25, 36):
        assert items_of([4096] * rows, 131072).sum() <= 396 // 8
        assert items_of([131072] * rows, 131072, waves=4, one_wave=2048).sum() <= 4 * 396 // 8
        assert items_of(list(rng.integers(1, 4096, rows)), 131072).sum() <= 396 // 8
    assert (items_of([131072], 131072, one_wave=4096) == 49).all()
    assert (items_of([32768] * 8, 131072, one_wave=4096) == 12).all()  # of 98 items
    assert (items_of([4096] * 8, 131072, one_wave=4096) == 6).all()  # of 49


def test_counters_add_up_to_the_pieces():
    lengths = [900, 1100, 60, 0, 64 * 14]  # 15, 18, 1, 0 and 14 pieces, of which the first two are merged in two levels
    plan = plan_decode(jnp.array(lengths, jnp.int32), kv_heads=2, max_context=1100, config=MANY_PIECES_OF_TWO)
    counters = np.asarray(plan.pending).reshape(-1, 2)
    assert (counters[:, 0] == counters[:, 1]).all()
    items = plan.items.shape[1]
    rows, first, pieces = np.asarray(plan.items)[[0, 2, 3]]
    merges = {}
    for row, begin, count in {(r, f, n) for r, f, n in zip(rows, first, pieces, strict=True) if n}:
        at_once = 14 if count <= 14 else 7
        assert counters[begin : begin + count : at_once, 0].sum() == count
        assert (counters[begin : begin + count, 0] <= at_once).all()
        merges[row] = len(range(0, count, at_once))
    assert merges == {0: 3, 1: 3, 2: 1, 3: 1, 4: 1}
    assert counters[items:, 0].tolist() == [merges[row] for row in range(len(lengths))]


def test_what_contexts_cannot_need_has_no_thread_blocks():
    short = plan_decode(jnp.ones((8,), jnp.int32), kv_heads=8, max_context=16384, config=DecodeConfig())
    long = plan_decode(jnp.ones((8,), jnp.int32), kv_heads=8, max_context=32768, config=DecodeConfig())
    assert (short.items.shape[1], long.items.shape[1]) == (49, 98)


def test_a_long_row_is_divided_and_equal_rows_stay_whole():
    uneven = items_of([100] * 63 + [32768], 32768, waves=4, one_wave=0, min_piece=1024)
    assert uneven[63] > 16 and (uneven[:63] == 1).all()
    assert (items_of([768] * 256, 4096, waves=4, one_wave=0, min_piece=1024) == 1).all()
    longest = items_of([131072] + [500] * 511, 131072, waves=4, one_wave=0, min_piece=4096)
    assert longest[0] == 32 and (longest[1:] == 1).all()


def test_refuses_what_it_cannot_run():
    case = make_case([20], head_dim=128, block_size=16)
    q, kv, layer, tables, lengths = arguments(case)
    call = lambda q, kv, **kwargs: paged_decode(q, kv, layer, tables, lengths, scale=1.0, **kwargs)  # noqa: E731
    with pytest.raises(ValueError, match="head_dim is 32; the Pallas kernels support"):
        call(q[..., :32], kv[..., :32])
    with pytest.raises(ValueError, match="kv has dtype float16, q has bfloat16"):
        call(q, kv.astype(jnp.float16))
    with pytest.raises(ValueError, match="q has 3 heads; expected a multiple of kv's 2"):
        call(q[:, :3], kv)
    with pytest.raises(ValueError, match="bytes of shared memory; a thread block has"):
        call(q, kv, config=DecodeConfig(stages=9))
    with pytest.raises(ValueError, match="5 tokens a row; the decode kernel computes 1 to 4"):
        call(jnp.tile(q[:, None], (1, 5, 1, 1)), kv)
    with pytest.raises(ValueError, match="block_size is 12; expected"):
        call(q, kv[..., :12, :])
    with pytest.raises(ValueError, match="stages is 1; expected 2 or more"):
        DecodeConfig(stages=1)
