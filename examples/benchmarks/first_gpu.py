"""The first day on a GPU: tests, defaults, speed against rivals, in one report within 30 minutes.

python examples/benchmarks/first_gpu.py [--out FOLDER] [--parts LIST] [--dry-run]

Every step is a process of its own, and every part has a time limit: what fails or hangs does not
stop the others. `report.json` and `report.html` in the folder are written after each step, and the
same command continues: steps that ended well are not run again. Models have random weights, SmolLM2
too, unless `--model` names its folder. Without a CUDA device it prints what it would run;
`--device cpu --sizes tiny` rehearses what can run on a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from bench.first_gpu_models import save_texts
from bench.first_gpu_parts import list_parts
from bench.first_gpu_plan import PYTHON, Part, Setup, Step
from bench.first_gpu_report import Report, Row
from bench.first_gpu_steps import CHECKOUT, StepError, read_figures, run_limited

from megtool import __version__

_PLACE = re.compile(r"\{(\w+)\}")
PACKAGES = ("torch", "triton", "transformer_engine", "megatron-core", "transformers")
PACKAGES += ("liger-kernel", "flash-linear-attention", "mamba-ssm", "causal-conv1d")


def describe_machine(setup: Setup) -> dict[str, str]:
    """Return what figures depend on: the device, versions of packages, and sizes."""
    import torch

    name = torch.cuda.get_device_name() if setup.device == "cuda" else "CPU"
    facts = {"device": name, "sizes": "tiny" if setup.is_tiny else "full", "megtool": __version__}
    facts["model"] = str(setup.model or "random weights in SmolLM2's shape")
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


class Runner:
    """Runs steps, and keeps a row of each."""

    def __init__(self, setup: Setup, report: Report, parts: list[Part]) -> None:
        self.setup, self.report, self.parts = setup, report, parts

    def run(self, part: Part) -> None:
        """Run the steps of a part that did not end well before."""
        deadline = time.monotonic() + part.seconds
        for step in part.steps:
            earlier = self.report.find(part.name, step.name)
            if earlier is not None and earlier.status == "ok":
                print(f"  {step.name}: ok before", flush=True)
                continue
            row = self._run_step(part, step, deadline)
            if step.against:
                self._compare(part, step, row)
            self.report.add(row)
            self.report.write(self.parts)
            why = f": {row.why}" if row.why else ""
            print(f"  {step.name}: {row.status}{why} ({row.seconds:.1f} s)", flush=True)

    def _run_step(self, part: Part, step: Step, deadline: float) -> Row:
        row = Row(part=part.name, step=step.name, status="skipped")
        if step.elsewhere:
            row.status, row.why = "not here", step.elsewhere
            return row
        missing = [name for name in step.packages if find_spec(name) is None]
        if step.needs_gpu and self.setup.device != "cuda":
            row.why = "it needs a GPU"
        elif missing:
            row.why = f"not installed: {', '.join(missing)}"
        if row.why:
            return row
        folder = self.setup.work / "step"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.monotonic()
        try:
            words = self._fill(step, folder, deadline)
            row.command = shlex.join(words)
            row.output = run_limited(words, deadline - time.monotonic())
            row.figures = read_figures(step.kind, folder)
            row.status = "ok"
        except StepError as error:
            row.status = "out of time" if error.is_late else "failed"
            row.why, row.output = error.why, error.output
            with contextlib.suppress(StepError):  # of tests some may have run
                row.figures = read_figures(step.kind, folder)
        finally:
            row.seconds = time.monotonic() - began
            shutil.rmtree(folder, ignore_errors=True)
        return row

    def _fill(self, step: Step, folder: Path, deadline: float) -> list[str]:
        """The command with paths, whose models exist then."""
        texts = self.setup.work / "documents.jsonl", self.setup.work / "page.txt"
        if not texts[1].exists():
            save_texts(*texts)
        values = {"folder": str(folder), "out": str(folder / "figures"), "text": str(texts[0])}
        values |= {"short_text": str(texts[1]), "arch": architecture()}
        for name in step.models:
            values[name] = str(self._model(name, deadline))
        return [_PLACE.sub(lambda m: values[m[1]], word) for word in step.command]

    def _model(self, name: str, deadline: float) -> Path:
        """The folder of a model, written if it is not there."""
        if name == "smollm2" and self.setup.model is not None:
            return self.setup.model
        folder = self.setup.work / name
        if not (folder / "tokenizer_config.json").exists():
            script = str(CHECKOUT / "examples/benchmarks/bench/first_gpu_models.py")
            tiny = ["--tiny"] if self.setup.is_tiny else []
            command = [PYTHON, script, name, str(folder), *tiny]
            run_limited(command, deadline - time.monotonic())
        return folder

    def _compare(self, part: Part, step: Step, row: Row) -> None:
        """Add the ratio of speeds to the figures."""
        other = self.report.find(part.name, step.against)
        if row.status != "ok" or other is None or not other.figures:
            return
        ratio = row.figures[0]["tokens_per_second"] / other.figures[0]["tokens_per_second"]
        row.figures[0][f"over {step.against}"] = ratio
        if step.goal is not None:
            row.figures[0]["goal"] = step.goal


def architecture() -> str:
    """Return the compute capability of the GPU as a number, such as 90; empty on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def print_plan(parts: Sequence[Part]) -> None:
    """Print every step with its part and time limit."""
    for part in parts:
        print(f"{part.name} (at most {part.seconds} s): {part.question}")
        for step in part.steps:
            needs = f" [needs {', '.join(step.packages)}]" if step.packages else ""
            print(f"  {step.name}{needs}{' [not here]' if step.elsewhere else ''}")
    print(f"At most {sum(p.seconds for p in parts) / 60:.0f} minutes.")


