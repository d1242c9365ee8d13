"""torch.distributed.checkpoint folders, plain (`dcp`) and as Megatron saves them (`torch_dist`).

Opening reads `.metadata`, `metadata.json` and the common state, and no tensor data. The offset of a
tensor inside its item is found at first use.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import FormatError
from megtool.formats.auxiliary_files import NEMO_1_CONFIG, can_copy, find_megatron_auxiliary_files
from megtool.formats.header_reader import check_inside, parse_json, read_exact, short_repr
from megtool.formats.save_folder import RELEASE, find_iteration, is_distributed
from megtool.formats.torch_dist.gathered import add_gathered_tensors
from megtool.formats.torch_dist.layout import COMMON_OBJECT, plan_torch_dist_layout
from megtool.formats.torch_dist.metadata import DcpMetadata, read_metadata
from megtool.pickles import reader as pickle_reader
from megtool.pickles import zip_reader, zip_tensor
from megtool.storage.files import Files, is_regular_file, opened
from megtool.storage.location.path import is_remote
from megtool.tensors.catalogue import (
    Catalogue,
    Extents,
    Replica,
    ShardOffsets,
    StoredFile,
    StoredObject,
)
from megtool.tensors.sharded import Shards

__all__ = ["NAMES", "detect", "open_checkpoint", "plan_torch_dist_layout"]

NAMES = ("torch_dist", "dcp")
WEIGHTS = "weights"
"""The folder of the data in NeMo 2, next to `context/`."""

NEMO_1_WEIGHTS = "model_weights"
"""NeMo 1's folder of weights, beside `model_config.yaml`, in an unpacked `.nemo` archive."""

_UNFINISHED = "-unfinished"  # suffix of NeMo's marker of a folder being written

MAX_METADATA_BYTES = 4 << 30
_MAX_SMALL_BYTES = 1 << 30
_BATCH_ITEMS = 4096
"""Items whose headers are requested together."""


def detect(path: Path) -> bool:
    """Whether `path` is such a folder, a Megatron save folder of some, or an unfinished one."""
    if not path.is_dir() or is_distributed(path) or _nemo_weights(path) is not None:
        return path.is_dir()
    folder = find_iteration(path, None)
    return folder is not None and is_distributed(folder)


def open_checkpoint(path: Path, *, iteration: int | str | None = None) -> Catalogue:
    """The catalogue of one iteration; `path` is its folder or the save folder around it.

    `iteration` is a number or `release`; without it the save folder's tracker decides. `metadata`
    gets `iteration` (a release has none), `args` (a dict), `checkpoint_version`,
    `content_metadata`, `common` (the inert tree, ready to be written again) and `planner_data`,
    each if present.

    Raises:
        FormatError: the save is unfinished, files are missing, or inconsistent.
        CoverageError: chunks do not tile their tensors.
    """
    is_iteration = is_distributed(path) and iteration is None
    nemo = None if is_iteration else _nemo_weights(path)
    folder = path if is_iteration else nemo or find_iteration(path, iteration)
    if folder is None:
        raise FormatError(
            "it is not a torch.distributed checkpoint", file=path, error_id="not-a-checkpoint"
        )
    megatron = _check_finished(folder, path)
    name = ".metadata"
    check_inside(folder, name)
    files = [StoredFile.stat(folder, name)]
    if files[0].size > MAX_METADATA_BYTES:
        raise FormatError(
            f"the metadata has {files[0].size:,} bytes, which is too much", file=folder / name
        )
    metadata = read_metadata(read_exact(folder / name, 0, files[0].size), file=folder / name)
    if not megatron and COMMON_OBJECT in metadata.objects:
        raise _unfinished_error("metadata.json", folder, path)
    data_files = _data_files(folder, metadata.paths)
    warnings = _warn_unlisted_files(folder, metadata.paths)
    catalogue = Catalogue(
        format="torch_dist" if megatron else "dcp",
        root=folder,
        files=data_files + files,
        tensors=metadata.tensors,
        shards=Shards(metadata.tensor, metadata.boxes, metadata.items.file),
        extents=Extents(
            file=metadata.items.file,
            offset=metadata.items.offset,
            length=metadata.items.length,
            contained=True,
        ),
        objects={
            name: StoredObject(name=name, kind="bytes", extent=extent)
            for name, extent in metadata.objects.items()
        },
        auxiliary_files=find_megatron_auxiliary_files(folder, warnings)
        | _find_nemo_auxiliary_files(folder, warnings),
        replicas=[
            Replica(shard=c, file=f, offset=o, length=n) for c, f, o, n in metadata.duplicates
        ],
        warnings=warnings,
    )
    _check_items(catalogue)
    catalogue.check()
    catalogue.locate_contained = _Locator(catalogue).locate
    _add_metadata(catalogue, metadata, megatron)
    return add_gathered_tensors(catalogue) if megatron else catalogue


