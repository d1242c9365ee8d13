"""Optional packages are those of the package's own metadata."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from megtool.machine.packages import PURPOSES, find_extras

_DEVELOPMENT = {"all", "demo", "dev", "docs", "lint", "peers", "test"}


def test_every_extra_for_users_has_a_purpose(checkout: Path) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    assert set(PURPOSES) == set(project["optional-dependencies"]) - _DEVELOPMENT


def test_packages_and_versions_are_those_that_are_installed() -> None:
    extras = {extra.name: extra for extra in find_extras()}
    gguf = extras["gguf"].packages
    assert [(p.name, p.installed, p.is_fitting) for p in gguf] == [
        ("gguf", metadata.version("gguf"), True)
    ]
    assert {"datasets", "transformers", "matplotlib"} <= {p.name for p in extras["train"].packages}
    assert extras["hf"].is_complete
    assert extras["hf"].command == "pip install 'megtool[hf]'"


@pytest.mark.parametrize(("version", "is_fitting"), [("0.1.0", False), ("0.17.0", True)])
def test_a_version_out_of_range_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, version: str, is_fitting: bool
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    extra = next(extra for extra in find_extras() if extra.name == "gguf")
    assert extra.packages[0].is_fitting == extra.is_complete == is_fitting


def test_a_missing_package_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", refuse)
    assert not any(extra.is_complete or extra.packages[0].installed for extra in find_extras())