def main() -> None:
    """Run what was asked for, and write the report."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--out", type=Path, default=Path("first-gpu"), help="the report's folder")
    options.add_argument("--parts", help="which, with commas; default: all")
    options.add_argument("--steps", default="", help="only those whose names have this text")
    options.add_argument("--model", type=Path, help="a folder of SmolLM2-135M")
    options.add_argument("--dry-run", action="store_true", help="print the plan and run nothing")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--sizes", choices=("full", "tiny"), default="full")
    options.add_argument("--patience", type=float, default=1.0, help="times the time limits")
    options.add_argument("--keep", action="store_true", help="keep the models that were written")
    given = options.parse_args()
    setup = Setup(
        checkout=CHECKOUT,
        work=given.out.resolve() / "work",
        device=given.device,
        is_tiny=given.sizes == "tiny",
        model=given.model,
    )
    parts = list_parts(setup)
    names = [p.name for p in parts] if given.parts is None else given.parts.split(",")
    unknown = [n for n in names if n not in {p.name for p in parts}]
    if unknown:
        known = ", ".join(p.name for p in parts)
        raise SystemExit(f"no such part: {', '.join(unknown)}. Known: {known}.")
    chosen = [
        replace(p, steps=steps, seconds=int(p.seconds * given.patience))
        for p in parts
        if p.name in names and (steps := tuple(s for s in p.steps if given.steps in s.name))
    ]
    if given.dry_run:
        print_plan(chosen)
        return
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        print_plan(chosen)
        raise SystemExit(
            "There is no CUDA device: nothing was run. "
            "--device cpu --sizes tiny rehearses on a CPU."
        )
    report = Report.open(given.out, describe_machine(setup))
    setup.work.mkdir(parents=True, exist_ok=True)
    runner = Runner(setup, report, parts)
    for part in chosen:
        print(f"{part.name}: {part.question}", flush=True)
        runner.run(part)
    if not given.keep:
        shutil.rmtree(setup.work, ignore_errors=True)
    print(f"{report.summary()}\n{given.out / 'report.html'}")
    sys.exit(int(any(r.status in ("failed", "out of time") for r in report.rows)))


if __name__ == "__main__":
    main()
