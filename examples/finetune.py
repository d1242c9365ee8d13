"""Finetune: a few steps on a text, then the same run again, which goes on, and what it has learned.

python examples/finetune.py ./SmolLM2-135M-Instruct ./tuned text.txt
"""

import sys

from megtool import finetune

source, folder, text = sys.argv[1:4]
options = {"seq_length": 16, "eval_split": 0.2, "global_batch_size": 2, "lr": 1e-4, "to": "hf"}

finetune(source, folder, data=[text], train_iters=4, exit_duration_in_mins=0.001, **options)
report = finetune(source, folder, data=[text], train_iters=4, **options)
print("\n".join(report.lines()))
