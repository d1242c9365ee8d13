"""The first run on a GPU: steps that fail or hang stop no others, and a second call goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[1] / "examples/benchmarks"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the script."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # which `bench` adds to
    import first_gpu
    from bench import first_gpu_parts, first_gpu_plan, first_gpu_report, first_gpu_steps

    return SimpleNamespace(
        script=first_gpu,
        parts=first_gpu_parts,
        plan=first_gpu_plan,
        report=first_gpu_report,
        steps=first_gpu_steps,
    )


@pytest.fixture
def call(checkout: Path, tmp_path: Path) -> Run:
    """Run the script, whose report is in `tmp_path / "out"`."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(SCRIPTS / "first_gpu.py"), "--out", str(tmp_path / "out"), *words],
            cwd=checkout,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    content = json.loads((folder / "report.json").read_text())
    return {row["step"]: row for row in content["rows"]}


WRITES = "import json, sys; json.dump([{'tokens_per_second': %s}], open(sys.argv[1], 'w'))"


def make_parts(bench: SimpleNamespace, *, is_mended: bool = False) -> list[Any]:
    """A part of a step that fails, one that hangs and good ones, and another part."""
    step, python = bench.plan.Step, sys.executable

    def measures(name: str, speed: int, **more: Any) -> Any:
        command = (python, "-c", WRITES % speed, "{out}")
        return step(name=name, command=command, kind="json", **more)

    fails = "print('ok')" if is_mended else "print('half way'); raise SystemExit('error: <no>')"
    sleeps = "import time; time.sleep(600)"
    hangs = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{sleeps}'])"
    first = (
        measures("plain", 50),
        step(name="fails", command=(python, "-c", fails)),
        measures("faster", 75, against="plain", goal=1.2),
        step(name="silent", command=(python, "-c", ""), kind="json"),
        step(name="not installed", command=(python, "-c", ""), packages=("no_such_module",)),
        step(name="for a GPU", command=(python, "-c", ""), needs_gpu=True),
        step(name="for two", elsewhere="it needs two GPUs"),
    )
    second = (
        step(name="hangs", command=(python, "-c", sleeps if is_mended else hangs)),
        measures("too late", 1),
    )
    part = bench.plan.Part
    return [
        part(name="one", question="Is < less?", seconds=60, steps=first),
        part(name="two", question="?", seconds=1, steps=second),
        part(name="three", question="?", seconds=60, steps=(measures("last", 1),)),
    ]


def run_parts(bench: SimpleNamespace, folder: Path, parts: list[Any]) -> None:
    setup = bench.plan.Setup(checkout=SCRIPTS.parents[1], work=folder / "work", device="cpu")
    report = bench.report.Report.open(folder, {"device": "CPU"})
    runner = bench.script.Runner(setup, report, parts)
    for part in parts:
        runner.run(part)


def test_what_fails_or_hangs_stops_no_other(
    bench: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_parts(bench, tmp_path, make_parts(bench))
    rows = rows_of(tmp_path)
    assert {name: row["status"] for name, row in rows.items()} == {
        "plain": "ok",
        "fails": "failed",
        "faster": "ok",
        "silent": "failed",
        "not installed": "skipped",
        "for a GPU": "skipped",
        "for two": "not here",
        "hangs": "out of time",
        "too late": "out of time",
        "last": "ok",
    }
    assert rows["fails"]["why"] == "exit status 1: error: <no>"
    assert "half way" in rows["fails"]["output"]
    assert rows["silent"]["why"] == "it wrote no figures"
    assert rows["faster"]["figures"] == [{"tokens_per_second": 75, "over plain": 1.5, "goal": 1.2}]
    assert rows["hangs"]["seconds"] < 30
    page = (tmp_path / "report.html").read_text()
    assert "error: &lt;no&gt;" in page
    assert "Is &lt; less?" in page
    assert "<no>" not in page

    # The second call runs again what did not end well, and nothing else.
    before = {name: row["seconds"] for name, row in rows.items()}
    run_parts(bench, tmp_path, make_parts(bench, is_mended=True))
    again = rows_of(tmp_path)
    assert list(again) == list(rows)
    assert again["fails"]["status"] == "ok"
    assert all(again[n]["seconds"] == before[n] for n in ("plain", "faster", "last"))
    assert "plain: ok before" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="device was CPU"):
        bench.report.Report.open(tmp_path, {"device": "H200"})


