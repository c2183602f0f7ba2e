import pytest

from jaxllm.cache.block_pool import BlockPool, BlockPoolExhausted


def test_allocates_every_block_once_and_takes_it_back():
    pool = BlockPool(4)
    blocks = pool.allocate(3) + pool.allocate(1)
    assert sorted(blocks) == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_referenced) == (0, 4)
    assert [pool.ref_count(block) for block in blocks] == [1] * 4
    pool.free(blocks)
    assert (pool.num_free, pool.num_referenced) == (4, 0)
    assert pool.allocate(0) == []


@pytest.mark.parametrize("n", [0, -1])
def test_a_pool_needs_a_block(n):
    with pytest.raises(ValueError, match=f"num_blocks is {n}"):
        BlockPool(n)


def test_exhaustion_takes_nothing():
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(BlockPoolExhausted, match="3 blocks were asked for, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="-1 blocks"):
        pool.allocate(-1)


def test_a_shared_block_is_free_after_the_last_reference():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share([block])
    assert pool.ref_count(block) == 2
    pool.free([block])
    assert (pool.ref_count(block), pool.num_free) == (1, 1)
    pool.free([block])
    assert (pool.ref_count(block), pool.num_free) == (0, 2)


def test_freeing_what_is_free_changes_nothing():
    pool = BlockPool(3)
    a, b = pool.allocate(2)
    pool.free([b])
    with pytest.raises(ValueError, match=f"block {b} is already free"):
        pool.free([a, b])
    with pytest.raises(ValueError, match="named twice"):
        pool.free([a, a])
    assert (pool.ref_count(a), pool.num_free) == (1, 2)


def test_only_content_can_be_shared_or_retained():
    pool = BlockPool(2)
    a, b = pool.allocate(2)
    pool.free([b])
    with pytest.raises(ValueError, match=f"block {b} is free"):
        pool.share([a, b])
    with pytest.raises(ValueError, match=f"block {b} is free"):
        pool.retain(b)
    assert pool.ref_count(a) == 1


def test_retained_blocks_are_revived_or_evicted_least_recently_used_first():
    pool = BlockPool(5)
    evicted = []
    pool.set_evict_listener(evicted.append)
    first, second = pool.allocate(2), pool.allocate(2)
    for block in first + second:
        pool.retain(block)
    pool.free(first)
    pool.free(second)
    assert pool.num_free == 5
    pool.share([first[0]])  # in use again, hence most recently used once it is free
    assert (pool.ref_count(first[0]), pool.num_free) == (1, 4)
    pool.free([first[0]])

    (empty,) = pool.allocate(1)  # the block that holds nothing goes first
    assert empty not in first + second
    assert evicted == []
    assert pool.allocate(4) == evicted == [first[1], second[1], second[0], first[0]]
    assert not any(pool.is_retained(block) for block in evicted)


def test_an_evicted_block_is_empty_when_freed_again():
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.retain(block)
    pool.free([block])
    assert pool.is_retained(block)
    pool.free(pool.allocate(1))
    with pytest.raises(ValueError, match="holds nothing"):
        pool.share([block])


def test_one_listener():
    pool = BlockPool(1)
    pool.set_evict_listener(lambda block: None)
    with pytest.raises(RuntimeError, match="already has an evict listener"):
        pool.set_evict_listener(lambda block: None)


def test_a_pool_of_another_size():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.retain(blocks[0])
    with pytest.raises(ValueError, match="2 of 4 blocks are in use or retained"):
        pool.resize(6)
    pool.free(blocks)
    with pytest.raises(ValueError, match="1 of 4 blocks are in use or retained"):
        pool.resize(6)
    pool.free(pool.allocate(4))  # evicts it
    with pytest.raises(ValueError, match="num_blocks is 0"):
        pool.resize(0)
    for size in (2, 6):
        pool.resize(size)
        assert pool.num_free == pool.num_blocks == size
        with pytest.raises(BlockPoolExhausted):
            pool.allocate(size + 1)
        blocks = pool.allocate(size)
        assert sorted(blocks) == list(range(size))
        pool.free(blocks)
