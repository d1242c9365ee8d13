"""The same model's passes on the CPU by megtool and by transformers, in turn: tokens per second.

python examples/benchmarks/forward_speed.py [--tokens 512] [--threads 1,2] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench.table import Table, parser, show, times

from megtool.convert.families.detection import family
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.stacks.decoder import Decoder

LEAST = 1.0
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
PROMPT = 64  # tokens before decoding


def fill(module: torch.nn.Module) -> None:
    """Small random weights, norms of one."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02)


def models(layers: int) -> tuple[Any, Decoder]:
    """Theirs, with its default attention (SDPA), and ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**SIZES, "num_hidden_layers": layers})
    theirs = LlamaForCausalLM(config)
    ours = Decoder(family("llama").read_config(config.to_dict()), device="cpu")
    fill(theirs)
    fill(ours)
    return theirs.eval(), ours.eval()


def jobs(
    theirs: Any, ours: Decoder, tokens: int, steps: int
) -> dict[str, tuple[int, Callable[[], Any], Callable[[], Any]]]:
    """By name: how many tokens it passes, theirs, ours."""
    ids = torch.randint(0, SIZES["vocab_size"], (1, tokens + 1))
    text, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    batch = Batch(tokens_BS=text)

    @torch.no_grad()
    def their_forward() -> None:
        theirs(text, use_cache=False)

    @torch.no_grad()
    def our_forward() -> None:
        ours(batch)

    def their_backward() -> None:
        theirs(text, labels=labels, shift_labels=labels, use_cache=False).loss.backward()
        theirs.zero_grad()

    def our_backward() -> None:
        total, count = ours.loss(batch, labels)
        (total / count).backward()
        ours.zero_grad()

    @torch.no_grad()
    def their_decoding() -> None:
        past, new = None, text[:, :PROMPT]
        for _ in range(steps + 1):
            out = theirs(new, past_key_values=past, use_cache=True, logits_to_keep=1)
            past, new = out.past_key_values, out.logits[:, -1:].argmax(-1)

    @torch.no_grad()
    def our_decoding() -> None:
        cache = ContiguousCache(ours.config, num_rows=1, max_tokens=PROMPT + steps)
        new = text[:, :PROMPT]
        for _ in range(steps + 1):
            new = ours(Batch(tokens_BS=new), cache, last_only=True).argmax(-1)

    return {
        "forward, all logits": (tokens, their_forward, our_forward),
        "forward and backward of the loss": (tokens, their_backward, our_backward),
        f"prompt of {PROMPT}, then token by token": (steps, their_decoding, our_decoding),
    }


def seconds(job: Callable[[], Any]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


def measure(table: Table, given: argparse.Namespace, theirs: Any, ours: Decoder) -> None:
    """A row for every job and number of threads; the two run in turn, after one of each."""
    for threads in map(int, given.threads.split(",")):
        torch.set_num_threads(threads)
        for name, (tokens, *both) in jobs(theirs, ours, given.tokens, given.steps).items():
            for job in both:
                job()
            runs = [[seconds(job) for job in both] for _ in range(given.rounds)]
            peer, own = (min(column) for column in zip(*runs, strict=True))
            table.add(
                name,
                str(threads),
                f"{tokens / peer:.0f}",
                f"{tokens / own:.0f}",
                f"{times(peer / own)} {'✓' if peer / own >= LEAST else '✗'}",
                times(statistics.median(a / b for a, b in runs)),
                job=name,
                threads=threads,
                tokens=tokens,
                peer_seconds=peer,
                seconds=own,
                speedup=peer / own,
            )


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", gib=None)
    options.add_argument("--tokens", type=int, default=512, help="tokens of a pass")
    options.add_argument("--steps", type=int, default=32, help="tokens to decode")
    options.add_argument("--layers", type=int, default=12, help="layers of the model")
    options.add_argument("--threads", default="1,2", help="numbers of threads, with commas")
    given = options.parse_args()
    theirs, ours = models(given.layers)
    millions = sum(p.numel() for p in theirs.parameters()) / 1e6
    head = ("job", "threads", "transformers tokens/s", "ours tokens/s")
    head = (*head, f"x faster (min/min, limit {LEAST:g})", "(median)")
    table = Table(title=f"Passes of a Llama of {millions:.0f} M parameters, fp32", head=head)
    measure(table, given, theirs, ours)
    show(given, Path(tempfile.gettempdir()), [table])


if __name__ == "__main__":
    main()
