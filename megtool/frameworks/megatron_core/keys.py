"""Boxes of the tensors that a Megatron state dict asks for, in any checkpoint.

Layers may share a key with a leading axis or have one each, experts share one or have one each, and
gate and up rows may be tensors of their own: the same elements are found under every spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from megtool.access.read_boxes import BoxReader
from megtool.convert.canonical_view import CanonicalView, TargetView
from megtool.convert.config.hybrid import GPT, HYBRID
from megtool.convert.dialects import STATE_FIRST, DialectNaming, write_side
from megtool.convert.megatron.names import split_state
from megtool.dtypes import DType
from megtool.errors import MappingError
from megtool.source.checkpoint import CheckpointSource
from megtool.tensors.sharded import GlobalTensor

ANY = -1
"""A size that the request does not say."""

BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_")
"""Keys of optimizer state in the buckets of one layout."""

_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias))_([wv])")
_EXPERT = re.compile(r"(.*\.experts)\.experts\.(\d+)\.(.+)")
_LAYER = re.compile(r"((?:decoder|encoder)\.layers\.)(\d+)\.(.+)")
_STACKED = re.compile(r"((?:decoder|encoder)\.layers\.)(?!\d+\.)(.+)")
_NORMS = (
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBox:
    """The box `lo:hi` of the tensor of a key, which has `shape`."""

    key: str
    shape: tuple[int, ...]
    lo: tuple[int, ...]
    hi: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedBox:
    """A box of a tensor that can be read: `lo:hi` of `tensor`, by the reader of `keys`."""

    keys: MegatronKeys
    tensor: GlobalTensor
    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """Whether the box is inside the tensor."""
        return all(b <= n for b, n in zip(self.hi, self.tensor.shape, strict=True))


class MegatronKeys:
    """The tensors of a checkpoint by Megatron's keys, one key per layer (or as they are stored)."""

    def __init__(
        self,
        source: CheckpointSource,
        view: CanonicalView,
        target: TargetView,
        threads: int | None = None,
    ) -> None:
        self.target = target
        self._source, self._view, self._threads = source, view, threads
        self.tensors: Mapping[tuple[str, str], GlobalTensor] = {
            (state, key): t
            for t in target.tensors
            for state, _, key in [split_state(t.name)]
            if state != "step"
        }

    @cached_property
    def reader(self) -> BoxReader:
        """What reads boxes of the tensors."""
        return BoxReader(self._source.catalogue, self._view, self.target, threads=self._threads)

    def spelled(self) -> Iterator[tuple[str, tuple[int, ...], DType]]:
        """Keys, shapes and types: as they are, and with layers on a leading axis."""
        stacks: dict[str, list[GlobalTensor]] = {}
        for t in self.target.tensors:
            yield t.name, t.shape, t.dtype
            key = split_state(t.name)[2]
            if match := _LAYER.fullmatch(key):
                stacked = t.name.removesuffix(key) + match[1] + match[3]
                stacks.setdefault(stacked, []).append(t)
        for key, layers in stacks.items():
            if len({(t.shape, t.dtype) for t in layers}) == 1:
                yield key, (len(layers), *layers[0].shape), layers[0].dtype

    def place(self, box: KeyBox, *, any_shape: bool = False) -> PlacedBox | tuple[int, ...] | None:
        """Where a box lies; a shape if the tensor has another one; None if there is no tensor.

        `any_shape` takes a tensor of another shape, whose axes are as many.
        """
        state, _, key = split_state(box.key)
        other: tuple[int, ...] | None = None
        for spelled in _spellings(replace(box, key=key)):
            tensor = self.tensors.get((state, spelled.key))
            if tensor is None:
                continue
            same = len(tensor.shape) == len(spelled.shape) and all(
                b in (a, ANY) for a, b in zip(tensor.shape, spelled.shape, strict=True)
            )
            if same or (any_shape and len(tensor.shape) == len(spelled.shape)):
                return PlacedBox(keys=self, tensor=tensor, lo=spelled.lo, hi=spelled.hi)
            other = other or tensor.shape
        return other


