"""The manners of the command line: help, statuses, and what goes to which stream."""

from __future__ import annotations

import inspect
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import megtool as package
from megtool import __version__, errors
from megtool.cli.app import main
from megtool.cli.generate import FULL_WIDTH, make_command
from megtool.cli.runner import CommandOutput, run
from megtool.commands.verbs import VERBS as ALL_VERBS
from megtool.commands.verbs import Verb
from megtool.console import Progress
from megtool.options.field import flag, option_fields
from megtool.report.sections import Report, Section
from megtool.train.options.config import TrainConfig
from tests.support.limits import is_within

VERBS = ("inspect", "reshard", "verify", "tokenize", "demo")


def megtool(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megtool", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Report):
    """A small real report."""

    values: dict[str, Any]
    status: int = 0

    @property
    def exit_status(self) -> int:
        return self.status

    def to_json(self) -> dict[str, Any]:
        return self.values

    def title(self) -> str:
        return ""

    def sections(self) -> Iterator[Section]:
        yield Section(texts=[f"{key}: {value}" for key, value in self.values.items()])


def answer(values: dict[str, Any], status: int = 0) -> Callable[[Progress], Answer]:
    return lambda progress: Answer(values=values, status=status)


def raising(error: BaseException) -> Callable[[Progress], Answer]:
    def work(progress: Progress) -> Answer:
        raise error

    return work


def test_version() -> None:
    done = megtool("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"megtool {__version__}\n", "")


def seconds_of_children() -> float:
    """What finished children have computed, which does not grow with what else the machine does."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_help_is_quick_and_imports_neither_torch_nor_numpy() -> None:
    fastest = 9.0
    for _ in range(3):
        begin = seconds_of_children()
        done = megtool("--help")
        fastest = min(fastest, seconds_of_children() - begin)
        assert done.returncode == 0
    assert is_within(fastest, 0.4)
    traced = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "megtool", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    modules = {line.rpartition("|")[2].strip() for line in traced.stderr.splitlines()}
    assert "typer" in modules
    assert modules & {"torch", "numpy", "safetensors", "awscrt", "transformers"} == set()


@pytest.mark.parametrize("verb", ALL_VERBS, ids=lambda verb: verb.api)
def test_a_list_of_verbs_shows_the_first_sentence_of_their_help(verb: Verb) -> None:
    first, _, _ = (inspect.getdoc(verb.options) or "").partition("\n\n")
    assert verb.summary == first.replace("\n", " ")


def test_help_lists_the_verbs_and_the_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in (*VERBS, "Exit status", "130"))


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_an_example_and_the_common_options(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "--help"]) == 0
    shown = capsys.readouterr().out
    for text in (f"Example: megtool {verb}", "--json", "--quiet", "--verbose"):
        assert text in shown


def test_help_sorts_options_into_panels(capsys: pytest.CaptureFixture[str]) -> None:
    main(["reshard", "--help"])
    shown = capsys.readouterr().out
    places = [shown.index(f" {name} ─") for name in ("Input", "Parallel layout", "Output")]
    assert places == sorted(places)
    assert shown.index("Dangerous") < shown.index("--overwrite")


@pytest.mark.parametrize("verb", ALL_VERBS, ids=lambda verb: verb.api)
def test_the_python_api_has_the_same_options(verb: Verb) -> None:
    command = make_command(verb, lambda verb, values: 0)
    typed = set(inspect.signature(command).parameters) - {"as_json", "quiet", "verbose", "config"}
    function = inspect.signature(getattr(package, verb.api)).parameters
    assert set(function) == typed
    for entry in option_fields(verb.options):
        default = function[entry.name].default
        assert default == (inspect.Parameter.empty if entry.is_required else entry.default)


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["inspekt"], "No such command 'inspekt'. Did you mean 'inspect'?", "megtool --help"),
        (["inspect"], "Missing argument 'SRC'.", "megtool inspect --help"),
        (["reshard", "a"], "Missing argument 'DST'.", "megtool reshard --help"),
        (["reshard", "a", "b", "--tp", "0"], "'--tp'", "megtool reshard --help"),
        (["reshard", "a", "b", "--digest", "some"], "'some'", "megtool reshard --help"),
        (["verify", "a", "b", "c"], "unexpected extra argument", "megtool verify --help"),
    ],
)
def test_wrong_usage_is_one_line_and_a_hint(
    args: list[str], message: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert second == f"  hint: {hint}"


@pytest.mark.parametrize("columns", [60, 80, FULL_WIDTH - 1, FULL_WIDTH, 240])
def test_long_option_names_are_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["finetune", "--help"]) == 0
    told = capsys.readouterr().out
    assert not [name for f in option_fields(TrainConfig) if (name := flag(f.name)) not in told]
    assert all(title in told for title in ("Input", "Optimizer", "Parallel layout"))


def test_no_verb_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert "inspect" in out + err
    assert "error" not in err


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.MegtoolError, 1),
        (errors.UsageError, 2),
        (errors.LayoutError, 2),
        (errors.DestinationError, 2),
        (errors.FormatError, 3),
        (errors.SourceChangedError, 3),
        (errors.MappingError, 5),
        (errors.MissingPackageError, 6),
    ],
)
def test_an_error_brings_its_status_its_place_and_its_hint(
    kind: type[errors.MegtoolError], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    error = kind("size 9 is odd", file="a.safetensors", tensor="wte", hint="pad it")
    assert run(raising(error), CommandOutput(quiet=True)) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: size 9 is odd [file a.safetensors, tensor wte]\n  hint: pad it\n"


def test_verbose_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(errors.FormatError("bad header")), CommandOutput(verbose=True)) == 3
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("error: bad header\n")


@pytest.mark.parametrize("verbose", [False, True])
def test_the_unforeseen_is_one_line_unless_verbose(verbose: bool) -> None:
    code = (
        "import sys; from megtool.cli import app, runner\n"
        f"output = runner.CommandOutput(verbose={verbose})\n"
        "@app.app.command('fail')\n"
        "def fail() -> int:\n    return runner.run(lambda p: 1 // 0, output)\n"
        "sys.exit(app.main(['fail']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-2].startswith("error: unexpected ZeroDivisionError")
    assert lines[-1].startswith("  hint: -v")
    assert lines[-1].endswith(f"megtool {__version__}")
    assert ("Traceback" in done.stderr) is verbose


@pytest.mark.parametrize("resumes", [False, True])
def test_an_interrupt_is_130_and_says_how_to_go_on(
    resumes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(raising(KeyboardInterrupt()), CommandOutput(resumes=resumes)) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: interrupted\n")
    assert ("the same command resumes" in err) is resumes


def test_the_report_goes_to_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(answer({"tensors": 3, "name": "a\x1b[2J"}, status=7)) == 7
    assert capsys.readouterr() == ("tensors: 3\nname: a\\x1b[2J\n", "")


def test_json_is_json_even_with_nan(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"min": float("-inf"), "max": [float("nan"), 1.5], "name": "é\x1b"}
    assert run(answer(values), CommandOutput(as_json=True)) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    out, err = capsys.readouterr()
    expected = {"min": "-inf", "max": ["nan", 1.5], "name": "é\x1b"}
    assert json.loads(out, parse_constant=refuse) == expected
    assert err == ""


@pytest.mark.parametrize("quiet", [False, True])
def test_warnings_are_part_of_the_json(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def work(progress: Progress) -> Answer:
        for text in ("stale tracker", "two shards", "stale tracker"):
            logging.getLogger("megtool.staging").warning("%s", text)
        return Answer(values={"warnings": ["two shards"]})

    assert run(work, CommandOutput(as_json=True, quiet=quiet)) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["warnings"] == ["two shards", "stale tracker"]
    assert err.count("warning: ") == (0 if quiet else 3)


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); from megtool.cli.runner import run\n"
        "from megtool.report.sections import Report, Section\n"
        "class Long(Report):\n"
        "    def title(self): return ''\n"
        "    def sections(self): return [Section(texts=['x' * 100] * 100_000)]\n"
        "sys.exit(run(lambda progress: Long()))"
    )
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert os.read(reader, 10) == b"x" * 10
    os.close(reader)
    _, err = process.communicate()
    assert (process.returncode, err) == (0, b"")


@pytest.mark.parametrize("option", ["inspect", "--version"])
def test_a_full_disk_under_stdout_is_one_line(option: str, tmp_path: Path) -> None:
    save_file({"a": np.zeros(3)}, tmp_path / "a.safetensors")
    arguments = [option, str(tmp_path / "a.safetensors")] if option == "inspect" else [option]
    command = [sys.executable, "-m", "megtool", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    first, second = done.stderr.splitlines()
    assert first == "error: cannot write to stdout: No space left on device"
    assert second.startswith("  hint: ")


@pytest.mark.parametrize("verb", ["inspect", "verify", "reshard"])
def test_a_missing_source_is_an_error_that_names_it(verb: str, tmp_path: Path) -> None:
    source = tmp_path / "nowhere"
    done = megtool(verb, source, *([tmp_path / "out"] if verb == "reshard" else []))
    assert done.returncode in (2, 3)
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_verbs_end_to_end(tmp_path: Path) -> None:
    save_file({"a": np.arange(12, dtype=np.float32).reshape(3, 4)}, tmp_path / "a.safetensors")

    seen = megtool("inspect", tmp_path / "a.safetensors", "--json")
    assert (seen.returncode, seen.stderr) == (0, "")
    assert isinstance(json.loads(seen.stdout), dict)

    done = megtool("reshard", tmp_path / "a.safetensors", tmp_path / "b", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    same = megtool("verify", tmp_path / "a.safetensors", tmp_path / "b", "-q")
    assert (same.returncode, same.stderr) == (0, "")

    save_file({"a": np.zeros((3, 4), np.float32)}, tmp_path / "c.safetensors")
    assert megtool("verify", tmp_path / "a.safetensors", tmp_path / "c.safetensors").returncode == 7
