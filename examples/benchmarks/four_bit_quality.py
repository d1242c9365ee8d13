"""What four-bit recipes cost in nats over the unquantized model, with the noise of seeds and texts.

python examples/benchmarks/four_bit_quality.py --model FOLDER --data TEXT --held-out TEXT
    [--held-out TEXT] [--seeds 0,1,2] [--recipes mxfp4,mxfp4_gptq] [--folder NAME=FOLDER]
    [--set steps=50] [--rotation r1=hadamard,r2=hadamard] [--group-size 32]
    [--auto-round PYTHON] [--auto-round-steps 50] [--batch-size 1] [--samples 16]
    [--length 512] [--tokens 8192]

FOLDER is a Hugging Face folder. Rows of TEXT to calibrate on are drawn at random, once for each
seed. The loss is measured as engines compute the written folder, on the first tokens of each
`--held-out`: its mean over seeds, their standard deviation, and the largest standard error of one
of them, which is the noise of a text of so many tokens. `--folder` measures what another tool
quantized. `--set` changes an option of the algorithm in all recipes that have it. Each `--rotation`
adds a row for every recipe with its weights rotated; random ones have the seed of the run.
`--auto-round` names a Python with auto-round, which then quantizes the same rows in the formats of
the recipes, on the CPU, in as many threads; seconds are of the CPU, without measuring.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import torch
import yaml
from bench.table import Table, parser, show, workplace
from bench.text_loss import losses_of

from megtool import quantize
from megtool.options.quantize import CalibrationData
from megtool.quant.recipes.dialects import load_recipe
from megtool.quant.recipes.recipe import Recipe
from megtool.quantize.calibration_data import read_samples
from megtool.source.open import open_decoder

RECIPES = "mxfp4,mxfp4_gptq,nvfp4,nvfp4_gptq"
AUTO_ROUND = "auto-round "
ROTATED = "rotated by"
AUTO_ROUND_SCRIPT = """
import json, sys
import torch
from auto_round import AutoRound

