"""Which implementation of a kernel runs: chosen once per device, or forced by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch

from megtool.errors import UsageError

Implementation = Literal["auto", "torch", "compile", "triton", "te"]
Chosen = Literal["torch", "compile", "triton", "te"]

_asked: ContextVar[Implementation] = ContextVar("megtool_kernels", default="auto")


@contextmanager
def use(name: Implementation) -> Iterator[None]:
    """Run kernels by the implementation `name` inside the block (of this thread)."""
    if name not in get_args(Implementation):
        raise UsageError(
            f"no kernels are called {name!r}", hint=f"known: {', '.join(get_args(Implementation))}"
        )
    token = _asked.set(name)
    try:
        yield
    finally:
        _asked.reset(token)


def chosen(device: torch.device | str) -> Chosen:
    """The implementation that runs on `device`."""
    name = _asked.get()
    return "torch" if name == "auto" else name
