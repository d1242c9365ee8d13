"""Demo training: two real steps of AdamW, saved as a Hugging Face folder with its optimizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from megtool.errors import MegtoolError

# Master weights and moments are float32, the weights are the master weights rounded: what mixed
# precision training keeps. It runs in a process of its own, whose memory goes with it.
_SCRIPT = """
import sys, warnings
warnings.filterwarnings("ignore")
import torch
from pathlib import Path
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

source, target, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(source)
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
text = "A checkpoint is a catalogue of tensors, cut into boxes, that lie at known bytes. " * 4
ids = tokenizer(text, return_tensors="pt")["input_ids"]
for _ in range(steps):
    loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
named = dict(model.named_parameters())
state = {}
for name, p in named.items():
    held = optimizer.state[p]
    state[f"optimizer.state.param.{name}"] = p.detach()
    state[f"optimizer.state.exp_avg.{name}"] = held["exp_avg"]
    state[f"optimizer.state.exp_avg_sq.{name}"] = held["exp_avg_sq"]
target.mkdir()
save_file({n: p.detach().bfloat16() for n, p in named.items()}, target / "model.safetensors")
save_file(state, target / "optimizer.safetensors")
model.config.dtype = torch.bfloat16
model.config.save_pretrained(target)
tokenizer.save_pretrained(target)
print(f"{loss.item():.3f}")
"""


def train(source: Path, target: Path, *, steps: int = 2) -> float:
    """Train the model in a Hugging Face folder for some steps; the last loss.

    `target` becomes a Hugging Face folder whose `optimizer.safetensors` holds master weights and
    moments, `optimizer.state.STATE.NAME`, in float32.

    Raises:
        MegtoolError: transformers cannot load or train the model.
    """
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(source), str(target), str(steps)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )
    if done.returncode:
        raise MegtoolError(f"transformers cannot train {source}: {done.stderr.strip()[-300:]}")
    return float(done.stdout)
