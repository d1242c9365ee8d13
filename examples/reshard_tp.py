"""Reshard: a checkpoint for two tensor-parallel ranks, as Megatron-Core loads it.

python examples/reshard_tp.py ./SmolLM2-135M-Instruct ./megatron-tp2
"""

import sys
from pathlib import Path

from megtool.commands.reshard import reshard

source, destination = map(Path, sys.argv[1:3])
plan = reshard(source, destination, to="torch_dist", tp=2, dry_run=True)
print("\n".join(plan.lines()))

report = reshard(source, destination, to="torch_dist", tp=2)
print("\n".join(report.lines()))
