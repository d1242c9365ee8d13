"""Hugging Face folders (`hf`) and bare `.safetensors` files (`safetensors`).

A folder has safetensors, or the `pytorch_model.bin` of earlier releases (`torch_weights`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.digests.embedded import METADATA_KEY, check_reserved, reserve_digests
from megtool.errors import DestinationError, FormatError, UsageError, listed
from megtool.formats.auxiliary_files import find_auxiliary_files
from megtool.formats.header_reader import (
    DAMAGED,
    NUMBERED,
    check_inside,
    check_numbered,
    check_plain_name,
    list_names,
    parse_json,
    read_exact,
    read_start,
    short_repr,
)
from megtool.formats.safetensors.header import (
    ALIGNMENT,
    MAX_HEADER_BYTES,
    MAX_NDIM,
    SafetensorsEntry,
    SafetensorsHeader,
    encode_header,
    read_header,
)
from megtool.formats.safetensors.mistral_params import PARAMS, config_from_params
from megtool.formats.safetensors.quantization_config import (
    METHOD_FILES,
    QUANT_FILE,
    quantization_config,
)
from megtool.formats.safetensors.saved_parts import PARTS_KEY, read_saved_parts
from megtool.formats.safetensors.torch_weights import (
    TORCH_INDEX,
    find_torch_weights,
    is_torch_weights,
)
from megtool.formats.state_dict_file import make_catalogue, read_state_dict_file
from megtool.process.threads import map_in_threads
from megtool.storage.files import Files
from megtool.storage.location.path import choose_by_latency
from megtool.tensors.box import Boxes
from megtool.tensors.catalogue import Catalogue, Destination, Extents, StoredFile
from megtool.tensors.sharded import GlobalTensor, Shards, padded_shapes, widest

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MARK = ".safetensors"
DEFAULT_SHARD_BYTES = 5_000_000_000

_THREADS = 32
"""Headers that are read at a time from a store."""


def detect(path: Path) -> bool:
    """Detect a safetensors file, an index, or a folder with a config.json or weights."""
    if path.is_dir():
        names = list_names(path)
        return any(n == "config.json" or _MARK in n or is_torch_weights(n) for n in names)
    if not path.is_file() or path.name.endswith((_MARK, f"{_MARK}.index.json", TORCH_INDEX)):
        return path.is_file()
    head = read_start(path, 9)
    return head[8:] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES


def open_checkpoint(path: Path, *, iteration: int | str | None = None) -> Catalogue:
    """The catalogue of a folder, of one file, or of the files an index names; headers only.

    If the config names a quantization, the catalogue has the weights it represents
    (`quantized.combine_packed_weights`); a single file has its tensors as stored.

    Raises:
        FormatError: there are no safetensors, or a header, an index or a name is invalid.
        UsageError: an iteration is requested, or it is a legacy TensorRT-LLM checkpoint.
    """
    if iteration is not None:
        raise UsageError(
            f"safetensors have no iterations, so there is no iteration {iteration}",
            file=path,
            hint="leave out --iteration",
        )
    if path.name.endswith((f"{_MARK}.index.json", TORCH_INDEX)):
        return _as_represented(_open_folder(path.parent, index=path))
    return _as_represented(_open_folder(path)) if path.is_dir() else _open_file(path)


def _as_represented(catalogue: Catalogue) -> Catalogue:
    """The catalogue with the weights that a quantization in the config represents."""
    if quantization_config(catalogue.metadata) is None:
        return catalogue
    from megtool.formats.safetensors.quantized import combine_packed_weights

    return combine_packed_weights(catalogue)


def open_as_stored(path: Path) -> Catalogue:
    """The catalogue of a folder (or of the files an index names) as stored: codes and scales of
    quantized weights are separate tensors.

    Raises:
        FormatError: see `open_checkpoint`.
    """
    if path.is_dir():
        return _open_folder(path)
    if path.name.endswith((f"{_MARK}.index.json", TORCH_INDEX)):
        return _open_folder(path.parent, index=path)
    return _open_file(path)


OPTIMIZER = "optimizer.safetensors"
"""Optimizer state of a Hugging Face folder: tensors `optimizer.state.STATE.NAME`."""


def _open_file(path: Path) -> Catalogue:
    file = StoredFile.stat(path, "")
    header = read_header(path, file.size)
    return _catalogue("safetensors", path, [file], [header], {"header": header.metadata}, {}, [])


def _open_folder(folder: Path, index: Path | None = None) -> Catalogue:
    present = list_names(folder, _MARK)
    refuse_trtllm_legacy(folder, present)
    if index.name.endswith(TORCH_INDEX) if index else not _has_weights(present):
        return _open_torch_weights(folder, index)
    index = index or _find_index(folder, present)
    weight_map, metadata = _read_index(index) if index else (None, {})
    warnings: list[str] = []
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
    else:
        names = _find_shards(folder, present)
    if OPTIMIZER in present and OPTIMIZER not in names:
        names = [*names, OPTIMIZER]
    if torch_names := [n for n in list_names(folder, ".bin") if is_torch_weights(n)]:
        warnings.append(
            f"{listed(torch_names)}: not read: safetensors come first, as in from_pretrained"
        )
    for name in [n for n in present if n not in names]:
        warnings.append(f"{name} is skipped: {index.name if index else SINGLE} does not name it")
    for name in names:
        check_inside(folder, name)
    files = [StoredFile.stat(folder, name) for name in names]
    headers = map_in_threads(
        lambda file: read_header(folder / file.path, file.size),
        files,
        threads=choose_by_latency(folder, 1, _THREADS),
    )
    if weight_map is not None and index is not None:
        indexed = [n for n in names if n in set(weight_map.values())]
        tensor_names = [{e.name for e in h.entries} for h in headers[: len(indexed)]]
        _check_index(index, weight_map, indexed, tensor_names)
    metadata |= _read_settings(folder)
    metadata["header"] = headers[0].metadata
    attachments = find_auxiliary_files(folder, warnings)
    if "config" in metadata and "config.json" not in attachments:
        attachments.pop(PARAMS, None)  # which says it for Mistral's names of tensors
    out = _catalogue("hf", folder, files, headers, metadata, attachments, warnings)
    total = metadata.get("index", {}).get("total_size")
    if total is not None and total != out.num_bytes:
        warnings.append(
            f"the index declares {total} bytes of tensors, the files hold {out.num_bytes}"
        )
    return out


def _has_weights(present: Sequence[str]) -> bool:
    return any(name != OPTIMIZER for name in present)


def _open_torch_weights(folder: Path, index: Path | None) -> Catalogue:
    """The catalogue of a folder with `pytorch_model.bin`."""
    weights = find_torch_weights(folder, index)
    if weights is None:
        raise _no_weights(folder)
    weight_map, metadata = _read_index(weights.index) if weights.index else (None, {})
    names = weights.names if weight_map is None else sorted(set(weight_map.values()))
    for name in names:
        check_inside(folder, name)
    parts = map_in_threads(
        lambda name: read_state_dict_file(folder, name),
        names,
        threads=choose_by_latency(folder, 1, _THREADS),
    )
    if weight_map is not None and weights.index is not None:
        tensor_names = [p.tensors.keys() | p.copies.keys() for p in parts]
        _check_index(weights.index, weight_map, names, tensor_names)
    warnings = [
        f"{name} is skipped: {weights.index.name if weights.index else names[0]} does not name it"
        for name in weights.all_names
        if name not in names
    ]
    attachments = find_auxiliary_files(folder, warnings)
    metadata |= {**_read_settings(folder), "header": {}}
    return make_catalogue(
        "hf",
        folder,
        parts,
        metadata=metadata,
        auxiliary_files=attachments,
        warnings=warnings,
    )


def _read_settings(folder: Path) -> dict[str, Any]:
    """The settings beside the weights, by their key in a catalogue's metadata."""
    metadata: dict[str, Any] = {}
    if (folder / "config.json").exists():
        check_inside(folder, "config.json")
        metadata["config"] = _read_json(folder / "config.json")
    elif (folder / PARAMS).exists():
        check_inside(folder, PARAMS)
        config = config_from_params(_read_json(folder / PARAMS), folder / PARAMS)
        if config is not None:
            metadata["config"] = config
    if (folder / QUANT_FILE).exists():
        check_inside(folder, QUANT_FILE)
        metadata["hf_quant_config"] = _read_json(folder / QUANT_FILE)
    for name, method in METHOD_FILES.items():
        if (folder / name).exists():
            check_inside(folder, name)
            metadata["method_config"] = {"quant_method": method, **_read_json(folder / name)}
    return metadata


