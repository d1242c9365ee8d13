"""Files of a web server, read in ranges; folders where the server lists them, or by known names."""

from __future__ import annotations

import functools
import html
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from email.utils import parsedate_to_datetime
from urllib.parse import quote, unquote, urljoin, urlsplit

from megtool.errors import StorageError
from megtool.storage.stores.http_client import HttpClient, HttpReply, error_of
from megtool.storage.stores.protocol import ConditionError, Listing, ObjectInfo, by_key
from megtool.storage.stores.read_only import ReadOnlyStore
from megtool.storage.stores.read_pool import read_pool
from megtool.storage.stores.reply_limits import MAX_DEPTH, ListingLimit, odd_reply, to_size

KNOWN_FILES = (
    *("config.json", "model.safetensors.index.json", "model.safetensors", "hf_quant_config.json"),
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "adapter_config.json", "adapter_model.safetensors", "recipe.yaml"),
    *("pytorch_model.bin.index.json", "pytorch_model.bin", "megtool.json"),
    *("metadata.json", ".metadata", "common.pt", "modelopt_run_config.yaml"),
    *("latest_checkpointed_iteration.txt", "latest_wandb_artifact_path.txt"),
)
"""Names that are asked for in a folder that the server does not list."""

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_TRACKER = "latest_checkpointed_iteration.txt"
_FILES = (".safetensors", ".gguf", ".json", ".pt", ".bin", ".distcp", ".yaml", ".txt", ".npz")
"""What ends like this is no folder."""

_MAX_TAG = 1024
_MAX_INDEX_BYTES = 256 << 20
"""The most bytes of an index or of `.metadata` that are read for the names of files in it."""

_RANK_FILE = re.compile(rb"__[0-9]{1,9}_[0-9]{1,9}\.distcp")
_LINK = re.compile(
    r"<a\s[^<>]{0,1000}?\bhref\s{0,9}=\s{0,9}(?:\"([^\"<>]{1,4096})\"|'([^'<>]{1,4096})'|([^\s\"'<>]{1,4096}))",
    re.IGNORECASE,
)


class HttpStore(ReadOnlyStore):
    """See `Store`; `url` is `https://HOST`, keys are paths as they stand in URLs."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._client = HttpClient(url)
        self._sizes: dict[str, int] = {}
        """Of files that have no version: what is read of them later must have the same size."""

    def _address(self, key: str) -> str:
        # What is encoded already stays.
        return f"{self.url}/" + re.sub(
            r"%25(?=[0-9A-Fa-f]{2})", "%", quote(key, safe="/~!$&'()*+,;=:@")
        )

    # ---- reading

    def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`."""
        address = self._address(key)
        reply = self._client.send("HEAD", address, self._place(key))
        if reply.status in (404, 410) or _is_folder(address, reply):
            return None
        place = self._place(key)
        if reply.status != 200 or "Content-Length" not in reply.headers:
            reply = self._client.send(
                "GET", address, self._place(key), headers={"Range": "bytes=0-0"}
            )
            if reply.status in (404, 410) or _is_folder(address, reply):
                return None
            if reply.status not in (200, 206, 416):
                raise error_of(reply, place)
        info = _info(key, reply, place)
        if not info.version:
            self._sizes[key] = info.size
        return info

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """See `Store.read`."""
        if num_bytes == 0:
            return memoryview(b"")

        def check(reply: HttpReply) -> None:
            place, is_found = self._place(key), reply.status in (200, 206)
            size = None if version else self._sizes.get(key)
            is_changed = version and _version(reply, place) != version
            if is_found and (is_changed or (size is not None and _size(reply, place) != size)):
                raise ConditionError("the file has another version", file=place)

        headers = {"If-Match": version} if version.startswith('"') else {}
        return self._client.read_range(
            self._address(key), self._place(key), offset, num_bytes, headers=headers, check=check
        )

    # ---- listing

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        """See `Store.list`; a server that does not list is asked for known names."""
        return self._list(prefix, recursive, 0, ListingLimit(self._place(prefix)))

    def _list(self, prefix: str, recursive: bool, depth: int, limit: ListingLimit) -> Listing:
        if depth > MAX_DEPTH:
            raise StorageError(
                f"the server lists more than {MAX_DEPTH} folders in each other",
                file=self._place(prefix),
                hint="give a folder further down",
            )
        if prefix.endswith(_FILES):
            return Listing(objects=())
        names = self._listed(prefix)
        limit.add(1 if names is None else len(names))
        is_listed = names is not None
        if names is None:
            names = KNOWN_FILES
        start = f"{prefix}/" if prefix else ""
        objects = [*self._heads(start + name for name in names if not name.endswith("/"))]
        prefixes = [start + name.rstrip("/") for name in names if name.endswith("/")]
        if not is_listed:
            if objects:
                self._expect_refusals(start)
            more, folders = self._further(start, objects)
            objects += more
            prefixes = [*folders]
        if recursive:
            for folder in prefixes:
                objects += self._list(folder, True, depth + 1, limit).objects
            prefixes = []
        return Listing(objects=tuple(sorted(objects, key=by_key)), prefixes=tuple(prefixes))

    def _expect_refusals(self, start: str) -> None:
        """Raise if the server has every file that one asks for: then none is known to exist."""
        if self.head(f"{start}no-such-file-{secrets.token_hex(8)}.bin") is not None:
            raise StorageError(
                "the server answers every name as if there were such a file",
                file=self._place(start.rstrip("/")),
                hint="give the address of one file, or a server that says 404 for what it lacks",
            )

    def _heads(self, keys: Iterable[str]) -> Sequence[ObjectInfo]:
        heads: dict[str, ObjectInfo | None] = dict.fromkeys(keys)

        def head(key: str) -> None:
            heads[key] = self.head(key)

        read_pool().run([functools.partial(head, key) for key in heads])
        return [info for info in heads.values() if info is not None]

    def _listed(self, prefix: str) -> Sequence[str] | None:
        """Names in a folder, those of folders with a slash; None if the server does not list."""
        address = self._address(prefix).rstrip("/") + "/"
        reply = self._client.send(
            "GET", address, self._place(prefix), headers={"Accept": "application/json, text/html"}
        )
        kind = reply.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if reply.status != 200:
            return None
        if kind == "application/json":
            return _names_in_json(reply.json())
        if kind in ("text/html", "application/xhtml+xml"):
            names = _names_in_html(reply.body.decode("utf-8", "replace"), reply.url)
            return names or None
        return None

    def _further(
        self, start: str, objects: Sequence[ObjectInfo]
    ) -> tuple[Sequence[ObjectInfo], Sequence[str]]:
        """What the known files of a folder name: shards, ranks, and the last iteration."""
        sizes = {info.key.rpartition("/")[2]: info.size for info in objects}
        keys: list[str] = []
        for name in _INDEXES:
            if name in sizes:
                index = self._json(start + name, sizes[name])
                names = index.get("weight_map") if isinstance(index, dict) else None
                shards = names.values() if isinstance(names, dict) else ()
                keys += [start + n for n in shards if isinstance(n, str) and "/" not in n]
        if ".metadata" in sizes:
            keys += self._ranks(start, sizes[".metadata"])
        others = [*self._heads(keys)]
        prefixes = []
        if _TRACKER in sizes:
            text = bytes(self.read(start + _TRACKER, 0, min(sizes[_TRACKER], 64))).strip()
            folder = f"iter_{int(text):07d}" if re.fullmatch(rb"[0-9]{1,19}", text) else "release"
            prefixes.append(start + folder)
        return others, prefixes

    def _small(self, key: str, size: int) -> bytes:
        if size > _MAX_INDEX_BYTES:
            raise StorageError(
                f"{size:,} bytes are too many for an index of files", file=self._place(key)
            )
        return bytes(self.read(key, 0, size))

    def _json(self, key: str, size: int) -> object:
        try:
            return json.loads(self._small(key, size))
        except (ValueError, RecursionError):
            return None

    def _ranks(self, start: str, size: int) -> Sequence[str]:
        """Return the files `__RANK_NUMBER.distcp` that a distributed checkpoint's metadata names.

        They stand in it as they are, so its pickle is not opened here.
        """
        rank_files = set(_RANK_FILE.findall(self._small(start + ".metadata", size)))
        return [start + name.decode() for name in sorted(rank_files)]


