"""Work in small units, so that every worker of a tiny model has a share."""

from __future__ import annotations

import pytest

from megtool.checkpoint.transport import work_units
from tests.support.runs.worker_runs import UNIT_BYTES


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units in few bytes."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", UNIT_BYTES)
