"""Replaced functions come back, and modules that are imported later are waited for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megtool.frameworks.installed import Installed


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that can be imported."""
    (tmp_path / "awaited_module.py").write_text("def answer():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "awaited_module", raising=False)
    return "awaited_module"


def test_a_module_is_changed_as_soon_as_it_is_imported(written: str) -> None:
    finders = list(sys.meta_path)
    with Installed() as installed:

        def change(module: ModuleType) -> None:
            installed.replace(module, "answer", lambda original: lambda: original() + 1)
            installed.replace(module, "unknown", lambda original: original)

        installed.when_imported(written, change)
        module = importlib.import_module(written)
        assert module.answer() == 2
        installed.when_imported(written, change)  # it is there by now
        assert module.answer() == 3
        assert not hasattr(module, "unknown")
    assert module.answer() == 1
    assert sys.meta_path == finders


def test_what_is_undone_waits_no_longer(written: str) -> None:
    with Installed() as installed:
        installed.when_imported(written, lambda module: setattr(module, "answer", None))
        installed.when_imported("megtool_no_such_module", print)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("megtool_no_such_module")
    assert importlib.import_module(written).answer() == 1
