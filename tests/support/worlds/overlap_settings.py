"""Settings of the distributed optimizer with communication that overlaps."""

from __future__ import annotations

from dataclasses import replace

from tests.support.worlds.optimizer_layouts import PLAIN

# Buckets of a few parameters each.
SMALL = replace(PLAIN, ddp_bucket_size=500)

OVERLAPPED = replace(SMALL, overlap_grad_reduce=True, overlap_param_gather=True)
