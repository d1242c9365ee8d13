"""Text with and without drafts of a layer of multi-token prediction, attention and recurrent.

python examples/benchmarks/speculative_speed.py [--steps 200] [--threads 1] [--rounds 5]

A small model of bytes is trained for `--steps` on a passage of text, and continues parts of it
greedily. Both ways take turns in one process and have to write the same text. Besides the time
that passes, the time of processors is shown, which other work on the machine disturbs less.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from bench.table import Table, parser, show, times

import megtool.data
from megtool.inference.forward import Forward
from megtool.inference.generation.batching import GenerateRequest
from megtool.inference.generation.generate import Decoding, Meter, generate
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.spec.model_config import ModelConfig

TEXT = Path(megtool.data.__file__).parent / "founding_documents.txt"
WINDOW, ROWS = 128, 4  # tokens and rows of a training step
BLOCK = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_conv_kernel": 4}
KINDS: dict[str, dict[str, Any]] = {
    "attention": {"layer_kinds": ("*-",) * 8, "mtp_kind": "*-"},
    "gated delta nets": BLOCK
    | {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "mtp_kind": "*-"}
    | {"layer_kinds": ("G-", "G-", "G-", "*-") * 2},
    "Mamba-2": {"mamba_num_heads": 16, "mamba_head_dim": 32, "mamba_state_dim": 32}
    | {"mamba_num_groups": 2, "mamba_conv_kernel": 4, "mtp_kind": "*-"}
    | {"layer_kinds": ("M-", "M-", "M-", "*-") * 2},
}


class Letters:
    """A detokenizer of bytes."""

    def push(self, token: int) -> str:
        """The byte as a character."""
        return chr(token)

    def finish(self) -> str:
        """Nothing is left."""
        return ""


def trained(kinds: dict[str, Any], tokens_T: torch.Tensor, given: Any) -> Decoder:
    """A model with a layer of multi-token prediction, after some training."""
    config = ModelConfig.from_fields(
        num_layers=len(kinds["layer_kinds"]),
        hidden_size=given.hidden,
        ffn_hidden_size=3 * given.hidden,
        num_heads=8,
        num_kv_heads=4,
        head_dim=given.hidden // 8,
        vocab_size=256,
        max_positions=4096,
        num_mtp_layers=1,
        tied_embeddings=True,
        **kinds,
    )
    decoder = Decoder(config, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.normal_(0, 0.02, generator=generator)
            if "norm" in name or name.endswith(".D"):
                parameter.fill_(1)
            if name.endswith(("A_log", "dt_bias")):
                parameter.uniform_(-1, 1, generator=generator)
    assert decoder.mtp is not None
    decoder.mtp.loss_factor = 1.0  # all that counts here is how good drafts are
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-3, betas=(0.9, 0.95))
    places_S = torch.arange(WINDOW + 1)
    for _ in range(given.steps):
        starts_B = torch.randint(len(tokens_T) - WINDOW, (ROWS, 1), generator=generator)
        rows_BS = tokens_T[starts_B + places_S]
        batch, labels_BS = Batch(tokens_BS=rows_BS[:, :-1]), rows_BS[:, 1:]
        frame = decoder.frame(batch)
        x_TH = decoder.finish(decoder.run(decoder.embed(batch, frame), frame))
        loss, count = decoder.loss_of(x_TH, labels_BS)
        further = decoder.mtp_loss(x_TH, batch, labels_BS, frame)
        optimizer.zero_grad()
        ((loss + further) / count).backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
    return decoder.requires_grad_(False).eval()


def write(
    forward: Forward, requests: Sequence[GenerateRequest], *, speculative: bool
) -> tuple[list[tuple[int, ...]], Meter, float]:
    """Texts, their meter, and the seconds of processors that their steps took."""
    meter, began = Meter(), time.process_time()
    options = Decoding(num_slots=len(requests), speculative=speculative, graphed=False)
    texts = generate(forward, requests, options, new_detokenizer=Letters, meter=meter)
    out = [text.ids for text in texts]
    return out, meter, time.process_time() - began


def main() -> None:
    """Command line."""
    options = parser(__doc__ or "", gib=None)
    options.add_argument("--steps", type=int, default=200, help="of training each model")
    options.add_argument("--bytes", type=int, default=1024, help="of text to train on")
    options.add_argument("--hidden", type=int, default=192)
    options.add_argument("--tokens", type=int, default=128, help="of each text")
    options.add_argument("--texts", default="1,4", help="how many are written at once")
    options.add_argument("--threads", type=int, default=1)
    given = options.parse_args()
    torch.set_num_threads(given.threads)
    tokens_T = torch.tensor(list(TEXT.read_bytes()[: given.bytes]))
    table = Table(
        title=f"Texts of {given.tokens} bytes on a CPU, {given.threads} threads",
        head=(
            "mixers",
            "texts at once",
            "drafts accepted",
            "tokens in a step",
            "plain ms per token",
            "with drafts ms per token",
            "x plain",
            "processor time: x plain",
        ),
    )
    for name, kinds in KINDS.items():
        forward = Forward(trained(kinds, tokens_T, given))
        for count in map(int, given.texts.split(",")):
            starts = [len(tokens_T) * (2 * n + 1) // (2 * count) for n in range(count)]
            requests = [
                GenerateRequest(
                    number=n,
                    prompt=tuple(tokens_T[start : start + 64].tolist()),
                    max_new_tokens=given.tokens,
                )
                for n, start in enumerate(starts)
            ]
            found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
            for _ in range(given.rounds + 1):
                texts = {}
                for way in found:
                    texts[way], meter, cpu = write(forward, requests, speculative=way)
                    found[way].append((meter.step_seconds / meter.step_tokens, cpu))
                if texts[True] != texts[False]:
                    raise SystemExit(f"{name}: drafts have changed the text")
            plain, drafted = (
                [statistics.median(x[n] for x in found[way][1:]) for n in range(2)]
                for way in (False, True)
            )
            share = meter.num_accepted / max(1, meter.num_drafted)
            table.add(
                name,
                str(count),
                f"{share:.0%}",
                f"{meter.step_tokens / count / meter.num_steps:.2f}",
                f"{plain[0] * 1e3:.2f}",
                f"{drafted[0] * 1e3:.2f}",
                times(drafted[0] / plain[0]),
                times(drafted[1] / plain[1]),
                mixers=name,
                texts=count,
                accepted=share,
                seconds={str(way): x[1:] for way, x in found.items()},
                ratio=drafted[1] / plain[1],
            )
            show(given, Path(tempfile.gettempdir()), [table])


if __name__ == "__main__":
    main()
