"""Quantize: run the data once, then write two formats from what was kept of it.

python examples/quantize_twice.py ./SmolLM2-135M-Instruct ./scratch text.txt
"""

import sys
from pathlib import Path

from megtool import quantize

source, scratch, text = map(Path, sys.argv[1:4])
scratch.mkdir(exist_ok=True)
kept = scratch / "calibration.safetensors"
quantize(source, kept, recipe="fp8", data=text, seq_length=32, calibrate_only=True)

for recipe in ("fp8", "nvfp4"):
    report = quantize(source, scratch / recipe, recipe=recipe, calibration=[kept], eval_data=text)
    print("\n".join(report.lines()))
