"""The headers and config files of a quantized folder, planned, staged or finished."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError
from megtool.formats.safetensors.quantization_config import (
    QUANT_FILE,
    QUANT_KEYS,
    with_method,
)
from megtool.formats.safetensors.reader import INDEX, open_checkpoint, refuse_trtllm_legacy
from megtool.number_formats.small_floats import single
from megtool.storage.files import Files, read_file
from megtool.tensors.box import numel
from megtool.tensors.catalogue import Catalogue
from megtool.transport.reading.reader import CheckpointReader

CONFIG_FILE = "config.json"
BRANCH: tuple[str, ...] = ("svdquant_lora_a", "svdquant_lora_b")
"""SVDQuant's matrices, which ModelOpt calls so, or `weight_quantizer._svdquant_lora_a`."""

COMPANIONS = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", *BRANCH)
"""Tensors that ModelOpt stores next to the codes of a weight."""

KV_CACHE_SCALES: tuple[str, ...] = ("k_scale", "v_scale")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tekken.json")

_SAMPLES = 1 << 16

Floats = NDArray[np.float32]
Tiles = Callable[[str], Iterator[Floats]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as its header describes it, and its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleStatistics:
    """The values of one scale: counts, the first value, and extremes and median of the magnitudes
    that are finite and not zero (`num_smallest` of them have the smallest)."""

    count: int
    zeros: int
    nan: int
    inf: int
    negative: int
    smallest: float
    largest: float
    median: float
    num_smallest: int
    first: float


def _no_tiles(name: str) -> Iterator[Floats]:
    return iter(())


@dataclass(slots=True, kw_only=True)
class FolderView:
    """A folder of safetensors with its two config files.

    `config` and `hf_quant_config` are config.json and hf_quant_config.json; None if one is missing
    or no JSON object, which `problems` (file or tensor, message) then says. `modules` are the
    stored tensors by module and last part of the name. `read_tile` yields the elements of a tensor
    by its name, a few at a time; `file_names` are all files of the folder.
    """

    path: Path
    config: dict[str, Any] | None = None
    hf_quant_config: dict[str, Any] | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    modules: dict[str, dict[str, StoredTensor]] = field(default_factory=dict)
    file_names: frozenset[str] = frozenset()
    read_tiles: Tiles = _no_tiles
    _open_files: ExitStack = field(default_factory=ExitStack)

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The quantization_config of config.json."""
        for key in QUANT_KEYS:
            if isinstance(value := (self.config or {}).get(key), dict):
                return with_method(value)
        return None

    @property
    def is_deepseek_v4(self) -> bool:
        """Whether scales have DeepSeek-V4's name, `scale`; `modules` have the usual one."""
        return (self.config or {}).get("model_type") == "deepseek_v4"

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer file."""
        return not self.file_names.isdisjoint(TOKENIZER_FILES)

    def modules_with(self, last: str) -> list[str]:
        """Modules that have a tensor of that last name."""
        return [module for module, tensors in self.modules.items() if last in tensors]

    def read_values(self, tensor: StoredTensor) -> Floats:
        """All elements of a small tensor, in its shape; uint8 scales are powers of two (E8M0)."""
        tiles = [t.copy() for t in self.read_tiles(tensor.name)]
        return np.concatenate([np.zeros(0, np.float32), *tiles]).reshape(tensor.shape)

    def read_statistics(self, tensor: StoredTensor) -> ScaleStatistics:
        """The statistics of a scale; the median is that of some thousands of evenly spaced
        elements."""
        step = max(1, numel(tensor.shape) // _SAMPLES)
        count = zeros = nan = inf = negative = num_smallest = 0
        smallest, largest, first = np.inf, 0.0, np.nan
        samples: list[Floats] = []
        for tile in self.read_tiles(tensor.name):
            if not count:
                first = float(tile[0])
            samples.append(tile[(-count) % step :: step].copy())
            count += tile.size
            nan += int(np.isnan(tile).sum())
            inf += int(np.isinf(tile).sum())
            zeros += int((tile == 0).sum())
            negative += int((tile < 0).sum())
            size = np.abs(tile[np.isfinite(tile) & (tile != 0)])
            if size.size:
                low = float(size.min())
                equal = int((size == low).sum())
                if low < smallest:
                    num_smallest = equal
                elif low == smallest:
                    num_smallest += equal
                smallest, largest = min(smallest, low), max(largest, float(size.max()))
        sample = np.abs(np.concatenate([np.zeros(0, np.float32), *samples]))
        sample = sample[np.isfinite(sample) & (sample != 0)]
        return ScaleStatistics(
            count=count,
            zeros=zeros,
            nan=nan,
            inf=inf,
            negative=negative,
            smallest=smallest if largest else 0.0,
            largest=largest,
            median=float(np.median(sample.astype(np.float64))) if sample.size else 0.0,
            num_smallest=num_smallest,
            first=first,
        )

    def __enter__(self) -> FolderView:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    def _add(self, tensor: StoredTensor) -> None:
        if tensor.name in self.tensors:
            text = f"is in {self.tensors[tensor.name].file} and in {tensor.file}"
            self.problems.append((tensor.name, text))
        self.tensors[tensor.name] = tensor
        module, _, last = tensor.name.rpartition(".")
        if last == "scale" and self.is_deepseek_v4:
            last = "weight_scale_inv"
        if last.removeprefix("_") in BRANCH:
            module, last = module.removesuffix(".weight_quantizer"), last.removeprefix("_")
        self.modules.setdefault(module, {})[last] = tensor

    def _parse(self, name: str, read: Callable[[str], bytes]) -> dict[str, Any] | None:
        """A JSON object by its file name; a problem if it is none."""
        try:
            value = json.loads(read(name))
        except KeyError:
            self.problems.append((name, "is missing"))
            return None
        except (ValueError, RecursionError) as e:
            self.problems.append((name, f"is not valid JSON: {e}"))
            return None
        if not isinstance(value, dict):
            self.problems.append((name, "is not a JSON object"))
            return None
        return value


_HEAD_BYTES = 64 << 10
"""What is requested of each file of a store at first: most headers are as short."""


def open_folder(path: Path) -> FolderView:
    """Read the headers and the config files of a staged or finished folder.

    Raises:
        FormatError: there are no safetensors, or a header cannot be trusted.
        UsageError: it is a legacy TensorRT-LLM checkpoint.
    """
    names = frozenset(p.name for p in path.iterdir() if p.is_file()) if path.is_dir() else ()
    files = sorted(n for n in names if n.endswith(".safetensors"))
    refuse_trtllm_legacy(path, files)
    readers: dict[str, CheckpointReader] = {}

    def read_tiles(name: str) -> Iterator[Floats]:
        tensor = view.tensors[name]
        kind = "float8_e8m0fnu" if tensor.dtype == "uint8" else tensor.dtype
        with closing(readers[tensor.file].open_stored(name).tiles()) as tiles:
            for _, tile in tiles:
                yield single(tile, kind)

    view = FolderView(path=path, file_names=frozenset(names), read_tiles=read_tiles)
    present = {n: path / n for n in names}  # another name is a KeyError
    view.config = view._parse(CONFIG_FILE, lambda name: read_file(present[name]))
    view.hf_quant_config = view._parse(QUANT_FILE, lambda name: read_file(present[name]))
    index = None
    if INDEX in names:
        index = view._parse(INDEX, lambda name: read_file(present[name]))
    if not files:
        raise FormatError("holds no safetensors", file=path, hint="is the folder complete?")
    Files().prefetch([(path / file, [(0, _HEAD_BYTES)]) for file in files])
    for file in files:
        catalogue = open_checkpoint(path / file)
        readers[file] = CheckpointReader(catalogue, Files())
        view._open_files.callback(readers[file].close)
        for t in catalogue.tensors:
            view._add(StoredTensor(name=t.name, dtype=t.dtype.name, shape=t.shape, file=file))
    if index is not None:
        listed = index.get("weight_map")
        stored = {name: t.file for name, t in view.tensors.items()}
        if listed != stored:
            wrong = set(listed.items() if isinstance(listed, dict) else ()) ^ set(stored.items())
            name = min(wrong)[0] if wrong else INDEX
            view.problems.append((INDEX, f"does not match the files: {name}"))
    return view


def plan_folder(
    path: Path,
    catalogue: Catalogue,
    files: Iterable[tuple[str, bytes]],
    read_tiles: Tiles = _no_tiles,
) -> FolderView:
    """The Hugging Face folder that `catalogue` lays out at `path`, before a byte is written.

    `files` are the other files of the folder, and `read_tiles` yields the elements of a small
    tensor by its name.
    """
    contents = dict(files)
    view = FolderView(path=path, file_names=frozenset(contents), read_tiles=read_tiles)
    view.config = view._parse(CONFIG_FILE, contents.__getitem__)
    view.hf_quant_config = view._parse(QUANT_FILE, contents.__getitem__)
    for row, t in enumerate(catalogue.tensors):
        file = catalogue.path(int(catalogue.extents.file[row])).name
        view._add(StoredTensor(name=t.name, dtype=t.dtype.name, shape=t.shape, file=file))
    return view
