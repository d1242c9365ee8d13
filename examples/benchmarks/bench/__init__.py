"""What the benchmark scripts share: synthetic checkpoints, jobs, races against cp, tables.

Importing it makes this checkout's megtool the one that is measured, here and in child processes.
"""

import os
import sys
from pathlib import Path

_CHECKOUT = str(Path(__file__).resolve().parents[3])
sys.path.insert(0, _CHECKOUT)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [_CHECKOUT, *filter(None, [os.environ.get("PYTHONPATH")])]
)
