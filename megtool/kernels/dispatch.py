"""Selects the implementation of a kernel: once per device, or by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property
from typing import Generic, Literal, ParamSpec, TypeVar, cast, get_args

import torch

from megtool.errors import UsageError
from megtool.kernels import launch
from megtool.kernels.transformer_engine import library as transformer_engine

Implementation = Literal["auto", "torch", "compile", "triton", "te"]
Chosen = Literal["torch", "compile", "triton", "te"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

P = ParamSpec("P")
R = TypeVar("R")

_logger = logging.getLogger(__name__)
_requested: ContextVar[Implementation] = ContextVar("megtool_kernels", default="auto")


@contextmanager
def use(name: Implementation) -> Iterator[None]:
    """Run kernels by the implementation called `name` inside the block.

    `auto` is Triton's kernels on a CUDA device where Triton is installed, and torch's own
    operations elsewhere. `compile` is torch.compile of the reference. `te` is Transformer Engine
    where it has the operation (`transformer_engine.SCOPE`) and what `auto` runs where it has not,
    which is logged once for each.

    The choice holds for the calling thread, and for a forward pass: backward follows the forward it
    belongs to, wherever and whenever it runs. What is recomputed is chosen anew, by the block it is
    in, and as `auto` in a thread of autograd's own: who recomputes remembers
    `requested_implementation` (`model.recompute`).

    Raises:
        UsageError: no implementation is called so.
    """
    if name not in IMPLEMENTATIONS:
        raise UsageError(
            f"the kernels {name!r} are unknown", hint=f"known: {', '.join(IMPLEMENTATIONS)}"
        )
    token = _requested.set(name)
    try:
        yield
    finally:
        _requested.reset(token)


def requested_implementation() -> Implementation:
    """The name asked for; a backward pass that chooses, or recomputes, remembers it, for `use`."""
    return _requested.get()


def chosen(device: torch.device | str) -> Chosen:
    """The implementation that runs on `device`, proved to be there.

    Raises:
        MissingPackageError: the one asked for is not installed, or cannot run on `device`.
    """
    kind = torch.device(device).type
    name = _requested.get()
    if name == "auto":
        return _automatic(kind)
    if name == "triton":
        launch.require(kind)
    elif name == "te":
        transformer_engine.require(kind)
    return name


@cache
def _automatic(device_kind: str) -> Chosen:
    return "triton" if device_kind == "cuda" and launch.is_installed() else "torch"


class Kernel(Generic[P, R]):
    """One operation and its implementations, which have one signature.

    `name` is for messages. `reference` is made of torch's operations and always there.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[P, R],
        *,
        triton: Callable[P, R] | None = None,
        te: Callable[P, R] | None = None,
    ) -> None:
        self.name = name
        self.reference = reference
        self._ways = {"torch": reference, "triton": triton, "te": te}
        self._announced: set[str] = set()

    @cached_property
    def compiled(self) -> Callable[P, R]:
        """torch.compile of the reference; it compiles at its first call."""
        return cast("Callable[P, R]", torch.compile(self.reference))

    def on(self, device: torch.device, *, without: tuple[Chosen, ...] = ()) -> Callable[P, R]:
        """The implementation that runs on `device`; those in `without` cannot do this call.

        Raises:
            MissingPackageError: as `chosen`.
        """
        if (
            _requested.get() == "auto" and device.type == "cpu"
        ):  # the usual way on a CPU, kept short
            return self.reference
        name = chosen(device)
        if name == "compile":
            return self.compiled
        way = None if name in without else self._ways[name]
        if way is None:
            instead = _automatic(device.type)
            if instead in without or self._ways[instead] is None:
                instead = "torch"
            if _requested.get() != "auto" and name not in self._announced:
                self._announced.add(name)
                _logger.info("%s has no %s like this: %s runs it", name, self.name, instead)
            way = self._ways[instead] or self.reference
        return way
