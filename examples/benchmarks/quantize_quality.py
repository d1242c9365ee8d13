"""What each shipped recipe costs in perplexity and divergence, beside NVIDIA ModelOpt's figures.

python examples/benchmarks/quantize_quality.py --model FOLDER --data TEXT --held-out TEXT
    [--samples 16] [--length 512] [--tokens 8192] [--group-size 64] [--recipes fp8,int4_awq]

FOLDER is a Hugging Face folder. Both calibrate on the same tokens, the first of TEXT, and are
measured on the same others, in the same windows. Where a recipe's groups of 128 columns do not
divide the model, both take `--group-size`. ModelOpt's rows are its presets' algorithms for the same
formats on the same modules, where it runs on a CPU, by its own simulation and before its export.
"""

from __future__ import annotations

import argparse
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench.table import Table, parser, show, workplace

from megtool import quantize
from megtool.data.tokenizer import Tokenizer
from megtool.errors import MegtoolError, MissingPackageError
from megtool.inference.evaluation.compare import differences
from megtool.inference.evaluation.perplexity import token_scores
from megtool.inference.evaluation.texts import read_token_documents
from megtool.inference.windows import IGNORED, batches
from megtool.model.batch import Batch
from megtool.options.quantize import CalibrationData
from megtool.quant.modelopt.load import import_modelopt, silence_output
from megtool.quant.modelopt.quantizer_config import build_modelopt_config
from megtool.quant.recipes.dialects import load_recipe, recipe_names
from megtool.quant.resolve import ResolvedRecipe, resolve_recipe
from megtool.quantize.calibration_data import read_samples
from megtool.quantize.report import QuantizeReport
from megtool.source.open import open_source

WINDOW = 2048

