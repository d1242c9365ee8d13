"""Facts, groups and settings: what is recognized, grouped and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megtool.errors import MappingError, UsageError
from megtool.model.layers.param_attributes import mark
from megtool.optim.config import OptimizerConfig
from megtool.optim.param_groups import collect_param_infos, group_parameters
from megtool.optim.replicated import ReplicatedOptimizer
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from tests.support.worlds.gloo_world import run_world


def parameter(*shape: int, **marks: Any) -> nn.Parameter:
    return mark(nn.Parameter(torch.zeros(shape)), **marks)


def model() -> dict[str, nn.Parameter]:
    return {
        "embedding.word_embeddings.weight": parameter(4, 2, split_dim=0, tied=True),
        "decoder.layers.0.norm.weight": parameter(2, partial=True),
        "decoder.layers.0.fc1.weight": parameter(2, 2, split_dim=0),
        "decoder.layers.0.fc1.bias": parameter(2, split_dim=0),
        "decoder.layers.0.experts.weight": parameter(3, 2, 2, expert=True),
    }


def test_marks_are_read() -> None:
    facts = {
        f.name.removeprefix("decoder.layers.0."): f for f in collect_param_infos(model().items())
    }
    assert facts["embedding.word_embeddings.weight"].is_tied
    assert not facts["embedding.word_embeddings.weight"].is_tp_duplicate
    assert facts["norm.weight"].is_partial
    assert facts["norm.weight"].is_tp_duplicate
    assert facts["experts.weight"].is_expert
    assert not facts["fc1.weight"].is_expert
    plain = collect_param_infos([("w", nn.Parameter(torch.zeros(1)))])[0]
    assert (plain.is_tp_duplicate, plain.is_expert, plain.is_tied) == (True, False, False)


def test_frozen_parameters_are_left_out() -> None:
    named = model()
    named["decoder.layers.0.fc1.bias"].requires_grad_(False)
    assert len(collect_param_infos(named.items())) == 4


def test_duplicates_are_refused() -> None:
    p = parameter(2)
    with pytest.raises(MappingError, match="as 'a' too"):
        collect_param_infos([("a", p), ("b", p)])
    with pytest.raises(MappingError, match="'a' is given twice"):
        collect_param_infos([("a", p), ("a", parameter(2))])


def test_biases_and_vectors_are_not_decayed_and_experts_come_last() -> None:
    groups = group_parameters(collect_param_infos(model().items()), OptimizerConfig())
    assert [(g.is_expert, g.wd_mult) for g in groups] == [(False, 1.0), (False, 0.0), (True, 1.0)]
    assert [n.split(".", 3)[-1] for n in groups[1].names] == ["norm.weight", "fc1.bias"]
    assert groups[2].names == ("decoder.layers.0.experts.weight",)


def test_the_first_rule_that_matches_holds() -> None:
    settings = OptimizerConfig(lr_mult=("*.fc1.*=2",), wd_mult=("decoder.*=0.5",))
    groups = group_parameters(collect_param_infos(model().items()), settings)
    of = {n: (g.lr_mult, g.wd_mult) for g in groups for n in g.names}
    assert of["decoder.layers.0.fc1.weight"] == (2.0, 1.0)
    assert of["decoder.layers.0.fc1.bias"] == (2.0, 0.0)
    assert of["decoder.layers.0.norm.weight"] == (1.0, 0.5)
    assert of["embedding.word_embeddings.weight"] == (1.0, 1.0)


def test_a_rule_that_matches_nothing_is_refused() -> None:
    settings = OptimizerConfig(lr_mult=("*=1", "*.fc1.*=1"))
    with pytest.raises(UsageError, match=r"\*\.fc1\.\*"):
        group_parameters(collect_param_infos(model().items()), settings)


def on_stages(rank: int, size: int) -> Any:
    groups = ProcessGroups.start(ParallelConfig(pp=2))
    named = [(n, p) for i, (n, p) in enumerate(model().items()) if i % 2 == rank]
    settings = OptimizerConfig(lr_mult=("embedding.*=0.1",))
    made = group_parameters(collect_param_infos(named), settings, groups.world)
    groups.stop()
    return [(g.is_expert, g.lr_mult, g.wd_mult, g.names) for g in made]


def test_all_ranks_have_the_same_groups_and_a_rule_may_be_for_another_stage() -> None:
    first, second = run_world(on_stages, 2)
    assert [g[:3] for g in first] == [g[:3] for g in second]
    assert any(not names for *_, names in second)


def megatrons_groups(rank: int, size: int) -> Any:
    optimizer = pytest.importorskip("megatron.core.optimizer")
    core = pytest.importorskip("megatron.core.optimizer.optimizer")
    groups = ProcessGroups.start(ParallelConfig())
    dist.init_process_group("gloo")
    module = nn.Module()
    for name, p in model().items():
        module.register_parameter(name.replace(".", "/"), p)
    module.named_parameters = lambda: iter(model_of(module).items())  # type: ignore
    settings = OptimizerConfig(lr=0.1, min_lr=0.01, weight_decay=0.3)
    config = optimizer.OptimizerConfig(lr=0.1, min_lr=0.01, weight_decay=0.3)
    standard = optimizer.get_standard_config_overrides(config)
    theirs = optimizer._get_param_groups([module], config, standard)
    made = ReplicatedOptimizer(model_of(module).items(), settings, groups)
    ours = made.small_state()["optimizer"]["param_groups"]
    names = {id(p): n for n, p in model_of(module).items()}
    named = [{names[id(p)] for p in g.pop("params")} for g in theirs]
    saved = [{**g, "params": []} for g in ours]
    current = [{**g, "params": [i]} for i, g in enumerate(theirs)]
    matched = core.MegatronOptimizer._filter_and_reorder_param_groups(current, saved)
    return theirs, ours, named, [set(g.names) for g in made.param_groups], len(matched)


def model_of(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name.replace("/", "."): p for name, p in module._parameters.items() if p is not None}


@pytest.mark.peers
def test_groups_are_those_of_megatron_core() -> None:
    pytest.importorskip("megatron.core")
    theirs, ours, their_names, our_names, matched = run_world(megatrons_groups, 1)[0]
    # Theirs are in the order of their overrides, and each of its optimizers takes its own.
    order = [their_names.index(names) for names in our_names]
    assert sorted(order) == list(range(len(theirs)))
    for group, real in zip(ours, (theirs[i] for i in order), strict=True):
        assert real.items() <= group.items()
    assert matched == len(theirs)


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({"optimizer": "lamb"}, "--optimizer is"),
        ({"lr": -1.0}, "--lr is"),
        ({"lr": float("nan")}, "--lr is"),
        ({"weight_decay": -0.1}, "--weight-decay"),
        ({"adam_beta1": 1.0}, "--adam-beta1"),
        ({"clip_grad": -1.0}, "--clip-grad"),
        ({"loss_scale": 0.0}, "--loss-scale"),
        ({"min_loss_scale": 0.0}, "--min-loss-scale"),
        ({"hysteresis": 0}, "--hysteresis"),
        ({"exp_avg_dtype": "float8"}, "--exp-avg-dtype"),
        ({"optimizer_offload_fraction": 1.5}, "--optimizer-offload-fraction"),
        ({"ddp_bucket_size": 0}, "--ddp-bucket-size"),
        ({"lr_mult": ("*=-1",)}, "0 or more"),
        ({"wd_mult": ("0.5",)}, "PATTERN=NUMBER"),
    ],
)
def test_settings_out_of_range_name_their_option(values: dict[str, Any], option: str) -> None:
    with pytest.raises(UsageError) as raised:
        OptimizerConfig(**values)
    assert option in str(raised.value)