def _check_finished(folder: Path, requested: Path) -> bool:
    """Whether the save is Megatron's; raises an error if it is incomplete."""
    save = folder.absolute().parent
    marker = save.parent / (save.name + _UNFINISHED)
    if folder.name == WEIGHTS and marker.exists():
        raise FormatError(
            f"an unfinished save: {marker.name} exists",
            file=folder.parent,
            hint="NeMo removes that file last; use an older checkpoint",
            error_id="unfinished-save",
        )
    megatron = (folder / "metadata.json").exists()
    if megatron and (folder / ".metadata").exists():
        check_inside(folder, "metadata.json")
        size = (folder / "metadata.json").stat().st_size
        data = read_exact(folder / "metadata.json", 0, min(size, 1 << 20))
        config = parse_json(data, folder / "metadata.json")
        backend = config.get("sharded_backend") if isinstance(config, dict) else None
        if backend != "torch_dist":
            raise FormatError(
                f"sharded backend {backend!r} is not supported",
                file=folder / "metadata.json",
                hint="load it with the Megatron version that wrote it and save as torch_dist",
            )
        version = config.get("sharded_backend_version", 1)
        if version != 1:
            raise FormatError(
                f"version {version!r:.20} of the sharded backend is not known, only 1 is",
                file=folder / "metadata.json",
                hint="a newer Megatron wrote it: use a newer megtool, or save it with one up to "
                "core 0.19",
            )
        return True
    if not (folder / ".metadata").exists():
        raise _unfinished_error(".metadata", folder, requested)
    if (folder / "common.pt").exists():
        raise _unfinished_error("metadata.json", folder, requested)
    return False


def _unfinished_error(missing: str, folder: Path, requested: Path) -> FormatError:
    return FormatError(
        f"an unfinished save: {missing} is missing, which is written last",
        file=folder,
        hint=_complete_hint(folder, requested),
        error_id="unfinished-save",
    )


def _complete_hint(folder: Path, requested: Path) -> str:
    save_folder = folder.parent if folder == requested else requested
    iterations = sorted(save_folder.glob("iter_*"), key=lambda p: (len(p.name), p.name))
    iterations.append(save_folder / RELEASE)
    complete = [p.name for p in iterations if (p / "metadata.json").exists() and p != folder]
    return (
        f"the last complete one is {save_folder / complete[-1]}"
        if complete
        else "there is no complete one"
    )


def _data_files(folder: Path, paths: list[str]) -> list[StoredFile]:
    for path in paths:
        parts = path.split("/")
        absurd = any(p in ("", ".", "..") or len(p.encode(errors="replace")) > 255 for p in parts)
        if absurd or len(parts) > 8 or any(c in path for c in "\0\\"):
            raise FormatError(
                f"item in a file {path!r:.80} that leaves the folder",
                file=folder / ".metadata",
                error_id="unsafe-path",
            )
    missing = [p for p in paths if not (folder / p).exists()]
    if missing:
        some = ", ".join(sorted(missing)[:5]) + (", ..." if len(missing) > 5 else "")
        raise FormatError(
            f"{len(missing)} of {len(paths)} data files are missing: {some}",
            file=folder,
            hint="copy the whole folder",
            error_id="missing-shard",
        )
    for path in paths:
        check_inside(folder, path)
    return [StoredFile.stat(folder, path) for path in paths]


def _find_nemo_auxiliary_files(folder: Path, warnings: list[str]) -> dict[str, Path]:
    """Auxiliary files of NeMo, next to the folder of its data."""
    if folder.name == WEIGHTS:
        return find_megatron_auxiliary_files(folder.parent, warnings)
    config = folder.parent / NEMO_1_CONFIG
    is_nemo_1 = folder.name == NEMO_1_WEIGHTS and is_regular_file(config)
    is_small = is_nemo_1 and can_copy(folder.parent, NEMO_1_CONFIG, warnings)
    return {NEMO_1_CONFIG: config} if is_small else {}


def _nemo_weights(path: Path) -> Path | None:
    """The folder of weights in one that NeMo wrote; None in any other."""
    folders = (path / WEIGHTS, path / NEMO_1_WEIGHTS)
    return next((folder for folder in folders if is_distributed(folder)), None)