# What ModelOpt's presets do for the formats of a recipe; the recipe's own method is ours.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"method": "max"},
    "fp8_per_channel": {"method": "max"},
    "fp8_block128": {"method": "max"},
    "int8_weight_only": {"method": "max"},
    "int8_sq": {"method": "smoothquant"},
    "int4_weight_only": {"method": "max"},
    "int4_awq": {"method": "awq_lite", "alpha_step": 0.1},
    "int4_gptq": {"method": "max"},
    "w4a8_awq": {"method": "awq_lite", "alpha_step": 0.1},
    "kv_fp8": {"method": "max"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Before and after on the held-out text; `error` is the standard error of the rise of the mean
    loss (nats), token by token the same before and after."""

    before: float
    after: float
    kl: float
    error: float = 0.0


def main() -> None:
    """Quantize by every recipe in turn, by both, and print the table as it grows."""
    options = parser(__doc__, gib=None)
    options.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    options.add_argument("--data", type=Path, help="text to calibrate on; default: megtool's own")
    options.add_argument("--held-out", type=Path, required=True, help="text to measure on")
    options.add_argument("--samples", type=int, default=16)
    options.add_argument("--length", type=int, default=512)
    options.add_argument("--tokens", type=int, default=8192, help="to measure on")
    options.add_argument("--group-size", type=int, default=64, help="where 128 does not divide")
    options.add_argument("--recipes", help="some of the shipped ones, separated by commas")
    options.add_argument("--no-modelopt", action="store_true", help="ours alone")
    given = options.parse_args()
    chosen = given.recipes.split(",") if given.recipes else recipe_names()
    table = Table(
        title="Perplexity and divergence on held-out text",
        head=(
            "recipe",
            "bits a weight",
            "perplexity",
            "KL, nats",
            "seconds",
            "ModelOpt",
            "its KL",
            "its seconds",
            "our loss : its",
        ),
    )
    with workplace(given) as folder:
        place = Path(folder)
        peer = None if given.no_modelopt else Peer(given)
        for name in chosen:
            measure(given, name, place / "out", table, peer)
            show(given, place, [table])


def measure(
    given: argparse.Namespace, name: str, out: Path, table: Table, peer: Peer | None
) -> None:
    """One recipe: a row."""
    group = group_for(given, name)
    began = time.perf_counter()
    ours, bits, told = quantized(given, name, group, out)
    took = time.perf_counter() - began
    shutil.rmtree(out, ignore_errors=True)
    say(f"{name}: {told or shown(ours)} in {took:.0f} s")
    theirs, their_seconds = None, 0.0
    if peer is not None and name in PRESETS and ours is not None:
        began = time.perf_counter()
        theirs, their_told = peer.score(name, group)
        their_seconds = time.perf_counter() - began
        say(f"{name}: ModelOpt {their_told or shown(theirs)} in {their_seconds:.0f} s")
    ratio, error = loss_ratio(ours, theirs) if ours and theirs else (math.nan, math.nan)
    table.add(
        f"{name}, groups of {group}" if group else name,
        f"{bits:.2f}" if ours else "",
        f"{ours.before:.2f} -> {ours.after:.2f}" if ours else told,
        f"{ours.kl:.4f}" if ours else "",
        f"{took:.0f}",
        f"{theirs.after:.2f}" if theirs else "-",
        f"{theirs.kl:.4f}" if theirs else "",
        f"{their_seconds:.0f}" if theirs else "",
        f"{ratio:.2f} ± {error:.2f}" if math.isfinite(ratio) else "",
        recipe=name,
        group=group,
        bits=bits if ours else None,
        refused=told,
        before=ours.before if ours else None,
        after=ours.after if ours else None,
        kl=ours.kl if ours else None,
        seconds=took,
        modelopt_before=theirs.before if theirs else None,
        modelopt_after=theirs.after if theirs else None,
        modelopt_kl=theirs.kl if theirs else None,
        modelopt_seconds=their_seconds if theirs else None,
        loss_ratio=ratio if math.isfinite(ratio) else None,
        loss_ratio_error=error if math.isfinite(error) else None,
    )


def loss_ratio(ours: Score, theirs: Score) -> tuple[float, float]:
    """Our rise in perplexity over ModelOpt's, and its standard error: as many tokens say it.

    Both rises are taken to scatter as ModelOpt's does, independently of each other.
    """
    rise = theirs.after - theirs.before
    if rise <= 0:
        return math.nan, math.nan
    ratio = (ours.after - ours.before) / rise
    return ratio, math.hypot(1.0, ratio) * theirs.error * theirs.after / rise


def group_for(given: argparse.Namespace, name: str) -> int:
    """The group size to ask for, where the recipe's own does not divide the model and it has a
    choice; 0 else."""
    loaded = load_recipe(name)
    formats = [f for f in loaded.formats.values() if f.algo and len(f.number.groups) > 1]
    if not formats:
        return 0
    try:
        resolve_recipe(given.model, name)
    except MegtoolError:
        return int(given.group_size)
    return 0


def quantized(
    given: argparse.Namespace, name: str, group: int, out: Path
) -> tuple[Score | None, float, str]:
    """Our figures and bits a weight; why there are none."""
    try:
        report = quantize(
            given.model,
            out,
            recipe=name,
            group_size=group or None,
            data=given.data,
            samples=given.samples,
            seq_length=given.length,
            eval_data=given.held_out,
            eval_tokens=given.tokens,
            dtype="float32",
            stream_layers=False,
            fsync=False,
        )
    except MegtoolError as e:
        return None, 0.0, e.message.splitlines()[0]
    if not isinstance(report, QuantizeReport) or report.evaluation is None:
        return None, 0.0, "not measured"
    e = report.evaluation
    score = Score(before=e.perplexity_before, after=e.perplexity_after, kl=e.kl_mean)
    return score, report.bits, ""


def quantize_model(folder: Path, config: Mapping[str, Any], samples: Sequence[Batch]) -> Any:
    """The transformers model of a folder, fake-quantized by `mtq.quantize` over some batches."""
    mtq = import_modelopt()
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def run(model: Any) -> None:
        for batch in samples:
            model(input_ids=batch.tokens_BS, use_cache=False)

    with silence_output():
        return mtq.quantize(model, {**config, "quant_cfg": list(config["quant_cfg"])}, run)


class Peer:
    """ModelOpt, on the same tokens."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        opened = open_source(given.model)
        tokenizer = Tokenizer.load(opened.attachments())
        config = opened.view.config
        if config is None:
            raise SystemExit(f"{given.model} is no model")
        wanted = CalibrationData(data=given.data, samples=given.samples, seq_length=given.length)
        vocab_size, most = config.embedding.vocab_size, config.positions.max_positions
        drawn = read_samples(wanted, tokenizer, vocab_size=vocab_size, max_positions=most)
        self._samples = drawn.batches()
        self._texts = read_token_documents(given.held_out, tokenizer, max_tokens=given.tokens)
        self._window = min(WINDOW, most)
        self._model: Any = None

    def score(self, name: str, group: int) -> tuple[Score | None, str]:
        """Its figures for the formats of a recipe; why there are none."""
        try:
            if self._model is None:
                off = {"quant_cfg": [{"quantizer_name": "*", "enable": False}], "algorithm": "max"}
                self._model = quantize_model(self._given.model, off, ())
            decided = resolve_recipe(self._given.model, name, group_size=group or None)
            config = self._config(name, decided)
            found = quantize_model(self._given.model, config, self._samples)
        except MissingPackageError as e:
            return None, e.hint or e.message
        except MegtoolError as e:
            return None, e.message
        return self._compared(found), ""

    def _config(self, name: str, decided: ResolvedRecipe) -> dict[str, Any]:
        """Its settings for our decisions, with the algorithm of its preset."""
        recipe = replace(decided.recipe, algorithm={"method": "max"})
        decisions = [
            replace(d, format=replace(d.format, method="")) if d.format else d
            for d in decided.matched.decisions
        ]
        names = {d.module.name: next(iter(d.module.names_in("hf")), "") for d in decisions}
        config = build_modelopt_config(recipe, decisions, names=names)
        return {**config, "algorithm": dict(PRESETS[name])}

    @torch.inference_mode()
    def _compared(self, found: Any) -> Score:
        """Perplexities and divergence over all predictions, in the windows of `quantize`."""
        losses, kl = [], []
        for rows in batches(self._texts, window=self._window, stride=self._window, batch_size=1):
            labels = rows.labels_BS[0]
            both = [
                m(input_ids=rows.batch.tokens_BS, use_cache=False).logits[0].float()
                for m in (self._model, found)
            ]
            for some in (labels != IGNORED).nonzero()[:, 0].split(512):
                a, b = (logits[some] for logits in both)
                pair = [token_scores(x, labels[some])[0].double() for x in (a, b)]
                losses.append(torch.stack(pair))
                kl.append(differences(a, b).kl_T)
        both_2N = torch.cat(losses, 1)
        before, after = both_2N.mean(1).exp().tolist()
        rise_N = both_2N[1] - both_2N[0]
        error = float(rise_N.std() / len(rise_N) ** 0.5)
        return Score(before=before, after=after, kl=float(torch.cat(kl).mean()), error=error)


def shown(score: Score | None) -> str:
    """Figures in a line."""
    if score is None:
        return "no figures"
    return f"perplexity {score.before:.2f} -> {score.after:.2f}, KL {score.kl:.4f}"


def say(text: str) -> None:
    """A line of progress, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    main()
