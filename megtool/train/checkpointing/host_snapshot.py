"""Host copies: the bytes of this rank's shards, taken at one moment, while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megtool.model.decoder import Decoder
from megtool.train.checkpointing.save_layout import WEIGHT, Layout, Part

if TYPE_CHECKING:
    from megtool.optim.optimizer import Optimizer

_ALIGNMENT = 64
_TOGETHER = 256 << 20  # bytes that are copied by one call

Piece = tuple[str, str, int, Tensor]
"""A state, a parameter of this rank, the element at which it begins, and 1-D live elements."""


def live(stages: Sequence[Decoder], optimizer: Optimizer | None) -> Iterator[Piece]:
    """All that this rank holds: weights (state `""`), and the optimizer's state."""
    for stage in stages:
        for name, tensor in stage.state_dict().items():
            yield WEIGHT, name, 0, tensor.detach().reshape(-1)
    for piece in optimizer.pieces() if optimizer is not None else ():
        yield piece.state, piece.parameter, piece.start, piece.tensor.detach()


class HostCopy:
    """Room for the shards that this rank writes, each in the type it is held in.

    It is one block of memory, page-locked where the state is on a GPU, and touched at once: the
    first copy into fresh memory takes several times as long as the later ones.
    """

    def __init__(
        self, layout: Layout, kinds: Mapping[tuple[str, str], torch.dtype], *, pinned: bool
    ) -> None:
        numels = layout.shards.boxes.volume().tolist()
        places: list[tuple[int, int, torch.dtype]] = []
        size = 0
        for row, parts in layout.parts.items():
            kind = kinds[parts[0].state, parts[0].name]
            places.append((row, size, kind))
            size += -(-numels[row] * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._memory.fill_(0)  # zeros alone are promised, and given at the first write
        self._pinned = pinned
        self.rows: dict[int, Tensor] = {}
        self._wanted: dict[tuple[str, str], list[tuple[Part, Tensor]]] = {}
        for row, at, kind in places:
            held = self._memory[at : at + numels[row] * kind.itemsize].view(kind)
            self.rows[row] = held
            for part in layout.parts[row]:
                self._wanted.setdefault((part.state, part.name), []).append((part, held))

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        return self._memory.numel()

    def taking(self, pieces: Iterable[Piece]) -> Callable[[], None]:
        """What copies the state, as the work given to the device so far leaves it.

        It may be called in another thread, as long as nothing changes the state before it is done.
        """
        if not self._pinned:
            return lambda: self._take(pieces)
        device = torch.cuda.current_device()
        ready = torch.cuda.current_stream().record_event()

        def copy() -> None:
            beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(beside):
                beside.wait_event(ready)
                self._take(pieces)

        return copy

    @torch.no_grad()
    def _take(self, pieces: Iterable[Piece]) -> None:
        to: list[Tensor] = []
        what: list[Tensor] = []
        size = 0
        for state, name, start, tensor in pieces:
            for part, held in self._wanted.get((state, name), ()):
                a, b = max(part.start, start), min(part.stop, start + tensor.numel())
                if a < b:
                    at = part.at + a - part.start
                    to.append(held[at : at + b - a])
                    what.append(tensor[a - start : b - start])
                    size += what[-1].nbytes
            if size >= _TOGETHER:  # pieces may be made as they are asked for: let go of them
                torch._foreach_copy_(to, what, non_blocking=self._pinned)
                to, what, size = [], [], 0
        if to:
            torch._foreach_copy_(to, what, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream().synchronize()


class LiveRows:
    """The same shards straight from the live state, for a save during which nothing is trained."""

    def __init__(self, layout: Layout, pieces: Iterable[Piece]) -> None:
        self._layout = layout
        self._numels = layout.shards.boxes.volume().tolist()
        self._pieces: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
        for state, name, start, tensor in pieces:
            self._pieces.setdefault((state, name), []).append((start, tensor))

    def __getitem__(self, row: int) -> Tensor:
        """One shard's elements on the CPU: live ones where they lie there, and in one piece."""
        found: list[tuple[int, Tensor]] = []
        for part in self._layout.parts[row]:
            for start, tensor in self._pieces[part.state, part.name]:
                a, b = max(part.start, start), min(part.stop, start + tensor.numel())
                if a < b:
                    found.append((part.at + a - part.start, tensor[a - start : b - start]))
        if len(found) == 1 and found[0][1].numel() == self._numels[row]:
            return found[0][1].cpu()
        whole = torch.zeros(self._numels[row], dtype=found[0][1].dtype)
        for at, tensor in found:
            whole[at : at + tensor.numel()] = tensor.cpu()
        return whole