def test_figures_of_tests_and_of_training(bench: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "figures").write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1">'
        '<testcase classname="a" name="b"><failure message="wrong&#10;more"/></testcase>'
        "</testsuite></testsuites>"
    )
    (row,) = bench.steps.read_figures("tests", tmp_path)
    counts = {"tests": 3, "failures": 1, "errors": 0, "skipped": 1}
    assert row == {**counts, "failed": "a::b: wrong"}
    (tmp_path / "run").mkdir()
    speeds = (1.0, 40.0, 44.0, 42.0)  # the first step compiles
    lines = [{"tokens_per_second": x, "seconds": 1 / x, "loss": 9.0 - x / 8} for x in speeds]
    (tmp_path / "run/log.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (row,) = bench.steps.read_figures("run", tmp_path)
    assert row["tokens_per_second"] == 42.0
    assert (row["first loss"], row["last loss"]) == (8.875, 3.75)


def test_all_of_it_takes_half_an_hour(bench: SimpleNamespace, tmp_path: Path) -> None:
    setup = bench.plan.Setup(checkout=SCRIPTS.parents[1], work=tmp_path)
    parts = bench.parts.list_parts(setup)
    assert sum(part.seconds for part in parts) <= 30 * 60
    assert len({part.name for part in parts}) == len(parts)
    from bench.first_gpu_models import MODELS

    for part in parts:
        names = [step.name for step in part.steps]
        assert len(set(names)) == len(names), part.name
        for number, step in enumerate(part.steps):
            assert set(step.models) <= set(MODELS), step.name
            assert not step.against or step.against in names[:number], step.name
            assert bool(step.command) != bool(step.elsewhere), step.name
            for word in step.command:
                file = SCRIPTS.parents[1] / word.removeprefix("--ignore=")
                assert not word.endswith(".py") or file.exists(), word


def test_without_a_gpu_it_says_what_it_would_do(call: Run, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = call()
    assert done.returncode == 1
    assert "There is no CUDA device: nothing was run." in done.stderr
    assert "pytest -m gpu: graphs" in done.stdout
    assert not (tmp_path / "out").exists()
    done = call("--dry-run", "--parts", "fp8,nccl")
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.startswith(("fp8", "nccl"))]
    assert "kernels" not in done.stdout
    assert "no such part: fast" in call("--parts", "fast").stderr


TINY = ("--sizes", "tiny", "--patience", "10")


@pytest.mark.slow
def test_a_rehearsal_on_a_cpu(call: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    here = (*TINY, "--device", "cpu")
    assert call(*here, "--parts", "products").returncode == 0
    done = call(*here, "--parts", "defaults", "--steps", "SmolLM2")
    assert done.returncode == 0, done.stdout
    rows = rows_of(tmp_path / "out")
    assert set(rows) == {
        *("fp8", "experts", "attention"),
        *("finetune SmolLM2, packed", "quantize SmolLM2", "evaluate SmolLM2"),
    }
    for name in ("experts", "attention"):  # in bfloat16
        assert 0 < rows[name]["figures"][0]["error"] < 0.01
    errors = [f["error"] for f in rows["fp8"]["figures"] if "error" in f]
    assert len(errors) == 4
    assert max(errors) < 0.01
    (run,) = rows["finetune SmolLM2, packed"]["figures"]
    assert run["tokens_per_second"] > 0
    assert run["first loss"] > 0
    assert not (tmp_path / "out/work").exists()
    assert "model was" in call(*here, "--model", str(tmp_path)).stderr


@pytest.mark.slow
def test_a_run_on_the_emulated_device(call: Run, checkout: Path, tmp_path: Path) -> None:
    """Every process has a GPU, and so have its children."""
    pytest.importorskip("transformers")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None or torch.version.cuda is not None:
        pytest.skip("no compiler to build the emulated GPU with, or a torch with CUDA")
    from tests.support.emulated.device import build

    library = build(tmp_path, compiler)
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nfrom pathlib import Path\n"
        f"sys.path.append({str(checkout)!r})\n"
        "from tests.support.emulated.device import start\n"
        f"start(Path({str(library)!r}))\n"
        "from megtool.kernels import dispatch\n"
        "dispatch._automatic = lambda kind: 'torch'\n"
    )
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{checkout}"}
    here = (*TINY, "--model", "nowhere")
    done = call(*here, "--parts", "calibration", "--steps", "experts", **variables)
    assert done.returncode == 0, done.stdout
    done = call(*here, "--parts", "defaults", "--steps", "evaluate", **variables)
    assert done.returncode == 1
    rows = rows_of(tmp_path / "out")
    eager, graphed = rows["experts, fp8"]["figures"]
    assert (eager["layers"], graphed["layers"]) == ("eager", "graphed")
    assert graphed["log"] == "CUDA graphs: 24 of 28 layer runs were replays (86%)"
    assert rows["evaluate SmolLM2"]["status"] == "failed"  # of a model that is not there
    assert "nowhere" in rows["evaluate SmolLM2"]["output"]
