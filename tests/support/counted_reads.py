"""How many bytes are read from files."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from megtool.storage.files import Files


class CountedReads:
    """Counts the bytes that `Files` reads from files while it is active."""

    def __enter__(self) -> CountedReads:
        self.num_bytes, self._system = 0, Files.system

        def count(files: Files, function: Callable[..., Any], /, *args: Any) -> Any:
            result = self._system(files, function, *args)
            self.num_bytes += result if function is os.preadv else 0
            return result

        Files.system = count  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Files.system = self._system  # type: ignore[method-assign]
