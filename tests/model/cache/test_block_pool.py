"""Blocks of a paged cache: counted, found by their tokens, and given away when room is needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megtool.errors import UsageError
from megtool.model.cache.block_pool import BlockPool
from tests.support.errors import raises

SIZE = 2


def publish(pool: BlockPool, blocks: list[int], tokens: list[int]) -> None:
    serial = 0
    for n, block in enumerate(blocks):
        serial = pool.publish(block, serial, tokens[SIZE * n : SIZE * (n + 1)])


def test_blocks_are_found_by_all_tokens_up_to_their_end() -> None:
    pool = BlockPool(9, SIZE)
    first = pool.take(3)
    publish(pool, first, [1, 2, 3, 4, 5, 6])
    assert pool.find([1, 2, 3, 4, 9, 9]) == first[:2]
    assert pool.find([1, 2, 3]) == first[:1]
    assert pool.find([3, 4, 5, 6]) == []
    other = pool.take(2)
    publish(pool, other, [9, 9, 3, 4])
    assert pool.find([9, 9, 3, 4]) == other
    assert pool.find([1, 2, 3, 4]) == first[:2]


def test_what_nobody_has_stays_until_its_room_is_needed() -> None:
    pool = BlockPool(5, SIZE)
    blocks = pool.take(3)
    publish(pool, blocks, [1, 2, 3, 4, 5, 6])
    pool.release(blocks)
    assert pool.num_free == 4
    pool.share(found := pool.find([1, 2, 3, 4]))
    assert (found, pool.num_free) == (blocks[:2], 2)
    pool.release(found)
    pool.take(2)  # the free one, and the last of those that were left
    assert pool.find([1, 2, 3, 4, 5, 6]) == blocks[:2]
    pool.take(1)
    assert pool.find([1, 2, 3, 4, 5, 6]) == blocks[:1]
    with raises(UsageError, "2 blocks are needed, and 1 of 5"):
        pool.take(2)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=12), st.data())
def test_what_is_found_holds_the_tokens_and_nothing_is_lost(
    texts: list[list[int]], data: st.DataObject
) -> None:
    """Sequences that begin, publish and leave, in a pool that is short of blocks."""
    pool, contents = BlockPool(9, SIZE), dict[int, list[int]]()
    alive: list[list[int]] = []
    for tokens in texts:
        found = pool.find(tokens)
        assert [contents[b] for b in found] == [tokens[: SIZE * (n + 1)] for n in range(len(found))]
        pool.share(found)
        need = len(tokens) // SIZE - len(found)
        if need > pool.num_free:
            pool.release(found)
            continue
        blocks = [*found, *pool.take(need)]
        for n, block in enumerate(blocks):
            contents[block] = tokens[: SIZE * (n + 1)]
        publish(pool, blocks, tokens)
        alive.append(blocks)
        for one in data.draw(st.lists(st.sampled_from(alive), unique_by=id)):
            alive.remove(one)
            pool.release(one)
        assert pool.num_free == 8 - len({b for one in alive for b in one})
