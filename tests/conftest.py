"""Settings and fixtures that every test shares."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.audit import Audit

# Several workers share few cores, and no test may reach a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton's kernels run in Python where there is no GPU; it looks once, when it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Time limits per example say more about the machine than about the code.
settings.register_profile("megtool", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("megtool")


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """A command run in this process sends the log to stderr; the next test finds it as before."""
    logger = logging.getLogger("megtool")
    before = logger.level, list(logger.handlers), logger.propagate
    yield
    level, logger.handlers[:], logger.propagate = before
    logger.setLevel(level)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of this checkout."""
    return Path(__file__).resolve().parent.parent


LONGEST = ("test_readme.py",)
"""Files that would keep one process busy at the end while the others wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest; skip, and say why, what needs a GPU where there is none."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def carry() -> Callable[..., dict[str, Any]]:
    """Move arrays from a read side to a written one, element by element through placements."""
    from tests.support.checkpoints import arrays

    return arrays.carry


@pytest.fixture(scope="session")
def materialize() -> Callable[[Any, Path, dict[str, Any]], None]:
    """Write a destination and the tensors (numpy, in the dtype's view) that belong into it."""
    from tests.support.checkpoints import arrays

    return arrays.materialize


@pytest.fixture(scope="session")
def audit() -> Audit:
    """The audit hook of this process; set `watching`, then look at `seen`."""
    hook = Audit()
    sys.addaudithook(hook)
    return hook
