"""Evaluate: does a model in another format and layout still predict a text as it did?

python examples/evaluate_perplexity.py ./SmolLM2-135M-Instruct ./scratch text.txt
"""

import sys
from pathlib import Path

from megtool import evaluate, reshard

source, scratch, text = map(Path, sys.argv[1:4])
reshard(source, scratch / "megatron", to="torch_dist", tp=3, pp=2)

report = evaluate(scratch / "megatron", data=text, max_tokens=4096, against=source)
print("\n".join(report.lines()))
