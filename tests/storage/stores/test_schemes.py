"""A row of `SCHEMES` says what the store's class, the package's extras and the guide say."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from megtool.errors import DestinationError, UsageError
from megtool.machine.packages import PURPOSES
from megtool.storage.location.path import location
from megtool.storage.objects.index import lists_all
from megtool.storage.objects.object_path import ObjectPath
from megtool.storage.stores.connect import connect
from megtool.storage.stores.http import HttpStore
from megtool.storage.stores.read_only import ReadOnlyStore, require_writable
from megtool.storage.stores.schemes import SCHEMES, find_scheme, missing_package, writable_places
from tests.support.errors import raises

PUBLIC = [name for name, row in SCHEMES.items() if not row.is_for_tests]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_says_what_the_class_says(scheme: str) -> None:
    row = SCHEMES[scheme]
    module, _, name = row.store.partition(":")
    assert getattr(importlib.import_module(module), name).can_write == row.is_written
    assert all(form.startswith(f"{scheme}://") for form in row.form.split(" or "))


@pytest.mark.parametrize("scheme", PUBLIC)
def test_the_guide_and_the_extras_have_the_scheme(checkout: Path, scheme: str) -> None:
    row = SCHEMES[scheme]
    if scheme != "http":  # https:// stands for both
        page = (checkout / "docs/guides/object-stores.md").read_text()
        (line,) = [n for n in page.splitlines() if n.startswith(f"| `{row.form.split(' or ')[0]}`")]
        assert ("only read" not in line) == (row.is_written or not row.extra)
        assert not row.extra or f"megtool[{row.extra}]" in line
        assert not row.extra or f"{scheme}://" in PURPOSES[row.extra]
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    assert not row.extra or row.extra in project["optional-dependencies"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bucket_and_key_are_where_the_row_says(scheme: str) -> None:
    names = ["a", "b"][: SCHEMES[scheme].bucket_names]
    path = location(f"{scheme}://{'/'.join(names)}/run/x")
    assert isinstance(path, ObjectPath)
    assert (path.bucket_url, path.key) == (f"{scheme}://{'/'.join(names)}", "run/x")
    assert lists_all(path) == (not scheme.startswith("http"))


def test_a_scheme_without_a_row_is_one_of_fsspec() -> None:
    row = find_scheme("sftp")
    assert (row.form, row.is_written, row.extra) == ("sftp://BUCKET/PREFIX", False, "")
    with raises(UsageError, "no store has the scheme nothing://", id="usage") as caught:
        connect("nothing://bucket")
    hint = str(caught.value.hint)
    assert all(f"{name}://" in hint for name in PUBLIC)
    assert "memory://" not in hint


def test_what_is_only_read_is_refused_as_a_destination() -> None:
    assert writable_places() == "a local folder, s3://, gs:// or az://"
    store = HttpStore("https://host")
    place = location("https://host/run")
    with raises(DestinationError, "only read", file=str(place), hint=writable_places()) as caught:
        require_writable(store, place)
    assert caught.value.id == "destination-not-writable"
    assert writable_places() in ReadOnlyStore.write_hint


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("gs://bucket", "pip install 'megtool[stores]'"),
        ("hf://org/name", "pip install 'megtool[hub]'"),
        ("msc://profile", "pip install package"),
    ],
)
def test_a_missing_package_is_installed_by_the_extra_of_the_scheme(url: str, command: str) -> None:
    assert missing_package("package", url).hint == command
