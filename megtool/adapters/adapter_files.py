"""The files of an adapter, planned before their data, and written into a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megtool.adapters.peft_config import CONFIG_FILE, WEIGHTS_FILE
from megtool.adapters.peft_writer import PeftAdapter
from megtool.dtypes import dtype
from megtool.formats.safetensors.header import encode_header
from megtool.formats.safetensors.reader import place_tensors
from megtool.formats.torch_dist.layout import MegatronSave, plan_torch_dist_layout
from megtool.staging.stage import Stage
from megtool.tensors.sharded import GlobalTensor, Shards, widest


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """A file: bytes and tensors, each with its offset."""

    name: str
    num_bytes: int
    parts: Sequence[tuple[int, bytes | Tensor]]


def plan_peft_files(adapter: PeftAdapter) -> list[AdapterFile]:
    """The two files of PEFT's format."""
    entries = place_tensors(_global_tensors(adapter.tensors))
    header = encode_header(entries, {"format": "pt"}, WEIGHTS_FILE)
    size = len(header) + max((e.end for e in entries), default=0)
    parts: list[tuple[int, bytes | Tensor]] = [(0, header)]
    parts += [(len(header) + e.begin, adapter.tensors[e.name]) for e in entries]
    return [
        AdapterFile(name=WEIGHTS_FILE, num_bytes=size, parts=parts),
        _whole(CONFIG_FILE, adapter.config_file),
    ]


def plan_megatron_files(
    adapter_tensors: Mapping[str, Tensor], small_files: Mapping[str, bytes], iteration: int
) -> list[AdapterFile]:
    """A save folder with one iteration; `small_files` are those beside its data: run_config.yaml
    with the adapter's section, or ModelOpt's state."""
    tensors = _global_tensors(adapter_tensors)
    num_dims = widest(tensors)
    shards = Shards.build(
        [(row, [0] * len(t.shape), t.shape, 0) for row, t in enumerate(tensors)], num_dims
    )
    planned = plan_torch_dist_layout(
        tensors,
        shards,
        num_files=1,
        small_files=small_files,
        megatron=MegatronSave(
            common={"checkpoint_version": 3.0, "iteration": iteration}, iteration=iteration
        ),
    )
    catalogue = planned.catalogue
    parts: list[list[tuple[int, bytes | Tensor]]] = [[] for _ in catalogue.files]
    for file, offset, data in planned.fragments:
        parts[file].append((offset, data))
    located = catalogue.locate(np.arange(len(catalogue.shards)))
    for row, number in enumerate(catalogue.shards.tensor.tolist()):
        tensor = adapter_tensors[catalogue.tensors[number].name]
        parts[int(catalogue.extents.file[row])].append((int(located.offset[row]), tensor))
    return [
        *(
            AdapterFile(name=file.path, num_bytes=file.size, parts=_fill_gaps(of_file))
            for file, of_file in zip(catalogue.files, parts, strict=True)
        ),
        *(_whole(name, data) for name, data in planned.iter_small_files()),
    ]


def write_files(stage: Stage, planned: Sequence[AdapterFile]) -> None:
    """Write all files into an entered stage, which the caller commits.

    Raises:
        StorageError: they cannot be written.
    """
    stage.require_space(sum(file.num_bytes for file in planned))
    for file in planned:
        if len(file.parts) == 1 and isinstance(file.parts[0][1], bytes):
            stage.write(file.name, file.parts[0][1])
            continue
        fd = stage.files.open_write(stage.create(file.name, file.num_bytes, None))
        try:
            for offset, data in file.parts:
                stage.files.pwrite_all(fd, data if isinstance(data, bytes) else _raw(data), offset)
        finally:
            stage.files.close(fd)


def _fill_gaps(parts: Sequence[tuple[int, bytes | Tensor]]) -> list[tuple[int, bytes | Tensor]]:
    """The parts in their order, with zeros between them, which a store needs."""
    out: list[tuple[int, bytes | Tensor]] = []
    end = 0
    for offset, data in sorted(parts, key=lambda part: part[0]):
        if offset > end:
            out.append((end, bytes(offset - end)))
        out.append((offset, data))
        end = offset + (len(data) if isinstance(data, bytes) else data.nbytes)
    return out


def _whole(name: str, data: bytes) -> AdapterFile:
    return AdapterFile(name=name, num_bytes=len(data), parts=[(0, data)])


def _global_tensors(tensors: Mapping[str, Tensor]) -> list[GlobalTensor]:
    return [
        GlobalTensor(
            name=name,
            shape=tuple(tensors[name].shape),
            dtype=dtype(str(tensors[name].dtype).removeprefix("torch.")),
        )
        for name in sorted(tensors)
    ]


def _raw(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
