"""Selects the implementation of a kernel: once per device, or by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, cached_property
from typing import Generic, Literal, ParamSpec, TypeVar, cast, get_args

import torch

from megtool.errors import UsageError
from megtool.kernels import launch, peers
from megtool.kernels.transformer_engine import library as transformer_engine
from megtool.options.kernels import Implementation, Peer

Chosen = Literal["torch", "compile", "triton", "te"] | Peer
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)

P = ParamSpec("P")
R = TypeVar("R")

_logger = logging.getLogger(__name__)
_requested: ContextVar[Implementation] = ContextVar("megtool_kernels", default="auto")


@contextmanager
def use(name: Implementation) -> Iterator[None]:
    """Run kernels by the implementation called `name` inside the block.

    `auto` takes, on a CUDA device, the first of: kernels of a package that an operation prefers
    (`Kernel.preferred`) and that is installed, megtool's own by Triton, torch's operations;
    elsewhere torch's operations. `compile` is torch.compile of the reference. `te` is Transformer
    Engine where it has the operation (`transformer_engine.SCOPE`), and the name of a package
    (`peers.PACKAGES`) that package where it has one; what `auto` runs where they have not, which is
    logged once for each.

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
    require_package(name, kind)
    return name


def require_package(name: Implementation, device_kind: str) -> None:
    """Make sure that Transformer Engine, or the package that an implementation is named after, runs
    on devices of a kind, such as "cuda". Other implementations need no package of their own.

    Raises:
        MissingPackageError: it is not installed, or does not run there.
    """
    if name == "te":
        transformer_engine.require(device_kind)
    elif (peer := peers.as_peer(name)) is not None:
        peers.require(peer, device_kind)


@cache
def _automatic(device_kind: str) -> Chosen:
    return "triton" if device_kind == "cuda" and launch.is_installed() else "torch"


class Kernel(Generic[P, R]):
    """One operation and its implementations, which have one signature.

    `name` is for messages. `reference` is made of torch's operations and always there. `packages`
    are the ways of other packages by name, of which `auto` takes those in `preferred`, in this
    order, before megtool's own: kernels that their authors have timed on GPUs.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[P, R],
        *,
        triton: Callable[P, R] | None = None,
        te: Callable[P, R] | None = None,
        packages: Mapping[Peer, Callable[P, R]] | None = None,
        preferred: Sequence[Peer] = (),
    ) -> None:
        self.name = name
        self.reference = reference
        self.preferred = tuple(preferred)
        self._ways: dict[Chosen, Callable[P, R] | None] = {
            "torch": reference,
            "triton": triton,
            "te": te,
        }
        self._ways.update((packages or {}).items())
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
        if _requested.get() == "auto":
            return self._ways[self.automatic(device, without=without)] or self.reference
        way = None if name in without else self._ways.get(name)
        if way is None:
            instead = self.automatic(device, without=without)
            self._announce(name, f"{name} has no {self.name} like this: {instead} runs it")
            way = self._ways[instead] or self.reference
        return way

    def automatic(self, device: torch.device, *, without: tuple[Chosen, ...] = ()) -> Chosen:
        """Return what `auto` takes on `device`, of all but `without`."""
        for peer in self.preferred:
            if peer not in without and peers.is_usable(peer, device):
                self._announce(peer, f"{peer} {peers.installed_version(peer)} runs {self.name}")
                return peer
        usual = _automatic(device.type)
        return "torch" if usual in without or self._ways[usual] is None else usual

    def _announce(self, name: str, message: str) -> None:
        if name not in self._announced:
            self._announced.add(name)
            _logger.info("%s", message)
