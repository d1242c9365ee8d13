"""Plan files: a plan saved as columns in an .npz without pickles, and loaded to be executed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megtool.checkpoint.catalogue import (
    Catalogue,
    Cells,
    Destination,
    Extents,
    Replica,
    SetAside,
    StoredFile,
    StoredObject,
    StoredPart,
)
from megtool.checkpoint.columns import (
    Columns,
    NotPlainError,
    Stored,
    blobs,
    from_plain,
    names,
    put_blobs,
    put_names,
    put_text,
    text,
    to_plain,
)
from megtool.checkpoint.plan import Dropped, Entry, Op, Pieces, Plan, Steps
from megtool.checkpoint.relocate import Relocator, Reopen
from megtool.dtypes import dtype
from megtool.errors import FormatError, StorageError
from megtool.tensors.box import Boxes
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor, Shards

VERSION = 2

_OPS = tuple(Op)
_DIGEST_BYTES = 64


def save(plan: Plan, path: Path) -> None:
    """Write a plan to `path`, which appears whole or not at all.

    Values of objects and metadata that are not plain data (numbers, text, bytes, and lists and
    dictionaries of them) are left out: no step needs them, since what the target holds of them
    already is among its header bytes.

    Raises:
        StorageError: the file cannot be written.
    """
    columns: dict[str, Any] = {}
    put_text(columns, "meta", json.dumps(_describe(plan, columns)))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(temporary, "wb") as f:
            np.savez(f, **columns)
        with open(temporary, "r+b") as f:
            _seal(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as e:
        raise StorageError(f"cannot write the plan: {e.strerror}", file=path) from e
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


def load(path: Path, *, reopen: Reopen | None = None) -> Plan:
    """The plan that `save` wrote, with the same fingerprint, ready to be executed.

    Where shards lie inside containers, their raw offsets are not part of a plan; `reopen` opens
    such a checkpoint (given its root) at the first need of one.

    Raises:
        FormatError: the file is no plan, of another version, truncated or changed.
        SourceChangedError: later, when a reopened source is no longer the one planned for.
    """
    try:
        with open(path, "rb") as f:
            _check_seal(f, path)
            with np.load(f, allow_pickle=False) as columns:
                meta = json.loads(text(columns, "meta"))
                if meta.get("version") != VERSION:
                    raise FormatError(f"plan of version {meta.get('version')!r}", file=path)
                return _rebuild(meta, columns, reopen)
    except OSError as e:
        raise FormatError(f"cannot read the plan: {e.strerror or e}", file=path) from e
    except (ValueError, KeyError, IndexError, TypeError, EOFError, zipfile.BadZipFile) as e:
        raise FormatError(f"not a plan: {e}", file=path) from e


# A digest of all other bytes is the archive's comment, so that any reader of .npz still reads it.


def _seal(f: io.BufferedRandom) -> None:
    """Make the digest of the file its zip comment."""
    end = f.seek(-2, os.SEEK_END)
    f.write(_DIGEST_BYTES.to_bytes(2, "little"))
    digest = _digest(f, end + 2)
    f.seek(end + 2)
    f.write(digest.encode())


def _check_seal(f: io.BufferedReader, path: Path) -> None:
    size = f.seek(0, os.SEEK_END)
    if size <= _DIGEST_BYTES:
        raise FormatError(f"a plan is longer than {size} bytes", file=path)
    f.seek(-_DIGEST_BYTES, os.SEEK_END)
    sealed = f.read(_DIGEST_BYTES)
    if sealed != _digest(f, size - _DIGEST_BYTES).encode():
        raise FormatError(
            "not a plan, or one that was truncated or changed since it was saved",
            file=path,
            hint="plan again",
        )
    f.seek(0)


def _digest(f: io.BufferedRandom | io.BufferedReader, num_bytes: int) -> str:
    h = hashlib.sha256()
    f.seek(0)
    while num_bytes > 0 and (data := f.read(min(num_bytes, 1 << 20))):
        h.update(data)
        num_bytes -= len(data)
    return h.hexdigest()


# What goes in: small facts as JSON, everything that comes by the thousand as columns.


def _describe(plan: Plan, columns: Columns) -> dict[str, Any]:
    for number, catalogue in enumerate((*plan.sources, plan.target.catalogue)):
        _put_catalogue(columns, f"c{number}", catalogue)
    _put_entries(columns, plan.entries)
    for name, pieces in (("got", plan.source_pieces), ("want", plan.target_pieces)):
        columns |= {f"{name}.entry": pieces.entry, f"{name}.shard": pieces.shard}
        columns |= {f"{name}.lo": pieces.boxes.lo, f"{name}.hi": pieces.boxes.hi}
        columns[f"{name}.first"] = pieces.first
    s = plan.steps
    columns |= {"steps.entry": s.entry, "steps.source": s.source_piece, "steps.first": s.first}
    columns |= {"steps.target": s.target_piece, "steps.lo": s.boxes.lo, "steps.hi": s.boxes.hi}
    target = plan.target
    table = [(number, offset) for number, offset, _ in target.fragments]
    columns["fragments.at"] = np.array(table, np.int64).reshape(-1, 2)
    put_blobs(columns, "fragments", [data for _, _, data in target.fragments])
    put_blobs(columns, "small", [data for _, data in target.all_small()])
    return {
        "version": VERSION,
        "fingerprint": plan.fingerprint,
        "num_sources": len(plan.sources),
        "small": list(target.small),
        "last": list(target.last),
        "dropped": [(d.name, d.reason, d.num_bytes, d.is_lost) for d in plan.dropped],
    }


def _rebuild(meta: dict[str, Any], columns: Stored, reopen: Reopen | None) -> Plan:
    catalogues = [
        _catalogue(columns, f"c{number}", reopen) for number in range(meta["num_sources"] + 1)
    ]
    at = columns["fragments.at"].tolist()
    fragments = [(k, o, d) for (k, o), d in zip(at, blobs(columns, "fragments"), strict=True)]
    small = dict(zip([*meta["small"], *meta["last"]], blobs(columns, "small"), strict=True))
    return Plan(
        sources=tuple(catalogues[:-1]),
        target=Destination(
            catalogue=catalogues[-1],
            fragments=fragments,
            small={name: small[name] for name in meta["small"]},
            last={name: small[name] for name in meta["last"]},
        ),
        entries=_entries(columns, catalogues),
        source_pieces=_pieces(columns, "got"),
        target_pieces=_pieces(columns, "want"),
        steps=Steps(
            columns["steps.entry"],
            columns["steps.source"],
            columns["steps.target"],
            Boxes(columns["steps.lo"], columns["steps.hi"]),
            columns["steps.first"],
        ),
        dropped=[
            Dropped(name=n, reason=r, num_bytes=b, is_lost=x) for n, r, b, x in meta["dropped"]
        ],
        fingerprint=meta["fingerprint"],
    )


def _pieces(columns: Stored, name: str) -> Pieces:
    return Pieces(
        columns[f"{name}.entry"],
        columns[f"{name}.shard"],
        Boxes(columns[f"{name}.lo"], columns[f"{name}.hi"]),
        columns[f"{name}.first"],
    )


def _put_entries(columns: Columns, entries: Sequence[Entry]) -> None:
    """Entries in columns; views, of which there are few, are numbered."""
    views: dict[object, int] = {}
    rows, bases = [], []
    for e in entries:
        a, b = e.source, e.target
        seen = [
            -1 if p is None else views.setdefault((p.shape, p.dims, p.mults), len(views))
            for p in (a, b)
        ]
        shape = views.setdefault((e.shape, (), ()), len(views))
        rows.append(
            (
                *(_OPS.index(e.op), e.source_index, e.source_tensor, e.target_tensor),
                *(*seen, shape, e.adds_to),
            )
        )
        bases += [a.base if a else (), b.base]
    columns["entries"] = np.array(rows, np.int64).reshape(-1, 8)
    columns["entries.share"] = np.array([e.share for e in entries], np.float64)
    columns["entries.fill"] = np.array([e.fill for e in entries], np.float64)
    columns["entries.base"] = np.array([x for base in bases for x in base], np.int64)
    columns["entries.base_width"] = np.array([len(base) for base in bases], np.int64)
    held = [
        (p.canonical, p.stored) if p else ("", "") for e in entries for p in (e.source, e.target)
    ]
    put_names(columns, "entries.canonical", [e.canonical for e in entries])
    put_names(columns, "entries.held", [name for pair in held for name in pair])
    put_text(columns, "views", json.dumps(list(views)))


def _entries(columns: Stored, catalogues: Sequence[Catalogue]) -> list[Entry]:
    views = [tuple(map(tuple, view)) for view in json.loads(text(columns, "views"))]
    ends = np.cumsum(columns["entries.base_width"]).tolist()
    flat = columns["entries.base"].tolist()
    bases = [tuple(flat[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=False)]
    canonical, held = names(columns, "entries.canonical"), names(columns, "entries.held")
    fill, share = columns["entries.fill"].tolist(), columns["entries.share"].tolist()
    out = []
    for k, (op, index, tensor, to, a, b, shape, adds_to) in enumerate(columns["entries"].tolist()):
        sides = [
            None
            if view < 0
            else Placement(
                canonical=held[4 * k + 2 * side],
                stored=held[4 * k + 2 * side + 1],
                shape=views[view][0],
                dims=views[view][1],
                mults=views[view][2],
                base=bases[2 * k + side],
            )
            for side, view in enumerate((a, b))
        ]
        if sides[1] is None or not -1 <= index < len(catalogues) - 1 or not -1 <= adds_to < k:
            raise ValueError(f"entry {canonical[k]!r} makes no sense")
        out.append(
            Entry(
                canonical=canonical[k],
                op=_OPS[op],
                shape=views[shape][0],
                source_index=index,
                source_tensor=tensor,
                target_tensor=to,
                source=sides[0],
                target=sides[1],
                fill=fill[k],
                share=share[k],
                adds_to=adds_to,
            )
        )
    return out


def _put_catalogue(columns: Columns, key: str, c: Catalogue) -> None:
    s, e = c.shards, c.extents
    columns |= {f"{key}.tensor": s.tensor, f"{key}.lo": s.boxes.lo, f"{key}.hi": s.boxes.hi}
    columns |= {f"{key}.owner": s.owner, f"{key}.file": e.file}
    columns |= {f"{key}.offset": e.offset, f"{key}.length": e.length}
    if c.cells is not None:
        columns[f"{key}.cell"] = c.cells.held
    facts = {
        "format": c.format,
        "root": str(c.root),
        "contained": e.contained,
        "files": [(f.path, f.size, f.mtime_ns, f.inode) for f in c.files],
        "tensors": [(t.name, t.shape, t.dtype.name, t.packing) for t in c.tensors],
        "objects": [
            (o.name, o.kind, o.extent, *(_plain(o.value) or [None])) for o in c.objects.values()
        ],
        "object_keys": list(c.objects),
        "attachments": {name: str(p) for name, p in c.attachments.items()},
        "metadata": [(k, *plain) for k, v in c.metadata.items() if (plain := _plain(v))],
        "replicas": [(r.shard, r.file, r.offset, r.length) for r in c.replicas],
        "warnings": c.warnings,
        "packed": {n: [p.facts() for p in parts] for n, parts in c.packed.items()},
        "set_aside": [(s.name, s.reason, s.num_bytes) for s in c.set_aside],
    }
    put_text(columns, f"{key}.facts", json.dumps(facts))


def _catalogue(columns: Stored, key: str, reopen: Reopen | None) -> Catalogue:
    facts = json.loads(text(columns, f"{key}.facts"))
    objects = [
        StoredObject(name=n, kind=k, extent=tuple(at) if at else None, value=from_plain(value))
        for n, k, at, value in facts["objects"]
    ]
    catalogue = Catalogue(
        format=facts["format"],
        root=Path(facts["root"]),
        files=[StoredFile(path=p, size=n, mtime_ns=t, inode=i) for p, n, t, i in facts["files"]],
        tensors=[
            GlobalTensor(name=n, shape=tuple(shape), dtype=dtype(d), packing=packing)
            for n, shape, d, packing in facts["tensors"]
        ],
        shards=Shards(
            columns[f"{key}.tensor"],
            Boxes(columns[f"{key}.lo"], columns[f"{key}.hi"]),
            columns[f"{key}.owner"],
        ),
        extents=Extents(
            file=columns[f"{key}.file"],
            offset=columns[f"{key}.offset"],
            length=columns[f"{key}.length"],
            contained=facts["contained"],
        ),
        objects=dict(zip(facts["object_keys"], objects, strict=True)),
        attachments={name: Path(p) for name, p in facts["attachments"].items()},
        metadata={k: from_plain(v) for k, v in facts["metadata"]},
        replicas=[Replica(shard=s, file=f, offset=o, length=n) for s, f, o, n in facts["replicas"]],
        warnings=facts["warnings"],
        packed={n: tuple(map(StoredPart.of, parts)) for n, parts in facts["packed"].items()},
        set_aside=[SetAside(name=n, reason=r, num_bytes=b) for n, r, b in facts["set_aside"]],
    )
    if catalogue.extents.contained and reopen is not None:
        relocator = Relocator(catalogue, reopen)
        catalogue.locate_contained = relocator
        if f"{key}.cell" in columns:
            catalogue.cells = Cells(columns[f"{key}.cell"], relocator.read)
    return catalogue


def _plain(value: Any) -> list[Any]:
    """The value as JSON can hold it, or nothing."""
    try:
        return [to_plain(value)]
    except NotPlainError:
        return []
