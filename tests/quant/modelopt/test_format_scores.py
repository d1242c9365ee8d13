"""ModelOpt's scores of formats in our decoder, beside those in the transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.errors import RecipeError, UsageError
from megtool.model.batch import Batch
from megtool.options.layout import ParallelConfig
from megtool.quant.mixed_precision.auto_quantize import choose
from megtool.quant.mixed_precision.sensitivity import check_layout
from megtool.quant.modelopt.format_scores import check_memory
from megtool.quant.modelopt.load import import_modelopt, silence_output
from megtool.quant.modelopt.quantizer_config import build_format_config, name_modules
from megtool.quant.recipes.decision_units import key_of, list_units
from megtool.quant.recipes.formats import RecipeFormat
from megtool.quant.resolve import ResolvedRecipe, resolve_recipe
from tests.support.errors import raises
from tests.support.models import tiny_models
from tests.support.quant.loaded import measure_sensitivities

METHODS = ("gradient", "kl_div")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(
        tmp_path_factory.mktemp("scores") / "llama", dtype="float32", num_hidden_layers=1
    )


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [Batch(tokens_BS=torch.randint(0, 128, (2, 24), generator=generator)) for _ in range(2)]


def decided_by(method: str, folder: Path, checkout: Path, at: Path) -> ResolvedRecipe:
    """The shipped recipe with ModelOpt's scores."""
    text = (checkout / "quant_recipes" / "auto_nvfp4_fp8.yaml").read_text()
    line = f"algorithm: {{method: {method}, modelopt: true}}"
    at.write_text(text.replace("algorithm: kl_div", line))
    return resolve_recipe(folder, at)


def in_transformers(
    folder: Path, configs: list[dict[str, Any]], batches: list[Batch], method: str
) -> dict[str, Any]:
    """What `mtq.auto_quantize` keeps of the transformers model."""
    import transformers

    mtq = import_modelopt()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def loss(logits_BSV: Tensor, batch: Batch) -> Tensor:
        labels_BS = batch.tokens_BS[:, 1:]
        return F.cross_entropy(logits_BSV[:, :-1].mT, labels_BS, reduction="sum")

    with silence_output():
        _, state = mtq.auto_quantize(
            model,
            constraints={"effective_bits": 16.0},
            quantization_formats=configs,
            data_loader=batches,
            forward_step=lambda m, batch: m(batch.tokens_BS, use_cache=False).logits,
            loss_func=loss if method == "gradient" else None,
            num_calib_steps=len(batches),
            num_score_steps=len(batches),
            disabled_layers=["*lm_head*"],
            method=method,
        )
    stats: dict[str, Any] = state["candidate_stats"]
    return stats


@pytest.mark.peers
@pytest.mark.parametrize("method", METHODS)
def test_scores_are_those_of_the_transformers_model(
    method: str, folder: Path, batches: list[Batch], checkout: Path, tmp_path: Path
) -> None:
    decided = decided_by(method, folder, checkout, tmp_path / "auto.yaml")
    decisions, recipe = decided.matched.decisions, decided.recipe
    ours = measure_sensitivities(decided, batches)
    assert ours.method == f"modelopt_{method}"
    units = list_units(decisions, recipe)
    formats = units[0].formats
    configs = [build_format_config(recipe, f, device="cpu") for f in formats]
    from modelopt.torch.quantization.algorithms import QuantRecipe

    stats = in_transformers(folder, configs, batches, method)
    names, factor = name_modules(decisions), 0.5 if method == "gradient" else 1.0
    for unit in units:
        group = next(
            g for g in stats.values() if set(g["module_names"]) == {names[m] for m in unit.modules}
        )
        for number_format, config in zip(formats, configs, strict=True):
            index = group["formats"].index(QuantRecipe(config, name="x"))
            want = float(group["scores"][index]) * factor / ours.num_tokens
            got = ours.losses[unit.name][key_of(number_format, recipe)]
            # A divergence of 1e-7 is within the rounding of logits.
            assert got == pytest.approx(want, rel=2e-2, abs=5e-8), (unit.name, number_format.algo)
    choice = choose(decisions, recipe, ours, bits=6.0)
    assert {d.format.algo for d in choice.decisions if d.format} & {"NVFP4", "FP8"}


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_experts_are_scored(
    method: str, batches: list[Batch], checkout: Path, tmp_path: Path
) -> None:
    moe = tiny_models.moe(tmp_path / "moe")
    decided = decided_by(method, moe, checkout, tmp_path / "auto.yaml")
    scores = measure_sensitivities(decided, batches)
    experts = [n for n in scores.losses if n.endswith(".experts")]
    assert experts
    assert all(scores.losses[n].values() for n in experts)


def test_what_modelopt_cannot_score_is_refused(
    folder: Path, checkout: Path, tmp_path: Path
) -> None:
    decided = decided_by("kl_div", folder, checkout, tmp_path / "auto.yaml")
    with raises(UsageError, "in one process, and there are 2", hint="modelopt: true"):
        check_layout(decided.recipe, ParallelConfig(dp=2))
    units = list_units(decided.matched.decisions, decided.recipe)
    sizes = {m: 1 << 50 for u in units for m in u.modules}
    with raises(UsageError, "ModelOpt scores the whole model in memory", hint="layer by layer"):
        check_memory(units, sizes, 4)
    for method in ("svdquant", "gptq", "smoothquant", "entropy"):
        number_format = RecipeFormat(name="f", algo="FP8", method=method)
        with raises(RecipeError, f"ModelOpt does not score FP8 with algorithm {method}"):
            build_format_config(decided.recipe, number_format, device="cpu")
