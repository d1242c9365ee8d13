"""What pruning by several scores costs in nats over the whole model, with the noise of seeds.

python examples/benchmarks/pruning_quality.py --model FOLDER --data TEXT --held-out TEXT
    [--held-out TEXT] [--cut num_layers=27] [--cut ffn_hidden_size=1152] [--seeds 0,1,2]
    [--samples 4] [--length 512] [--tokens 1024] [--steps 40] [--steps-seeds 0] [--lr 1e-4]

FOLDER is a Hugging Face folder. A seed draws the rows of TEXT that scores are measured on, and
random scores. Each `--cut` is a size of `reshard`. Scores are megtool's, random ones, those of the
position for layers, and those of the hooks of ModelOpt (`modelopt.torch.prune.importance_hooks`) on
transformers' model, on the same rows. Every choice is cut by `megtool reshard`, and measured on the
first tokens of each `--held-out`: means over seeds, their standard deviation, and the standard
error of one text. `--steps` distils every smaller model from the whole one, on TEXT, with those of
`--steps-seeds`. Seconds of the CPU and memory are of the scores alone, in processes of their own.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench.pruning_scores import (
    GROUPS,
    ITERATIVE,
    MINITRON,
    NORMS,
    OURS,
    WEIGHTED,
    Measured,
    alone,
    by_megtool,
    by_modelopt,
)
from bench.table import Table, mib, parser, show, workplace
from bench.text_loss import losses_of
from torch import Tensor

from megtool import finetune, reshard
from megtool.convert.pruning_scores import KeptParts, PruningScores, choose_parts, encode_scores
from megtool.options.quantize import CalibrationData
from megtool.options.selection import Pruning
from megtool.quantize.calibration_data import read_samples
from megtool.source.open import open_decoder

RANDOM, LAST, BEFORE_LAST = "random", "the last ones left out", "those before the last one left out"
METHODS: Mapping[str, tuple[str, ...]] = {
    "num_layers": (OURS, LAST, BEFORE_LAST, RANDOM),
    "hidden_size": (OURS, MINITRON, NORMS, RANDOM),
    "ffn_hidden_size": (OURS, MINITRON, WEIGHTED, ITERATIVE, RANDOM),
    "num_attention_heads": (OURS, MINITRON, RANDOM),
    "num_query_groups": (OURS, MINITRON, GROUPS, RANDOM),
}
CUTS = ("num_layers=27", "ffn_hidden_size=1152", "hidden_size=512", "num_query_groups=2")


def main() -> None:
    """Prune by every score with every seed, and print the table as it grows."""
    options = parser(__doc__, gib=None)
    options.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    options.add_argument("--data", type=Path, required=True, help="text to measure scores on")
    options.add_argument(
        "--held-out", type=Path, required=True, action="append", help="text to measure loss on"
    )
    options.add_argument("--cut", action="append", help="SIZE=NUMBER")
    options.add_argument("--seeds", default="0,1,2", help="separated by commas")
    options.add_argument("--samples", type=int, default=4)
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--tokens", type=int, default=1024, help="of each held-out text")
    options.add_argument("--steps", type=int, default=0, help="of distillation")
    options.add_argument("--steps-seeds", default="0", help="separated by commas")
    options.add_argument("--lr", type=float, default=1e-4, help="of distillation")
    given = options.parse_args()
    scoring = Table(
        title=f"Measuring scores on {given.samples} rows of {given.length} tokens",
        head=("by", "CPU s", "peak resident MiB"),
    )
    texts = [t.stem for t in given.held_out]
    after = [f"{t}, distilled" for t in texts] if given.steps else []
    table = Table(
        title="Loss over the whole model, in nats",
        head=("cut", "scores", "seeds", *texts, "noise", *after),
    )
    with workplace(given) as folder:
        run = PruningRun(given, Path(folder))
        run.add_scoring(scoring)
        for cut in given.cut or CUTS:
            name, _, size = cut.partition("=")
            for method in METHODS[name]:
                run.add(table, name, int(size), method)
                show(given, Path(folder), [scoring, table])


class PruningRun:
    """Scores of every seed, and losses of what they choose; equal choices are measured once."""

    def __init__(self, given: argparse.Namespace, place: Path) -> None:
        self._given, self._place = given, place
        self._config = open_decoder(given.model).config
        self._seeds = [int(s) for s in given.seeds.split(",")]
        self._steps_seeds = [int(s) for s in given.steps_seeds.split(",")]
        self._whole = losses_of(given.model, given.held_out, given.tokens)
        self._losses = dict[KeptParts, list[Tensor]]()
        self._distilled = dict[tuple[KeptParts, int], list[Tensor]]()
        kinds: dict[str, Callable[..., Measured]] = {OURS: by_megtool, MINITRON: by_modelopt}
        self._measured = {
            name: [alone(of, given.model, self._rows(s)) for s in self._seeds]
            for name, of in kinds.items()
        }
        runs = zip(*self._measured.values(), strict=True)
        self._scores = [{n: v for m in row for n, v in m.scores.items()} for row in runs]

    def _rows(self, seed: int) -> Tensor:
        """Rows of tokens [N, S], drawn from the text."""
        given, source = self._given, open_decoder(self._given.model)
        options = CalibrationData(
            data=str(given.data), samples=given.samples, seq_length=given.length, seed=seed
        )
        drawn = read_samples(
            options,
            source.tokenizer(None),
            vocab_size=self._config.embedding.vocab_size,
            max_positions=self._config.positions.max_positions,
        )
        return torch.as_tensor(drawn.tokens_NS)

    def add_scoring(self, table: Table) -> None:
        """A row for each tool."""
        for name, measured in self._measured.items():
            seconds = [m.seconds for m in measured]
            peak = max(m.peak_bytes for m in measured)
            table.add(
                name,
                f"{statistics.mean(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f})",
                mib(peak),
                by=name,
                seconds=seconds,
                peak_bytes=peak,
            )

    def add(self, table: Table, cut: str, size: int, method: str) -> None:
        """A row of one score."""
        seeds = self._seeds[:1] if method in (LAST, BEFORE_LAST) else self._seeds
        rises, distilled = list[list[float]](), list[list[float]]()
        errors = list[float]()
        for number, seed in enumerate(seeds):
            kept, folder = self._prune(cut, size, self._of(method, number, seed))
            if kept not in self._losses:
                self._losses[kept] = self._on_texts(folder)
            differences = [a - b for a, b in zip(self._losses[kept], self._whole, strict=True)]
            rises.append([float(d.mean()) for d in differences])
            errors += [float(d.std() / len(d) ** 0.5) for d in differences]
            if self._given.steps and seed in self._steps_seeds:
                if (kept, seed) not in self._distilled:
                    self._distilled[kept, seed] = self._on_texts(self._distil(folder, seed))
                pairs = zip(self._distilled[kept, seed], self._whole, strict=True)
                distilled.append([float((a - b).mean()) for a, b in pairs])
            shutil.rmtree(folder)
            line = f"{cut}={size}, {method}, seed {seed}: {rises[-1]}, distilled {distilled[-1:]}"
            print(time.strftime("%H:%M:%S"), line, flush=True)
        table.add(
            f"{cut} {self._config.get(SIZE_OF[cut])} -> {size}",
            method,
            str(len(seeds)),
            *map(spread, zip(*rises, strict=True)),
            f"{max(errors):.3f}",
            *map(spread, zip(*distilled, strict=True)),
            cut=cut,
            size=size,
            scores=method,
            seeds=list(seeds),
            losses=rises,
            errors=errors,
            distilled=distilled,
        )

    def _of(self, method: str, number: int, seed: int) -> PruningScores:
        """The scores of a method with a seed."""
        ours = self._scores[number][OURS]
        if method == LAST:
            return replace(ours, layers=tuple(float(-n) for n in range(len(ours.layers))))
        if method == BEFORE_LAST:  # the last layer stays
            falling = [float(-n) for n in range(len(ours.layers) - 1)]
            return replace(ours, layers=(*falling, 1.0))
        if method == RANDOM:
            draw = random.Random(seed)
            return replace(
                ours,
                layers=tuple(draw.random() for _ in ours.layers),
                hidden=tuple(draw.random() for _ in ours.hidden),
                ffn={n: tuple(draw.random() for _ in row) for n, row in ours.ffn.items()},
                heads={n: tuple(draw.random() for _ in row) for n, row in ours.heads.items()},
            )
        return self._scores[number][method]

    def _prune(self, cut: str, size: int, scores: PruningScores) -> tuple[KeptParts, Path]:
        """What stays, and the folder of it."""
        file, folder = self._place / "scores.json", self._place / "small"
        file.write_bytes(encode_scores(scores))
        sizes = {cut: size}
        kept = choose_parts(scores, Pruning(**sizes), self._config, file)
        reshard(self._given.model, folder, to="hf", pruning_scores=file, fsync=False, **sizes)
        return freeze(kept), folder

    def _on_texts(self, folder: Path) -> list[Tensor]:
        return losses_of(folder, self._given.held_out, self._given.tokens)

    def _distil(self, folder: Path, seed: int) -> Path:
        """The pruned model after some steps of learning from the whole one."""
        out = self._place / "distilled"
        shutil.rmtree(out, ignore_errors=True)
        finetune(
            folder,
            out,
            data=[str(self._given.data)],
            teacher=self._given.model,
            distill_weight=1.0,
            train_iters=self._given.steps,
            global_batch_size=1,
            seq_length=min(256, self._given.length),
            lr=self._given.lr,
            lr_warmup_iters=min(5, self._given.steps - 1),
            seed=seed,
            to="hf",
            fsync=False,
        )
        return out / "hf"


SIZE_OF = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_heads",
    "num_query_groups": "num_kv_heads",
}
"""The size of a model that each option changes."""


def freeze(kept: KeptParts) -> KeptParts:
    """The same parts, with mappings as tuples: to be looked up by."""
    by_layer = {
        name: tuple(sorted(value.items()))
        for name in ("ffn", "heads", "groups", "experts")
        if (value := getattr(kept, name)) is not None
    }
    frozen: Any = by_layer
    return replace(kept, **frozen)


def spread(values: tuple[float, ...]) -> str:
    """The mean, and the standard deviation of several."""
    mean = f"{statistics.mean(values):.3f}"
    return f"{mean} ± {statistics.stdev(values):.3f}" if len(values) > 1 else mean


if __name__ == "__main__":
    main()
