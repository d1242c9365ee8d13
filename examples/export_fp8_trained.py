"""Amax: a checkpoint that was trained in FP8, quantized with the scales of its training, no data.

python examples/export_fp8_trained.py ./checkpoints/fp8-run ./scratch
"""

import sys
from pathlib import Path

from megtool import derive_amax, inspect_amax, quantize

source, scratch = map(Path, sys.argv[1:3])
scratch.mkdir(exist_ok=True)
print("\n".join(inspect_amax(source).lines()))

scales = scratch / "scales.safetensors"
print("\n".join(derive_amax(source, scales).lines()))
report = quantize(source, scratch / "fp8", recipe="fp8", calibration=[scales])
print("\n".join(report.lines()))
