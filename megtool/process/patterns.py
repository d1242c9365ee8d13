"""Regular expressions out of files, which the file may have written to never end.

The syntax is that of `re`, as the libraries read it that wrote these files. The matching is that of
the package `regex`, which can be stopped.
"""

from __future__ import annotations

import functools
import importlib
import re
import threading
import time
from typing import Any

from megtool.errors import FormatError

MAX_PATTERN_CHARACTERS = 16_384
"""The longest regular expression that is compiled."""

_SECONDS = 4.0
"""Time that slow matches of all patterns may take together, until one is refused."""

_SLOW_SECONDS = 0.005
_LOCK = threading.Lock()
_spent = 0.0


class Pattern:
    """A regular expression whose matching is limited in time.

    Raises:
        re.error: the text is no regular expression of `re`, or too long.
    """

    def __init__(self, text: str) -> None:
        regex: Any = importlib.import_module("regex")
        if len(text) > MAX_PATTERN_CHARACTERS:
            raise re.error(f"it has {len(text):,} characters, {MAX_PATTERN_CHARACTERS:,} at most")
        self.text = text
        try:
            re.compile(text)
            self._pattern: Any = regex.compile(text, regex.V0)
        except (RecursionError, OverflowError, MemoryError, regex.error) as e:
            raise re.error(str(e) or type(e).__name__) from e

    def match(self, name: str) -> Any:
        """Return the match at the beginning of `name`, or None.

        Raises:
            FormatError: the pattern does not end in time.
        """
        return self._run(self._pattern.match, name)

    def fullmatch(self, name: str) -> Any:
        """Return the match of all of `name`, or None.

        Raises:
            FormatError: the pattern does not end in time.
        """
        return self._run(self._pattern.fullmatch, name)

    def search(self, name: str) -> Any:
        """Return the first match anywhere in `name`, or None.

        Raises:
            FormatError: the pattern does not end in time.
        """
        return self._run(self._pattern.search, name)

    def _run(self, function: Any, name: str) -> Any:
        start = time.perf_counter()
        try:
            match = function(name, timeout=_SECONDS)
        except TimeoutError:
            raise self._refusal() from None
        seconds = time.perf_counter() - start
        if seconds > _SLOW_SECONDS and _is_over(seconds):
            raise self._refusal()
        return match

    def _refusal(self) -> FormatError:
        shown = self.text if len(self.text) <= 80 else self.text[:77] + "..."
        return FormatError(
            f"the regular expression {shown!r} takes too long to match",
            hint="write it without repeats inside repeats, as (a+)+ has them",
            error_id="slow-pattern",
        )


@functools.lru_cache(4096)
def compile_pattern(text: str) -> Pattern:
    """Return the pattern of a text, compiled once.

    Raises:
        re.error: the text is no regular expression of `re`, or too long.
    """
    return Pattern(text)


def _is_over(seconds: float) -> bool:
    """Add the time of a slow match, and return whether that was too much; then count anew."""
    global _spent
    with _LOCK:
        _spent += seconds
        if _spent <= _SECONDS:
            return False
        _spent = 0.0
        return True