job = json.load(sys.stdin)
torch.set_num_threads(job["threads"])
rows = [
    {"input_ids": torch.tensor([r]), "attention_mask": torch.ones(1, len(r), dtype=torch.int64)}
    for r in job["rows"]
]
AutoRound(
    job["model"], scheme=job["scheme"], dataset=rows, nsamples=len(rows),
    seqlen=len(job["rows"][0]), iters=job["steps"], batch_size=job["batch_size"],
    seed=job["seed"], device_map="cpu", amp=False,
).quantize_and_save(job["out"], format="llm_compressor")
"""


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
    options.add_argument("--set", action="append", default=[], help="OPTION=VALUE of recipes")
    options.add_argument("--rotation", action="append", default=[], help="KEY=VALUE,...")
    options.add_argument("--group-size", type=int, help="of formats that have several")
    options.add_argument("--auto-round", type=Path, help="a Python that has auto-round")
    options.add_argument("--auto-round-steps", type=int, default=50, help="for each layer")
    options.add_argument(
        "--batch-size", type=int, default=1, help="samples in a step of auto-round"
    )
    options.add_argument("--samples", type=int, default=16)
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--tokens", type=int, default=8192, help="to measure on")
    given = options.parse_args()
    table = Table(
        title="Loss over the unquantized model, in nats",
        head=("recipe", "text", "loss", "of nearest", "over seeds", "standard error", "CPU s"),
    )
    folders = dict(f.split("=", 1) for f in given.folder)
    nearest: dict[str, list[float]] = {}
    with workplace(given) as folder:
        place = Path(folder)
        before = losses_of(given.model, given.held_out, given.tokens)
        recipes = [n for n in given.recipes.split(",") if n]
        algos = dict.fromkeys(algos_of(load_recipe(n)) for n in recipes)
        peers = [AUTO_ROUND + a for a in algos] if given.auto_round else []
        rotated = [f"{n} {ROTATED} {r}" for n in recipes for r in given.rotation]
        for name in (*recipes, *rotated, *peers, *folders):
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
    is_peer = name.startswith(AUTO_ROUND)
    base, _, rotation = name.partition(f" {ROTATED} ")
    recipe = None if folder or is_peer else load_recipe(base)
    uses_data = is_peer or (recipe is not None and recipe.method != "none")
    varies = uses_data or "random" in rotation
    seeds = [int(s) for s in given.seeds.split(",")]
    runs, seconds = [], []
    for seed in seeds if varies else seeds[:1]:
        began, written = cpu_seconds(), Path(folder or out)
        if is_peer:
            written = auto_round(given, name.removeprefix(AUTO_ROUND), seed, out)
        elif folder is None:
            drawn = {
                "data": str(given.data) if given.data else None,
                "samples": given.samples,
                "seq_length": given.length,
                "seed": seed,
            }
            changed = with_options(base, given.set, rotation, seed, out.with_suffix(".yaml"))
            quantize(
                given.model,
                out,
                recipe=changed,
                group_size=given.group_size,
                fsync=False,
                **(drawn if uses_data else {}),
            )
        seconds.append(cpu_seconds() - began)
        runs.append(losses_of(written, given.held_out, given.tokens))
        shutil.rmtree(out, ignore_errors=True)
        rises = ", ".join(
            f"{float((r - b).mean()):.3f}" for r, b in zip(runs[-1], before, strict=True)
        )
        print(f"{name}, seed {seed}: {rises} nats, {seconds[-1]:.0f} s", flush=True)
    algos = algos_of(recipe) if recipe else name.removeprefix(AUTO_ROUND)
    means = [
        [float((run[n] - before[n]).mean()) for run in runs] for n in range(len(given.held_out))
    ]
    if recipe is not None and recipe.method in ("none", "max") and not rotation:
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


def algos_of(recipe: Recipe) -> str:
    """The formats of a recipe."""
    return ",".join(sorted(f.algo for f in recipe.formats.values()))


def with_options(name: str, options: list[str], rotation: str, seed: int, path: Path) -> str:
    """A recipe with options of its algorithm changed, if it has them, and with a rotation, if there
    is one; its name or its file."""
    recipe = load_recipe(name)
    changed = dict(option.split("=", 1) for option in options)
    changed = {k: v for k, v in changed.items() if k in recipe.algorithm}
    if not changed and not rotation:
        return name
    text = yaml.safe_load((files("megtool.quant_recipes") / f"{name}.yaml").read_text())
    if changed:
        text["algorithm"] |= {k: yaml.safe_load(v) for k, v in changed.items()}
    if rotation:
        keys = dict(option.split("=", 1) for option in rotation.split(","))
        text["rotation"] = {k: yaml.safe_load(v) for k, v in keys.items()} | {"seed": seed}
    path.write_text(yaml.safe_dump(text))
    return str(path)


def auto_round(given: argparse.Namespace, scheme: str, seed: int, out: Path) -> Path:
    """Have auto-round quantize the same rows; the folder in compressed-tensors' format."""
    source = open_decoder(given.model)
    drawn = CalibrationData(
        data=given.data, samples=given.samples, seq_length=given.length, seed=seed
    )
    rows = read_samples(
        drawn,
        source.tokenizer(None),
        vocab_size=source.config.embedding.vocab_size,
        max_positions=source.config.positions.max_positions,
    )
    job = {
        "model": str(given.model),
        "scheme": scheme,
        "rows": rows.tokens_NS.tolist(),
        "steps": given.auto_round_steps,
        "batch_size": given.batch_size,
        "seed": seed,
        "threads": torch.get_num_threads(),
        "out": str(out),
    }
    words = [str(given.auto_round), "-c", AUTO_ROUND_SCRIPT]
    done = subprocess.run(words, input=json.dumps(job), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"auto-round failed:\n{done.stderr[-2000:]}")
    return next(out.rglob("config.json")).parent


def cpu_seconds() -> float:
    """Seconds of the CPU that this process and those it has started and awaited have taken."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


if __name__ == "__main__":
    main()
