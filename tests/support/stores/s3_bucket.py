"""A bucket of its own for one test, on a server that tests share."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.stores.s3_servers import S3Server


def make_bucket(server: S3Server) -> str:
    """The name of a new, empty bucket."""
    name = f"test-{secrets.token_hex(8)}"
    server.client.create_bucket(Bucket=name)
    return name


@dataclass(frozen=True)
class S3Bucket:
    """A fresh bucket and direct access to it, past what is tested.

    `endpoint` and `environment` are the server's. Keys are relative to the bucket.
    """

    server: S3Server
    name: str = field(default="")

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", make_bucket(self.server))

    @property
    def endpoint(self) -> str:
        return self.server.endpoint

    @property
    def environment(self) -> dict[str, str]:
        return self.server.environment

    @property
    def client(self) -> Any:
        """A boto3 client that tries once."""
        return self.server.client

    def url(self, key: str = "") -> str:
        return f"s3://{self.name}/{key}".rstrip("/")

    def new_bucket(self) -> str:
        """The name of one more new bucket."""
        return make_bucket(self.server)

    def put(self, key: str, data: bytes) -> str:
        """Put an object and return its ETag."""
        reply = self.client.put_object(Bucket=self.name, Key=key, Body=data)
        return str(reply["ETag"])

    def get(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return data

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that begin with `prefix`, in order."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=prefix
        )
        return sorted(item["Key"] for page in pages for item in page.get("Contents", []))

    def uploads(self, prefix: str = "") -> dict[str, str]:
        """Multipart uploads that are neither completed nor aborted: id to key."""
        reply = self.client.list_multipart_uploads(Bucket=self.name, Prefix=prefix)
        return {item["UploadId"]: item["Key"] for item in reply.get("Uploads", [])}

    def contents(self, prefix: str = "") -> dict[str, bytes]:
        """The objects below `prefix`, by what follows it in their keys."""
        return {key.removeprefix(prefix): self.get(key) for key in self.keys(prefix)}

    def upload(self, folder: Path, key: str) -> str:
        """Put the files of a folder, or one file, below `key`; returns its URL."""
        files = [folder] if folder.is_file() else [p for p in folder.rglob("*") if p.is_file()]
        for path in files:
            name = path.relative_to(folder).as_posix()
            self.client.upload_file(str(path), self.name, key if name == "." else f"{key}/{name}")
        return self.url(key)

    def download(self, key: str, folder: Path) -> Path:
        """Write the objects below the prefix `key` as files of a new folder."""
        for name, data in self.contents(f"{key}/").items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return folder
