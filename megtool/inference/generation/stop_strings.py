"""Stop strings, matched across token boundaries and cut exactly."""

from __future__ import annotations

from collections.abc import Sequence

from megtool.errors import UsageError


class Stops:
    """Text that grows piece by piece and ends before the first stop string that is complete in it.

    The outcome does not depend on how the text is cut into pieces. Text that may be the beginning
    of a stop string is held back until it is known whether it is.

    Raises:
        UsageError: a stop string is empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        if "" in strings:
            raise UsageError("a stop string is empty", hint="--stop TEXT needs a text")
        self._strings = tuple(strings)
        self._pending = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """Take in a piece; what may now be shown of the text. Nothing once `stopped`."""
        if self.stopped:
            return ""
        text = self._pending + piece
        matches = [(start + len(s), start) for s in self._strings if (start := text.find(s)) >= 0]
        if matches:
            self.stopped, self._pending = True, ""
            return text[: min(matches)[1]]
        keep = max((_overlap(text, s) for s in self._strings), default=0)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, now that no more text comes."""
        text, self._pending = self._pending, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
