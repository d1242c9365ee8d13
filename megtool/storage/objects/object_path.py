"""The path of an object or a folder in a store: a name, with the store that it is in."""

from __future__ import annotations

import re
from pathlib import PosixPath
from typing import TYPE_CHECKING, Self

from megtool.errors import MegtoolError
from megtool.storage.stores.schemes import find_scheme

if TYPE_CHECKING:
    from megtool.storage.stores.protocol import Store

SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")


class ObjectPath(PosixPath):
    """A URL such as `s3://bucket/run` as a path, of which only the name is known.

    Every such path is a `StorePath`, which asks the store. Code below that class uses this one.
    """

    __slots__ = ()

    def __str__(self) -> str:
        text = super().__str__()
        scheme, colon, rest = text.partition(":/")
        if colon and SCHEME.fullmatch(f"{scheme}:") and not rest.startswith("/"):
            return f"{scheme}://{rest}"
        return text

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is in a store: it has no path on this machine")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (str(self),)

    @property
    def scheme(self) -> str:
        """The kind of store: `s3`."""
        return self.parts[0].rstrip(":")

    @property
    def bucket_url(self) -> str:
        """The URL of the bucket (for `hf`, of the repository), without a slash at its end."""
        depth = 1 + find_scheme(self.scheme).bucket_names
        return f"{self.scheme}://{'/'.join(self.parts[1:depth])}"

    @property
    def key(self) -> str:
        """The name inside the bucket; empty for the bucket itself."""
        return "/".join(self.parts[1 + find_scheme(self.scheme).bucket_names :])

    @property
    def store(self) -> Store:
        """The store that the path is in.

        Raises:
            UsageError: no store has this scheme.
            MissingPackageError: the package of the store is missing.
        """
        from megtool.storage.stores.connect import connect

        try:
            return connect(self.bucket_url)
        except MegtoolError as e:
            if e.file == self.bucket_url:
                e.file = str(self)
            raise

    @property
    def parent(self) -> Self:
        """The folder that it is in; the bucket is in none, and is its own."""
        return super().parent if self.key else self

    @property
    def parents(self) -> tuple[Self, ...]:
        """All folders that it is in, up to the bucket."""
        out: list[Self] = []
        path = self
        while path.key:
            path = path.parent
            out.append(path)
        return tuple(out)

    def is_absolute(self) -> bool:
        """Whether it is a whole URL."""
        return bool(self.parts) and SCHEME.fullmatch(self.parts[0]) is not None

    def absolute(self) -> Self:
        """The path itself."""
        return self

    def resolve(self, strict: bool = False) -> Self:
        """The path itself: stores have no links."""
        return self

    def expanduser(self) -> Self:
        """The path itself."""
        return self
