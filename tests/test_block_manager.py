"""The block manager alone: who holds what, what can be found again, and what is given away first."""

from __future__ import annotations

import pytest

from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from tests.scheduler_simulation import make_sequence


def sequence(token_ids: list[int], max_tokens: int = 16) -> Sequence:
    return make_sequence(0, token_ids, max_tokens, max_model_len=1000)


def compute(blocks: BlockManager, seq: Sequence) -> int:
    """Admit a sequence and compute all its tokens; returns the number of blocks that it found."""
    hits = blocks.match_prefix(seq)
    blocks.allocate(seq, blocks.num_blocks_for(len(seq.token_ids)), hits)
    seq.num_computed = len(seq.token_ids)
    blocks.register(seq, len(seq.token_ids))
    return len(hits)


def run(blocks: BlockManager, token_ids: list[int]) -> int:
    """Compute a prompt and let it go; returns the number of blocks that it found."""
    seq = sequence(token_ids)
    num_hits = compute(blocks, seq)
    blocks.release(seq)
    return num_hits


def test_block_0_is_never_given_away() -> None:
    blocks = BlockManager(5, 4)
    seq = sequence(list(range(16)))
    assert (blocks.num_usable, blocks.num_free) == (4, 4)
    compute(blocks, seq)
    assert sorted(seq.block_table) == [1, 2, 3, 4] and blocks.num_free == 0
    blocks.release(seq)
    assert seq.block_table == [] and blocks.num_free == 4 and blocks.num_to_come == 0


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_the_last_token_is_always_computed(block_size: int) -> None:
    """A26: a prompt of whole blocks that is fully cached."""
    for length in {block_size - 1, block_size, block_size + 1, 2 * block_size} - {0}:
        blocks = BlockManager(20, block_size)
        prompt = list(range(100, 100 + length))
        assert run(blocks, prompt) == 0
        assert run(blocks, prompt) == (length - 1) // block_size
        assert run(blocks, prompt + [7]) == length // block_size  # the last block is there for longer ones
        assert blocks.num_free == 19


def test_a_reused_block_is_not_found_under_its_old_contents() -> None:
    """A25."""
    blocks = BlockManager(7, 2)
    x = [1, 2, 3, 4, 5]
    assert run(blocks, x) == 0 and run(blocks, x) == 2
    assert run(blocks, [6] * 11) == 0  # takes all six blocks
    assert run(blocks, x) == 0
    assert run(blocks, x) == 2


@pytest.mark.parametrize("bad_hash", [lambda parent, content: 5, lambda parent, content: len(content)])
def test_a_hash_collision_only_costs_hits(monkeypatch: pytest.MonkeyPatch, bad_hash: object) -> None:
    """A27: contents are compared."""
    monkeypatch.setattr(block_manager, "hash_block", bad_hash)
    blocks = BlockManager(20, 2)
    assert run(blocks, [1, 2, 9]) == 0
    assert run(blocks, [1, 2, 9]) == 1
    assert run(blocks, [3, 4, 9]) == 0
    assert run(blocks, [3, 4, 9]) == 1
    assert blocks.num_free == 19


