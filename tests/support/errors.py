"""Assertions on errors: their type, what they are about and where, and not how they say it."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Generic, TypeVar

import pytest

from megtool.errors import MegtoolError

E = TypeVar("E", bound=MegtoolError)


class raises(Generic[E]):
    """Like `pytest.raises`, for megtool's errors; `as e` gives the same `ExceptionInfo`.

    Args:
        error: The type, or several. Its exit status is checked with it; subclasses of the plain
            `MegtoolError` have their own.
        facts: Values that the error holds, in this order: names, numbers, options.
        file: The file that the error names; a path, or the end of one.
        tensor: The tensor that the error names.
        hint: Whether there is a hint, or a value that it holds.
        id: The id of the error; see `megtool.errors.ERROR_IDS`.
        match: A pattern that the whole text matches, where no value tells the error apart.
    """

    def __init__(
        self,
        error: type[E] | tuple[type[E], ...],
        *facts: object,
        file: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        hint: bool | str | None = None,
        id: str | None = None,
        match: str | None = None,
    ) -> None:
        self._types = error if isinstance(error, tuple) else (error,)
        self._facts = [str(fact) for fact in facts]
        self._file, self._tensor, self._hint, self._id = file, tensor, hint, id
        self._raises = pytest.raises(error, match=match)

    def __enter__(self) -> pytest.ExceptionInfo[E]:
        self._info = self._raises.__enter__()
        return self._info

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        is_expected = bool(self._raises.__exit__(kind, value, traceback))
        if is_expected:
            self._check(self._info.value)
        return is_expected

    def _check(self, error: E) -> None:
        kinds = {kind for kind in self._types if isinstance(error, kind)}
        statuses = {(type(error) if kind is MegtoolError else kind).exit_status for kind in kinds}
        assert error.exit_status in statuses, f"exit status {error.exit_status}: {error}"
        if self._id is not None:
            assert error.id == self._id, f"id {error.id}: {error}"
        text, start = str(error), 0
        for fact in self._facts:
            position = text.find(fact, start)
            assert position >= 0, f"the error does not hold {fact!r}: {text}"
            start = position + len(fact)
        if self._file is not None:
            path = os.fspath(self._file)
            assert error.file is not None, f"no file is named: {error}"
            assert error.file == path or Path(error.file).match(path), f"not file {path}: {error}"
        if self._tensor is not None:
            assert error.tensor == self._tensor, f"not tensor {self._tensor}: {error}"
        if isinstance(self._hint, str):
            assert self._hint in (error.hint or ""), (
                f"the hint does not hold {self._hint!r}: {error}"
            )
        elif self._hint is not None:
            assert bool(error.hint) == self._hint, f"hint: {error}"
