"""Nested checkpoints of torch.distributed among the small files, such as ModelOpt's.

Their data files are copied as they are, so every item in them is checked as something that is
unpickled, and every byte has to belong to an item.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from megtool.errors import FormatError, MegtoolError
from megtool.formats.header_reader import check_plain_name
from megtool.formats.torch_dist import reader as torch_dist
from megtool.formats.torch_dist.metadata import DcpMetadata, read_metadata
from megtool.pickles.rules import verbatim_problems
from megtool.pickles.zip_reader import load_object_bytes, read_pickle_bytes
from megtool.source.foreign_tensors import find_foreign_tensors, is_extra_state_tensor
from megtool.storage.files import read_file

DATA_SUFFIX = ".distcp"
_METADATA = ".metadata"
_HEADER = b"PK\3\4"


def find_item_problems(files: Mapping[str, Path]) -> dict[str, tuple[str, ...]]:
    """The problems of every data file of nested checkpoints, by name; empty for sound files.

    `files` are small files by name. A data file is one that a `.metadata` names or whose suffix
    says so, and such a file without a `.metadata` beside it is a problem.
    """
    out: dict[str, tuple[str, ...]] = {}
    for name in files:
        if name.lower().endswith(DATA_SUFFIX):
            out[name] = ("data without a readable .metadata",)
    for name, path in files.items():
        folder, _, base = name.rpartition("/")
        if base != _METADATA:
            continue
        try:
            metadata = read_metadata(read_file(path), file=path)
            names = {check_plain_name(n, path): posixpath.join(folder, n) for n in metadata.paths}
        except FormatError:
            continue  # it is written without what is wrong with it, or not at all
        present = {n: full for n, full in names.items() if full in files}
        states = _state_problems(path.parent, metadata)
        for n, full in present.items():
            problems = dict.fromkeys(_file_problems(metadata, n, files[full]))
            problems |= dict.fromkeys(states.get(n, ()))
            out[full] = tuple(problems)
    return out


def _file_problems(metadata: DcpMetadata, name: str, path: Path) -> Iterator[str]:
    """What is wrong with the items in a file, and with bytes that are in none."""
    data = read_file(path)
    end = 0
    for offset, length, is_object in sorted(_items(metadata, name)):
        if offset + length > len(data):
            yield f"an item at {offset:,} that goes past the end"
            return
        if offset > end and any(data[end:offset]):
            yield f"bytes at {end:,} that belong to no item"
        end = max(end, offset + length)
        yield from _item_problems(data[offset : offset + length], path, is_object=is_object)
    if any(data[end:]):
        yield f"bytes at {end:,} that belong to no item"


def _item_problems(data: bytes, path: Path, *, is_object: bool) -> tuple[str, ...]:
    """The problems of one item; of a tensor those of its description, and not of its elements."""
    try:
        if not data.startswith(_HEADER):  # torch.load unpickles anything else
            return ("an item that torch.save did not write, or before torch 1.6",)
        if not is_object:
            return verbatim_problems(read_pickle_bytes(data, file=path))
        load_object_bytes(data, file=path)
    except FormatError as e:
        return (e.message,)
    return verbatim_problems(data)


def _items(metadata: DcpMetadata, name: str) -> Iterator[tuple[int, int, bool]]:
    """The offset and length of every item in a file, and whether it is an object."""
    numbers = {n for n, path in enumerate(metadata.paths) if path == name}
    for number, offset, length in metadata.objects.values():
        if number in numbers:
            yield offset, length, True
    for number, offset, length in _tensor_items(metadata):
        if number in numbers:
            yield offset, length, False


def _tensor_items(metadata: DcpMetadata) -> Iterator[tuple[int, int, int]]:
    """The file, offset and length of every item that is a part of a tensor."""
    items = metadata.items
    yield from zip(items.file.tolist(), items.offset.tolist(), items.length.tolist(), strict=True)
    yield from ((file, offset, length) for _, file, offset, length in metadata.duplicates)


def _state_problems(folder: Path, metadata: DcpMetadata) -> dict[str, tuple[str, ...]]:
    """The problems of extra states in tensors, by each file that has a part of one."""
    if not any(is_extra_state_tensor(t.name) for t in metadata.tensors):
        return {}
    problems: dict[str, tuple[str, ...]] = {}
    try:
        catalogue = torch_dist.open_checkpoint(folder)
        problems = {name: faults for name, _, faults in find_foreign_tensors(catalogue)}
    except MegtoolError as e:
        message = (f"extra states that cannot be read: {e.message}",)
        problems = {t.name: message for t in metadata.tensors if is_extra_state_tensor(t.name)}
    out: dict[str, tuple[str, ...]] = {}
    for name, faults in problems.items():
        for file in _files_of(metadata, name):
            out[file] = (*out.get(file, ()), *faults)
    return out


def _files_of(metadata: DcpMetadata, tensor: str) -> Collection[str]:
    """The data files that have a part of a tensor."""
    number = next(n for n, t in enumerate(metadata.tensors) if t.name == tensor)
    chunks = {int(c) for c in (metadata.tensor == number).nonzero()[0]}
    files = {int(metadata.items.file[c]) for c in chunks}
    files |= {file for chunk, file, _, _ in metadata.duplicates if chunk in chunks}
    return {metadata.paths[n] for n in files}
