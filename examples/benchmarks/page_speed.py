"""Pages of reports in a real browser: bytes, and milliseconds until the first figures are drawn.

python examples/benchmarks/page_speed.py [--model SRC] [--layers 61] [--experts 256] [--rounds 5]

`inspect --tensors` of a model (with `--model`, also with `--stats`), and of the headers of a
mixture of experts of 671B parameters with optimizer state, of which every rank is shown. The time
is the page's own clock, from navigation on. It needs Debian's chromium and chromium-driver, and
selenium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.race import run_job
from bench.table import Table, parser, show, verdict, workplace

MAX_MS, MAX_BYTES = 2000, 5_000_000
SWITCHES = (
    *("headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"),
    *("disable-background-networking", "disable-component-update", "disable-sync"),
)


def open_browser(profile: str) -> Any:
    """Chromium with a new profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for switch in (*SWITCHES, f"user-data-dir={profile}", "window-size=1280,1000"):
        options.add_argument(f"--{switch}")
    options.binary_location = shutil.which("chromium") or ""
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def milliseconds(driver: Any, page: Path) -> tuple[float, float]:
    """Until the visible figures are drawn, and until all are."""
    driver.get(page.resolve().as_uri())
    while not driver.execute_script("return document.documentElement.dataset.complete"):
        time.sleep(0.02)
    ready = float(driver.execute_script("return document.documentElement.dataset.ready"))
    return ready, float(driver.execute_script("return performance.now()"))


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=None)
    options.add_argument("--model", type=Path, help="a checkpoint; without it only the experts")
    options.add_argument("--layers", type=int, default=61)
    options.add_argument("--experts", type=int, default=256)
    given = options.parse_args()
    table = Table(
        title="Pages of reports",
        head=("page", "MB", "limit", "ms until drawn (min)", "limit", "ms (median)", "all (min)"),
    )
    with workplace(given) as folder, tempfile.TemporaryDirectory() as profile:
        sources = {}
        if given.model is not None:
            sources["inspect --stats of the model"] = (given.model, ["--tensors", "--stats"])
        moe = Path(folder) / "moe"
        run_job("metadata", {"folder": str(moe), "layers": given.layers, "experts": given.experts})
        sources["inspect of the mixture of experts"] = (moe, ["--tensors"])
        driver = open_browser(profile)
        for number, (name, (source, flags)) in enumerate(sources.items()):
            page = Path(folder) / f"{number}.html"
            command = [sys.executable, "-m", "megtool", "inspect", source, *flags, "-q"]
            subprocess.run([*command, "--report", page], check=True, stdout=subprocess.DEVNULL)
            runs = sorted(milliseconds(driver, page) for _ in range(given.rounds))
            size, ready = page.stat().st_size, [r for r, _ in runs]
            table.add(
                name,
                f"{size / 1e6:.2f}",
                verdict(size, MAX_BYTES),
                f"{ready[0]:.0f}",
                verdict(ready[0], MAX_MS),
                f"{ready[len(ready) // 2]:.0f}",
                f"{min(a for _, a in runs):.0f}",
                page=name,
                num_bytes=size,
                ms=ready,
            )
        driver.quit()
        show(given, Path(folder), [table])


if __name__ == "__main__":
    main()