def _warn_unlisted_files(folder: Path, paths: list[str]) -> list[str]:
    listed = set(paths)
    extra = sorted(p.name for p in folder.glob("*.distcp") if p.name not in listed)
    if not extra:
        return []
    return [f"{len(extra)} data files that .metadata does not name, such as {extra[0]}"]


def _check_items(catalogue: Catalogue) -> None:
    """Check that no item is smaller than its chunk."""
    s, e = catalogue.shards, catalogue.extents
    itemsize = np.array([t.dtype.itemsize for t in catalogue.tensors], np.int64)
    shape = s.boxes.shape
    # In floating point first: the product of hostile sizes may not fit into 64 bits.
    estimate = np.prod(shape.astype(np.float64), axis=1) * itemsize[s.tensor]
    for row in np.flatnonzero(estimate > e.length)[:1].tolist():
        t = catalogue.tensors[s.tensor[row]]
        raise FormatError(
            f"a chunk of {shape[row, : len(t.shape)].tolist()} {t.dtype} cannot be in an item of "
            f"{int(e.length[row])} bytes",
            file=catalogue.path(int(e.file[row])),
            tensor=t.name,
        )
    for o in catalogue.objects.values():
        number, offset, length = o.extent or (0, 0, 0)
        if offset + length > catalogue.files[number].size:
            raise FormatError(
                f"object {o.name!r} is at {offset}+{length} of a file of "
                f"{catalogue.files[number].size} bytes",
                file=catalogue.path(number),
                error_id="truncated-file",
            )


def _add_metadata(catalogue: Catalogue, metadata: DcpMetadata, megatron: bool) -> None:
    out, folder = catalogue.metadata, catalogue.root
    if metadata.planner_data is not None:
        out["planner_data"] = pickle_reader.to_plain(
            metadata.planner_data, file=folder / ".metadata"
        )
    if "mcore_data" in metadata.extra:
        out["mcore_data"] = pickle_reader.to_plain(
            metadata.extra["mcore_data"], file=folder / ".metadata"
        )
    if megatron and (common := _read_common_state(catalogue)) is not None:
        out["common"] = common
        selected = {k: common.get(k) for k in _METADATA_KEYS if k in common}
        out.update(pickle_reader.to_plain(selected, file=folder / "common.pt"))
    elif parts := _read_flattened_state(catalogue):
        out["common"] = parts
        selected = {k: parts.get(k) for k in _METADATA_KEYS if k in parts}
        out.update(pickle_reader.to_plain(selected, file=folder / ".metadata"))
    if folder.name == RELEASE:
        out.pop("iteration", None)  # a release has iteration 0, which means none
    elif folder.name in (WEIGHTS, NEMO_1_WEIGHTS) and isinstance(
        step := out.get("global_step"), int
    ):
        out["iteration"] = step
        out["common"] = {"checkpoint_version": 3.0, "iteration": step, **out["common"]}
    elif "iteration" not in out and folder.name.removeprefix("iter_").isdigit():
        out["iteration"] = int(folder.name.removeprefix("iter_"))


_METADATA_KEYS = ("args", "iteration", "checkpoint_version", "content_metadata", "global_step")
_FLATTENED = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far")
_SCHEDULER = "opt_param_scheduler"


def _read_flattened_state(catalogue: Catalogue) -> dict[str, Any]:
    """The common state of Megatron's `fsdp_dtensor` and `torch_dcp`: one object per leaf of the
    state dict. Empty if there are no args."""
    out: dict[str, Any] = {}
    if "args" not in catalogue.objects:
        return out
    for name, stored in catalogue.objects.items():
        top, _, leaf = name.partition(".")
        if stored.extent is None or (name not in _FLATTENED and (top != _SCHEDULER or not leaf)):
            continue
        number, offset, length = stored.extent
        value = _load_object(catalogue.path(number), offset, length)
        if leaf:
            out.setdefault(top, {})[leaf] = value
        else:
            out[name] = value
    return out


_DAMAGED = "the file is damaged or of another kind; --iteration N chooses another iteration"


