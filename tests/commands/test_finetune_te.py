"""Finetune by Transformer Engine: refused before any work where it is not; on a GPU, as our FP8."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import finetune, verify
from megtool.commands.reports.finetune import FinetunePlan, FinetuneReport
from megtool.errors import MissingPackageError, UsageError
from megtool.fp8_state.inspect import inspect_amax
from megtool.kernels.dispatch import use
from megtool.kernels.transformer_engine.linear import TeModule
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.recompute import recompute
from megtool.optim.fp8.config import Fp8Config, Recipe
from megtool.optim.fp8.transformer_engine import TeAmaxHistories, require_recipe
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.open import open_source
from megtool.train.features.fp8 import Fp8Feature
from megtool.train.model.build import load_for_training
from megtool.train.run_log import read_log
from tests.support.models import moe_cases, tiny_text

RECIPES: tuple[Recipe, ...] = ("delayed", "tensorwise", "blockwise", "mxfp8")
IS_THERE = find_spec("transformer_engine") is not None


def by_te(test: Any) -> Any:
    """Mark a test that runs Transformer Engine."""
    missing = pytest.mark.skipif(not IS_THERE, reason="Transformer Engine is not installed")
    return pytest.mark.gpu(missing(test))


def tune(model: Path, folder: Path, text: Path, **more: Any) -> list[float]:
    """Losses of a few steps of two micro batches each, of 30 tokens: FP8 has to fill them up."""
    options: dict[str, Any] = {"seq_length": 30, "train_iters": 6, "global_batch_size": 2}
    options |= {"lr": 1e-3, "threads": 1, "fsync": False, "bf16": True}
    report = finetune(model, folder, data=[str(text)], **(options | more))
    assert isinstance(report, FinetuneReport)
    return [line["loss"] for line in read_log(folder / "log.jsonl") if "loss" in line]


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.skipif(IS_THERE, reason="Transformer Engine is installed")
def test_that_it_is_missing_is_said_before_any_work(
    dry_run: bool, model: Path, tmp_path: Path
) -> None:
    """Even before the data are looked at, which are not there."""
    with pytest.raises(MissingPackageError, match="not installed") as caught:
        finetune(
            model,
            tmp_path / "dst",
            data=[str(tmp_path / "none.txt")],
            kernels="te",
            fp8_recipe="delayed",
            dry_run=dry_run,
        )
    assert "pip install" in str(caught.value)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"fp8_recipe": "delayed", "kernels": "te", "fp8_param_gather": True}, "--fp8-param-gat"),
        (
            {"fp8_recipe": "delayed", "kernels": "te", "recompute_granularity": "selective"},
            "cannot be kept",
        ),
        ({"fp8_recipe": "delayed", "kernels": "te", "cuda_graph_impl": "local"}, "its own scales"),
        ({"fp8_recipe": "delayed", "kernels": "te", "qat": "fp8"}, "--qat and --fp8-recipe"),
    ],
)
def test_what_it_does_not_do_is_refused(
    more: dict[str, Any], message: str, model: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        tune(model, tmp_path / "dst", text, **more)


def need(recipe: Recipe) -> None:
    """Skip, with Transformer Engine's reason, what this GPU does not have."""
    try:
        require_recipe(recipe)
    except UsageError as error:
        pytest.skip(str(error))


@by_te
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_learns_as_our_own_fp8_and_as_bf16(
    recipe: Recipe, model: Path, text: Path, tmp_path: Path
) -> None:
    need(recipe)
    if recipe == "mxfp8":  # which needs multiples of 32
        model = tiny_text.save(tmp_path / "wide", intermediate_size=64)
    how: dict[str, Any] = {"device": "cuda", "train_iters": 20, "lr": 1e-2}
    plain = tune(model, tmp_path / "bf16", text, **how)
    how |= {"fp8_recipe": recipe}
    ours = tune(model, tmp_path / "ours", text, **(how | {"device": "cpu"}))
    theirs = tune(model, tmp_path / "theirs", text, **how, kernels="te")
    assert plain[-1] < 0.9 * plain[0]
    assert theirs != plain
    for want in (ours, plain):
        assert max(abs(a - b) for a, b in zip(theirs, want, strict=True)) < 0.02 * want[0]