def test_equal_blocks_behind_other_prefixes_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A27: parents are compared."""
    monkeypatch.setattr(block_manager, "hash_block", lambda parent, content: hash(content))
    blocks = BlockManager(20, 2)
    assert run(blocks, [1, 1, 2, 2, 9]) == 0
    assert run(blocks, [3, 3, 2, 2, 9]) == 0
    assert run(blocks, [3, 3, 2, 2, 9]) == 2


def test_a_parent_is_named_by_its_contents_not_by_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_manager, "hash_block", lambda parent, content: hash(content))
    blocks = BlockManager(6, 2)
    first, second = sequence([1, 1, 5]), sequence([1, 1])
    compute(blocks, first)
    compute(blocks, second)
    second.token_ids += [2, 2, 7]
    blocks.extend(second, 3)
    blocks.register(second, 4)  # its [2, 2] is the child of first's [1, 1]
    parent = first.block_table[0]
    blocks.release(first)
    other = sequence([3, 3, 5])
    compute(blocks, other)
    assert parent in other.block_table  # the only two blocks left
    if other.block_table[0] != parent:
        blocks.release(other)
        other = sequence([4, 4, 5])
        compute(blocks, other)
    assert other.block_table[0] == parent
    assert blocks.match_prefix(sequence([*other.token_ids[:2], 2, 2, 9])) == [parent]


def test_children_are_recycled_before_parents() -> None:
    blocks = BlockManager(9, 2)
    run(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])  # four full blocks; another four are empty
    for num_taken, num_left in ((4, 4), (5, 3), (6, 2), (7, 1)):
        seq = sequence(list(range(50, 50 + 2 * num_taken)))
        hits = blocks.match_prefix(seq)
        blocks.allocate(seq, num_taken, hits)
        assert len(blocks.match_prefix(sequence([1, 2, 3, 4, 5, 6, 7, 8, 9]))) == num_left
        blocks.release(seq)  # it registered nothing


def test_the_least_recently_used_prefix_goes_first() -> None:
    blocks = BlockManager(7, 2)
    for prompt in ([1, 1, 0], [2, 2, 0], [3, 3, 0], [1, 1, 0]):
        run(blocks, prompt)
    seq = sequence([8] * 8)
    blocks.allocate(seq, 4, [])
    assert [len(blocks.match_prefix(sequence([i, i, 0]))) for i in (1, 2, 3)] == [1, 0, 1]


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    blocks = BlockManager(10, 2)
    first, second = sequence([1, 2, 3, 4, 5]), sequence([1, 2, 3, 4, 6])
    compute(blocks, first)
    assert compute(blocks, second) == 2
    assert second.block_table[:2] == first.block_table[:2] and blocks.num_free == 9 - 4
    assert blocks.num_shared == 2 == blocks.num_shared_blocks(first) == blocks.num_shared_blocks(second)
    blocks.release(first)
    assert blocks.num_free == 9 - 3 and blocks.num_shared == 0
    blocks.release(second)
    assert blocks.num_free == 9


def test_what_is_computed_twice_is_cached_once() -> None:
    blocks = BlockManager(10, 2)
    first, second = sequence([1, 2]), sequence([1, 2])
    compute(blocks, first)
    compute(blocks, second)
    blocks.release(first)
    blocks.release(second)
    assert len(blocks._cached) == 1 and blocks.num_free == 9
    third = sequence([1, 2])  # nobody holds the cached copy: the new one takes its place, and the old one is empty
    compute(blocks, third)
    assert len(blocks._cached) == 0 and blocks.match_prefix(sequence([1, 2, 3])) == third.block_table


def test_reset_forgets_everything_and_running_sequences_register_no_more() -> None:
    blocks = BlockManager(10, 2)
    run(blocks, [1, 2, 3])
    seqs = [sequence([5, 6, 7, 8, 9]), sequence([4])]
    for seq in seqs:
        compute(blocks, seq)
    blocks.reset_prefix_cache()
    assert run(blocks, [1, 2, 3]) == 0
    for seq in seqs:
        seq.token_ids += [1]
        blocks.register(seq, len(seq.token_ids))  # its KV may be of the old weights
        blocks.release(seq)
    assert blocks.num_free == 9
    assert run(blocks, [5, 6, 7, 8, 9, 1, 2]) == run(blocks, [4, 1, 3]) == 0
    assert run(blocks, [4, 1, 3]) == 1


def test_without_prefix_caching_nothing_is_hashed() -> None:
    blocks = BlockManager(10, 2, enable_prefix_caching=False)
    assert run(blocks, [1, 2, 3]) == run(blocks, [1, 2, 3]) == 0
    seq = sequence([1, 2, 3])
    blocks.hash_blocks(seq)
    assert seq.block_hashes == []


def test_blocks_are_hashed_once() -> None:
    blocks = BlockManager(10, 2)
    seq = sequence([1, 2, 3, 4, 5])
    blocks.hash_blocks(seq)
    hashes = list(seq.block_hashes)
    seq.token_ids += [6]
    blocks.hash_blocks(seq)
    assert seq.block_hashes[:2] == hashes and len(seq.block_hashes) == 3
    other = sequence([1, 2, 3, 4, 5, 6])
    blocks.hash_blocks(other)
    assert other.block_hashes == seq.block_hashes and len(set(hashes)) == 2
