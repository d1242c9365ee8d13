"""A cache of tokenized documents in a folder, read by memory map.

A cache is a folder: `tokens.bin` (int32, all documents one after the other), `lengths.npy` (tokens
of each), `learned.bin` (one byte per token: whether it is a label) if some are not learned, and
`facts.json`, which is written last; `check.json` records that all of it was compared with its
digest. It is written to a temporary folder and renamed, so an existing
cache is complete, and processes that write the same one do not disturb each other.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megtool.console import Progress, silent
from megtool.data.check_record import CheckRecord
from megtool.data.dataset_writer import INDEX, add_suffix, dataset_prefix
from megtool.data.documents import Document, documents, source_bytes
from megtool.data.indexed import IndexedDataset
from megtool.data.tokenize_documents import EncodedDocument, encode
from megtool.data.tokenizer import Tokenizer
from megtool.errors import FormatError, StorageError
from megtool.storage.files import Files
from megtool.storage.location.path import (
    is_remote,
    location,
    make_folder,
    require_local,
    resolve_links,
)

_LOG = logging.getLogger(__name__)
_VERSION = 3
_TOKENS, _LENGTHS, _LEARNED, _FACTS = "tokens.bin", "lengths.npy", "learned.bin", "facts.json"
_CHECK = "check.json"

Int = NDArray[np.int64]


class Documents(Protocol):
    """Tokenized documents by number: a `TokenCache` or a Megatron data set."""

    lengths: Int
    fingerprint: str
    is_partly_learned: bool

    def tokens(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """Tokens `begin` to `end` of a document."""

    def learned(self, document: int, begin: int, end: int) -> NDArray[np.bool_] | None:
        """Which of these tokens are labels; None if all are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How text becomes tokens."""

    field: str | None = None
    split: str | None = None
    answers_only: bool = True
    append_eos: bool = True


class TokenCache:
    """A tokenized source of text. `fingerprint` is a digest of all tokens and of the training mask.

    Raises:
        FormatError: the folder is no store, or not a whole one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            facts = json.loads(_read(folder / _FACTS))
            self.lengths: Int = np.load(io.BytesIO(_read(folder / _LENGTHS))).astype(np.int64)
            if self.lengths.ndim != 1 or (self.lengths < 0).any():
                raise ValueError(f"{_LENGTHS} holds no lengths")
            count = int(self.lengths.sum())
            self._tokens = _mapped(folder / _TOKENS, np.dtype("<i4"), count)
            self.is_partly_learned = bool(facts["partly"])
            self._learned = (
                _mapped(folder / _LEARNED, np.dtype(np.bool_), count)
                if self.is_partly_learned
                else None
            )
            self.fingerprint = str(facts["digest"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as e:
            raise FormatError(
                f"the token cache is incomplete: {e}", file=folder, hint="delete it: it is rebuilt"
            ) from e
        self._first = np.concatenate([[0], np.cumsum(self.lengths)])

    def check(self) -> None:
        """Compare the digest of the tokens and of the training mask with the stored one.

        After a whole comparison a record saves the next one, while nothing has changed the files
        (see `CheckRecord`).

        Raises:
            FormatError: the cache is damaged, as by a power failure before it was on the disk.
        """
        names = [_FACTS, _LENGTHS, _TOKENS, *([_LEARNED] if self.is_partly_learned else [])]
        record = CheckRecord(self.folder / _CHECK, [self.folder / name for name in names])
        facts = {"digest": self.fingerprint}
        if record.recall() == facts:
            return
        self._compare_digest()
        record.note(facts)

    def _compare_digest(self) -> None:
        digest = hashlib.sha256()
        for document, length in enumerate(self.lengths.tolist()):
            digest.update(length.to_bytes(8, "little"))
            digest.update(self.tokens(document, 0, length).data)
            mask = self.learned(document, 0, length)
            if mask is not None and not mask.all():
                digest.update(np.packbits(mask).tobytes())
        if digest.hexdigest() != self.fingerprint:
            raise FormatError(
                "the token cache is damaged: its digest is another",
                file=self.folder,
                hint="delete it: it is rebuilt",
            )

    def tokens(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """Tokens `begin` to `end` of a document."""
        first = int(self._first[document])
        return self._tokens[first + begin : first + end]

    def learned(self, document: int, begin: int, end: int) -> NDArray[np.bool_] | None:
        """Which of these tokens are labels; None if all are."""
        if self._learned is None:
            return None
        first = int(self._first[document])
        return self._learned[first + begin : first + end]


class IndexedStore:
    """A Megatron data set as documents; all of its tokens are learned."""

    def __init__(self, prefix: str | Path, vocab_size: int, *, cache: Path | None = None) -> None:
        """Open `prefix`.bin and `prefix`.idx; a record in `cache` saves reading them whole.

        Raises:
            FormatError: the files are damaged, or have tokens that the model does not have.
        """
        self._data = IndexedDataset(prefix)
        if self._data.dtype.kind not in "iu":
            raise FormatError(
                f"the data are {self._data.dtype.name}, no tokens", file=self._data.index_file
            )
        ends = np.concatenate([[0], np.cumsum(self._data.lengths, dtype=np.int64)])
        self.lengths: Int = np.diff(ends[self._data.document_ends])
        self.is_partly_learned = False
        least, most, self.fingerprint = self._scan_once(cache)
        if least < 0 or most >= vocab_size:
            raise FormatError(
                f"token {least if least < 0 else most}, and the model knows 0 to {vocab_size - 1}",
                file=self._data.data_file,
                hint="tokenize the text with this model's tokenizer",
            )

    def _scan_once(self, cache: Path | None) -> tuple[int, int, str]:
        """Return the least and the largest token, and a digest of all, which a record may have."""
        if cache is None:
            return self._scan()
        files = self._data.index_file, self._data.data_file
        name = hashlib.sha256(os.fsencode(str(resolve_links(files[0]))))
        record = CheckRecord(cache / f"indexed-{name.hexdigest()[:24]}.json", files)
        match record.recall():
            case {"least": int(least), "most": int(most), "digest": str(digest)}:
                return least, most, digest
        least, most, digest = self._scan()
        with contextlib.suppress(OSError):
            make_folder(cache)
        record.note({"least": least, "most": most, "digest": digest})
        return least, most, digest

    def _scan(self) -> tuple[int, int, str]:
        digest = hashlib.sha256(self._data.lengths.tobytes())
        least = most = 0
        for ids in self._data.documents():
            if len(ids):
                least, most = min(least, int(ids.min())), max(most, int(ids.max()))
                digest.update(np.ascontiguousarray(ids, "<i4").tobytes())
        return least, most, digest.hexdigest()

    def tokens(self, document: int, begin: int, end: int) -> NDArray[Any]:
        """Tokens `begin` to `end` of a document."""
        return self._data.document(document)[begin:end]

    def learned(self, document: int, begin: int, end: int) -> None:
        """All of them are labels."""


def is_indexed(source: str | Path) -> bool:
    """Whether a name is that of a Megatron data set: a prefix, or one of its two files.

    A text with the name of a prefix is that text: `text.jsonl` beside `text.jsonl.bin`.
    """
    path = location(source)
    prefix = dataset_prefix(path)
    if not prefix.name or not add_suffix(prefix, INDEX).is_file():
        return False
    return prefix != path or not path.is_file()


def store_tokens(
    source: str | Path,
    tokenizer: Tokenizer,
    cache: Path | None,
    encoding: Encoding,
    *,
    progress: Progress = silent,
) -> TokenCache:
    """Tokenize the documents of `source` into `cache`, unless they are there.

    A cache is used again while path, size and time of the source's files, the tokenizer and the
    encoding are the same; for a data set of the hub, while its name is. It is compared with its
    digest first (see `TokenCache.check`): a damaged one is rebuilt. Without `cache` the tokens
    exist as long as the object.

    Raises:
        FormatError: a line is malformed (it is named), or the source has nothing to learn.
        StorageError: the cache cannot be written.
    """
    if cache is None:
        with tempfile.TemporaryDirectory(prefix="megtool-tokens-") as folder:
            return store_tokens(source, tokenizer, Path(folder), encoding, progress=progress)
    require_local(cache, "--data-cache-path")
    place = cache / f"tokens-{_key(source, tokenizer, encoding)[:24]}"
    if (place / _FACTS).is_file():
        try:
            existing = TokenCache(place)
            existing.check()
            return existing
        except FormatError as e:
            _LOG.warning("%s [file %s]: the text is tokenized again", e.message, place)
            _set_aside(place)
    building = cache / f"{place.name}.{os.getpid()}.partial"
    try:
        shutil.rmtree(building, ignore_errors=True)  # of a process that had this number before
        building.mkdir(parents=True)
        source_documents = documents(source, field=encoding.field, split=encoding.split)
        _build(
            building,
            _counted(source_documents, source, encoding.split, progress),
            tokenizer,
            encoding,
        )
        files = Files()
        for path in building.iterdir():
            files.fsync(path)
        files.fsync_dir(building)
        try:
            building.rename(place)
            files.fsync_dir(cache)
        except OSError:
            if not (place / _FACTS).is_file():
                raise
            shutil.rmtree(building)  # another process was sooner
    except OSError as e:
        shutil.rmtree(building, ignore_errors=True)
        raise StorageError(
            f"encoded data cannot be cached: {e.strerror or e}",
            file=cache,
            hint="free some space, or choose another DST; --data-cache-path names another folder "
            "for "
            "the data alone",
        ) from e
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return TokenCache(place)


def _set_aside(place: Path) -> None:
    """Remove a damaged cache; a process that has it mapped keeps what it has."""
    damaged = place.with_name(f"{place.name}.{os.getpid()}.partial")
    shutil.rmtree(damaged, ignore_errors=True)
    try:
        place.rename(damaged)
    except OSError as e:
        raise StorageError(
            f"the damaged token cache cannot be removed: {e.strerror or e}",
            file=place,
            hint="delete it, or choose another folder by --data-cache-path",
        ) from e
    shutil.rmtree(damaged, ignore_errors=True)


def _build(
    folder: Path, source_documents: Iterable[Document], tokenizer: Tokenizer, encoding: Encoding
) -> None:
    lengths: list[int] = []
    digest, partly = hashlib.sha256(), False
    with (folder / _TOKENS).open("wb") as tokens, (folder / _LEARNED).open("wb") as learned:
        for encoded in _encoded(source_documents, tokenizer, encoding):
            ids = np.ascontiguousarray(encoded.ids, "<i4").tobytes()
            partly = partly or encoded.learned is not None
            mask = (
                np.ones(len(encoded.ids), np.bool_) if encoded.learned is None else encoded.learned
            )
            tokens.write(ids)
            learned.write(mask.tobytes())
            digest.update(len(encoded.ids).to_bytes(8, "little") + ids)
            if not mask.all():
                digest.update(np.packbits(mask).tobytes())
            lengths.append(len(encoded.ids))
    if not partly:
        (folder / _LEARNED).unlink()
    np.save(folder / _LENGTHS, np.asarray(lengths, np.int64))
    facts = {
        "version": _VERSION,
        "documents": len(lengths),
        "partly": partly,
        "digest": digest.hexdigest(),
    }
    (folder / _FACTS).write_text(json.dumps(facts))


def _encoded(
    source_documents: Iterable[Document], tokenizer: Tokenizer, encoding: Encoding
) -> Iterator[EncodedDocument]:
    return encode(
        source_documents,
        tokenizer,
        append_eos=encoding.append_eos and tokenizer.eos_id is not None,
        answers_only=encoding.answers_only,
    )


def _counted(
    source_documents: Iterable[Document], source: str | Path, split: str | None, progress: Progress
) -> Iterator[Document]:
    total = source_bytes(source, split=split)
    for document in source_documents:
        yield document
        progress("tokenize", document.num_bytes, total)


def _key(source: str | Path, tokenizer: Tokenizer, encoding: Encoding) -> str:
    """A digest of everything that determines the contents of a cache, without reading the data."""
    path = location(source)
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    states = []
    for file in files:
        if file.is_file():
            stat = file.stat()
            version = [stat.st_ino] if is_remote(file) else []
            states.append([str(resolve_links(file)), stat.st_size, stat.st_mtime_ns, *version])
    facts = [_VERSION, str(source), states, tokenizer.fingerprint, asdict(encoding)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _read(path: Path) -> bytes:
    """Read a file that must exist.

    Raises:
        FormatError: it is missing, or not a regular file.
    """
    data = Files().read_whole(path)
    if data is None:
        raise FormatError(
            f"the token cache has no {path.name}",
            file=path.parent,
            hint="delete it: it is rebuilt",
        )
    return data


def _mapped(path: Path, kind: np.dtype[Any], count: int) -> NDArray[Any]:
    if path.stat().st_size != count * kind.itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes")
    return np.memmap(path, kind, mode="r") if count else np.empty(0, kind)