def _read_common_state(catalogue: Catalogue) -> dict[Any, Any] | None:
    """The common state: `common.pt`, or the object that newer cores write instead."""
    path = catalogue.root / "common.pt"
    if path.exists():
        check_inside(catalogue.root, path.name)
        catalogue.files.append(StoredFile.stat(catalogue.root, path.name))
        tree = _load_object(path, 0, catalogue.files[-1].size)
        catalogue.objects.pop(COMMON_OBJECT, None)
    elif stored := catalogue.objects.pop(COMMON_OBJECT, None):
        number, offset, length = stored.extent or (0, 0, 0)
        path = catalogue.path(number)
        tree = _load_object(path, offset, length)
        tree = tree[0] if isinstance(tree, list) and len(tree) == 1 else tree
    else:
        catalogue.warnings.append("no common state: neither common.pt nor an object for it")
        return None
    if not isinstance(tree, dict):
        raise FormatError(
            f"the common state is {short_repr(tree)}, not a dict", file=path, hint=_DAMAGED
        )
    return tree


def _load_object(path: Path, offset: int, length: int) -> Any:
    if length > _MAX_SMALL_BYTES:
        raise FormatError(
            f"the common state has {length:,} bytes, which is too much", file=path, hint=_DAMAGED
        )
    try:
        with opened(path) as fd:
            return zip_reader.load_object(fd, offset, length, file=path)
    except FormatError as e:
        raise FormatError(
            e.message, file=e.file, tensor=e.tensor, hint=e.hint or _DAMAGED, error_id=e.error_id
        ) from e


class _Locator:
    """Locates raw bytes inside items, in batches, from any thread."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._views: zip_tensor.StorageViews = {}
        count = len(catalogue.shards)
        self._offset = np.full(count, -1, np.int64)
        self._strides: dict[int, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def locate(self, shards: NDArray[np.int64]) -> ShardOffsets:
        """Absolute offsets of the given shards' bytes; each item is opened once.

        Raises:
            FormatError: an item is damaged, or does not match `.metadata`.
        """
        offsets = self._offset[shards]
        todo = shards[offsets < 0]
        if len(todo):
            extents = self._catalogue.extents
            order = np.lexsort((extents.offset[todo], extents.file[todo]))
            todo = todo[order]
            file = extents.file[todo]
            for first in range(0, len(todo), _BATCH_ITEMS):
                self._prefetch(todo[first : first + _BATCH_ITEMS])
                batch = file[first : first + _BATCH_ITEMS]
                for run in np.split(
                    todo[first : first + _BATCH_ITEMS], np.flatnonzero(np.diff(batch)) + 1
                ):
                    self._look_into(run)
            offsets = self._offset[shards]
        strides = {}
        if self._strides:
            strides = {
                k: s
                for k, row in enumerate(shards.tolist())
                if (s := self._strides.get(row)) is not None
            }
        return ShardOffsets(offset=offsets, strides=strides)

    def _prefetch(self, rows: NDArray[np.int64]) -> None:
        """Request the headers of items in a store, many at a time."""
        catalogue, extents = self._catalogue, self._catalogue.extents
        if not is_remote(catalogue.root):
            return
        ranges_by_file: dict[int, list[tuple[int, int]]] = {}
        table = (extents.file[rows], extents.offset[rows], extents.length[rows])
        for file, begin, length in zip(*(c.tolist() for c in table), strict=True):
            ranges = ranges_by_file.setdefault(file, [])
            for a, b in zip_reader.header_ranges(begin, length):
                if ranges and a <= ranges[-1][1]:
                    ranges[-1] = ranges[-1][0], max(b, ranges[-1][1])
                else:
                    ranges.append((a, b))
        Files().prefetch([(catalogue.path(n), ranges) for n, ranges in ranges_by_file.items()])

    def _look_into(self, rows: NDArray[np.int64]) -> None:
        """Locate the items of one file."""
        catalogue = self._catalogue
        s, e = catalogue.shards, catalogue.extents
        path = catalogue.path(int(e.file[rows[0]]))
        sizes = s.boxes.shape[rows].tolist()
        with opened(path) as fd:
            for row, size in zip(rows.tolist(), sizes, strict=True):
                tensor = catalogue.tensors[s.tensor[row]]
                location = zip_tensor.locate_tensor_item(
                    fd,
                    int(e.offset[row]),
                    int(e.length[row]),
                    file=path,
                    tensor=tensor.name,
                    views=self._views,
                )
                shape = tuple(size[: len(tensor.shape)])
                if location.dtype is not tensor.dtype or location.shape != shape:
                    raise FormatError(
                        f"an item holds {list(location.shape)} {location.dtype}, .metadata "
                        f"declares {list(shape)} {tensor.dtype}",
                        file=path,
                        tensor=tensor.name,
                        hint="the file is stale, or belongs to another checkpoint",
                    )
                if location.strides is not None:
                    with self._lock:
                        self._strides[row] = location.strides
                self._offset[row] = location.offset
