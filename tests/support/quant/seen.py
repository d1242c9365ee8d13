"""Statistics of plain arrays, by the tally that recording uses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megtool.model.stacks.hook_locations import HookLocation
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.statistics.reduce import reduce_statistics
from megtool.quant.statistics.running import RunningStatistics
from megtool.quant.statistics.site_statistics import ActivationStatistics


def statistics_of(
    *parts: NDArray[Any], gram: bool = False, sample: bool = False
) -> ActivationStatistics:
    """Of rows `[tokens, width]` that came in these parts."""
    width = parts[0].shape[1]
    tally = RunningStatistics(
        width, torch.device("cpu"), gram_width=width if gram else 0, keep_sample=sample
    )
    for x in parts:
        rows = torch.from_numpy(np.ascontiguousarray(x, np.float32))
        assert tally.add(rows) is None
        tally.sample_from(rows)
    place = HookLocation(module=torch.nn.Identity())
    return reduce_statistics(tally, place, width, ProcessGroups.alone(), gram=gram, sample=sample)