def _catalogue(
    name: str,
    root: Path,
    files: list[StoredFile],
    headers: list[SafetensorsHeader],
    metadata: dict[str, Any],
    attachments: dict[str, Path],
    warnings: list[str],
) -> Catalogue:
    parts = read_saved_parts(root, files, headers, has_config="config" in metadata)
    if parts is not None:
        metadata["header"] = {n: v for n, v in metadata["header"].items() if n != PARTS_KEY}
        joined = Catalogue(
            format=name,
            root=root,
            files=files,
            tensors=parts.tensors,
            shards=parts.shards,
            extents=Extents(file=parts.file, offset=parts.offset, length=parts.length),
            auxiliary_files=attachments,
            metadata=metadata,
            warnings=warnings,
        )
        joined.check()
        return joined
    tensors = [
        GlobalTensor(name=e.name, shape=e.shape, dtype=e.dtype) for h in headers for e in h.entries
    ]
    file = np.repeat(np.arange(len(headers), dtype=np.int32), [len(h.entries) for h in headers])
    offset = np.array([h.start + e.begin for h in headers for e in h.entries], np.int64)
    length = np.array([e.end - e.begin for h in headers for e in h.entries], np.int64)
    out = Catalogue(
        format=name,
        root=root,
        files=files,
        tensors=tensors,
        shards=whole_shards(tensors, file),
        extents=Extents(file=file, offset=offset, length=length),
        auxiliary_files=attachments,
        metadata=metadata,
        warnings=warnings,
    )
    if len(out.index) != len(tensors):
        rows: dict[str, int] = {}
        for row, t in enumerate(tensors):
            if t.name in rows:
                raise FormatError(
                    f"is also in {files[file[rows[t.name]]].path!r}",
                    file=out.path(int(file[row])),
                    tensor=t.name,
                    hint=f"two checkpoints share this folder: keep one, or add {INDEX}",
                )
            rows[t.name] = row
    out.check()
    return out


