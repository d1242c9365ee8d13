"""Importance of the columns of weights: llama.cpp's imatrix files, and calibration files as such.

An imatrix has, for each weight, the sum of the squares of each of its inputs (`NAME.in_sum2`) and
the number of tokens (`NAME.counts`), with a row for each expert: see `tools/imatrix` of llama.cpp.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from megtool.errors import CalibrationError, FormatError
from megtool.formats.gguf.reader import open_checkpoint
from megtool.formats.header_reader import read_start
from megtool.number_formats.gguf import package
from megtool.source.checkpoint import CheckpointSource
from megtool.spec.model_config import ModelConfig
from megtool.storage.files import Files
from megtool.storage.local_copy import map_file
from megtool.tensors.catalogue import Catalogue
from megtool.tensors.placement import Placement

if TYPE_CHECKING:
    from megtool.quant.calibration.calibration_file import CalibrationFile

Floats = NDArray[np.float32]
_CHUNK_TOKENS = 512
_SUMS, _COUNTS = ".in_sum2", ".counts"
_KEYS = ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size")


class ImportanceMatrix(Protocol):
    """The importance of the columns of a model's weights."""

    @property
    def digest(self) -> str:
        """What it is made of, for the fingerprint of a run."""

    def sums(self, to: Placement) -> tuple[NDArray[np.floating], float] | None:
        """Sums of squares `[cols]` and tokens of the weight that is stored as `to` says, if any."""


def column_weights(matrix: ImportanceMatrix | None, to: Placement, cols: int) -> Floats | None:
    """The mean squares of the inputs of a weight `[cols]`; None if nothing is known of them.

    Inputs that no token reached count alike, as in llama.cpp.

    Raises:
        CalibrationError: there are others than `cols` columns, or a mean that is no number.
    """
    known = None if matrix is None else matrix.sums(to)
    if known is None:
        return None
    sums, tokens = known
    if sums.shape != (cols,):
        raise CalibrationError(
            f"the importance matrix has {len(sums)} columns of this weight, the model {cols}",
            tensor=to.stored,
            hint="it is of another model",
        )
    if tokens <= 0:
        return np.ones(cols, np.float32)
    weights = (sums / tokens).astype(np.float32)
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise CalibrationError(
            "the importance matrix has NaN, infinite or negative numbers",
            tensor=to.stored,
            hint="calibrate again",
        )
    return weights


