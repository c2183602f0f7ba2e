import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kernels_pallas.kv_write import WriteConfig, kv_write, kv_write_reference

CASES = {
    "bfloat16": dict(block_size=16, head_dim=128, dtype=jnp.bfloat16, tokens=12),
    "float16, one token a block": dict(block_size=64, head_dim=64, dtype=jnp.float16, tokens=5),
    "fp8": dict(block_size=32, head_dim=256, dtype=jnp.float8_e4m3fn, tokens=8),
}


def write_case(block_size, head_dim, dtype, tokens, layers=2, num_blocks=3, kv_heads=2):
    rng = np.random.default_rng(0)
    kv = np.full((layers, 2, num_blocks, kv_heads, block_size, head_dim), np.nan)
    k, v = (jnp.asarray(rng.standard_normal((tokens, kv_heads, head_dim)), dtype) for _ in range(2))
    slots = rng.permutation(num_blocks * block_size)[:tokens].astype(np.int32)
    slots[1], slots[-1] = num_blocks * block_size, 2**31 - 1  # padding tokens
    return jnp.asarray(kv, dtype), k, v, slots


def written(kv, layer, k, v, slots):
    want = np.array(kv.astype(jnp.float32))
    for token, slot in enumerate(slots):
        if slot < want.shape[2] * want.shape[4]:
            block, offset = divmod(int(slot), want.shape[4])
            want[layer, 0, block, :, offset] = k[token].astype(jnp.float32)
            want[layer, 1, block, :, offset] = v[token].astype(jnp.float32)
    return want


@pytest.mark.parametrize("name", CASES)
def test_writes_only_its_slots(name, execute):
    kv, k, v, slots = write_case(**CASES[name])
    for layer in (0, jnp.int32(1)):
        got = execute(kv_write, kv, layer, k, v, jnp.asarray(slots), config=WriteConfig(tokens=4, blocks=2))
        np.testing.assert_array_equal(np.asarray(got.astype(jnp.float32)), written(kv, int(layer), k, v, slots))


@pytest.mark.parametrize("name", CASES)
def test_reference_writes_only_its_slots(name):
    kv, k, v, slots = write_case(**CASES[name])
    got = kv_write_reference(kv, 1, k, v, jnp.asarray(slots))
    np.testing.assert_array_equal(np.asarray(got.astype(jnp.float32)), written(kv, 1, k, v, slots))


@pytest.mark.gpu
@pytest.mark.parametrize("sharded", [False, True])
def test_is_in_place_through_layers_and_loops(sharded):
    """A donated cache is written by several layers inside a loop without a copy of even one layer."""
    write = kv_write
    if sharded:
        mesh = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
        heads, cache, whole = P(None, "tensor", None), P(None, None, None, "tensor", None, None), P()
        specs = (cache, whole, heads, heads, whole)
        write = jax.shard_map(kv_write, mesh=mesh, in_specs=specs, out_specs=cache, check_vma=False)
    kv = jnp.zeros((4, 2, 512, 2, 64, 128), jnp.bfloat16)
    k = jnp.ones((64, 2, 128), jnp.bfloat16)

    def step(kv, k, slots):
        def body(index, kv):
            for layer in range(4):
                kv = write(kv, jnp.int32(layer), k, k, slots + index)
            return kv

        return jax.lax.fori_loop(0, 3, body, kv)

    slots = jnp.arange(64, dtype=jnp.int32) * 3
    compiled = jax.jit(step, donate_argnums=0).lower(kv, k, slots).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < kv.nbytes // 4, memory
    assert memory.alias_size_in_bytes == kv.nbytes
    got = compiled(kv, k, slots)
    assert int((got != 0).sum()) == 4 * 2 * 64 * 3 * 2 * 128


def test_blocks_of_tokens_divide_the_tokens():
    config = WriteConfig(tokens=8, blocks=132)
    for tokens, want in ((16384, 8), (2048, 8), (512, 2), (256, 1), (7, 1), (1056, 8), (1060, 4)):
        assert config.tokens_per_block(tokens) == want


def test_refuses_what_it_cannot_run():
    kv, k, v, slots = write_case(**CASES["bfloat16"])
    slots = jnp.asarray(slots)
    with pytest.raises(ValueError, match=r"k is float16\[12, 2, 128\]; expected bfloat16\[12, 2, 128\]"):
        kv_write(kv, 0, k.astype(jnp.float16), v, slots)
    with pytest.raises(ValueError, match="bytes of shared memory; a thread block has"):
        kv_write(kv, 0, k, v, slots, config=WriteConfig(tokens=512))