@by_te
def test_a_run_that_was_stopped_is_the_one_that_was_not(
    model: Path, text: Path, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"device": "cuda", "kernels": "te", "fp8_recipe": "delayed"}
    how |= {"train_iters": 4, "lr_decay_iters": 4, "save_interval": 2, "eval_split": 0.2}
    how |= {"recompute_granularity": "full", "eval_interval": 1, "fp8_amax_history_len": 8}
    whole = tune(model, tmp_path / "whole", text, **how)
    tune(model, tmp_path / "cut", text, **(how | {"train_iters": 2}))
    assert tune(model, tmp_path / "cut", text, **how) == whole
    assert verify(tmp_path / "cut", tmp_path / "whole").verdict == "equal"
    seen = inspect_amax(tmp_path / "whole")
    assert seen.modules
    assert seen.exit_status == 0, list(seen.lines())


@by_te
def test_adapters_are_trained_beside_it(model: Path, text: Path, tmp_path: Path) -> None:
    how: dict[str, Any] = {"device": "cuda", "lora_rank": 4, "lr": 1e-2}
    plain = tune(model, tmp_path / "bf16", text, **how)
    got = tune(model, tmp_path / "te", text, **how, kernels="te", fp8_recipe="delayed")
    assert got != plain
    assert max(abs(a - b) for a, b in zip(got, plain, strict=True)) < 0.02 * plain[0]


@dataclass
class Passed:
    """What training left: gradients, and each layer's delayed scaling state."""

    stage: Decoder
    fp8: Fp8Feature
    gradients: dict[str, torch.Tensor]
    states: list[dict[str, torch.Tensor]]


def passes(folder: Path, *, again: bool = False, evaluated: bool = False) -> Passed:
    """Three passes there and back over 21 tokens each, with evaluations between or not."""
    opened, groups = open_source(folder), ProcessGroups.alone("cuda")
    assert opened.model is not None
    source = opened
    (stage,) = load_for_training(source, groups, dtype="bfloat16")
    if again:
        recompute(stage, "full")
    with use("te"):
        fp8 = Fp8Feature([stage], Fp8Config(fp8_amax_history_len=4, fp8_recipe="delayed"), groups)
    for step in range(3):
        tokens = torch.randint(0, 101, (3, 7), generator=torch.Generator().manual_seed(step))
        batch, labels = Batch(tokens_BS=tokens.cuda()), tokens.roll(-1, 1).cuda()
        stage.loss(batch, labels)[0].backward()
        if evaluated:
            with torch.no_grad():
                stage.loss(Batch(tokens_BS=tokens.flip(0).cuda()), labels)
    assert isinstance(fp8.histories, TeAmaxHistories)
    gradients = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    states = [fp8.histories.state(i) for i in range(len(fp8.names))]
    return Passed(stage, fp8, gradients, states)


@by_te
@pytest.mark.parametrize("how", [{"again": True}, {"evaluated": True}])
def test_recomputation_and_evaluations_leave_no_trace(how: dict[str, bool], model: Path) -> None:
    kept, other = passes(model), passes(model, **how)
    assert len(kept.gradients) == len(other.gradients) == 15
    for name, gradient in kept.gradients.items():
        assert torch.equal(other.gradients[name], gradient), name
    assert len(kept.states) == 8
    for mine, theirs in zip(kept.states, other.states, strict=True):
        assert all(torch.equal(theirs[n], t) for n, t in mine.items())
        assert (mine["amax_history_fwd"][1:, :2] > 0).all()
        assert not mine["amax_history_fwd"][0].any()