def _expert(to: Placement) -> int:
    """The expert of a weight that is stored with others on a leading dimension."""
    return to.base[0] if len(to.base) > 2 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImatrixFile:
    """A file of `llama-imatrix`: a row of sums and a count for each expert, by weight."""

    entries: Mapping[str, tuple[Floats, Floats]]
    digest: str

    def sums(self, to: Placement) -> tuple[NDArray[np.floating], float] | None:
        if to.stored not in self.entries:
            return None
        rows, counts = self.entries[to.stored]
        row = _expert(to) if len(rows) > 1 else 0
        if row >= len(rows):
            raise CalibrationError(
                f"the importance matrix has {len(rows)} experts, and the model more",
                tensor=to.stored,
                hint="it is of another model",
            )
        return rows[row], float(counts[min(row, len(counts) - 1)])


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedImportance:
    """The statistics of a calibration file, by canonical names of the modules that read them."""

    calibration: CalibrationFile
    sites: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The model and the data of the calibration."""
        return repr((self.calibration.fingerprint, self.calibration.data_hashes))

    def sums(self, to: Placement) -> tuple[NDArray[np.floating], float] | None:
        module, _, last = to.canonical.rpartition(".")
        site = self.sites.get(module)
        if last != "weight" or site is None:
            return None
        statistics = self.calibration.statistics[site]
        return statistics.square_sum, statistics.num_tokens


def open_importance(path: Path, opened: CheckpointSource, config: ModelConfig) -> ImportanceMatrix:
    """The importance matrix in an imatrix file (GGUF), or in a calibration file of this model.

    Raises:
        CalibrationError: the calibration file is damaged, of another model, or without sums.
        FormatError: the GGUF file is no imatrix.
    """
    if read_start(path, 4) == b"GGUF":
        return _read_imatrix(path)
    from megtool.quant.calibration.calibration_file import CalibrationFile, check_model
    from megtool.quant.calibration.fingerprint import Fingerprint, hash_model
    from megtool.quant.recipes.modules import list_modules
    from megtool.quant.statistics.activation_sites import list_activation_sites

    try:
        calibration = CalibrationFile.load(path)
        model = hash_model(opened.catalogue, opened.view)
        check_model(calibration, Fingerprint(model=model, recipe="", data=""))
    except CalibrationError as e:
        e.file = e.file or str(path)
        e.hint = (
            f"megtool quantize {opened.path} FILE --recipe fp8 --calibrate-only makes one of this "
            "model; of an imatrix file of llama.cpp's older form llama-imatrix --in-file OLD "
            "--output-format gguf makes one that is read"
        )
        raise
    sites = {
        module: site.name
        for site in list_activation_sites(list_modules(opened.view).modules, config)
        for module in site.modules
        if site.kind == "input" and site.name in calibration.statistics
    }
    if not any(calibration.statistics[s].square_sum.any() for s in sites.values()):
        raise CalibrationError(
            "the calibration file has no sums of squares of inputs",
            file=path,
            hint="calibrate with --data and any recipe: megtool quantize --calibrate-only",
            error_id="missing-statistics",
        )
    return CalibratedImportance(calibration=calibration, sites=sites)


def _read_imatrix(path: Path) -> ImatrixFile:
    catalogue = open_checkpoint(path)
    values = catalogue.metadata["gguf"]
    missing = [k for k in _KEYS if k not in values]
    if values.get("general.type") != "imatrix" or missing:
        raise FormatError(
            "is no importance matrix" + (f": it has no {missing[0]}" if missing else ""),
            file=path,
            hint="llama-imatrix makes one (--output-format gguf), or give a calibration file",
        )
    arrays = _map_tensors(path, catalogue)
    names = {n.removesuffix(_SUMS) for n in arrays if n.endswith(_SUMS)}
    names &= {n.removesuffix(_COUNTS) for n in arrays if n.endswith(_COUNTS)}
    entries = {}
    for name in sorted(names):
        sums, counts = arrays[name + _SUMS], arrays[name + _COUNTS].reshape(-1)
        entries[name] = (sums.reshape(-1, sums.shape[-1]), counts)
    if not entries:
        raise FormatError("the importance matrix has no weights", file=path)
    digest = hashlib.sha256()
    for sums, counts in entries.values():
        digest.update(sums.tobytes())
        digest.update(counts.tobytes())
    return ImatrixFile(entries=entries, digest=digest.hexdigest())


def _map_tensors(path: Path, catalogue: Catalogue) -> dict[str, Floats]:
    """The tensors of floats of a GGUF file of one part, memory-mapped."""
    data = map_file(path)
    extents = catalogue.extents
    out = {}
    for tensor, offset, length in zip(
        catalogue.tensors, extents.offset, extents.length, strict=True
    ):
        if tensor.dtype.name == "float32" and tensor.packing is None and length:
            raw = np.frombuffer(data, np.float32, int(length) // 4, int(offset))
            out[tensor.name] = raw.reshape(tensor.shape)
    return out


def write_imatrix(path: Path, matrix: ImportanceMatrix, placements: Sequence[Placement]) -> None:
    """Write what a matrix says of weights as an imatrix file of llama.cpp.

    `placements` say where weights are stored. Counts are tokens; a chunk, by which llama.cpp merges
    files of its older form, has 512.

    Raises:
        StorageError: it cannot be written.
    """
    rows: dict[str, dict[int, tuple[NDArray[np.floating], float]]] = {}
    for to in placements:
        known = matrix.sums(to)
        if known is not None:
            rows.setdefault(to.stored, {})[_expert(to)] = known
    gguf = package()
    writer = gguf.GGUFWriter(None, "imatrix")
    writer.kv_data[0].pop("general.architecture", None)
    writer.add_type("imatrix")
    writer.add_array(_KEYS[0], ["megtool calibration"])
    tokens = max((int(t) for known in rows.values() for _, t in known.values()), default=0)
    writer.add_uint32(_KEYS[1], max(1, tokens // _CHUNK_TOKENS))
    writer.add_uint32(_KEYS[2], _CHUNK_TOKENS)
    for name, by_expert in sorted(rows.items()):
        experts = [by_expert[e] for e in sorted(by_expert)]
        sums = np.stack([s for s, _ in experts]).astype(np.float32)
        counts = np.array([[t] for _, t in experts], np.float32)
        writer.add_tensor(name + _SUMS, sums)
        writer.add_tensor(name + _COUNTS, counts)
    with tempfile.TemporaryDirectory(prefix="megtool-") as folder:
        local = Path(folder) / "imatrix.gguf"
        writer.write_header_to_file(local)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        Files().replace_file(path, local.read_bytes(), f".{path.name}.tmp")
