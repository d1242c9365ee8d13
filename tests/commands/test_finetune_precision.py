"""Finetune of experts and latent attention in FP8, and of modules in a precision of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megtool import finetune, verify
from megtool.commands.reports.finetune import FinetunePlan
from megtool.errors import MegtoolError, RecipeError, UsageError
from megtool.fp8_state.inspect import inspect_amax
from tests.support.errors import raises
from tests.support.models import moe_models, tiny_text
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.finetune_runs import curve, tune
from tests.support.worlds.torchrun import torchrun

transformers = pytest.importorskip("transformers")

SHORT: dict[str, Any] = {"bf16": True, "train_iters": 4, "lr_decay_iters": 4}
MEGATRON = """
configs:
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  mx:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: mxfp8}
matchers:
  attention: {config: bf16, type: glob, pattern: "*self_attention*", enabled: true}
  experts: {config: mx, type: glob, pattern: "*.experts.*", enabled: true}
"""
OWN = """
description: experts in blocks, attention with one scale, the rest in 16 bits
algorithm: max
formats:
  one: {algo: FP8}
  blocks: {algo: FP8_PB_WO}
rules:
  - match: {role: expert}
    format: blocks
  - match: {role: fc1}
    format: keep
  - match: {kind: linear}
    format: one
  - match: {any: [{kind: norm}, {kind: embedding}, {kind: kv_cache}]}
    format: keep
"""


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts and latent attention, two layers."""
    folder = tmp_path_factory.mktemp("source") / "model"
    family, _, keys = moe_models.CASES["deepseek_v3"]
    sizes = {"vocab_size": tiny_text.VOCABULARY, "eos_token_id": tiny_text.END}
    keys = keys | sizes | {"num_hidden_layers": 2}
    tiny_model(family, folder, sizes=moe_models.SIZES, **keys)
    tiny_text.save_tokenizer(folder)
    return folder


def losses(folder: Path) -> list[float]:
    return [float(line[1]) for line in curve(folder) if line[1] is not None]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_experts_and_latents_learn_in_fp8(
    deepseek: Path, data: Path, tmp_path: Path, recipe: str
) -> None:
    tune(deepseek, tmp_path / "fp8", data, fp8_recipe=recipe, **SHORT)
    tune(deepseek, tmp_path / "bf16", data, **SHORT)
    got, want = losses(tmp_path / "fp8"), losses(tmp_path / "bf16")
    assert got != want
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < 0.05


def test_delayed_scaling_of_experts_goes_on_where_it_stopped(
    deepseek: Path, data: Path, tmp_path: Path
) -> None:
    """Their states are in the checkpoint under Megatron's names, an object for each expert."""
    how = SHORT | {"fp8_recipe": "delayed", "fp8_amax_history_len": 4, "save_interval": 2}
    tune(deepseek, tmp_path / "whole", data, **how)
    tune(deepseek, tmp_path / "cut", data, **(how | {"train_iters": 2}))
    tune(deepseek, tmp_path / "cut", data, **how)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert verify(tmp_path / "cut", tmp_path / "whole").verdict == "equal"
    seen = inspect_amax(tmp_path / "whole", modules=True)
    names = {line.name for line in seen.modules}
    assert any("linear_kv_down_proj" in name for name in names)
    assert {line.expert for line in seen.modules if line.expert is not None} == set(range(8))
    assert seen.exit_status == 0, list(seen.lines())


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_weights_that_are_fp8_alone_go_on_where_they_stopped(
    deepseek: Path, data: Path, tmp_path: Path, recipe: str
) -> None:
    """Dense ones, latent projections and experts; offloaded or not, the same checkpoints."""
    how = SHORT | {"fp8_recipe": recipe, "fp8_param_gather": True, "save_interval": 2}
    tune(deepseek, tmp_path / "whole", data, **how)
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    tune(deepseek, tmp_path / "cut", data, **(how | {"train_iters": 2}))
    tune(deepseek, tmp_path / "cut", data, **how, optimizer_cpu_offload=True)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert verify(tmp_path / "cut", tmp_path / "whole").verdict == "equal"
    plans = [
        finetune(deepseek, tmp_path / "plan", data=[str(data)], dry_run=True, **options)
        for options in (how, SHORT | {"fp8_recipe": recipe})
    ]
    assert isinstance(plans[0], FinetunePlan)
    assert isinstance(plans[1], FinetunePlan)
    assert plans[0].weight_bytes < 0.75 * plans[1].weight_bytes


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("axes", [("--ep", "2"), ("--tp", "2", "--sequence-parallel")])
def test_layouts_learn_the_same(
    deepseek: Path, data: Path, tmp_path: Path, recipe: str, axes: tuple[str, ...]
) -> None:
    how = SHORT | {"fp8_recipe": recipe, "fp8_amax_history_len": 4, "global_batch_size": 4}
    tune(deepseek, tmp_path / "one", data, **how)
    options = ["--fp8-recipe", recipe, "--fp8-amax-history-len", "4", "--global-batch-size", "4"]
    options += ["--bf16", "--train-iters", "4", "--lr-decay-iters", "4", "--seq-length", "32"]
    options += ["--lr", "1e-3", "--threads", "1", "--no-fsync", "-q", "--data", str(data)]
    words = "finetune", str(deepseek), str(tmp_path / "two"), *options, *axes
    run = torchrun(2, *words)
    assert run.returncode == 0, run.stderr
    got, want = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < 0.03


