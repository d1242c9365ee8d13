"""The contents of a checkpoint and their byte positions, without reading tensor data.

Every format opens to a `Catalogue`. A checkpoint to be written is a `Destination`: the catalogue
that opening it afterwards gives, and the header bytes to write around the data. Planning and
copying do not know about formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megtool.errors import CoverageError, FormatError, SourceChangedError
from megtool.number_formats.packed_parts import PackedPart
from megtool.storage.files import Files
from megtool.storage.objects.index import inode_of
from megtool.tensors.box import Boxes, Ints, cover_fault, outside
from megtool.tensors.sharded import GlobalTensor, Shards, padded_shapes

MAX_DIMS = 16
"""Limit on tensor dimensions: the time and memory of the checks double with each."""

MAX_NAME_CHARACTERS = 1024
"""Limit on the name of a tensor: reports, and indices of layers in it, stay readable."""

IN_MEMORY = "memory"
"""The format of a target in the memory of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a checkpoint. `path` is relative to the root; times and inode detect changes."""

    path: str
    size: int
    mtime_ns: int = 0
    inode: int = 0

    @classmethod
    def stat(cls, root: Path, path: str) -> StoredFile:
        """Read the current size, time and inode of a file.

        Raises:
            FormatError: the file is missing or not a regular file.
        """
        full = root / path if path else root
        try:
            st = full.stat()
        except OSError as e:
            raise FormatError(
                f"cannot open {path!r}: {e.strerror}",
                file=full,
                hint="is the checkpoint complete?",
            ) from e
        if not full.is_file():
            raise FormatError("it is not a regular file", file=full)
        return cls(path=path, size=st.st_size, mtime_ns=st.st_mtime_ns, inode=st.st_ino)

    @property
    def has_version(self) -> bool:
        """Whether a change would be noticed; some web servers tell neither a version nor a time."""
        return bool(self.mtime_ns) or self.inode != inode_of("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extents:
    """The bytes of each shard, one row per row of `Shards`.

    `offset` and `length` delimit the raw row-major bytes. If `contained` is true, they delimit the
    item that contains them (a zip written by torch.save), and `Catalogue.locate` finds the raw
    offset at first use.
    """

    file: NDArray[np.int32]
    offset: Ints
    length: Ints
    contained: bool = False

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOffsets:
    """Absolute file offsets of the raw bytes of some shards, and strides if not row-major.

    `strides` maps a position in the request to the shard's element strides, for shards that were
    saved as a transposed or otherwise permuted view.
    """

    offset: Ints
    strides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


LocateShards = Callable[[NDArray[np.int64]], ShardOffsets]


@dataclass(frozen=True, slots=True)
class EncodedChunks:
    """Shards that a library has to decode whole, into memory.

    `mask` (bool, one per row of `Shards`) selects them. `read` returns the raw row-major bytes of
    one, and `Catalogue.locate` gives the offset in them; any thread may call it. Their extents only
    name the file, to detect changes, and approximate the bytes read.
    """

    mask: NDArray[np.bool_]
    read: Callable[[int], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """A small value that is not a tensor: where its bytes are, or the decoded value.

    `extent` is `(file index, offset, length)`; `value` holds inert decoded data (see
    `containers.pickle_reader`), or raw bytes.
    """

    name: str
    kind: str
    extent: tuple[int, int, int] | None = None
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A second copy of a shard. It is only compared with the first."""

    shard: int
    file: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """One array of a packed tensor (see `number_formats.packed_parts`), row-major at `offset`."""

    part: PackedPart
    file: int
    offset: int

    def to_plain(self) -> list[Any]:
        """The fields as plain values, for the fingerprint of a plan."""
        p = self.part
        return [p.role, p.dtype, p.shape, [(s.dim, s.per) for s in p.spans], self.file, self.offset]


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredTensor:
    """A stored tensor that decoded tensors do not need, and the reason."""

    name: str
    reason: str
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class Catalogue:
    """Everything a checkpoint declares about itself.

    `format` is a name of `checkpoint.formats`. `auxiliary_files` are small files stored with the
    tensors (tokenizer, config) by relative path. `metadata` is specific to the format, such as
    `config` (the Hugging Face config), `args` (Megatron's) or `iteration`. `packed` holds the parts
    of tensors stored in several arrays, codes first; such a tensor is one shard, whose extent is
    that of its codes. `ignored` are stored tensors that are not among `tensors`.
    `computed_identity` returns what the contents depend on besides these files.
    """

    format: str
    root: Path
    files: list[StoredFile]
    tensors: list[GlobalTensor]
    shards: Shards
    extents: Extents
    objects: dict[str, StoredObject] = field(default_factory=dict)
    auxiliary_files: dict[str, Path] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    replicas: list[Replica] = field(default_factory=list)
    packed: dict[str, tuple[StoredPart, ...]] = field(default_factory=dict)
    ignored: list[IgnoredTensor] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    locate_contained: LocateShards | None = None
    encoded_chunks: EncodedChunks | None = None
    computed_identity: Callable[[], bytes] | None = None
    _index: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def index(self) -> dict[str, int]:
        """Position of every tensor in `tensors`, by name."""
        if len(self._index) != len(self.tensors):
            self._index = {t.name: i for i, t in enumerate(self.tensors)}
        return self._index

    def __contains__(self, name: object) -> bool:
        return name in self.index

    def __getitem__(self, name: str) -> GlobalTensor:
        return self.tensors[self.index[name]]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, decoded."""
        return sum(t.num_bytes for t in self.tensors)

    def path(self, file: int) -> Path:
        """The full path of file number `file`."""
        name = self.files[file].path
        return self.root / name if name else self.root

    def encoded_chunk_path(self, shard: int) -> Path:
        """A path that stands for an encoded chunk; no file has this name."""
        return self.root / f"{self.files[int(self.extents.file[shard])].path}#{shard}"

    def locate(self, shards: NDArray[np.int64]) -> ShardOffsets:
        """Absolute offsets of the raw bytes of the given shards."""
        if self.extents.contained:
            if self.locate_contained is None:
                raise ValueError(f"format {self.format!r} gave no way to locate contained shards")
            return self.locate_contained(shards)
        return ShardOffsets(offset=self.extents.offset[shards])

    def select(self, keep: Callable[[str], bool]) -> Catalogue:
        """The catalogue of the tensors whose name `keep` accepts, over the same files."""
        chosen = np.array([keep(t.name) for t in self.tensors], bool)
        rows = np.flatnonzero(chosen[self.shards.tensor]) if len(self.shards) else np.zeros(0, int)
        number = np.cumsum(chosen) - 1
        return self._at(
            rows,
            number[self.shards.tensor[rows]],
            files=self.files,
            tensors=[t for t, c in zip(self.tensors, chosen, strict=True) if c],
            objects=self.objects,
            auxiliary_files=self.auxiliary_files,
            metadata=self.metadata,
            replicas=[
                replace(r, shard=int(np.searchsorted(rows, r.shard)))
                for r in self.replicas
                if chosen[self.shards.tensor[r.shard]]
            ],
            packed={name: parts for name, parts in self.packed.items() if keep(name)},
            ignored=[s for s in self.ignored if keep(s.name)],
            warnings=self.warnings,
        )

    def pick(self, names: Iterable[str]) -> Catalogue:
        """The catalogue of a few tensors, to read them: without objects, replicas or small files.

        It takes time for these tensors alone, where `select` looks at every name.
        """
        numbers = sorted({self.index[name] for name in names})
        slices = [self.shards.of(n) for n in numbers]
        rows = np.concatenate(
            [np.zeros(0, np.int64), *(np.arange(s.start, s.stop) for s in slices)]
        )
        counts = [s.stop - s.start for s in slices]
        tensors = [self.tensors[n] for n in numbers]
        parts = {t.name: self.packed[t.name] for t in tensors if t.name in self.packed}
        file = self.extents.file[rows]
        used = sorted({*file.tolist(), *(p.file for ps in parts.values() for p in ps)})
        picked = self._at(
            rows,
            np.repeat(np.arange(len(numbers)), counts),
            files=[self.files[n] for n in used],
            tensors=tensors,
            packed={
                name: tuple(replace(p, file=used.index(p.file)) for p in ps)
                for name, ps in parts.items()
            },
        )
        extents = replace(picked.extents, file=np.searchsorted(used, file).astype(np.int32))
        return replace(picked, extents=extents)

    def _at(self, rows: Ints, tensor: Ints, **others: Any) -> Catalogue:
        """The catalogue of some shards; `tensor` numbers the tensor of each."""
        e, locate, chunks = self.extents, self.locate_contained, self.encoded_chunks
        return Catalogue(
            format=self.format,
            root=self.root,
            shards=Shards(
                tensor.astype(np.int32), self.shards.boxes[rows], self.shards.owner[rows]
            ),
            extents=Extents(
                file=e.file[rows],
                offset=e.offset[rows],
                length=e.length[rows],
                contained=e.contained,
            ),
            locate_contained=(lambda ids: locate(rows[ids])) if locate else None,
            encoded_chunks=EncodedChunks(chunks.mask[rows], lambda i: chunks.read(int(rows[i])))
            if chunks
            else None,
            computed_identity=self.computed_identity,
            **others,
        )

    def check(self) -> None:
        """Prove that shards tile their tensors and that extents are inside their files.

        Raises:
            CoverageError: a hole, an overlap, or a shard outside its tensor.
            FormatError: a duplicate name, an impossible shape, an extent outside its file, shorter
                than its shard, or shared by two shards.
        """
        self._check_tensors()
        s, e = self.shards, self.extents
        shapes = padded_shapes(self.tensors, s.boxes.ndim)
        for row in outside(s.boxes, shapes[s.tensor])[:1].tolist():
            raise CoverageError(
                f"a shard {_format_box(s.boxes, row)} is outside its tensor of shape "
                f"{list(self.tensors[s.tensor[row]].shape)}",
                file=self.path(int(e.file[row])),
                tensor=self.tensors[s.tensor[row]].name,
            )
        self._check_extents()
        is_split = self._is_split(shapes)
        number = np.cumsum(is_split) - 1
        rows = np.flatnonzero(is_split[s.tensor])
        if fault := cover_fault(s.boxes[rows], shapes[is_split], number[s.tensor[rows]]):
            tensor = self.tensors[int(np.flatnonzero(is_split)[fault.group])]
            index = list(fault.index[: len(tensor.shape)])
            raise CoverageError(
                f"element {index} is stored {fault.times} times ({fault.kind})"
                if fault.times
                else f"no shard holds element {index} ({fault.kind})",
                file=self.root,
                tensor=tensor.name,
                hint="a shard file is missing, stale or from another checkpoint",
            )

    def _is_split(self, shapes: Ints) -> NDArray[np.bool_]:
        """Tensors that are not one shard covering the whole tensor; only these need the proof."""
        s = self.shards
        is_full: NDArray[np.bool_] = ((s.boxes.lo == 0) & (s.boxes.hi == shapes[s.tensor])).all(
            axis=1
        )
        single: NDArray[np.bool_] = np.bincount(s.tensor, minlength=len(self.tensors)) == 1
        single[s.tensor[~is_full]] = False
        return ~single

    def _check_tensors(self) -> None:
        names = set[str]()
        for t in self.tensors:
            if t.name in names:
                raise FormatError("two tensors have this name", file=self.root, tensor=t.name)
            names.add(t.name)
            if len(t.name) > MAX_NAME_CHARACTERS:
                raise FormatError(
                    f"the name {t.name[:40]!r}... has {len(t.name):,} characters, "
                    f"{MAX_NAME_CHARACTERS:,} at most",
                    file=self.root,
                )
            if min(t.shape, default=0) < 0 or t.num_bytes >= 1 << 63 or len(t.shape) > MAX_DIMS:
                raise FormatError(
                    f"no checkpoint can hold a tensor of shape {list(t.shape)}",
                    file=self.root,
                    tensor=t.name,
                )

    def _check_extents(self) -> None:
        s, e = self.shards, self.extents
        if not len(e):
            return
        sizes = np.array([f.size for f in self.files], np.int64)
        is_encoded = (
            np.zeros(len(e), bool) if self.encoded_chunks is None else self.encoded_chunks.mask
        )
        bad = (e.offset < 0) | (e.length < 0) | (e.offset > sizes[e.file] - e.length)
        bad &= ~is_encoded
        for row in np.flatnonzero(bad)[:1].tolist():
            raise FormatError(
                f"bytes {int(e.offset[row])}+{int(e.length[row])} are outside a file of "
                f"{int(sizes[e.file[row]])} bytes",
                file=self.path(int(e.file[row])),
                tensor=self.tensors[s.tensor[row]].name,
                hint="the file is truncated, or belongs to another checkpoint",
                error_id="truncated-file",
            )
        plain = np.array([t.packing is None for t in self.tensors], bool)[s.tensor]
        item = np.array([t.dtype.itemsize for t in self.tensors], np.int64)[s.tensor]
        needed = s.boxes.volume() * item
        for row in np.flatnonzero(plain & ~is_encoded & (e.length < needed))[:1].tolist():
            raise FormatError(
                f"{int(e.length[row])} bytes are too few for a shard "
                f"{_format_box(s.boxes, row)} of {int(needed[row])} bytes",
                file=self.path(int(e.file[row])),
                tensor=self.tensors[s.tensor[row]].name,
                hint="the file is truncated, or belongs to another checkpoint",
            )
        used = np.flatnonzero((e.length > 0) & ~is_encoded)
        order = used[np.lexsort((e.offset[used], e.file[used]))]
        is_same_file = e.file[order][1:] == e.file[order][:-1]
        over = is_same_file & (e.offset[order][1:] < (e.offset + e.length)[order][:-1])
        for k in np.flatnonzero(over)[:1].tolist():
            a, b = int(order[k]), int(order[k + 1])
            raise FormatError(
                f"shares bytes with {self.tensors[s.tensor[a]].name!r}",
                file=self.path(int(e.file[b])),
                tensor=self.tensors[s.tensor[b]].name,
            )

    def check_unchanged(self, files: Sequence[int] | None = None) -> None:
        """Compare the files with their state when the checkpoint was opened.

        Raises:
            SourceChangedError: a file was modified, replaced or removed since.
        """
        Files().refresh(self.root)
        Files().load_tree(self.root)
        for f in self.files if files is None else [self.files[i] for i in files]:
            full = self.root / f.path if f.path else self.root
            try:
                st = full.stat()
            except OSError as e:
                raise SourceChangedError(
                    "the source disappeared while it was read", file=full
                ) from e
            if (st.st_size, st.st_mtime_ns, st.st_ino) != (f.size, f.mtime_ns, f.inode):
                raise SourceChangedError(
                    "the source changed while it was read",
                    file=full,
                    hint="wait until nothing writes to the source, then run again",
                )


def _format_box(boxes: Boxes, row: int) -> str:
    pairs = zip(boxes.lo[row].tolist(), boxes.hi[row].tolist(), strict=True)
    return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in pairs) + "]"


@dataclass(slots=True, kw_only=True)
class Destination:
    """The layout of a checkpoint to be written.

    `catalogue.root` is not set yet: the commit chooses a staging folder. `fragments` are the header
    bytes around the data, as `(file index, offset, bytes)`. `small_files` are whole files by
    relative path; `final_files` are written after all others (commit markers).
    """

    catalogue: Catalogue
    fragments: list[tuple[int, int, bytes]]
    small_files: dict[str, bytes] = field(default_factory=dict)
    final_files: dict[str, bytes] = field(default_factory=dict)

    def iter_small_files(self) -> Iterator[tuple[str, bytes]]:
        """Small files in the order in which they are written."""
        yield from self.small_files.items()
        yield from self.final_files.items()
