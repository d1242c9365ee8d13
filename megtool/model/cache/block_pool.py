"""Blocks of a paged cache: which are free, how many share each, which are found by tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from megtool.errors import UsageError

_Key = tuple[int, tuple[int, ...]]
"""What a published block holds: the serial number of the block before it, and its own tokens. So
equal keys mean equal tokens from the first one on, without a chance of a collision."""

_NOTHING = 0  # the serial number before a first block


class BlockPool:
    """Blocks 1 to `num_blocks - 1`, counted by the sequences that have each; block 0 is scratch.

    A full block may be published, to be shared by sequences that begin with the same tokens. After
    the last of them has left it stays, until its room is needed: those that were left first go
    first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, 0, -1))
        self._users = [0] * num_blocks
        self._serials: dict[_Key, int] = {}
        self._blocks: dict[int, int] = {}  # by serial number
        self._keys: dict[int, _Key] = {}  # by block
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._next_serial = _NOTHING + 1

    @property
    def num_free(self) -> int:
        """Blocks that `take` has, those among them that could still be found."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Blocks for one sequence, whose contents are forgotten.

        Raises:
            UsageError: there are not as many; then none is taken.
        """
        if count > self.num_free:
            raise UsageError(
                f"{count} blocks are needed, and {self.num_free} of {len(self._users)} are free",
                hint="reduce the number of running sequences, or give the cache more blocks",
            )
        out = []
        for _ in range(count):
            if not self._free:
                block, _ = self._idle.popitem(last=False)
                del self._blocks[self._serials.pop(self._keys.pop(block))]
                self._free.append(block)
            out.append(self._free.pop())
            self._users[out[-1]] = 1
        return out

    def share(self, blocks: Iterable[int]) -> None:
        """Count one more sequence for blocks that were found."""
        for block in blocks:
            self._users[block] += 1
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Count one sequence less; the last ones first, which are useless without those before."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._keys:
                self._idle[block] = None
            else:
                self._free.append(block)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The published blocks that a sequence of these tokens begins with."""
        blocks, serial = [], _NOTHING
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            key = serial, tuple(tokens[start : start + self.block_size])
            if key not in self._serials:
                break
            serial = self._serials[key]
            blocks.append(self._blocks[serial])
        return blocks

    def publish(self, block: int, before: int, tokens: Sequence[int]) -> int:
        """Let a full block be found; returns its serial number.

        `before` is that of the block before it, 0 for a first one. If another block already stands
        for these tokens, that one stays, and the number is its.
        """
        key = before, tuple(tokens)
        if key in self._serials:
            return self._serials[key]
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        self._serials[key], self._blocks[serial], self._keys[block] = serial, block, key
        return serial
