"""Trained: a Llama with its optimizer state in Megatron's own formats, as large as asked."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.race import run_job
from bench.synthetic import LARGE, SMALL, configuration, shapes
from megtool.dtypes import dtype
from megtool.formats.safetensors.reader import plan_safetensors_layout
from megtool.tensors.sharded import GlobalTensor

BYTES_PER_PARAMETER = 14
"""Two of the weight, and four each of the master weight and the two moments."""


def trained(root: Path, gib: float, *, to: str, optimizer: str, **layout: Any) -> tuple[Path, int]:
    """A checkpoint of about `gib` GiB in one of Megatron's formats, and the bytes of its tensors.

    It is made of a Hugging Face folder whose tensors repeat one block of numbers; each master
    weight is its weight exactly, as the proof of decoding demands.
    """
    source = root / "trained-hf"
    num_bytes = _hugging_face(source, gib)
    made = root / optimizer
    options = {
        "source": str(source),
        "destination": str(made),
        "to": to,
        "optimizer_format": optimizer,
    }
    run_job("reshard", {**options, **layout, "fsync": False, "digest": "none"})
    shutil.rmtree(source)
    os.sync()
    return made, num_bytes


def _hugging_face(folder: Path, gib: float) -> int:
    shape = LARGE if gib >= 4 else SMALL
    layers, sizes = 0, list[tuple[str, tuple[int, ...]]]()
    while sum(int(np.prod(s)) for _, s in sizes) * BYTES_PER_PARAMETER < gib * 2**30:
        layers += 2
        sizes = list(shapes(shape, layers))
    weights = [GlobalTensor(name=n, shape=s, dtype=dtype("bfloat16")) for n, s in sizes]
    tensors = list(weights)
    for state in ("param", "exp_avg", "exp_avg_sq"):
        prefix = f"optimizer.state.{state}."
        tensors += [replace(t, name=prefix + t.name, dtype=dtype("float32")) for t in weights]
    num_bytes = sum(t.num_bytes for t in tensors)
    laid = plan_safetensors_layout(
        tensors,
        max_shard_bytes=num_bytes // 4,
        small_files={"config.json": configuration(shape, layers, "bfloat16")},
    )
    folder.mkdir(parents=True)
    block = np.random.default_rng(0).standard_normal(1 << 20).astype("<f4").view("<u4") >> 16
    narrow, wide = block.astype("<u2").tobytes(), (block << 16).astype("<u4").tobytes()
    catalogue = laid.catalogue
    for file in catalogue.files:
        with (folder / file.path).open("wb") as out:
            out.truncate(file.size)
    for row, number in enumerate(catalogue.shards.tensor.tolist()):
        data = narrow if catalogue.tensors[number].dtype.itemsize == 2 else wide
        left = int(catalogue.extents.length[row])
        path = folder / catalogue.files[int(catalogue.extents.file[row])].path
        with path.open("r+b") as out:
            out.seek(int(catalogue.extents.offset[row]))
            while left:
                left -= out.write(data[:left])
    for at, offset, data in laid.fragments:
        with (folder / catalogue.files[at].path).open("r+b") as out:
            out.seek(offset)
            out.write(data)
    for name, data in laid.iter_small_files():
        (folder / name).write_bytes(data)
    return num_bytes
