"""Verify: a way to Megatron's format and back loses nothing.

python examples/verify_roundtrip.py ./SmolLM2-135M-Instruct ./scratch
"""

import sys
from pathlib import Path

from megtool import reshard, verify

source, scratch = map(Path, sys.argv[1:3])
reshard(source, scratch / "megatron", to="torch_dist", tp=3, pp=2)
reshard(scratch / "megatron", scratch / "back", to="hf")

report = verify(source, scratch / "back")
print("\n".join(report.lines()))
sys.exit(report.exit_status)
