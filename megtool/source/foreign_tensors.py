"""Tensors whose bytes are a pickle, because whoever loads them unpickles them.

Transformer Engine keeps a module's extra state in a tensor of bytes, `<module>._extra_state`, and
calls `pickle.loads` with them. In formats without objects (`dcp`, `zarr`, `safetensors`) it is a
tensor like any other, so its name says what it is. Its bytes are copied as they are if they are no
pickle, or one that names nothing but what checkpoints need.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from megtool.errors import FormatError
from megtool.pickles.rules import verbatim_problems
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue
from megtool.transport.reading.reader import CheckpointReader
from megtool.transport.strided import Array

MAX_STATE_BYTES = 16 << 20
"""The size of an extra state that is checked; real ones have some KB. Larger ones are refused."""

MAX_TOTAL_BYTES = 1 << 30
_SHORTEST = 8
_PROTO = b"\x80"
_MARK = "extra_state"


def is_extra_state_tensor(name: str) -> bool:
    """Whether a tensor's bytes are unpickled by those who load it, by its name."""
    return _MARK in name.lower()


def find_foreign_tensors(
    catalogue: Catalogue,
    names: Collection[str] | None = None,
    *,
    renamed: Collection[str] = (),
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The name, file and problems of the extra states that must not be written.

    Reads extra states only, and of those only the ones in `names` if given. Tensors in `renamed`
    get the names of extra states when they are written.
    """
    chosen = [
        t
        for t in catalogue.tensors
        if t.num_bytes
        and t.name not in catalogue.packed
        and (
            t.name in renamed
            or (is_extra_state_tensor(t.name) and (names is None or t.name in names))
        )
    ]
    if not chosen:
        return
    total = 0
    with CheckpointReader(catalogue, Files()) as reader:
        for tensor in chosen:
            total += tensor.num_bytes
            if tensor.num_bytes > MAX_STATE_BYTES or total > MAX_TOTAL_BYTES:
                problems: tuple[str, ...] = ("an extra state too large to be checked",)
            else:
                problems = _problems(reader, tensor.name)
            if problems:
                shard = catalogue.shards.of(catalogue.index[tensor.name]).start
                yield tensor.name, str(catalogue.path(int(catalogue.extents.file[shard]))), problems


def _problems(reader: CheckpointReader, name: str) -> tuple[str, ...]:
    try:
        array = reader.open_stored(name).read()
    except FormatError as e:
        return (e.message,)
    problems: dict[str, None] = {}
    for part in _parts(reader.catalogue, name, array):
        data = part.tobytes()
        problems |= dict.fromkeys(_payload_problems(data))
    return tuple(problems)


def _parts(catalogue: Catalogue, name: str, array: Array) -> Iterator[Array]:
    """What one loader may take for a state: all of it, a shard, or a row of several states."""
    yield array
    for axis in range(1, array.ndim):
        rows = array.reshape(int(np.prod(array.shape[:axis])), -1)
        if rows.shape[1] * rows.itemsize >= _SHORTEST:
            yield from rows
    shards = catalogue.shards.of(catalogue.index[name])
    if shards.stop - shards.start > 1:
        boxes = catalogue.shards.boxes[shards]
        for lo, hi in zip(boxes.lo.tolist(), boxes.hi.tolist(), strict=True):
            box = tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))
            yield array[box[: array.ndim]]


def _payload_problems(data: bytes) -> tuple[str, ...]:
    problems = verbatim_problems(data)
    if problems and data.startswith(_PROTO) and data.endswith(b"\0"):
        padded = data.rstrip(b"\0")  # a pickle ends at its STOP: zeros may follow it
        return verbatim_problems(padded) if padded.endswith(b".") else problems
    return problems
