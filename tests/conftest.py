"""Settings and fixtures that every test shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Several workers share few cores, and no test may reach a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

# Time limits per example say more about the machine than about the code.
settings.register_profile("megtool", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("megtool")


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of this checkout."""
    return Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what needs a GPU where there is none."""
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
