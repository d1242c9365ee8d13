"""Generate: a model in any format continues a text, and picks other words by another seed.

python examples/generate_text.py ./SmolLM2-135M-Instruct "Once upon a time"
"""

import sys

from megtool import generate

source, prompt = sys.argv[1:3]
for seed in range(3):
    report = generate(
        source, prompt=[prompt], max_new_tokens=24, temperature=0.8, top_p=0.95, seed=seed
    )
    print(f"--- seed {seed}")
    print("\n".join(report.lines()))
