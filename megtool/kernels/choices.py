"""What `auto` takes for each operation on a device, and which packages are there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megtool.kernels import peers
from megtool.kernels.attention import softmax
from megtool.kernels.dispatch import Kernel
from megtool.kernels.elementwise import activation, dropout_add, norm, rotary
from megtool.kernels.experts import grouped_gemm
from megtool.kernels.fp8 import cast
from megtool.kernels.recurrence import causal_conv, delta_rule, kimi_delta, ssd
from megtool.kernels.vocabulary import lm_head

_MODULES = (
    *(norm, activation, dropout_add, rotary, causal_conv, ssd, delta_rule, kimi_delta),
    *(grouped_gemm, cast, softmax, lm_head),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """An operation, and the implementation of it that `auto` takes."""

    operation: str
    implementation: str


def automatic_choices(device: torch.device) -> tuple[KernelChoice, ...]:
    """Return what `auto` takes on a device, for inputs that every implementation can compute."""
    kernels = [k for module in _MODULES for k in vars(module).values() if isinstance(k, Kernel)]
    return tuple(
        KernelChoice(operation=k.name, implementation=k.automatic(device)) for k in kernels
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFinding:
    """A package of the field: the installed version (empty: none), and why it cannot be used."""

    name: str
    runs: str
    installed: str
    problem: str
    operations: tuple[str, ...]


def find_peers(device: torch.device) -> tuple[PeerFinding, ...]:
    """Look at every package; `operations` are those that `auto` gives it on a device."""
    from megtool.errors import MissingPackageError

    choices = automatic_choices(device)
    findings = []
    for name, package in peers.PACKAGES.items():
        problem = ""
        try:
            peers.load(name)
        except MissingPackageError as error:
            problem = f"{error.message}: {error.hint}"
        findings.append(
            PeerFinding(
                name=name,
                runs=package.runs,
                installed=peers.installed_version(name),
                problem=problem,
                operations=tuple(c.operation for c in choices if c.implementation == name),
            )
        )
    return tuple(findings)
