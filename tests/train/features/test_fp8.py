"""Training in FP8: it learns as fp32 does, at any layout, and its state is saved and resumed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import reshard
from megtool.dtypes import dtype
from megtool.errors import UsageError
from megtool.fp8_state.inspect import inspect_amax
from megtool.megatron_state.extra_states.te_state import decode
from megtool.megatron_state.saved_objects import read_object
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.recompute import recompute
from megtool.optim.config import OptimizerConfig
from megtool.optim.distributed import DistributedOptimizer
from megtool.optim.fp8.config import Fp8Config, Recipe
from megtool.optim.fp8.weights import find_fp8_weight
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.open import open_source
from megtool.tensors.sharded import GlobalTensor
from megtool.train.checkpointing.protocol import SaveMetadata
from megtool.train.features.fp8 import Fp8Feature
from tests.support.models import tiny_llama
from tests.support.runs.train_runs import Trained
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.optimizer_layouts import data, named, stages_of, start, whole

RECIPES: tuple[Recipe, ...] = ("delayed", "tensorwise", "blockwise", "mxfp8")
STEPS = 30


def curve(
    groups: ProcessGroups,
    settings: Fp8Config | None,
    *,
    steps: int = STEPS,
    name: str = "tied",
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    micro: int = 1,
    fp8_param_gather: bool = False,
    **optimizer: Any,
) -> list[float]:
    """The loss of every step on the same few rows, under a layout."""
    stages = stages_of(name, groups, sequence_parallel=sequence_parallel, dtype=dtype)
    fp8 = None if settings is None else Fp8Feature(stages, settings, groups)
    how = OptimizerConfig(lr=1e-2, **optimizer)
    made = DistributedOptimizer(
        named(stages), how, groups, chunks=stages, fp8_param_gather=fp8_param_gather
    )
    tokens_BS, labels_BS = data(0)
    rank, size = groups.dp.rank, groups.dp.size
    losses = []
    for _ in range(steps):
        made.zero_grad()
        made.begin(micro)
        if fp8 is not None:
            fp8.begin_step(labels_BS, 1.0)
        total = torch.zeros(())
        for text, wanted in zip(
            tokens_BS.chunk(size)[rank].chunk(micro),
            labels_BS.chunk(size)[rank].chunk(micro),
            strict=True,
        ):
            loss, _ = stages[0].loss(Batch(tokens_BS=text), wanted)
            loss.backward()
            total += loss.detach()
        if groups.dp.handle is not None:
            torch.distributed.all_reduce(total, group=groups.dp.handle)
        made.finish((labels_BS != -100).sum())
        assert made.step(1e-2, 0.0).ok
        if fp8 is not None:
            fp8.end_step()
        losses.append(float(total) / int((labels_BS != -100).sum()))
    return losses


@pytest.mark.parametrize("name", ["tied", "biases"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_falls_as_in_fp32(recipe: Recipe, name: str) -> None:
    """Within 6 % of the first loss at every one of 30 steps, in which it falls by most of it."""
    want = curve(ProcessGroups.alone(), None, name=name)
    got = curve(ProcessGroups.alone(), Fp8Config(fp8_recipe=recipe), name=name)
    assert want[-1] < 0.05 * want[0]
    assert got[-1] < 0.1 * want[0]
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < 0.06 * want[0]
    assert got != want


def layouts(rank: int, size: int, recipe: Recipe) -> None:
    """The same curve at tp and dp; sums over ranks are in another order, and FP8 rounds them."""
    settings = Fp8Config(fp8_recipe=recipe, fp8_amax_history_len=8)
    want = curve(ProcessGroups.alone(), settings, steps=10)
    for how, sequence_parallel in (({"dp": 2}, False), ({"tp": 2}, False), ({"tp": 2}, True)):
        groups = start(**how)
        got = curve(groups, settings, steps=10, sequence_parallel=sequence_parallel)
        # In the first step nothing is known of other ranks' magnitudes.
        worst = max(abs(a - b) for a, b in zip(got, want, strict=True))
        assert worst < 0.02 * want[0], (how, sequence_parallel, worst, want)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_processes_learn_the_same(recipe: Recipe) -> None:
    run_world(layouts, 2, recipe)


def gathers(rank: int, size: int, recipe: Recipe) -> None:
    settings = Fp8Config(fp8_recipe=recipe, fp8_amax_history_len=8)
    groups, bf16 = start(dp=2), torch.bfloat16
    want = curve(groups, settings, dtype=bf16, steps=12)
    got = curve(groups, settings, dtype=bf16, steps=12, fp8_param_gather=True)
    alone = curve(ProcessGroups.alone(), settings, dtype=bf16, steps=12, fp8_param_gather=True)
    for other in (got, alone):
        assert max(abs(a - b) for a, b in zip(other, want, strict=True)) < 0.03 * want[0]
    assert got != want


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_parameters_may_be_gathered_in_fp8(recipe: Recipe) -> None:
    run_world(gathers, 2, recipe)


def test_scales_do_not_depend_on_micro_batches_or_recomputation() -> None:
    """From the second step on: in the first, each pass goes by what it holds itself."""
    states, losses = [], []
    for micro, again in ((1, False), (1, True), (4, False)):
        stages = [whole("tied")]
        fp8 = Fp8Feature(
            stages, Fp8Config(fp8_amax_history_len=4, fp8_recipe="delayed"), ProcessGroups.alone()
        )
        stages[0].train()
        if again:
            recompute(stages, "full")
        tokens_BS, labels_BS = data(0)
        for passes in (1, micro):
            loss = 0.0
            for text, wanted in zip(tokens_BS.chunk(passes), labels_BS.chunk(passes), strict=True):
                total = stages[0].loss(Batch(tokens_BS=text), wanted)[0]
                total.backward()
                loss += float(total.detach())
            fp8.end_step()
        assert fp8.histories is not None
        states.append({d: t.clone() for d, t in fp8.histories.scale.items()})
        losses.append(loss)
    assert losses[1] == losses[0]
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
    for d, scale in states[0].items():
        assert torch.equal(states[1][d], scale)
        torch.testing.assert_close(states[2][d], scale, rtol=1e-3, atol=0)


def test_first_and_last_layers_stay_as_they_are() -> None:
    groups = ProcessGroups.alone()
    stages = [whole("deep")]
    settings = Fp8Config(
        fp8_recipe="tensorwise", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2
    )
    fp8 = Fp8Feature(stages, settings, groups)
    modules = ("self_attention.linear_qkv", "self_attention.linear_proj")
    mlp = ("mlp.linear_fc1", "mlp.linear_fc2")
    assert fp8.names == [f"decoder.layers.1.{m}" for m in (*modules, *mlp)]
    assert "layers 1 to 1 of 4" in fp8.describe()
    assert "the output layer are not" in fp8.describe()
    with pytest.raises(UsageError, match="the model has 4"):
        Fp8Feature(stages, replace(settings, num_layers_at_end_in_bf16=3), groups)
    fp8.remove()
    tokens_BS, _ = data(0)
    batch = Batch(tokens_BS=tokens_BS)
    assert torch.equal(stages[0](batch), whole("deep")(batch))


def test_experts_are_in_fp8() -> None:
    fp8 = Fp8Feature([whole("experts")], Fp8Config(fp8_recipe="delayed"), ProcessGroups.alone())
    assert any(name.endswith("mlp.experts.experts.linear_fc1") for name in fp8.names)
    assert any("shared_experts" in name for name in fp8.names)
    assert not any("router" in name for name in fp8.names)
    dense = [n for n in fp8.names if ".experts.experts." not in n]
    histories = fp8.histories
    assert histories is not None
    experts = len(fp8.names) - len(dense)
    assert len(histories.is_fresh) == len(dense) + experts * 8  # a history for each of 8 experts


def test_it_says_that_transformer_engine_is_there_and_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fp8 = Fp8Feature([whole("tied")], Fp8Config(fp8_recipe="delayed"), ProcessGroups.alone())
    assert "Transformer Engine" not in fp8.describe()
    assert "multiplied as float32" in fp8.describe()
    found = importlib.util.find_spec

    def find(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "transformer_engine" else found(name)

    monkeypatch.setattr("megtool.train.features.fp8.find_spec", find)
    assert "Transformer Engine is installed but not used" in fp8.describe()


def test_fp16_is_refused() -> None:
    stage = whole("tied", torch.float16)
    with pytest.raises(UsageError, match="fp16"):
        Fp8Feature([stage], Fp8Config(fp8_recipe="delayed"), ProcessGroups.alone())


class Fp8Run(Trained):
    """A run in FP8 that saves its state."""

    def __init__(self, source: Path, *, length: int = 4, **how: Any) -> None:
        super().__init__(source, kind="bfloat16", **how)
        settings = Fp8Config(fp8_amax_history_len=length, fp8_recipe="delayed")
        self.fp8 = Fp8Feature(self.stages, settings, self.groups)

    def step(self, lr: float = 1e-2) -> None:
        super().step(lr)
        self.fp8.end_step()

    def keep(self, folder: Path) -> None:
        with self.saver(folder) as saver:
            extras = SaveMetadata(objects=self.fp8.saved_objects(saver.template.tensors))
            saver.save(self.num_steps, self.stages, self.optimizer, extras)

    def scales(self) -> dict[str, torch.Tensor]:
        assert self.fp8.histories is not None
        held = self.fp8.histories
        return {f"scale {d}": t.clone() for d, t in held.scale.items()} | {
            f"history {d}": t.clone() for d, t in held.history.items()
        }


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    """And what it saves is what `megtool amax inspect` knows, and reshard takes along."""
    tiny_llama.save(tmp_path / "hf", dtype="float32", num_hidden_layers=2)
    run = Fp8Run(tmp_path / "hf")
    for _ in range(3):
        run.step()
    run.keep(tmp_path / "dst")

    seen = inspect_amax(tmp_path / "dst", modules=True)
    assert {line.name for line in seen.modules} == set(run.fp8.names)
    assert len(run.fp8.names) == 8
    assert seen.exit_status == 0, list(seen.lines())

    opened = open_source(tmp_path / "dst").catalogue
    name = "decoder.layers.mlp.linear_fc1._extra_state/shard_1_2"
    state = decode(read_object(opened, opened.objects[name]))
    assert state is not None
    assert (state.release, state.recipe_name, state.num_gemms) == (2, "DelayedScaling", 1)
    assert state.recipe["amax_history_len"] == state.history_length == 4
    assert run.fp8.histories is not None
    held = run.fp8.histories.state(run.fp8.names.index("decoder.layers.1.mlp.linear_fc1"))
    assert all(np.array_equal(state.tensors[n], t.numpy()) for n, t in held.items())

    reshard(tmp_path / "dst", tmp_path / "cut", tp=2, pp=2, fsync=False)
    before = run.scales()
    for _ in range(2):
        run.step()
    end, scales = run.state(), run.scales()
    for folder in ("dst", "cut"):
        again = Fp8Run(tmp_path / folder)
        again.resume()
        assert again.fp8.load_objects(again.source.catalogue) == 8
        again.num_steps = 3
        assert all(torch.equal(again.scales()[n], t) for n, t in before.items())
        for _ in range(2):
            again.step()
        assert all(torch.equal(again.state()[n], t) for n, t in end.items())
        assert all(torch.equal(again.scales()[n], t) for n, t in scales.items())


def test_a_history_of_another_length_goes_on(tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "hf", dtype="float32", num_hidden_layers=2)
    run = Fp8Run(tmp_path / "hf")
    for _ in range(3):
        run.step()
    run.keep(tmp_path / "dst")
    longer = Fp8Run(tmp_path / "dst", length=6)
    assert longer.fp8.load_objects(longer.source.catalogue) == 8
    assert torch.equal(longer.scales()["history fwd"][-3:], run.scales()["history fwd"][-3:])
    assert torch.equal(longer.scales()["scale fwd"], run.scales()["scale fwd"])
    fresh = Fp8Run(tmp_path / "hf")
    assert fresh.fp8.load_objects(fresh.source.catalogue) == 0


def stored(name: str, *lead: int) -> GlobalTensor:
    return GlobalTensor(name=name, shape=(*lead, 8, 8), dtype=dtype("bfloat16"))


def test_other_recipes_have_no_state(tmp_path: Path) -> None:
    for recipe in RECIPES[1:]:
        fp8 = Fp8Feature([whole("tied")], Fp8Config(fp8_recipe=recipe), ProcessGroups.alone())
        assert fp8.saved_objects([stored("decoder.layers.mlp.linear_fc1.weight", 2)]) == {}
        fp8.end_step()


def test_names_of_states_follow_the_names_of_tensors() -> None:
    fp8 = Fp8Feature(
        [whole("tied")],
        Fp8Config(fp8_amax_history_len=2, fp8_recipe="delayed"),
        ProcessGroups.alone(),
    )
    stacked = fp8.saved_objects([stored("decoder.layers.mlp.linear_fc1.weight", 2)])
    single = fp8.saved_objects([stored("decoder.layers.0.mlp.linear_fc1.weight")])
    assert "decoder.layers.mlp.linear_fc1._extra_state/shard_1_2" in stacked
    assert "decoder.layers.1.mlp.linear_fc1._extra_state/shard_0_1" in single
    assert len(stacked) == len(single) == len(fp8.names)


def test_weights_that_were_gathered_are_what_is_multiplied() -> None:
    stages: list[Decoder] = [whole("tied", torch.bfloat16)]
    groups = ProcessGroups.alone()
    Fp8Feature(stages, Fp8Config(fp8_recipe="tensorwise"), groups)
    made = DistributedOptimizer(
        named(stages), OptimizerConfig(), groups, chunks=stages, fp8_param_gather=True
    )
    tokens_BS, labels_BS = data(0)
    made.begin(1)
    stages[0].loss(Batch(tokens_BS=tokens_BS), labels_BS)[0].backward()
    made.finish((labels_BS != -100).sum())
    assert made.step(1e-2, 0.0).ok
    held = {n: find_fp8_weight(p) for n, p in named(stages)}
    is_linear = {n: ".linear_" in n and n.endswith(".weight") for n in held}
    assert all((value is not None) == is_linear[n] for n, value in held.items())
