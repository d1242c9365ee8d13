"""Parts of `first_gpu.py`: each has a time limit, and steps that are processes of their own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

PYTHON = sys.executable


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where, on what and at which sizes everything runs; `model` is a folder for SmolLM2."""

    checkout: Path
    work: Path
    device: str = "cuda"
    is_tiny: bool = False
    model: Path | None = None

    @property
    def iterations(self) -> int:
        """Steps of a run of training."""
        return 4 if self.is_tiny else 20

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return 32 if self.is_tiny else 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One process, and where its figures are.

    Args:
        name: its name, unique in its part.
        command: its arguments. `{out}` is a file that it may write figures to, and `{folder}` a
            folder of its own; both are gone at the end.
        models: the models that it needs, by their names in `first_gpu_models`.
        packages: modules to import without which it is skipped.
        elsewhere: why this machine cannot run it, which the report shows instead.
        needs_gpu: skipped on a CPU.
        kind: where figures come from: `json` of `{out}`, a `run` of training in `{folder}`, or
            `tests`, JUnit's XML in `{out}`.
        against: the step of the part that its speed is divided by.
        goal: the least of that ratio.
    """

    name: str
    command: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    elsewhere: str = ""
    needs_gpu: bool = False
    kind: str = ""
    against: str = ""
    goal: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Steps that answer one question, within so many seconds together."""

    name: str
    question: str
    seconds: int
    steps: tuple[Step, ...]
