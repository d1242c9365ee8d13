"""Optional packages: which are installed, in versions that megtool is made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

PURPOSES = {
    "azure": "az:// locations",
    "data": "text from Parquet and datasets, and chat templates",
    "gguf": "GGUF files of llama.cpp",
    "hf": "tokenizers and models of transformers",
    "hub": "hf:// locations",
    "modelopt": "quantize --backend modelopt",
    "report": "pages of --report",
    "retro": "chunk databases and neighbors of Retro",
    "stores": "s3://, gs:// and https:// locations",
    "tasks": "evaluate --tasks, by lm-eval",
    "te": "--kernels te: Transformer Engine, on CUDA",
    "train": "finetune with loss curves and TensorBoard",
    "zarr": "zarr and tensorstore checkpoints with encoded chunks",
}
"""What each extra of the package is for; extras of megtool's own development are not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that an extra asks for; `installed` is empty where it is missing."""

    name: str
    required: str
    installed: str
    is_fitting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """An optional part of megtool, by name, and the packages that it needs."""

    name: str
    purpose: str
    packages: tuple[Package, ...]

    @property
    def is_complete(self) -> bool:
        """Whether all its packages are there, in versions that fit."""
        return all(p.installed and p.is_fitting for p in self.packages)

    @property
    def command(self) -> str:
        """What installs it."""
        return f"pip install 'megtool[{self.name}]'"


def find_extras() -> tuple[Extra, ...]:
    """All extras, by what megtool's own metadata says of them."""
    requirements = [Requirement(text) for text in metadata.requires("megtool") or ()]
    extras = []
    for name, purpose in PURPOSES.items():
        packages = {r.name: _look_up(r) for r in _requirements_of(name, requirements)}
        extras.append(
            Extra(name=name, purpose=purpose, packages=tuple(packages[n] for n in sorted(packages)))
        )
    return tuple(extras)


def _requirements_of(extra: str, requirements: Sequence[Requirement]) -> Iterator[Requirement]:
    """The requirements of an extra, and of the extras that it names."""
    for requirement in requirements:
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            continue
        if not marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "megtool":
            for inner in requirement.extras:
                yield from _requirements_of(inner, requirements)
        else:
            yield requirement


def _look_up(requirement: Requirement) -> Package:
    try:
        installed = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        installed = ""
    return Package(
        name=requirement.name,
        required=str(requirement.specifier),
        installed=installed,
        is_fitting=not installed or requirement.specifier.contains(installed, prereleases=True),
    )