def whole_shards(tensors: Sequence[GlobalTensor], file: NDArray[np.int32]) -> Shards:
    """One shard per tensor, covering it, owned by its file."""
    shapes = padded_shapes(tensors, widest(tensors))
    return Shards(
        np.arange(len(tensors), dtype=np.int32),
        Boxes(np.zeros_like(shapes), shapes),
        np.asarray(file, np.int32),
    )


# -- the index and the folder ----------------------------------------------------------------------


def _find_index(folder: Path, present: list[str]) -> Path | None:
    indexes = [folder / n for n in list_names(folder, f"{_MARK}.index.json")]
    index = folder / INDEX if folder / INDEX in indexes else None
    if index is None:
        if len(indexes) > 1 and SINGLE not in present:
            raise FormatError(
                f"there are {len(indexes)} indexes: {', '.join(p.name for p in indexes)}",
                file=folder,
                hint=f"name the one to open, for example {indexes[0]}",
            )
        return indexes[0] if indexes and SINGLE not in present else None
    if SINGLE in present and SINGLE not in (_read_index(index)[0] or {}).values():
        raise FormatError(
            f"both {SINGLE} and {INDEX} are here, and they do not belong together",
            file=folder,
            hint=f"name the one to open: {folder / SINGLE} or {index}",
        )
    return index


