"""Write a page as one HTML file that loads nothing: jinja2's template, plotly.js inside."""

from __future__ import annotations

import base64
import gzip
import json
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from megtool import __version__
from megtool.errors import MissingPackageError, StorageError
from megtool.report.page import Page, PageFigure, PageTable
from megtool.report.sections import finite_json
from megtool.storage.files import Files
from megtool.storage.location.path import make_folder

MAX_PLAIN_BYTES = 1 << 20
"""A report of more JSON than this is compressed on its page; Save JSON writes it in full."""

_HINT = "pip install 'megtool[report]'"


def check_page_packages() -> None:
    """Refuse to write a page before any work is done, if its packages are missing.

    Raises:
        MissingPackageError: jinja2 or plotly is not installed.
    """
    try:
        import jinja2  # noqa: F401
    except ModuleNotFoundError as e:
        raise MissingPackageError("--report needs the jinja2 package", hint=_HINT) from e
    _read_library()


def has_page_packages() -> bool:
    """Whether pages can be written here."""
    try:
        check_page_packages()
    except MissingPackageError:
        return False
    return True


def write_page(path: Path, page: Page) -> None:
    """Write a page; a file that exists is replaced, with one rename.

    Raises:
        MissingPackageError: jinja2 or plotly is not installed.
        StorageError: it cannot be written.
    """
    data = render_page(page).encode()
    try:
        make_folder(path.parent)
        Files().replace_file(path, data, f".{path.name}.new")
    except OSError as e:
        raise StorageError(f"cannot write the report: {e.strerror or e}", file=path) from e


def render_page(page: Page) -> str:
    """The HTML of a page.

    Raises:
        MissingPackageError: jinja2 or plotly is not installed.
    """
    check_page_packages()
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    data = json.dumps(finite_json(page.data), separators=(",", ":"))
    is_plain = len(data) <= MAX_PLAIN_BYTES
    return environment.from_string(_read_asset("page.html")).render(
        page=page,
        css=_read_asset("page.css"),
        script=_read_asset("page.js"),
        library=_pack(_read_library()),
        content=_pack(json.dumps(_content(page), separators=(",", ":"))),
        data=data.replace("<", "\\u003c") if is_plain else _pack(data),
        data_type="application/json" if is_plain else "application/gzip",
        version=__version__,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _content(page: Page) -> dict[str, Any]:
    """What the script draws: figures and tables, by the ids of the template."""
    figures, tables = {}, {}
    for number, section in enumerate(page.sections, 1):
        for index, block in enumerate(section.blocks, 1):
            key = f"b{number}-{index}"
            if isinstance(block, PageFigure):
                figures[key] = {
                    "variants": [list(traces) for traces in block.variants.values()],
                    "layout": block.layout,
                }
            elif isinstance(block, PageTable):
                tables[key] = {
                    "columns": [(column.name, column.kind) for column in block.columns],
                    "rows": block.page_rows,
                }
    return {"figures": finite_json(figures), "tables": finite_json(tables)}


def _pack(text: str) -> str:
    """A text that the page's script unpacks: gzip, as base64."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def _read_asset(name: str) -> str:
    return (resources.files("megtool.report") / name).read_text(encoding="utf-8")


def _read_library() -> str:
    """The source of plotly.js, which the Python package brings along.

    Raises:
        MissingPackageError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as e:
        raise MissingPackageError("--report needs the plotly package", hint=_HINT) from e
    library: str = get_plotlyjs()
    return library
