"""The Python API: verbs as functions of the package, which may share their names with packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import megtool
from megtool.cli.reference import render_api_stub, render_cli_reference
from megtool.commands.api import VerbFunction
from megtool.commands.verbs import VERBS, Verb
from megtool.errors import UsageError
from tests.support.models import tiny_llama

PACKAGES = ("export", "lint", "reshard")


def run_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_verbs_are_functions_of_the_package() -> None:
    others = {"__version__", "Checkpoint", "Engine", "load_state_dict", "open", "stream"}
    assert {verb.api for verb in VERBS} == set(megtool.__all__) - others
    assert all(isinstance(getattr(megtool, verb.api), VerbFunction) for verb in VERBS)
    assert set(megtool.__all__) <= set(dir(megtool))
    with pytest.raises(AttributeError, match="nothing"):
        _ = megtool.nothing


@pytest.mark.parametrize("name", PACKAGES)
def test_a_verb_stays_a_function_whatever_is_imported_first(name: str) -> None:
    run_python(
        f"import megtool.{name}, sys, types\n"
        f"from megtool import {name}\n"
        f"assert callable({name}), {name}\n"
        f"assert isinstance(sys.modules['megtool.{name}'], types.ModuleType)\n"
    )
    run_python(
        f"import megtool\n"
        f"function = megtool.{name}\n"
        f"import megtool.{name}.report as by_path\n"
        f"from megtool.{name} import report\n"
        f"assert report is by_path is megtool.{name}.report\n"
        f"assert megtool.{name} is function\n"
        if name != "lint"
        else "import megtool\n"
        "function = megtool.lint\n"
        "import megtool.lint.engines as by_path\n"
        "from megtool.lint import engines\n"
        "assert engines is by_path is megtool.lint.engines\n"
        "assert megtool.lint is function\n"
    )


def test_importing_the_package_is_cheap() -> None:
    run_python(
        "import sys, megtool\n"
        "megtool.reshard\n"
        "assert not {'numpy', 'torch', 'typer', 'rich'} & sys.modules.keys()\n"
    )


def test_a_local_reshard_imports_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    """Each takes milliseconds, of some 250 that a small reshard takes."""
    source = tiny_llama.save(tmp_path / "hf")
    unused = ("numpy.ma", "torch", "rich", "obstore", "megtool.report.html", "socket", "subprocess")
    unused += ("megtool.staging.store.place", "megtool.number_formats.kquants")
    run_python(
        "import sys, megtool\n"
        f"megtool.reshard({str(source)!r}, {str(tmp_path / 'out')!r}, to='torch_dist', pp=2)\n"
        f"assert not (loaded := set({unused!r}) & sys.modules.keys()), loaded\n"
    )


def test_verbs_take_keywords(tmp_path: Path) -> None:
    source, copy = tmp_path / "a.safetensors", tmp_path / "b"
    save_file({"a": np.arange(12, dtype=np.float32).reshape(3, 4)}, source)
    stages: set[str] = set()
    report = megtool.reshard(
        source, copy, to="dcp", progress=lambda stage, done, total: stages.add(stage)
    )
    assert report.target_format == "dcp"
    assert stages
    assert megtool.verify(source, copy).verdict == "equal"
    assert megtool.inspect(source=source, tensors=True).num_tensors == 1


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: megtool.reshard("a"), UsageError, "DST is missing"),
        (lambda: megtool.reshard("a", "b", tpp=2), UsageError, "there is no option 'tpp'"),
        (lambda: megtool.reshard("a", "b", "c"), TypeError, "2 positional"),
        (lambda: megtool.reshard("a", "b", source="c"), TypeError, "'source' twice"),
        (lambda: megtool.quantize("a", "b"), UsageError, "--recipe is missing"),
        (lambda: megtool.lint("a", cp=2), UsageError, "there is no option 'cp'"),
    ],
)
def test_wrong_calls_are_refused(call, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


def test_the_stub_is_what_the_options_say(checkout: Path) -> None:
    stub = (checkout / "megtool" / "__init__.pyi").read_text()
    assert stub == render_api_stub(), "run docs/generate.py"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.api)
def test_the_reference_has_every_command(verb: Verb) -> None:
    reference = render_cli_reference()
    assert f"\n## megtool {verb.command}\n" in f"\n{reference}"
    assert f"megtool.{verb.api}(" in reference
