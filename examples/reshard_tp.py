"""Reshard: a checkpoint for three tensor-parallel ranks, as Megatron-Core loads it.

python examples/reshard_tp.py ./SmolLM2-135M-Instruct ./megatron-tp3
"""

import sys
from pathlib import Path

from megtool import reshard

source, destination = map(Path, sys.argv[1:3])
plan = reshard(source, destination, to="torch_dist", tp=3, dry_run=True)
print("\n".join(plan.lines()))

report = reshard(source, destination, to="torch_dist", tp=3)
print("\n".join(report.lines()))