def _read_index(index: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """An index's weight map (tensor to plain file name), and its metadata under `index`."""
    check_inside(index.parent, index.name)
    value = _read_json(index)
    weight_map = value.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(
            f"weight_map {short_repr(weight_map)} names no tensors", file=index, hint=DAMAGED
        )
    plain: set[str] = set()
    for name in weight_map.values():
        if type(name) is not str or name not in plain:
            plain.add(check_plain_name(name, index))
    metadata = value.get("metadata")
    return weight_map, {"index": metadata if isinstance(metadata, dict) else {}}


def _check_index(
    index: Path,
    weight_map: dict[str, str],
    names: list[str],
    tensor_names: Sequence[Collection[str]],
) -> None:
    """Check that an index and the names that files hold agree, in both directions."""
    hint = "shard files are swapped, stale or from another checkpoint"
    names_by_file = {name: set(tensors) for name, tensors in zip(names, tensor_names, strict=True)}
    for tensor, name in weight_map.items():
        if tensor not in names_by_file[name]:
            holders = [n for n, h in names_by_file.items() if tensor in h]
            raise FormatError(
                f"{name!r} does not hold it" + (f", {holders[0]!r} does" if holders else ""),
                file=index,
                tensor=tensor,
                hint=hint,
                error_id="missing-shard",
            )
    for name, tensors in names_by_file.items():
        for tensor in sorted(t for t in tensors if weight_map.get(t) != name):
            raise FormatError(
                f"is in {name!r}, but the index does not say so",
                file=index,
                tensor=tensor,
                hint=hint,
            )


def _find_shards(folder: Path, present: list[str]) -> list[str]:
    if SINGLE in present:
        return [SINGLE]
    if not present:
        raise _no_weights(folder)
    for match in filter(None, map(NUMBERED.fullmatch, present)):
        check_numbered(folder, present, match, index=INDEX)
    return present


def _no_weights(folder: Path) -> FormatError:
    other_files = list_names(folder, ".bin", ".pt", ".pth", ".ckpt") + list_names(folder, ".gguf")
    hint = "is the download complete?"
    if other_files:
        hint = f"name the file: {folder / other_files[0]}"
    return FormatError(
        "there is no .safetensors file here"
        + (f", only {other_files[0]!r}" if other_files else ""),
        file=folder,
        hint=hint,
        error_id="not-a-checkpoint",
    )


def _read_json(path: Path) -> dict[str, Any]:
    size = StoredFile.stat(path.parent, path.name).size
    if size > MAX_HEADER_BYTES:
        raise FormatError(f"{size} bytes are too many for a JSON file", file=path, hint=DAMAGED)
    value = parse_json(read_exact(path, 0, size), path)
    if not isinstance(value, dict):
        raise FormatError(f"holds {short_repr(value)}, not a JSON object", file=path, hint=DAMAGED)
    return value


# -- laying out ------------------------------------------------------------------------------------


def plan_safetensors_layout(
    tensors: Sequence[GlobalTensor],
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    small_files: Mapping[str, bytes] | None = None,
    single_file: str | None = None,
    header_metadata: Mapping[str, str] | None = None,
) -> Destination:
    """Plan a folder (`hf`) of shards of at most `max_shard_bytes` of tensors, or one file.

    Tensors keep their order over files. Data starts at a multiple of 4 KiB (the header is padded
    with spaces); in each file, tensors that are whole pages long come first, so each of them
    starts on a page, and the others follow, wide elements first, so each is aligned to its
    element. A tensor larger than `max_shard_bytes` has its own file. `small_files` are further
    files. `header_metadata` is `{"format": "pt"}` unless given; one file also has room for its
    digests.

    Raises:
        FormatError: a dtype that safetensors lacks, packed or repeated tensors, too long a header.
        DestinationError: a small file and a shard share a name.
        UsageError: `max_shard_bytes` is not positive.
    """
    if max_shard_bytes <= 0:
        raise UsageError(f"a shard of {max_shard_bytes} bytes cannot hold a tensor")
    _check_writable(tensors)
    groups = [list(tensors)] if single_file else _group(tensors, max_shard_bytes)
    names = _file_names(len(groups), single_file)
    metadata = {"format": "pt"} if header_metadata is None else dict(header_metadata)
    if single_file:
        metadata[METADATA_KEY] = reserve_digests([t.num_bytes for t in tensors])
    files, fragments, headers = [], [], []
    for row, (name, group) in enumerate(zip(names, groups, strict=True)):
        entries = place_tensors(group)
        head = encode_header(entries, metadata, name)
        if single_file:
            check_reserved(head, name)
        end = entries[-1].end if entries else 0
        files.append(StoredFile(path=name, size=len(head) + end))
        fragments.append((row, 0, head))
        headers.append(SafetensorsHeader(entries, metadata, len(head)))
    out = dict(small_files or {})
    if clash := sorted(set(out) & {*names, INDEX}):
        raise DestinationError(f"{clash[0]!r} is both a shard and an auxiliary file")
    if len(groups) > 1:
        out[INDEX] = _encode_index(names, headers)
    kind = "safetensors" if single_file else "hf"
    catalogue = _catalogue(kind, Path(), files, headers, {"header": metadata}, {}, [])
    return Destination(catalogue=catalogue, fragments=fragments, small_files=out)


def _check_writable(tensors: Sequence[GlobalTensor]) -> None:
    names: set[str] = set()
    for t in tensors:
        if t.name in names or t.name == "__metadata__":
            raise FormatError("two tensors of one name", tensor=t.name)
        names.add(t.name)
        if t.packing or not t.dtype.safetensors:
            raise FormatError(
                f"safetensors cannot hold {t.packing or t.dtype}",
                tensor=t.name,
                hint="choose a dtype for it: --dtype bf16",
            )
        if len(t.shape) > MAX_NDIM:
            raise FormatError(f"{len(t.shape)} dimensions are too many", tensor=t.name)


def _group(tensors: Sequence[GlobalTensor], max_bytes: int) -> list[list[GlobalTensor]]:
    groups: list[list[GlobalTensor]] = [[]]
    used = 0
    for t in tensors:
        if groups[-1] and used + t.num_bytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(t)
        used += t.num_bytes
    return groups


def _file_names(count: int, single_file: str | None) -> list[str]:
    if count == 1:
        return [single_file or SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def place_tensors(group: Sequence[GlobalTensor]) -> list[SafetensorsEntry]:
    """Offsets of the tensors of one file: see `plan_safetensors_layout`."""
    pages = [t for t in group if t.num_bytes % ALIGNMENT == 0]
    ragged = [t for t in group if t.num_bytes % ALIGNMENT]
    offset = 0
    out = []
    for t in [*pages, *sorted(ragged, key=lambda t: -t.dtype.itemsize)]:
        out.append(SafetensorsEntry(t.name, t.dtype, t.shape, offset, offset + t.num_bytes))
        offset += t.num_bytes
    return sorted(out, key=lambda e: (e.begin, e.end))


def _encode_index(names: Sequence[str], headers: Sequence[SafetensorsHeader]) -> bytes:
    weight_map = {e.name: n for n, h in zip(names, headers, strict=True) for e in h.entries}
    total = sum(e.end - e.begin for h in headers for e in h.entries)
    value = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


_TRTLLM_LEGACY_FILE = "rank0.safetensors"


def refuse_trtllm_legacy(folder: Path, present: Collection[str]) -> None:
    """Refuse TensorRT-LLM's own checkpoints (releases up to 1.x); `present` are the folder's files.

    Their ranks use the same tensor names, so they would look like several checkpoints.

    Raises:
        UsageError: the folder is one.
    """
    if _TRTLLM_LEGACY_FILE not in present:
        return
    try:
        config = json.loads(Files().read_whole(folder / "config.json") or b"")
    except (ValueError, RecursionError):
        return
    if not isinstance(config, dict) or not isinstance(config.get("mapping"), dict):
        return
    raise UsageError(
        "this is a legacy TensorRT-LLM checkpoint (one file per rank), which megtool writes but "
        "does not read",
        file=folder,
        hint="trtllm-build reads it; give the folder it was exported from, or one of its files "
        f"({_TRTLLM_LEGACY_FILE})",
    )
