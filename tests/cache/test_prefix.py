import pytest

from jaxllm.cache.block_pool import BlockPool
from jaxllm.cache.prefix import ROOT, PrefixCache, PrefixKey

SIZE = 2


def make(num_blocks=8):
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, SIZE)


def fill(pool, cache, tokens):
    """Computes all full blocks of `tokens` without looking for hits; the block table and the contents' ids."""
    table, ids = pool.allocate(len(tokens) // SIZE), [ROOT]
    for i, block in enumerate(table):
        ids.append(cache.register(ids[-1], tokens[i * SIZE : (i + 1) * SIZE], block))
    return table, ids[1:]


@pytest.fixture(params=[False, True], ids=["hash", "constant hash"])
def any_hash(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(PrefixKey, "__hash__", lambda self: 7)
        assert hash(PrefixKey(0, (1,))) == hash(PrefixKey(1, (2,))) == 7


@pytest.mark.usefixtures("any_hash")
def test_hits_need_equal_tokens_under_an_equal_parent():
    pool, cache = make()
    table, ids = fill(pool, cache, [1, 2, 3, 4, 5, 6])
    assert len(set(ids)) == len(cache) == 3
    assert cache.match([1, 2, 3, 4, 5, 6, 7], 3) == (table, ids[-1])
    assert cache.match([1, 2, 3, 4, 9, 9], 3) == (table[:2], ids[1])
    assert cache.match([3, 4, 1, 2], 2) == ([], ROOT)  # the tokens of another block, not its parent
    assert cache.match([1, 2, 1, 2], 2) == (table[:1], ids[0])
    assert cache.match([2, 1], 1) == ([], ROOT)


@pytest.mark.parametrize(
    ("tokens", "max_blocks", "hits"),
    [
        ([], 9, 0),
        ([1], 9, 0),
        ([1, 2], 9, 1),
        ([1, 2, 3], 9, 1),
        ([1, 2, 3, 4], 9, 2),
        ([1, 2, 3, 4], 1, 1),
        ([1, 2], 0, 0),
    ],
)
def test_hits_are_whole_blocks_up_to_the_limit(tokens, max_blocks, hits):
    pool, cache = make()
    table, _ = fill(pool, cache, [1, 2, 3, 4])
    assert cache.match(tokens, max_blocks)[0] == table[:hits]


@pytest.mark.usefixtures("any_hash")
def test_duplicates_keep_the_first_block_and_one_content_id():
    pool, cache = make()
    first, ids = fill(pool, cache, [1, 2, 3, 4])
    second, same_ids = fill(pool, cache, [1, 2, 3, 4, 5, 6])
    assert same_ids[:2] == ids
    # The beginning is found in the first one's blocks, and goes on in the second one's.
    assert cache.match([1, 2, 3, 4, 5, 6], 3) == (first + second[2:], same_ids[2])
    assert [pool.is_retained(block) for block in second] == [False, False, True]


def test_eviction_forgets_the_end_of_a_chain_first():
    pool, cache = make(4)
    table, ids = fill(pool, cache, [1, 2, 3, 4, 5, 6])
    pool.free(table)
    assert cache.match([1, 2, 3, 4, 5, 6], 3) == (table, ids[-1])
    pool.allocate(2)  # the empty one and the tail
    assert cache.match([1, 2, 3, 4, 5, 6], 3) == (table[:2], ids[1])
    pool.allocate(2)
    assert cache.match([1, 2, 3, 4, 5, 6], 3) == ([], ROOT)
    assert len(cache) == 0


def test_what_continued_an_evicted_content_stays_unreachable():
    pool, cache = make(4)
    first, ids = fill(pool, cache, [1, 2])
    second = pool.allocate(2)  # the same two tokens computed side by side, and two more
    assert cache.register(ROOT, [1, 2], second[0]) == ids[0]
    cache.register(ids[0], [3, 4], second[1])
    pool.free(first)
    assert first[0] in pool.allocate(2)  # evicts the content [1, 2]
    assert cache.match([1, 2, 3, 4], 2) == ([], ROOT)
    # New content in the same block is a new parent: [3, 4] was computed after [1, 2], not after [9, 9].
    assert cache.register(ROOT, [9, 9], first[0]) not in ids
    assert cache.match([9, 9, 3, 4], 2)[0] == first
    cache.register(ROOT, [1, 2], second[0])
    assert cache.match([1, 2, 3, 4], 2)[0] == second[:1]


def test_register_refuses_partial_blocks_and_other_content():
    pool, cache = make()
    (block,) = pool.allocate(1)
    with pytest.raises(ValueError, match="has 1 tokens; only full blocks of 2 count"):
        cache.register(ROOT, [1], block)
    content_id = cache.register(ROOT, [1, 2], block)
    with pytest.raises(ValueError, match="registered with other content"):
        cache.register(ROOT, [1, 3], block)
    assert cache.register(ROOT, [1, 2], block) == content_id
    assert len(cache) == 1
