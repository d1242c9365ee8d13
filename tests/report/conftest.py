"""A browser for the tests of pages; they are skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, missing_browser, run_browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if (reason := missing_browser()) is not None:
        pytest.skip(reason)
    with run_browser(tmp_path_factory.mktemp("profile")) as running:
        yield running
