"""Schemes of URLs: a row for each, from which forms, hints, refusals and stores follow."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from megtool.errors import MissingPackageError

FSSPEC_PREFIX = "fsspec+"
"""`fsspec+PROTOCOL://` is fsspec's, even where megtool has a store for the protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A kind of URL: what is known about its stores before one is made.

    `store` is the store's class as `MODULE:CLASS`, which is imported at first use. `form` is a URL
    as hints and the guide show it, and `bucket` the word for what stands first in it.
    """

    store: str
    form: str
    bucket: str = "bucket"
    bucket_names: int = 1
    """The number of names between slashes that make the bucket: two in `hf://ORG/NAME`."""

    extra: str = ""
    """The extra of megtool that installs the packages."""

    is_written: bool = False
    """Whether megtool writes there; the class says the same in `can_write`."""

    lists_all: bool = True
    """Whether a listing names everything in a folder."""

    has_queries: bool = False
    """Whether `?` begins a query; in the keys of stores it is a character like any other."""

    has_revisions: bool = False
    """Whether `@` separates a revision; elsewhere it would follow a user name or a password."""

    is_for_tests: bool = False


_MODULES = "megtool.storage.stores"

SCHEMES: Mapping[str, Scheme] = {
    "s3": Scheme(
        store=f"{_MODULES}.s3:S3Store",
        form="s3://BUCKET/PREFIX",
        extra="stores",
        is_written=True,
    ),
    "gs": Scheme(
        store=f"{_MODULES}.gcs:GcsStore",
        form="gs://BUCKET/PREFIX",
        extra="stores",
        is_written=True,
    ),
    "az": Scheme(
        store=f"{_MODULES}.azure:AzureStore",
        form="az://CONTAINER/PREFIX",
        bucket="container",
        extra="azure",
        is_written=True,
    ),
    "https": Scheme(
        store=f"{_MODULES}.http:HttpStore",
        form="https://HOST/PATH",
        bucket="host",
        extra="stores",
        lists_all=False,
        has_queries=True,
    ),
    "http": Scheme(
        store=f"{_MODULES}.http:HttpStore",
        form="http://HOST/PATH",
        bucket="host",
        extra="stores",
        lists_all=False,
        has_queries=True,
    ),
    "hf": Scheme(
        store=f"{_MODULES}.hub:HubStore",
        form="hf://ORG/NAME or hf://ORG/NAME@REVISION",
        bucket="repository",
        bucket_names=2,
        extra="hub",
        has_revisions=True,
    ),
    "msc": Scheme(
        store=f"{_MODULES}.third_party:MscStore",
        form="msc://PROFILE/PREFIX",
        bucket="profile",
    ),
    "memory": Scheme(
        store=f"{_MODULES}.memory:MemoryStore",
        form="memory://BUCKET/PREFIX",
        is_written=True,
        is_for_tests=True,
    ),
}
"""What megtool has a store for. fsspec's protocol of the same name is reached by `fsspec+` only."""


@functools.cache
def find_scheme(name: str) -> Scheme:
    """Return the row of a scheme; one of fsspec's for a scheme that megtool has no store for."""
    return SCHEMES.get(name) or Scheme(
        store=f"{_MODULES}.third_party:FsspecStore", form=f"{name}://BUCKET/PREFIX"
    )


def writable_places() -> str:
    """Return where megtool writes, for hints: `a local folder, s3://, gs:// or az://`."""
    names = [n for n, row in SCHEMES.items() if row.is_written and not row.is_for_tests]
    places = ["a local folder", *(f"{name}://" for name in names)]
    return f"{', '.join(places[:-1])} or {places[-1]}"


def missing_package(package: str, url: str) -> MissingPackageError:
    """Return the error to raise where the package of a URL's store is not installed."""
    extra = find_scheme(url.partition("://")[0]).extra
    target = f"'megtool[{extra}]'" if extra else package
    return MissingPackageError(
        f"{package} is not installed", file=url, hint=f"pip install {target}"
    )
