"""Files of a web server, read in ranges; folders where the server lists them, or by known names."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from email.utils import parsedate_to_datetime
from html.parser import HTMLParser
from urllib.parse import quote, unquote, urljoin, urlsplit

from megtool.storage.stores.http_client import HttpClient, HttpReply, error_of
from megtool.storage.stores.protocol import ConditionError, Listing, ObjectInfo
from megtool.storage.stores.read_only import ReadOnlyStore
from megtool.storage.stores.read_pool import read_pool

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
_HEADS = 16
"""Files that are asked for at the same time."""

_FILES = (".safetensors", ".gguf", ".json", ".pt", ".bin", ".distcp", ".yaml", ".txt", ".npz")
"""What ends like this is no folder."""

_MAX_LISTING = 64 << 20


class HttpStore(ReadOnlyStore):
    """See `Store`; `url` is `https://HOST`, keys are paths as they stand in URLs."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._client = HttpClient(url)

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
        if reply.status != 200 or "Content-Length" not in reply.headers:
            reply = self._client.send(
                "GET", address, self._place(key), headers={"Range": "bytes=0-0"}
            )
            if reply.status in (404, 410) or _is_folder(address, reply):
                return None
            if reply.status not in (200, 206, 416):
                raise error_of(reply, self._place(key))
        return _info(key, reply)

    def read(self, key: str, offset: int, num_bytes: int, *, version: str = "") -> memoryview:
        """See `Store.read`."""
        if num_bytes == 0:
            return memoryview(b"")

        def check(reply: HttpReply) -> None:
            if reply.status in (200, 206) and version and _version(reply) != version:
                raise ConditionError("the file has another version", file=self._place(key))

        headers = {"If-Match": version} if version.startswith('"') else {}
        return self._client.read_range(
            self._address(key), self._place(key), offset, num_bytes, headers=headers, check=check
        )

    # ---- listing

    def list(self, prefix: str, *, recursive: bool = False, most: int | None = None) -> Listing:
        """See `Store.list`; a server that does not list is asked for known names."""
        if prefix.endswith(_FILES):
            return Listing(objects=())
        names = self._listed(prefix)
        is_listed = names is not None
        if names is None:
            names = KNOWN_FILES
        start = f"{prefix}/" if prefix else ""
        objects = [*self._heads(start + name for name in names if not name.endswith("/"))]
        prefixes = [start + name.rstrip("/") for name in names if name.endswith("/")]
        if not is_listed:
            more, folders = self._further(start, objects)
            objects += more
            prefixes = [*folders]
        if recursive:
            for folder in prefixes:
                objects += self.list(folder, recursive=True).objects
            prefixes = []
        return Listing(objects=tuple(objects), prefixes=tuple(prefixes))

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
        if reply.status != 200 or len(reply.body) > _MAX_LISTING:
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
        others = [*self._heads(keys)]
        if ".metadata" in sizes:
            others += self._ranks(start)
        prefixes = []
        if _TRACKER in sizes:
            text = bytes(self.read(start + _TRACKER, 0, min(sizes[_TRACKER], 64))).strip()
            folder = f"iter_{int(text):07d}" if text.isdigit() else "release"
            prefixes.append(start + folder)
        return others, prefixes

    def _json(self, key: str, size: int) -> object:
        try:
            return json.loads(bytes(self.read(key, 0, size)))
        except ValueError:
            return None

    def _ranks(self, start: str) -> Sequence[ObjectInfo]:
        """The files of a distributed checkpoint: `__RANK_NUMBER.distcp`, as far as they go."""
        objects: list[ObjectInfo] = []
        rank = 0
        while True:
            batch = self._heads(
                f"{start}__{r}_{n}.distcp" for r in range(rank, rank + _HEADS) for n in range(2)
            )
            objects += batch
            for r in range(rank, rank + _HEADS):
                number = 2
                while any(i.key == f"{start}__{r}_{number - 1}.distcp" for i in objects):
                    objects += self._heads([f"{start}__{r}_{number}.distcp"])
                    number += 1
            if not any(f"__{rank + _HEADS - 1}_" in info.key for info in batch):
                return objects
            rank += _HEADS


def _is_folder(address: str, reply: HttpReply) -> bool:
    """Whether a server led from a name to the folder of this name."""
    return urlsplit(reply.url).path.endswith("/") and not urlsplit(address).path.endswith("/")


def _version(reply: HttpReply) -> str:
    tag = reply.headers.get("ETag", "")
    return str(tag or reply.headers.get("Last-Modified", ""))


def _info(key: str, reply: HttpReply) -> ObjectInfo:
    total = reply.headers.get("Content-Range", "").rpartition("/")[2]
    size = int(total) if total.isdigit() else int(reply.headers.get("Content-Length", 0))
    modified_ns = 0
    if date := reply.headers.get("Last-Modified"):
        try:
            modified_ns = int(parsedate_to_datetime(date).timestamp()) * 10**9
        except ValueError:
            modified_ns = 0
    return ObjectInfo(key=key, size=size, version=_version(reply), modified_ns=modified_ns)


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
        if name and "/" not in name and name != "..":
            names.append(f"{name}/" if is_folder else name)
    return names


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def _names_in_html(text: str, base: str) -> Sequence[str]:
    """Names to which a page links that lie directly in its folder."""
    parser = _Links()
    parser.feed(text)
    here = urlsplit(base)
    folder = here.path.rpartition("/")[0] + "/"
    names: dict[str, None] = {}
    for link in parser.links:
        target = urlsplit(urljoin(base, link))
        if target.query or target.fragment or target.netloc != here.netloc:
            continue
        if not target.path.startswith(folder):
            continue
        name = unquote(target.path[len(folder) :])
        if name and "/" not in name[:-1] and name not in ("./", "../"):
            names[name] = None
    return tuple(names)