def planned(model: Path, data: Path, tmp_path: Path, text: str, **more: Any) -> dict[str, str]:
    file = tmp_path / "precision.yaml"
    file.write_text(text)
    plan = finetune(
        model,
        tmp_path / "out",
        data=[str(data)],
        te_precision_config_file=file,
        seq_length=32,
        dry_run=True,
        **more,
    )
    assert isinstance(plan, FinetunePlan)
    assert all(any(label in line for line in plan.lines()) for label in plan.precisions.values())
    return dict(plan.precisions)


def test_megatrons_matchers_choose(deepseek: Path, data: Path, tmp_path: Path) -> None:
    """As megatron-core's own matcher does, of every module."""
    quant_config = pytest.importorskip("megatron.core.quantization.quant_config")
    plan = planned(deepseek, data, tmp_path, MEGATRON, fp8_recipe="tensorwise")
    recipe = quant_config.RecipeConfig.from_yaml_file(str(tmp_path / "precision.yaml"))
    labels = {"bf16": "16 bits", "mx": "FP8 mxfp8, e4m3", None: "FP8 tensorwise, hybrid"}
    for row, label in plan.items():
        layers, _, module = row.partition(": ")
        first = layers.removeprefix("layers ").partition("-")[0]
        context = quant_config.MatchContext(f"decoder.layers.{first}.{module}", int(first))
        assert label == labels[recipe.match_to_config_key(context)], row
    assert plan["layers 1: mlp.experts.linear_fc1"] == "FP8 mxfp8, e4m3"
    assert plan["layers 0-1: self_attention.linear_proj"] == "16 bits"
    # Outside of the run's FP8 a config needs to say that it wants its own.
    with raises(UsageError, "no module is in FP8"):
        planned(deepseek, data, tmp_path, MEGATRON)
    wants = MEGATRON.replace("mxfp8}", "mxfp8, override_nonquantized_autocast: true}")
    plan = planned(deepseek, data, tmp_path, wants)
    assert plan["layers 1: mlp.experts.linear_fc1"] == "FP8 mxfp8, e4m3"
    assert plan["layers 0: mlp.linear_fc1"] == "16 bits"
    keeps = MEGATRON.replace("mxfp8}", "mxfp8, override_quantized_autocast: false}")
    plan = planned(deepseek, data, tmp_path, keeps, fp8_recipe="blockwise")
    assert plan["layers 1: mlp.experts.linear_fc1"] == "FP8 blockwise, hybrid"


def test_rules_of_our_own_choose(deepseek: Path, data: Path, tmp_path: Path) -> None:
    plan = planned(
        deepseek, data, tmp_path, OWN, fp8_recipe="delayed", num_layers_at_start_in_bf16=1
    )
    assert plan["layers 1: mlp.experts.linear_fc1"] == "FP8 blockwise, hybrid"
    assert plan["layers 0: mlp.linear_fc1"] == "16 bits"
    assert plan["layers 0-1: self_attention.linear_proj"] == "FP8 delayed, hybrid"
    file = tmp_path / "precision.yaml"
    how = SHORT | {"fp8_recipe": "delayed", "te_precision_config_file": file, "save_interval": 2}
    tune(deepseek, tmp_path / "whole", data, **how)
    tune(deepseek, tmp_path / "cut", data, **(how | {"train_iters": 2}))
    tune(deepseek, tmp_path / "cut", data, **how)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    file.write_text(OWN.replace("algo: FP8_PB_WO", "algo: MXFP8"))
    with pytest.raises(MegtoolError, match="te_precision_config_file"):
        tune(deepseek, tmp_path / "cut", data, **(how | {"train_iters": 6}))


def test_recipes_that_cannot_be_trained(deepseek: Path, data: Path, tmp_path: Path) -> None:
    for text, message in (
        (OWN.replace("FP8_PB_WO", "NVFP4"), "NVFP4, which is not trained"),
        (MEGATRON.replace("config: mx,", "config: my,"), "names no config: 'my'"),
        ("description: x\nrules: [{match: {role: qkv}, format: fp9}]", "fp9"),
    ):
        with raises(RecipeError, message):
            planned(deepseek, data, tmp_path, text, fp8_recipe="tensorwise")
    with raises(UsageError, "--kernels te"):
        planned(deepseek, data, tmp_path, MEGATRON, fp8_recipe="tensorwise", kernels="te")