def _is_folder(address: str, reply: HttpReply) -> bool:
    """Whether a server led from a name to the folder of this name."""
    return urlsplit(reply.url).path.endswith("/") and not urlsplit(address).path.endswith("/")


def _size(reply: HttpReply, place: str) -> int:
    """Return the size of the whole file of which a reply holds a part, all or nothing."""
    if reply.status == 200:
        return to_size(reply.headers.get("Content-Length", "none"), place)
    return to_size(reply.headers.get("Content-Range", "none").rpartition("/")[2], place)


def _version(reply: HttpReply, place: str) -> str:
    """Return the ETag of a file, else the time of its last change, else nothing."""
    headers = reply.headers
    tag = headers.get("ETag", "") or headers.get("Last-Modified", "")
    if len(tag) > _MAX_TAG:
        raise odd_reply(place, f"the version has {len(tag):,} characters")
    return tag


def _info(key: str, reply: HttpReply, place: str) -> ObjectInfo:
    modified_ns = 0
    if date := reply.headers.get("Last-Modified"):
        try:
            modified_ns = int(parsedate_to_datetime(date[:100]).timestamp()) * 10**9
        except (ValueError, TypeError, OverflowError, OSError):
            modified_ns = 0
    return ObjectInfo(
        key=key,
        size=_size(reply, place),
        version=_version(reply, place),
        modified_ns=modified_ns,
    )


def _names_in_json(listing: object) -> Sequence[str] | None:
    """Names of a listing by nginx (`autoindex_format json`) or Caddy (`file_server browse`)."""
    if not isinstance(listing, list):
        return None
    names = []
    for item in listing:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            return None
        is_folder = item.get("type") == "directory" or item.get("is_dir") is True
        name = item["name"].rstrip("/")
        if name and "/" not in name and "\0" not in name and name not in (".", ".."):
            names.append(f"{name}/" if is_folder else name)
    return names


def _names_in_html(text: str, base: str) -> Sequence[str]:
    """Names to which a page links that lie directly in its folder."""
    links = (html.unescape(next(filter(None, match))) for match in _LINK.findall(text))
    here = urlsplit(base)
    folder = here.path.rpartition("/")[0] + "/"
    names: dict[str, None] = {}
    for link in links:
        try:
            target = urlsplit(urljoin(base, link))
        except ValueError:
            continue
        if target.query or target.fragment or target.netloc != here.netloc:
            continue
        if not target.path.startswith(folder):
            continue
        name = unquote(target.path[len(folder) :])
        is_name = name.rstrip("/") not in ("", ".", "..") and "\0" not in name
        if is_name and "/" not in name[:-1]:
            names[name] = None
    return tuple(names)
