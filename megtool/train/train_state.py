"""The progress of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class TrainState:
    """The progress of a run: steps done, samples of the data used, and steps of the schedule, which
    counts samples, without those of skipped steps."""

    iteration: int = 0
    consumed_samples: int = 0
    num_steps: int = 0
