"""Standing: where a run is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class TrainState:
    """Where a run is: steps done, samples of the data used, and steps of the schedule (in samples;
    those of skipped steps do not count)."""

    iteration: int = 0
    consumed_samples: int = 0
    num_steps: int = 0
