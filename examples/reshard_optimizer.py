"""Optimizer: a training state in Megatron's default format, for another layout, and proved equal.

python examples/reshard_optimizer.py ./checkpoints ./checkpoints-tp2-pp2
"""

import sys
from pathlib import Path

from megtool import reshard, verify

source, destination = map(Path, sys.argv[1:3])
report = reshard(source, destination, tp=2, pp=2, verify_master_weights=True)
print("\n".join(report.lines()))

found = verify(source, destination)
print("\n".join(found.lines()))
sys.exit(found.exit_status)
