"""Packages of the field whose kernels can stand for megtool's own: found, checked, loaded.

A package is usable in versions that its table entry names, if its functions have the arguments that
are passed to them here. `--kernels NAME` asks for one by name; `auto` takes those that
`dispatch.Kernel` lists as `preferred`, and never fails for one that is broken.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any, cast, get_args

import torch
from packaging.specifiers import SpecifierSet

from megtool.errors import MissingPackageError
from megtool.kernels import launch
from megtool.options.kernels import Peer

NAMES: tuple[Peer, ...] = get_args(Peer)

Function = Callable[..., Any]
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPackage:
    """A package: its distribution and versions, the functions that are called, and what it runs.

    `functions` are `module:name` with the arguments that are passed by name. What `is_triton` runs
    in Triton's interpreter, too.
    """

    name: Peer
    distribution: str
    versions: str
    functions: Mapping[str, frozenset[str]]
    runs: str
    is_triton: bool = False
    build: str = ""

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install {self.build}'{self.distribution}{self.versions}'"


_NEEDS_CUDA = "--no-build-isolation "
_STATES = frozenset({"scale", "initial_state", "output_final_state", "cu_seqlens"})
_ATTENTION = frozenset({"softmax_scale", "causal", "window_size", "softcap"})
_NORM = frozenset({"eps", "offset", "casting_mode", "in_place"})

# Argument names are those of flash-linear-attention 0.5.0 and 0.6.0, mamba-ssm 2.2.0 to
# 2.3.2.post1, causal-conv1d 1.4.0 to 1.6.1, liger-kernel 0.7.0 to 0.8.5, flash-attn 2.7.0 to 2.8.3,
# and flash-attn-3 as of 2026-08.
PACKAGES: Mapping[Peer, PeerPackage] = {
    package.name: package
    for package in (
        PeerPackage(
            name="fla",
            distribution="fla-core",
            versions=">=0.5,<1",
            functions={
                "fla.ops.gated_delta_rule:chunk_gated_delta_rule": _STATES
                | {"use_qk_l2norm_in_kernel"},
                "fla.ops.kda:chunk_kda": _STATES | {"use_qk_l2norm_in_kernel"},
            },
            runs="the gated delta rule and Kimi's delta rule",
            is_triton=True,
        ),
        PeerPackage(
            name="mamba-ssm",
            distribution="mamba-ssm",
            versions=">=2.2,<3",
            functions={
                "mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined": frozenset(
                    {"D", "initial_states", "seq_idx", "return_final_states"}
                )
            },
            runs="the scan of Mamba-2",
            is_triton=True,
            build=_NEEDS_CUDA,
        ),
        PeerPackage(
            name="causal-conv1d",
            distribution="causal-conv1d",
            versions=">=1.4,<2",
            functions={
                "causal_conv1d:causal_conv1d_fn": frozenset(
                    {"bias", "seq_idx", "initial_states", "activation"}
                )
            },
            runs="the short convolution before a recurrence",
            build=_NEEDS_CUDA,
        ),
        PeerPackage(
            name="liger",
            distribution="liger-kernel",
            versions=">=0.7,<1",
            functions={
                "liger_kernel.ops.rms_norm:LigerRMSNormFunction": _NORM,
                "liger_kernel.ops.layer_norm:LigerLayerNormFunction": frozenset({"eps"}),
                "liger_kernel.ops.fused_add_rms_norm:LigerFusedAddRMSNormFunction": _NORM,
                "liger_kernel.ops.swiglu:LigerSiLUMulFunction": frozenset(),
                "liger_kernel.ops.geglu:LigerGELUMulFunction": frozenset(),
            },
            runs="norms with weights, and gated silu and gelu by tanh",
            is_triton=True,
        ),
        PeerPackage(
            name="flash-attn",
            distribution="flash-attn",
            versions=">=2.7,<3",
            functions={
                "flash_attn:flash_attn_func": _ATTENTION,
                "flash_attn:flash_attn_varlen_func": _ATTENTION,
            },
            runs="attention in 16 bits, if asked for by name",
            build=_NEEDS_CUDA,
        ),
        PeerPackage(
            name="flash-attn-3",
            distribution="flash-attn-3",
            versions=">=3.0.0b1,<4",
            functions={
                "flash_attn_interface:flash_attn_func": _ATTENTION,
                "flash_attn_interface:flash_attn_varlen_func": _ATTENTION,
            },
            runs="attention in 16 bits on Hopper, if asked for by name",
            build=_NEEDS_CUDA,
        ),
    )
}


def as_peer(name: str) -> Peer | None:
    """Return the package that `--kernels name` asks for; None for all other implementations."""
    return cast("Peer", name) if name in PACKAGES else None


def installed_version(name: Peer) -> str:
    """Return the version that is installed; empty if none is."""
    try:
        return metadata.version(PACKAGES[name].distribution)
    except metadata.PackageNotFoundError:
        return ""


@cache
def load(name: Peer) -> Mapping[str, Function]:
    """Import a package, and return its functions by name.

    Raises:
        MissingPackageError: it is not installed, in another version, cannot be imported, or its
            functions have other arguments.
    """
    package = PACKAGES[name]
    version = installed_version(name)
    if not version:
        raise MissingPackageError(
            f"kernels {name!r} need {package.distribution}, which is not installed",
            hint=package.install,
        )
    if not SpecifierSet(package.versions).contains(version, prereleases=True):
        raise MissingPackageError(
            f"kernels {name!r} need {package.distribution}{package.versions}, and {version} is "
            "installed",
            hint=package.install,
        )
    functions = {}
    for path, arguments in package.functions.items():
        module, _, function = path.partition(":")
        try:
            functions[function] = value = getattr(importlib.import_module(module), function)
        # Extensions that were built for another torch fail with all of these.
        except (ImportError, RuntimeError, OSError, AttributeError, AssertionError) as error:
            raise MissingPackageError(
                f"{package.distribution} {version} is installed but has no usable {path}: "
                f"{str(error).strip()!r}",
                hint=f"install a version that matches torch {torch.__version__}: {package.install}",
            ) from error
        if missing := arguments - _arguments(value):
            raise MissingPackageError(
                f"{path} of {package.distribution} {version} has no argument "
                f"{', '.join(sorted(missing))}",
                hint=package.install,
            )
    return functions


def _arguments(function: Any) -> frozenset[str]:
    """The names of the arguments of a function, or of a `torch.autograd.Function`."""
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        function = function.forward
    return frozenset(inspect.signature(function).parameters)


def require(name: Peer, device_kind: str) -> None:
    """Make sure that a package runs on devices of a kind, such as "cuda".

    Raises:
        MissingPackageError: it cannot be loaded, or does not run there.
    """
    if device_kind != "cuda" and not (PACKAGES[name].is_triton and _is_interpreted()):
        raise MissingPackageError(
            f"kernels {name!r} were requested on the device {device_kind!r}, and "
            f"{PACKAGES[name].distribution} runs on CUDA alone",
            hint="use a CUDA device, or kernels 'torch'",
            error_id="missing-device",
        )
    load(name)


def _is_interpreted() -> bool:
    return launch.is_installed() and launch.is_interpreted()


@cache
def is_usable(name: Peer, device: torch.device) -> bool:
    """Return whether `auto` can take a package's kernels on a device: a CUDA device, where the
    package loads. One that is there and broken is logged once."""
    if device.type != "cuda" or not installed_version(name):
        return False
    try:
        load(name)
    except MissingPackageError as error:
        _logger.warning("%s; megtool's own kernels run instead", error.message)
        return False
    return True


def is_installed(name: Peer) -> bool:
    """Return whether there is a module of the package, in any version."""
    first = next(iter(PACKAGES[name].functions))
    return find_spec(first.partition(":")[0].partition(".")[0]) is not None


def call(name: Peer, function: str) -> Function:
    """Return a function of a package that `require` or `is_usable` has found usable."""
    return load(name)[function]


def apply(name: Peer, function: str, *args: Any) -> Any:
    """Apply a `torch.autograd.Function` of a package."""
    return cast("Any", load(name)[function]).apply(*args)
