"""Who holds which block of the KV cache, and which blocks hold a prefix that can be shared.

Owns: every KV block's reference count, the free lists and the prefix cache. Invariant: a block is in exactly one
place: held (reference count above 0), cached (full, known contents, nobody holds it, least recently used first) or
empty; block 0 is in none, it is never allocated. It deliberately knows nothing of time: that a block's writer runs
before its reader is the caller's business, who registers a block only when the plan that writes it is final.

The cache is keyed by a hash chained over the blocks of a prefix (as in vLLM's automatic prefix caching), but a hash
is only where to look. A hit is verified by the block's own tokens and by its parent, named by a serial number of
block contents. Serials are never reused, while a block id can come back with other contents.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict

import xxhash

from nanovllm.engine.sequence import Sequence

ROOT_SERIAL = 0  # the parent of every first block


def hash_block(parent_hash: int, content: bytes) -> int:
    """64-bit hash of a full block and, through its parent's hash, of all before it. A collision only costs a hit."""
    return xxhash.xxh3_64_intdigest(content, seed=parent_hash)


class BlockManager:
    """Blocks of `block_size` tokens, with prefix sharing.

    Args:
        num_blocks: blocks in the pool, the reserved block 0 included.
        block_size: tokens in a block.
        enable_prefix_caching: False: nothing is hashed, registered or shared.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.num_shared = 0  # holders beyond each block's first, summed over blocks
        self.num_to_come = 0  # blocks that those who hold some would still take if all ran to their limit
        self._empty = list(range(num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # block ids that nobody holds, oldest first
        self._block_of_hash: dict[int, int] = {}
        self._hash: list[int] = [0] * num_blocks
        self._content: list[bytes | None] = [None] * num_blocks  # None: not registered
        self._parent: list[int] = [ROOT_SERIAL] * num_blocks
        self._serial: list[int] = [ROOT_SERIAL] * num_blocks
        self._last_serial = ROOT_SERIAL
        self._epoch = 0

    @property
    def num_usable(self) -> int:
        """Blocks that sequences can use."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; a cached one counts, it is given away when no empty one is left."""
        return len(self._empty) + len(self._cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps partly."""
        return -(-num_tokens // self.block_size)

    def num_blocks_at_most(self, seq: Sequence) -> int:
        """Blocks of the sequence at its greatest length; the last token's KV is never needed."""
        return self.num_blocks_for(seq.max_total_tokens - 1)

    def hash_blocks(self, seq: Sequence) -> None:
        """Hash the full blocks of the known tokens that are not hashed yet: a prompt's once, when it may start first.

        Not on arrival: then the device would wait for the hashes of a whole batch.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        hashes, contents = seq.block_hashes, seq.block_contents
        parent_hash = hashes[-1] if hashes else 0
        for start in range(len(hashes) * size, len(seq.token_ids) // size * size, size):
            content = array("i", seq.token_ids[start : start + size]).tobytes()
            parent_hash = hash_block(parent_hash, content)
            hashes.append(parent_hash)
            contents.append(content)

    def match_prefix(self, seq: Sequence) -> list[int]:
        """Cached blocks that hold the beginning of this sequence, longest run, nothing taken yet.

        At most (len - 1) // block_size blocks: the last token is always computed, into a block that nobody shares.
        None as long as logprobs of the prompt are wanted: they come from computing it.
        """
        if not self.enable_prefix_caching or seq.first_prompt_logprob is not None:
            return []
        self.hash_blocks(seq)
        hits: list[int] = []
        parent = ROOT_SERIAL
        for index in range((len(seq.token_ids) - 1) // self.block_size):
            block = self._block_of_hash.get(seq.block_hashes[index])
            if block is None or self._parent[block] != parent or self._content[block] != seq.block_contents[index]:
                break
            hits.append(block)
            parent = self._serial[block]
        return hits

    def num_held(self, blocks: list[int]) -> int:
        """How many of these blocks somebody holds, so that one more holder takes nothing from the free ones."""
        return sum(self.ref_counts[block] > 0 for block in blocks)

    def num_shared_blocks(self, seq: Sequence) -> int:
        """Leading blocks of the sequence that another one holds too: what its end would not set free."""
        if self.num_shared == 0:
            return 0
        return bisect_left(seq.block_table, True, key=lambda block: self.ref_counts[block] < 2)

    def share_prompt(self, seq: Sequence, fork: Sequence) -> None:
        """Let another sample of the same prompt hold what `seq` has of it: the KV of all tokens but the last.

        `seq` may go on writing into the last of these blocks, behind the tokens that the fork will read.
        """
        fork.prompt_blocks = seq.block_table[: self.num_blocks_for(seq.num_prompt_tokens - 1)]
        num_hashed = seq.num_prompt_tokens // self.block_size
        fork.block_hashes, fork.block_contents = seq.block_hashes[:num_hashed], seq.block_contents[:num_hashed]
        fork.cache_epoch = seq.cache_epoch
        for block in fork.prompt_blocks:
            self.ref_counts[block] += 1
        self.num_shared += len(fork.prompt_blocks)

    def release_prompt(self, fork: Sequence) -> None:
        """Take back the blocks that a fork held while it waited."""
        self._release(fork.prompt_blocks)
        fork.prompt_blocks = []

    def allocate(self, seq: Sequence, num_blocks: int, hits: list[int]) -> None:
        """Give the sequence its block table: the hits (cached, or a fork's own), then new blocks up to num_blocks."""
        assert not seq.block_table
        for block in hits:
            if self.ref_counts[block] == 0:
                del self._cached[block]
            else:
                self.num_shared += 1
            self.ref_counts[block] += 1
        seq.block_table = list(hits)
        self.num_to_come += self.num_blocks_at_most(seq) - len(hits)
        if seq.prompt_blocks:  # which need not be registered themselves, where copies are, and may be of old weights
            seq.num_registered_blocks, seq.parent_serial = 0, ROOT_SERIAL
        else:
            seq.num_registered_blocks = len(hits)
            seq.parent_serial = self._serial[hits[-1]] if hits else ROOT_SERIAL
            seq.cache_epoch = self._epoch
        self.extend(seq, num_blocks)

    def extend(self, seq: Sequence, num_blocks: int) -> None:
        """Append new blocks until the sequence has num_blocks. The caller has checked num_free."""
        for _ in range(num_blocks - len(seq.block_table)):
            block = self._take()
            self.ref_counts[block] = 1
            seq.block_table.append(block)
            self.num_to_come -= 1
        seq.num_slots = min(num_blocks * self.block_size, seq.max_total_tokens - 1)

    def register(self, seq: Sequence, num_final_tokens: int) -> None:
        """Offer the full blocks among the first num_final_tokens for reuse.

        Their tokens must be known and the plans that write their KV final: these run before any that could read it.
        """
        end = num_final_tokens // self.block_size
        if not self.enable_prefix_caching or end <= seq.num_registered_blocks or seq.cache_epoch != self._epoch:
            return
        self.hash_blocks(seq)
        for index in range(seq.num_registered_blocks, end):
            seq.parent_serial = self._register_block(
                seq.block_table[index], seq.block_hashes[index], seq.block_contents[index], seq.parent_serial
            )
        seq.num_registered_blocks = end

    def release(self, seq: Sequence) -> None:
        """Take back all blocks of the sequence; the registered ones stay findable until they are recycled.

        Children become the older ones: a parent recycled first would leave its children unreachable.
        """
        self.num_to_come -= self.num_blocks_at_most(seq) - len(seq.block_table)
        self._release(seq.block_table)
        seq.block_table = []

    def reset_prefix_cache(self) -> None:
        """Forget all contents. Sequences that run now register nothing any more: their KV may be of the old weights."""
        self._epoch += 1
        self._empty.extend(self._cached)
        self._cached.clear()
        self._block_of_hash.clear()
        self._content = [None] * self.num_blocks

    def _release(self, block_table: list[int]) -> None:
        for block in reversed(block_table):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] > 0:
                self.num_shared -= 1
            elif self._content[block] is not None:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def _take(self) -> int:
        if self._empty:
            return self._empty.pop()
        block, _ = self._cached.popitem(last=False)
        del self._block_of_hash[self._hash[block]]
        self._content[block] = None
        return block

    def _register_block(self, block: int, block_hash: int, content: bytes, parent: int) -> int:
        """Enter one block, return the serial of its contents."""
        serial = None
        other = self._block_of_hash.get(block_hash)
        if other is not None:
            if self._content[other] == content and self._parent[other] == parent:
                serial = self._serial[other]
                if self.ref_counts[other] > 0:
                    return serial  # somebody computed the same before: the chain goes on from that copy
            self._forget(other)  # nobody holds the old copy, or the hash collides: the new block takes its place
        if serial is None:
            self._last_serial += 1
            serial = self._last_serial
        self._block_of_hash[block_hash] = block
        self._hash[block], self._content[block] = block_hash, content
        self._parent[block], self._serial[block] = parent, serial
        return serial

    def _forget(self, block: int) -> None:
        del self._block_of_hash[self._hash[block]]
        self._content[block] = None
        if self.ref_counts[block] == 0:
            del self._cached[block]
            self._empty.append(block)
