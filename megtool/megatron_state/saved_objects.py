"""Megatron's saved args and objects in a catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megtool.pickles.zip_reader import load_object
from megtool.storage.files import opened
from megtool.tensors.catalogue import Catalogue, StoredObject


def saved_args(catalogue: Catalogue) -> Mapping[str, Any]:
    """The args of the run that saved a checkpoint; empty if it has none."""
    args = catalogue.metadata.get("args")
    return args if isinstance(args, dict) else {}


def vocab_divisor(catalogue: Catalogue) -> int:
    """`make_vocab_size_divisible_by` (times TP pads the vocabulary); Megatron's default is 128."""
    value = saved_args(catalogue).get("make_vocab_size_divisible_by")
    return value if isinstance(value, int) and value > 0 else 128


def read_object(catalogue: Catalogue, stored: StoredObject) -> Any:
    """Read an object as inert data, without the list that `torch_dist` wraps around it."""
    if stored.extent is None:
        return stored.value
    file, offset, length = stored.extent
    path = catalogue.path(file)
    with opened(path) as fd:
        tree = load_object(fd, offset, length, file=path)
    is_wrapped = stored.kind != "object" and isinstance(tree, list) and len(tree) == 1
    return tree[0] if is_wrapped else tree
