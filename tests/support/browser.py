"""Debian's Chromium, driven by selenium: opens pages, and tells what it logged and asked for."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SWITCHES = (
    *("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"),
    *("disable-background-networking", "disable-component-update", "disable-sync"),
    "disable-dev-shm-usage",
)


def missing_browser() -> str | None:
    """Why no browser can be driven here; None if one can."""
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "selenium is not installed"
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed (apt-get install chromium chromium-driver)"
    return None


class Browser:
    """A browser of its own profile, which a test asks for what a page shows."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, *, dark: bool = False) -> None:
        """Open a page and wait until all of its figures are drawn."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(page.resolve().as_uri())
        self.wait("return document.documentElement.dataset.complete === 'yes'")

    def wait(self, script: str, seconds: float = 60.0) -> Any:
        """Run a script until it returns something."""
        end = time.monotonic() + seconds
        while not (value := self.driver.execute_script(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"{script}: {self.logged()}")
            time.sleep(0.05)
        return value

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def logged(self) -> list[str]:
        """Messages of the console since the last call, errors and warnings."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requested(self) -> list[str]:
        """What the page asked for, besides itself."""
        names: list[str] = self.run(
            "return performance.getEntriesByType('resource').map(e=>e.name)"
        )
        return [name for name in names if not name.startswith(("data:", "blob:"))]

    def hover(self, selector: str, *, x: float = 0.5, y: float = 0.5) -> None:
        """Move the mouse to a place inside an element, in shares of its size."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block:'center'})", selector)
        box = self.run(
            "const b=document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [b.x,b.y,b.width,b.height]",
            selector,
        )
        for step in (0.98, 1.0):
            place = {"x": box[0] + box[2] * x * step, "y": box[1] + box[3] * y * step}
            self.driver.execute_cdp_cmd(
                "Input.dispatchMouseEvent", {"type": "mouseMoved", "button": "none", **place}
            )


@contextmanager
def run_browser(profile: Path) -> Iterator[Browser]:
    """A browser with a new profile in a folder."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for switch in (*SWITCHES, f"user-data-dir={profile}", "window-size=1280,1000"):
        options.add_argument(f"--{switch}")
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