@by_te
def test_weights_stay_the_models_own(model: Path) -> None:
    run = passes(model)
    assert "computed by Transformer Engine" in run.fp8.describe()
    modules = [*run.stage.decoder.layers.modules()]
    made = {
        id(te): te
        for m in modules
        for name in ("product", "norm_product")
        if isinstance(te := getattr(m, name, None), TeModule)
    }
    kinds = sorted(type(te).__name__ for te in made.values())
    assert kinds == ["TeLinear"] * 2 + ["TeNormLinear"] * 2 + ["TeNormMlp"] * 2
    own = {id(p) for p in run.stage.parameters()}
    assert len(own) == 15
    weights = [id(weight) for te in made.values() for weight in te.weights]
    assert len(weights) == len(run.fp8.names) == 8
    assert set(weights) <= own
    run.fp8.remove()
    assert "run" not in vars(run.stage)
    assert all(getattr(m, "product", None) is None for m in modules)
    assert all(getattr(m, "norm_product", None) is None for m in modules)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of two layers that reads bytes."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    sizes = {"num_hidden_layers": 2, "intermediate_size": 64, "num_local_experts": 4}
    vocabulary = {"vocab_size": tiny_text.VOCABULARY, "eos_token_id": tiny_text.END}
    moe_cases.save(("mixtral", "Mixtral", sizes | vocabulary), folder)
    tiny_text.save_tokenizer(folder)
    return folder


@by_te
@pytest.mark.parametrize("kind", ["model", "experts"])
@pytest.mark.parametrize("more", [{}, {"recompute_granularity": "full"}, {"lora_rank": 4}], ids=str)
def test_its_modules_learn_as_our_own_layers(
    kind: str, more: dict[str, Any], request: pytest.FixtureRequest, text: Path, tmp_path: Path
) -> None:
    """Norms with products, MLPs and experts, without FP8; weights' gradients in fp32 sums."""
    source = request.getfixturevalue(kind)
    how: dict[str, Any] = {"device": "cuda", "train_iters": 6, "lr": 1e-2, "micro_batch_size": 1}
    ours = tune(source, tmp_path / "ours", text, **(how | more), kernels="torch")
    theirs = tune(source, tmp_path / "theirs", text, **(how | more), kernels="te")
    assert "lora_rank" in more or ours[-1] < ours[0]
    assert max(abs(a - b) for a, b in zip(theirs, ours, strict=True)) < 0.02 * ours[0]


@by_te
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_are_trained_in_fp8(
    recipe: Recipe, experts: Path, text: Path, tmp_path: Path
) -> None:
    """Each expert's state is saved as our own FP8 saves it, and a stopped run resumes with it."""
    need(recipe)
    how: dict[str, Any] = {"device": "cuda", "train_iters": 8, "lr_decay_iters": 8, "lr": 1e-2}
    how |= {"save_interval": 4, "fp8_amax_history_len": 4} if recipe == "delayed" else {}
    plain = tune(experts, tmp_path / "bf16", text, **(how | {"fp8_amax_history_len": None}))
    how |= {"fp8_recipe": recipe}
    theirs = tune(experts, tmp_path / "theirs", text, **how, kernels="te")
    assert theirs != plain
    assert max(abs(a - b) for a, b in zip(theirs, plain, strict=True)) < 0.03 * plain[0]
    if recipe != "delayed":
        return
    tune(experts, tmp_path / "ours", text, **(how | {"device": "cpu"}))
    states = [inspect_amax(tmp_path / run).modules for run in ("theirs", "ours")]
    names = [{(state.module, state.expert) for state in run} for run in states]
    assert names[0] == names[1]
    assert len(names[0]) == 2 * (2 + 2 * 4)
    tune(experts, tmp_path / "cut", text, **(how | {"train_iters": 4}), kernels="te")
    assert tune(experts, tmp_path / "cut", text, **how, kernels="te") == theirs


@by_te
def test_a_plan_says_which_layers_have_which_module(
    experts: Path, text: Path, tmp_path: Path
) -> None:
    plan = finetune(
        experts, tmp_path / "dst", data=[str(text)], kernels="te", device="cuda", dry_run=True
    )
    assert isinstance(plan, FinetunePlan)
    assert plan.te_modules["layers 0-1: mlp.experts.linear_fc2"] == "GroupedLinear"
    assert plan.te_modules["layers 0-1: self_attention.linear_qkv"] == "LayerNormLinear"
    assert plan.te_modules["layers 0-1: self_attention.core_attention"] == "DotProductAttention"
    assert plan.te_modules["optimizer"] == "FusedAdam"