def megatron_keys(
    source: CheckpointSource, vocab_rows: int = 0, *, threads: int | None = None
) -> Iterator[MegatronKeys]:
    """The tensors of a checkpoint by the keys of Megatron's model classes, the likely one first.

    `vocab_rows` is the padded vocabulary that the model has, 0 if it is not known.

    Raises:
        MappingError: the model is not known, and its tensors have no names of Megatron's.
    """
    view = source.view
    if view.dialect == "identity":
        yield MegatronKeys(source, view, write_side(view, dialect="identity"), threads)
        return
    config = source.config
    padded = vocab_rows if vocab_rows >= config.embedding.vocab_size else 1
    failures: list[MappingError] = []
    count = 0
    for model_class in (None, GPT, HYBRID):
        options = DialectNaming(
            divisible_by=padded,
            model_class=model_class,
            in_parts=True,
            state_names=STATE_FIRST,
        )
        try:
            target = write_side(
                view, dialect="megatron", config=config, per_layer=True, options=options
            )
        except MappingError as e:
            failures.append(e)
            continue
        count += 1
        yield MegatronKeys(source, view, target, threads)
    if not count:
        raise failures[0]


def _spellings(box: KeyBox) -> Iterator[KeyBox]:
    """The box under every key that Megatron's classes and versions give its elements."""
    boxes = [box]
    if match := _HALF.fullmatch(box.key):
        axis = len(box.shape) - (2 if match[1].endswith("weight") else 1)
        shift = box.shape[axis] if match[2] == "v" else 0
        boxes.append(
            KeyBox(
                key=match[1],
                shape=_with(box.shape, axis, 2 * box.shape[axis]),
                lo=_with(box.lo, axis, box.lo[axis] + shift),
                hi=_with(box.hi, axis, box.hi[axis] + shift),
            )
        )
    for each in list(boxes):
        if match := _EXPERT.fullmatch(each.key):
            boxes.append(_stacked(each, f"{match[1]}.experts.{match[3]}", int(match[2])))
    for each in boxes:
        for first, second in (("", ""), *_NORMS, *((b, a) for a, b in _NORMS)):
            if first in each.key:
                yield from _by_layer(replace(each, key=each.key.replace(first, second)))


def _by_layer(box: KeyBox) -> Iterator[KeyBox]:
    """The box as it is, and with its layer in the key instead of an axis, or the other way."""
    yield box
    if match := _LAYER.fullmatch(box.key):
        yield _stacked(box, match[1] + match[3], int(match[2]))
    elif (match := _STACKED.fullmatch(box.key)) and box.lo and box.hi[0] - box.lo[0] == 1:
        key = f"{match[1]}{box.lo[0]}.{match[2]}"
        yield KeyBox(key=key, shape=box.shape[1:], lo=box.lo[1:], hi=box.hi[1:])


def _stacked(box: KeyBox, key: str, number: int) -> KeyBox:
    return KeyBox(
        key=key,
        shape=(ANY, *box.shape),
        lo=(number, *box.lo),
        hi=(number + 1, *box.hi),
    )


def _with(values: Sequence[int], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def split_flat_range(
    shape: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes that elements `start:stop` of a tensor in row-major order make, in their order.

    list(split_flat_range((2, 3), 1, 5))  # the rest of the first row, the begin of the second
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    row, last = start // inner, (stop - 1) // inner
    if start - row * inner or (row == last and stop - row * inner < inner):
        end = min(stop - row * inner, inner)
        for lo, hi in split_flat_range(shape[1:], start - row * inner, end):
            yield (row, *lo), (row + 1, *hi)
        yield from split_flat_range(shape, (row + 1) * inner, stop)
        return
    whole = stop // inner
    yield (row, *(0 for _ in shape[1:])), (whole, *shape[1:])
    for lo, hi in split_flat_range(shape[1:], 0, stop - whole * inner):
        yield (whole, *lo), (whole + 1, *hi)
