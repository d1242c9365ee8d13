"""Checkpoints as raw files, for tests of plans and copies."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.support.checkpoints import raw_checkpoints


@pytest.fixture(scope="session")
def raw() -> ModuleType:
    """Builders, writers and readers of raw checkpoints."""
    return raw_checkpoints
