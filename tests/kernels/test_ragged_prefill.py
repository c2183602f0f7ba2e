import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernels.attention_cases import Case, make_case, relative_error, solve

from kernels_pallas.hopper import KVLayout
from kernels_pallas.paged_decode import DecodeConfig
from kernels_pallas.ragged_prefill import (
    PrefillConfig,
    PrefillPlan,
    plan_prefill,
    ragged_prefill,
    ragged_prefill_reference,
)
from kernels_pallas.ragged_prefill.tuned import TUNED


def arguments(case: Case) -> tuple:
    return (
        jnp.asarray(case.q),
        jnp.asarray(case.kv),
        case.layer,
        jnp.asarray(case.block_tables),
        jnp.asarray(case.context_lens),
        jnp.asarray(case.cu_q_lens),
    )


def assert_solves(case: Case, out: jax.Array) -> None:
    real = case.cu_q_lens[-1]
    want, _ = solve(case)
    # Weights are rounded to the cache's dtype before they meet V.
    assert relative_error(out[:real], want[:real]) < (1e-3 if case.q.dtype == np.float16 else 8e-3)


def few_blocks(case: Case) -> PrefillConfig:
    """The tuned configuration with fewer thread blocks than units of work: each does several, and few are simulated."""
    return dataclasses.replace(TUNED[case.q.shape[-1]], blocks=2)


def plan_of(case: Case, single_tokens_apart: bool = False, **kwargs) -> PrefillPlan:
    return plan_prefill(
        jnp.asarray(case.context_lens),
        jnp.asarray(case.cu_q_lens),
        num_tokens=case.q.shape[0],
        heads=case.q.shape[1],
        kv=KVLayout.of(case.kv),
        max_context=case.block_tables.shape[1] * case.kv.shape[4],
        single_tokens_apart=single_tokens_apart,
        **kwargs,
    )


CASES = {
    # decode rows, a chunk behind context, a whole prompt, padding rows and tokens
    "mixed": dict(context_lens=[20, 1, 0, 140, 30], q_lens=[1, 1, 0, 70, 30], padding_tokens=9, heads=2, kv_heads=1),
    "group of 3, head_dim 64": dict(
        context_lens=[150, 9], q_lens=[140, 9], heads=3, kv_heads=1, head_dim=64, block_size=32
    ),
    "group of 4, head_dim 256": dict(context_lens=[80], q_lens=[17], heads=4, kv_heads=1, head_dim=256, block_size=64),
    "float16, block 256": dict(
        context_lens=[300, 256], q_lens=[50, 4], heads=2, kv_heads=1, block_size=256, dtype=np.float16
    ),
    "shared pages": dict(context_lens=[70, 64], q_lens=[6, 64], heads=2, kv_heads=1, shared_blocks=2),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name, execute):
    case = make_case(**CASES[name])
    assert_solves(
        case, execute(ragged_prefill, *arguments(case), scale=case.scale, plan=plan_of(case), config=few_blocks(case))
    )


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("registers", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_tuning_parameters_change_no_result(alternate, registers, execute):
    case = make_case([140, 3], q_lens=[70, 1], heads=3, kv_heads=1)
    config = PrefillConfig(step=64, weights_in_registers=registers, alternate=alternate, blocks=2)
    assert_solves(case, execute(ragged_prefill, *arguments(case), scale=case.scale, plan=plan_of(case), config=config))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float8_cache_equals_float64(head_dim, execute):
    case = make_case(
        [300, 70, 1], q_lens=[20, 70, 1], heads=2, kv_heads=1, head_dim=head_dim, kv_dtype=ml_dtypes.float8_e4m3fn
    )
    plan = plan_of(case, single_tokens_apart=True, decode_config=DecodeConfig(min_piece=2048))
    scales = dict(scale=2 * case.scale, k_scale=jnp.float32(0.5), v_scale=3.0)
    out = execute(ragged_prefill, *arguments(case), plan=plan, config=few_blocks(case), **scales)
    assert_solves(case, out / 3)
    assert_solves(case, ragged_prefill_reference(*arguments(case), **scales) / 3)


@pytest.mark.parametrize("heads", [2, 3])
def test_rows_of_one_token_may_be_apart(heads, execute):
    case = make_case(**CASES["mixed"] | {"heads": heads})
    for config in (DecodeConfig(min_piece=64, wave=8), DecodeConfig(min_piece=2048)):
        plan = plan_of(case, single_tokens_apart=True, decode_config=config)
        out = execute(ragged_prefill, *arguments(case), scale=case.scale, plan=plan, config=few_blocks(case))
        assert_solves(case, out)


def test_reference_equals_float64():
    case = make_case(**CASES["mixed"])
    assert_solves(case, ragged_prefill_reference(*arguments(case), scale=case.scale))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_random_cases(seed):
    rng = np.random.default_rng(seed)
    rows, kv_heads = int(rng.integers(1, 12)), int(rng.choice([1, 2, 4]))
    q_lens = np.exp(rng.uniform(0, np.log(700), rows)).astype(int) * (rng.random(rows) > 0.1)
    lengths = (q_lens + rng.integers(0, 1500, rows)) * (q_lens > 0)
    case = make_case(
        lengths,
        q_lens=q_lens,
        heads=kv_heads * int(rng.choice([1, 2, 4, 5])),
        kv_heads=kv_heads,
        head_dim=int(rng.choice([64, 128, 256])),
        block_size=int(rng.choice([16, 32, 64, 128, 256])),
        padding_tokens=int(rng.integers(0, 30)),
        dtype=np.float16 if seed % 3 == 0 else ml_dtypes.bfloat16,
        seed=seed,
    )
    call = jax.jit(lambda *args: ragged_prefill(*args, scale=case.scale))
    assert_solves(case, call(*arguments(case)))


def test_a_plan_covers_every_token_once():
    rng = np.random.default_rng(0)
    for rows, tile in ((1, 64), (5, 128), (60, 64)):
        q_lens = rng.integers(0, 200, rows)
        contexts = q_lens + rng.integers(0, 50, rows)
        cu = np.concatenate([[0], np.cumsum(q_lens)])
        tokens = int(cu[-1]) + 5
        plan = plan_prefill(
            jnp.asarray(contexts, jnp.int32),
            jnp.asarray(cu, jnp.int32),
            num_tokens=tokens,
            heads=2 if tile == 64 else 1,
            kv=KVLayout(1, 1, 1, 16, 128),
            max_context=256,
            single_tokens_apart=False,
        )
        covered = np.zeros(tokens, int)
        for row, start, first, last in zip(
            plan.tile_row, plan.tile_start, plan.tile_first, plan.tile_last, strict=True
        ):
            covered[int(first) : int(last)] += 1
            if last > first:
                assert start % 8 == 0 and start <= first and last <= start + tile
                assert cu[int(row)] <= first and last <= cu[int(row) + 1]
        assert (covered[: cu[-1]] == 1).all() and (covered[cu[-1] :] == 0).all()


def test_refuses_what_it_cannot_run():
    case = make_case([20], q_lens=[4])
    with pytest.raises(ValueError, match="bytes of shared memory; a thread block has"):
        ragged_prefill(*arguments(case), scale=1.0, config=PrefillConfig(stages=5))
    with pytest.raises(ValueError, match="step is 96; expected 64 or 128"):
        PrefillConfig(step=96)
