"""Copies of this rank's shards in host memory, so that training continues during a save."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megtool.model.stacks.decoder import Decoder
from megtool.optim.fp8.weights import weight_values
from megtool.tensors.dtensor_shards import local_shard, shard_ranges
from megtool.train.checkpointing.save_layout import WEIGHT, SaveLayout, ShardPart

if TYPE_CHECKING:
    from megtool.optim.optimizer import Optimizer

_ALIGNMENT = 64
_TOGETHER = 256 << 20  # bytes copied by one call

LivePiece = tuple[str, str, int, Tensor]
"""A state, a parameter of this rank, the first element, and the live elements (1-D)."""


def iterate_live_state(
    stages: Sequence[Decoder],
    optimizer: Optimizer | None,
    carried: Mapping[str, Tensor],
    without: Collection[str] = (),
) -> Iterator[LivePiece]:
    """All live state of this rank: weights (state `""`), and the optimizer's state.

    `carried` are further weights, which no module has; weights that `without` names are left out.
    Modules are asked for their weights at once,
    before passes that gather sharded ones; copies are made as the iterator comes to them.
    """
    weights = [(stage.dtype, stage.state_dict(keep_vars=True)) for stage in stages]

    def iterate() -> Iterator[LivePiece]:
        for name, tensor in carried.items():
            yield WEIGHT, name, 0, tensor.reshape(-1)
        for dtype, tensors in weights:
            for name in (n for n in tensors if n not in without):
                for start, elements in stored_elements(tensors[name], dtype):
                    yield WEIGHT, name, start, elements
        for piece in optimizer.pieces() if optimizer is not None else ():
            yield piece.state, piece.parameter, piece.start, piece.tensor.detach()

    return iterate()


def computed_weights(stages: Sequence[Decoder]) -> dict[str, Callable[[], Tensor]]:
    """The weights that stages compute when they are asked for them, and that nothing holds."""
    return {n: make for s in stages for n, make in getattr(s, "computed", {}).items()}


def stored_elements(tensor: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
    """The elements of a weight on this rank, 1-D, as they are stored, and the first of each range.

    A shard of a trained parameter is fp32, and stored in the model's `dtype`.
    """
    if not isinstance(tensor, DTensor):
        yield 0, weight_values(tensor).reshape(-1)
        return
    local, offset = local_shard(tensor).reshape(-1).to(dtype), 0
    for start, stop in shard_ranges(tensor):
        if start < stop:
            yield start, local[offset : offset + stop - start]
        offset += stop - start


class HostSnapshot:
    """Host memory for the shards that this rank writes, each in its live dtype.

    It is one block of memory, pinned if the state is on a GPU. It is written to once at the start,
    since the first copy into new memory takes several times as long as later ones.
    """

    def __init__(
        self, layout: SaveLayout, kinds: Mapping[tuple[str, str], torch.dtype], *, pinned: bool
    ) -> None:
        numels = layout.shards.boxes.volume().tolist()
        places: list[tuple[int, int, torch.dtype]] = []
        size = 0
        for row, parts in layout.parts.items():
            kind = kinds[parts[0].state, parts[0].name]
            places.append((row, size, kind))
            size += -(-numels[row] * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._memory.fill_(0)  # `zeros` alone allocates pages at the first write
        self._pinned = pinned
        self.rows: dict[int, Tensor] = {}
        self._targets: dict[tuple[str, str], list[tuple[ShardPart, Tensor]]] = {}
        for row, offset, kind in places:
            buffer = self._memory[offset : offset + numels[row] * kind.itemsize].view(kind)
            self.rows[row] = buffer
            for part in layout.parts[row]:
                self._targets.setdefault((part.state, part.name), []).append((part, buffer))

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self._memory.numel()

    def copy_fn(self, pieces: Iterable[LivePiece]) -> Callable[[], None]:
        """A function that copies the state as it is after the work queued on the device so far.

        It may be called in another thread; nothing may change the state before it returns.
        """
        if not self._pinned:
            return lambda: self._copy(pieces)
        device = torch.cuda.current_device()
        ready = torch.cuda.current_stream().record_event()

        def copy() -> None:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                self._copy(pieces)

        return copy

    @torch.no_grad()
    def _copy(self, pieces: Iterable[LivePiece]) -> None:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        size = 0
        for state, name, start, tensor in pieces:
            for part, buffer in self._targets.get((state, name), ()):
                a, b = max(part.start, start), min(part.stop, start + tensor.numel())
                if a < b:
                    offset = part.offset + a - part.start
                    targets.append(buffer[offset : offset + b - a])
                    sources.append(tensor[a - start : b - start])
                    size += sources[-1].nbytes
            if size >= _TOGETHER:  # free pieces that are computed on access
                torch._foreach_copy_(targets, sources, non_blocking=self._pinned)
                targets, sources, size = [], [], 0
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream().synchronize()


class LiveShards:
    """The same shards read from the live state, for synchronous saves.

    Weights that modules compute when they are asked for them, as merged ones, are computed for the
    shards that have them, and let go.
    """

    def __init__(
        self,
        layout: SaveLayout,
        pieces: Iterable[LivePiece],
        computed: Mapping[str, Callable[[], Tensor]] | None = None,
    ) -> None:
        self._layout = layout
        self._numels = layout.shards.boxes.volume().tolist()
        self._pieces: dict[tuple[str, str], list[tuple[int, Tensor]]] = {}
        self._computed = computed or {}
        self._last: tuple[str, Tensor | None] = ("", None)
        for state, name, start, tensor in pieces:
            self._pieces.setdefault((state, name), []).append((start, tensor))

    def __getitem__(self, row: int) -> Tensor:
        """A shard's elements on the CPU; the live ones if they are there, and contiguous."""
        pieces: list[tuple[int, Tensor]] = []
        for part in self._layout.parts[row]:
            for start, tensor in self._elements(part):
                a, b = max(part.start, start), min(part.stop, start + tensor.numel())
                if a < b:
                    pieces.append((part.offset + a - part.start, tensor[a - start : b - start]))
        if len(pieces) == 1 and pieces[0][1].numel() == self._numels[row]:
            return pieces[0][1].cpu()
        elements = torch.zeros(self._numels[row], dtype=pieces[0][1].dtype)
        for offset, tensor in pieces:
            elements[offset : offset + tensor.numel()] = tensor.cpu()
        return elements

    def _elements(self, part: ShardPart) -> Sequence[tuple[int, Tensor]]:
        """Live elements of a state of a tensor; the last one that was computed is kept."""
        make = self._computed.get(part.name) if part.state == WEIGHT else None
        if make is None:
            return self._pieces[part.state, part.name]
        if self._last[0] != part.name:
            self._last = "", None
            self._last = part.name, make().reshape(-1)
        tensor = self._last[1]
        return () if tensor is None else ((0, tensor),)
