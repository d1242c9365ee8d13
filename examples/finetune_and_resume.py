"""Finetune on two processes that are killed in the middle, and lose nothing when started again.

python examples/finetune_and_resume.py ./SmolLM2-135M-Instruct ./scratch --data text.txt

The run that was killed has to draw the loss curve of one that was not, to the last bit, and
transformers, which loads the exported model, to find the held-out loss that the run ended with.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megtool.train.run_log import read_log

parser = argparse.ArgumentParser()
parser.add_argument("source", type=Path)
parser.add_argument("scratch", type=Path)
parser.add_argument("--data", type=Path, required=True, help="a text")
parser.add_argument("--eval-split", type=float, default=0.02, help="its last part, never learned")
parser.add_argument("--train-iters", type=int, default=50)
parser.add_argument("--save-interval", type=int, default=20)
parser.add_argument("--seq-length", type=int, default=128)
asked = parser.parse_args()

asked.scratch.mkdir(parents=True)
text = asked.data.read_text()
border = round(len(text) * (1 - asked.eval_split))
learned, held = asked.scratch / "learned.txt", asked.scratch / "held.txt"
learned.write_text(text[:border])
held.write_text(text[border:])


def command(folder: Path) -> list[str]:
    """The run with its result in a folder, on two processes."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run += ["-m", "megtool", "finetune", str(asked.source), str(folder), "--data", str(learned)]
    run += ["--eval-data", str(held), "--train-iters", str(asked.train_iters)]
    run += ["--seq-length", str(asked.seq_length), "--global-batch-size", "4", "--lr", "2e-5"]
    for every in ("--save-interval", "--eval-interval"):
        run += [every, str(asked.save_interval)]
    return [*run, "--lr-warmup-iters", "5", "--most-recent-k", "1", "--device", "cpu", "--to", "hf"]


def kill_between_saves(folder: Path) -> int:
    """Start the run, and kill both of its processes half way from a save to the next."""
    step = asked.save_interval + asked.save_interval // 2
    with subprocess.Popen(command(folder)) as torchrun:
        while True:
            done = [line["iteration"] for line in read_log(folder / "log.jsonl")]
            if max(done, default=0) >= step:
                break
            if torchrun.poll() is not None:
                sys.exit("the run ended before it was killed")
            time.sleep(0.05)
        children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text()
        for process in children.split():
            os.kill(int(process), signal.SIGKILL)
    return max(done)


def curve(folder: Path) -> list[tuple[float | None, ...]]:
    """What the run logged of its steps and evaluations, line by line."""
    keys = ("iteration", "loss", "eval_loss", "grad_norm", "lr")
    return [tuple(line.get(key) for key in keys) for line in read_log(folder / "log.jsonl")]


def loss_in_transformers(folder: Path) -> float:
    """The mean loss of the held-out tokens, each seen after those of its row that precede it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([*tokenizer(held.read_text()).input_ids, tokenizer.eos_token_id])
    total = 0.0
    with torch.no_grad():
        for begin in range(0, len(ids) - 1, asked.seq_length):
            row = ids[begin : begin + asked.seq_length + 1]
            logits = model(row[None, :-1]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
    return total / (len(ids) - 1)


whole, killed = asked.scratch / "whole", asked.scratch / "killed"
subprocess.run(command(whole), check=True)
step = kill_between_saves(killed)
print(f"killed      both processes, after step {step}", flush=True)
subprocess.run(command(killed), check=True)

losses = [loss for _, _, loss, *_ in curve(killed) if loss is not None]
theirs = loss_in_transformers(killed / "hf")
is_same, is_close = curve(killed) == curve(whole), abs(theirs - losses[-1]) <= 1e-4
print(f"curves      of {asked.train_iters} steps are {'equal' if is_same else 'different'}")
print(f"held out    {losses[0]:.4f} -> {losses[-1]:.4f}")
print(f"exported    {theirs:.6f} in transformers, {losses[-1]:.6f} at the end of the run")
sys.exit(not (is_same and is_close and losses[-1] < losses[0]))
