"""Export: one calibrated checkpoint for three engines, held against their loaders' rules.

python examples/export_for_engines.py ./SmolLM2-135M-Instruct ./scratch
"""

import sys
from pathlib import Path

from megtool import export, lint, quantize, verify

source, scratch = map(Path, sys.argv[1:3])
scratch.mkdir(exist_ok=True)
quantize(source, scratch / "fp8", recipe="fp8_kv_fp8", samples=4, seq_length=32)

for form in ("vllm", "sglang", "trtllm", "compressed-tensors"):
    report = export(scratch / "fp8", scratch / form, to=form)
    print("\n".join(report.lines()))

found = lint(scratch / "vllm", target=["vllm", "sglang", "trtllm"])
print("\n".join(found.lines()))
near = verify(source, scratch / "vllm")
print("\n".join(near.lines()))
sys.exit(found.exit_status or near.exit_status)
