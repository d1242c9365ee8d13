"""Inspect: what a checkpoint holds, without reading its tensors.

python examples/inspect_checkpoint.py ./SmolLM2-135M-Instruct
"""

import sys
from pathlib import Path

from megtool import inspect

report = inspect(Path(sys.argv[1]))
print("\n".join(report.lines()))
