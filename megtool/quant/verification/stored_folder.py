"""Folder: a quantized Hugging Face folder as it is stored, opened afresh, nothing decoded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.checkpoint.formats.quantized import QUANT_FILE, QUANT_KEYS
from megtool.checkpoint.formats.safetensors import INDEX, open_checkpoint, refuse_legacy
from megtool.checkpoint.read import Reader
from megtool.checkpoint.storage.files import Files
from megtool.errors import FormatError
from megtool.number_formats.small_floats import single
from megtool.tensors.box import numel

COMPANIONS = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
"""What may lie beside the codes of a weight."""

CACHE_SCALES = ("k_scale", "v_scale")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")

_SAMPLES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor by what its header says, and the file it is in."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What the values of a scale are: counts of odd ones, extremes of magnitude and the median of
    the others (`num_lowest` have the smallest magnitude), the first value."""

    count: int
    zeros: int
    nan: int
    inf: int
    negative: int
    smallest: float
    largest: float
    median: float
    num_lowest: int
    first: float


@dataclass(slots=True, kw_only=True)
class Folder:
    """`config` and `quant` are config.json and hf_quant_config.json (None: not there or no JSON
    object; `faults` says what is the matter). `modules` are the stored tensors by module and last
    part of the name."""

    path: Path
    config: dict[str, Any] | None = None
    quant: dict[str, Any] | None = None
    faults: list[tuple[str, str]] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    modules: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    _readers: dict[str, Reader] = field(default_factory=dict)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """What config.json says of it."""
        for key in QUANT_KEYS:
            if isinstance(self.config, dict) and isinstance(found := self.config.get(key), dict):
                return found
        return None

    @property
    def has_tokenizer(self) -> bool:
        """A file of a tokenizer is there."""
        return any((self.path / name).is_file() for name in TOKENIZERS)

    def tiles(self, tensor: StoredTensor) -> Iterator[NDArray[np.float32]]:
        """The elements of a tensor as numbers, a few at a time; bytes of uint8 scales are powers of
        two (E8M0)."""
        kind = "float8_e8m0fnu" if tensor.dtype == "uint8" else tensor.dtype
        view = self._readers[tensor.file].stored(tensor.name)
        with closing(view.tiles()) as found:
            for _, tile in found:
                yield single(tile, kind)

    def values(self, tensor: StoredTensor) -> NDArray[np.float32]:
        """All elements of a small tensor, in its shape."""
        found = [t.copy() for t in self.tiles(tensor)]
        return np.concatenate([np.zeros(0, np.float32), *found]).reshape(tensor.shape)

    def numbers(self, tensor: StoredTensor) -> Numbers:
        """Counts and extremes; the median is that of some thousands of evenly spaced elements."""
        step = max(1, numel(tensor.shape) // _SAMPLES)
        count = zeros = nan = inf = negative = lowest = seen = 0
        smallest, largest, first = np.inf, 0.0, np.nan
        samples: list[NDArray[np.float32]] = []
        for tile in self.tiles(tensor):
            if not count:
                first = float(tile[0])
            count += tile.size
            nan += int(np.isnan(tile).sum())
            inf += int(np.isinf(tile).sum())
            zeros += int((tile == 0).sum())
            negative += int((tile < 0).sum())
            size = np.abs(tile[np.isfinite(tile) & (tile != 0)])
            samples.append(tile[(-seen) % step :: step].copy())
            seen += tile.size
            if size.size:
                low = float(size.min())
                same = int((size == low).sum())
                lowest = lowest + same if low == smallest else same if low < smallest else lowest
                smallest, largest = min(smallest, low), max(largest, float(size.max()))
        some = np.abs(np.concatenate([np.zeros(0, np.float32), *samples]))
        some = some[np.isfinite(some) & (some != 0)]
        return Numbers(
            count=count,
            zeros=zeros,
            nan=nan,
            inf=inf,
            negative=negative,
            smallest=smallest if largest else 0.0,
            largest=largest,
            median=float(np.median(some)) if some.size else 0.0,
            num_lowest=lowest,
            first=first,
        )

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers.values():
            reader.close()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_folder(path: Path) -> Folder:
    """Read the headers and the two config files of a folder.

    Raises:
        FormatError: there are no safetensors, or a header cannot be trusted.
        UsageError: it is a legacy TensorRT-LLM checkpoint.
    """
    refuse_legacy(path, [p.name for p in path.glob("*.safetensors")])
    out = Folder(path=path)
    out.config = _json(path / "config.json", out)
    out.quant = _json(path / QUANT_FILE, out)
    index = _json(path / INDEX, out) if (path / INDEX).exists() else None
    files = sorted(p.name for p in path.glob("*.safetensors"))
    if not files:
        raise FormatError("holds no safetensors", file=path, hint="is the folder complete?")
    for file in files:
        catalogue = open_checkpoint(path / file)
        out._readers[file] = Reader(catalogue, Files())
        for t in catalogue.tensors:
            if t.name in out.tensors:
                out.faults.append((t.name, f"is in {out.tensors[t.name].file} and in {file}"))
            tensor = StoredTensor(name=t.name, dtype=t.dtype.name, shape=t.shape, file=file)
            out.tensors[t.name] = tensor
            module, _, last = t.name.rpartition(".")
            out.modules.setdefault(module, {})[last] = tensor
    if index is not None:
        named = index.get("weight_map")
        held = {name: t.file for name, t in out.tensors.items()}
        if named != held:
            odd = set(named.items() if isinstance(named, dict) else ()) ^ set(held.items())
            name = min(odd)[0] if odd else INDEX
            out.faults.append((INDEX, f"does not say what the files hold: {name}"))
    return out


def _json(path: Path, out: Folder) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except OSError:
        out.faults.append((path.name, "is not there"))
        return None
    except ValueError as e:
        out.faults.append((path.name, f"is no JSON: {e}"))
        return None
    if not isinstance(value, dict):
        out.faults.append((path.name, "is no JSON object"))
        return None
    return value
