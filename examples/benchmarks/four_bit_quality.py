"""What four-bit recipes cost in nats over the unquantized model, with the noise of seeds and texts.

python examples/benchmarks/four_bit_quality.py --model FOLDER --data TEXT --held-out TEXT
    [--held-out TEXT] [--seeds 0,1,2] [--recipes mxfp4,mxfp4_gptq] [--folder NAME=FOLDER]
    [--samples 16] [--length 512] [--tokens 8192]

FOLDER is a Hugging Face folder. Rows of TEXT to calibrate on are drawn at random, once for each
seed. The loss is measured as engines compute the written folder, on the first tokens of each
`--held-out`: its mean over seeds, their standard deviation, and the largest standard error of one
of them, which is the noise of a text of so many tokens. `--folder` measures what another tool
quantized.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import torch
from bench.table import Table, parser, show, workplace

from megtool import quantize
from megtool.console import silent
from megtool.export.engine_arithmetic import run_as_engine
from megtool.inference.evaluate import predictions
from megtool.inference.evaluation_texts import read_token_documents
from megtool.inference.runtime import RuntimeOptions, load_forward, on_ranks
from megtool.inference.windows import batches
from megtool.quant.recipes.dialects import load_recipe
from megtool.reshard.open_source import open_decoder

WINDOW = 2048
RECIPES = "mxfp4,mxfp4_gptq,nvfp4,nvfp4_gptq"


def main() -> None:
    """Quantize by every recipe with every seed, and print the table as it grows."""
    options = parser(__doc__, gib=None)
    options.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    options.add_argument("--data", type=Path, help="text to calibrate on; default: megtool's own")
    options.add_argument(
        "--held-out", type=Path, required=True, action="append", help="text to measure on"
    )
    options.add_argument("--seeds", default="0,1,2", help="separated by commas")
    options.add_argument("--recipes", default=RECIPES, help="separated by commas")
    options.add_argument("--folder", action="append", default=[], help="NAME=FOLDER")
    options.add_argument("--samples", type=int, default=16)
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--tokens", type=int, default=8192, help="to measure on")
    given = options.parse_args()
    table = Table(
        title="Loss over the unquantized model, in nats",
        head=("recipe", "text", "loss", "of nearest", "over seeds", "standard error", "seconds"),
    )
    folders = dict(f.split("=", 1) for f in given.folder)
    nearest: dict[str, list[float]] = {}
    with workplace(given) as folder:
        place = Path(folder)
        before = [losses_of(given.model, text, given.tokens) for text in given.held_out]
        for name in (*given.recipes.split(","), *folders):
            measure(given, name, folders.get(name), place / "out", before, nearest, table)
            show(given, place, [table])


def measure(
    given: argparse.Namespace,
    name: str,
    folder: str | None,
    out: Path,
    before: list[torch.Tensor],
    nearest: dict[str, list[float]],
    table: Table,
) -> None:
    """One recipe, or one folder of another tool: a row for each text.

    `nearest` holds the losses of recipes that round to nearest, by their formats.
    """
    recipe = None if folder else load_recipe(name)
    uses_data = recipe is not None and recipe.method != "none"
    seeds = [int(s) for s in given.seeds.split(",")]
    runs, seconds = [], []
    for seed in seeds if uses_data else seeds[:1]:
        began = time.perf_counter()
        if folder is None:
            drawn = {
                "data": str(given.data) if given.data else None,
                "samples": given.samples,
                "seq_length": given.length,
                "seed": seed,
            }
            quantize(given.model, out, recipe=name, fsync=False, **(drawn if uses_data else {}))
        seconds.append(time.perf_counter() - began)
        runs.append([losses_of(folder or out, t, given.tokens) for t in given.held_out])
        shutil.rmtree(out, ignore_errors=True)
        rises = ", ".join(
            f"{float((r - b).mean()):.3f}" for r, b in zip(runs[-1], before, strict=True)
        )
        print(f"{name}, seed {seed}: {rises} nats, {seconds[-1]:.0f} s", flush=True)
    algos = ",".join(sorted(f.algo for f in recipe.formats.values())) if recipe else ""
    means = [
        [float((run[n] - before[n]).mean()) for run in runs] for n in range(len(given.held_out))
    ]
    if recipe is not None and recipe.method in ("none", "max"):
        nearest.setdefault(algos, [sum(m) / len(m) for m in means])
    for n, text in enumerate(given.held_out):
        loss = sum(means[n]) / len(runs)
        spread = float(torch.tensor(means[n]).std()) if len(runs) > 1 else 0.0
        losses = [run[n] - before[n] for run in runs]
        error = max(float(r.std() / len(r) ** 0.5) for r in losses)
        share = loss / nearest[algos][n] if algos in nearest else None
        table.add(
            name,
            text.stem,
            f"{loss:.3f}",
            f"{share:.2f}" if share is not None else "",
            f"± {spread:.3f}" if len(runs) > 1 else "",
            f"{error:.3f}",
            f"{sum(seconds) / len(seconds):.0f}",
            recipe=name,
            text=str(text),
            losses=means[n],
            share=share,
            error=error,
            seconds=seconds,
        )


def losses_of(folder: str | Path, text: Path, tokens: int) -> torch.Tensor:
    """The loss of every predicted token of a text, as engines compute the folder."""
    source = open_decoder(folder)
    texts = read_token_documents(text, source.tokenizer(None), max_tokens=tokens)
    window = min(WINDOW, source.config.max_positions)
    options = RuntimeOptions(dtype="float32")
    with on_ranks(options, alone=True) as groups, torch.inference_mode():
        forward = load_forward(source, options, groups, silent)
        run_as_engine(forward, source)
        return torch.cat(
            [
                -predictions(forward, forward.hidden(rows.batch), rows)[:, 0].double()
                for rows in batches(texts, window=window, stride=window, batch_size=1)
            ]
        )


if __name__ == "__main__":
    main()
