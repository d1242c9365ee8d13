"""Micro batches as graphs: the same bits as without, in every type, and what cannot be one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool.data.packing import PackedRows
from megtool.errors import GraphRuleError, UsageError
from megtool.inference.collate import collate_rows
from megtool.model.layers.dropout import Dropout
from megtool.model.stacks.pipeline import PipelineSchedule
from megtool.model.stacks.recompute import recompute
from megtool.optim.optimizer import Optimizer
from megtool.options.config_file import build_options
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.open import open_decoder
from megtool.train.cuda_graph import GraphedSchedule, check_graphs
from megtool.train.features.protocol import FeatureInputs
from megtool.train.features.registry import TrainingFeatures
from megtool.train.loop import TrainJob, TrainState, train
from megtool.train.model.build import load_for_training
from megtool.train.options.config import TrainConfig
from megtool.train.run_log import RunLog
from megtool.train.run_plan import make_optimizer, plan_run
from tests.support.emulated.graph_rules import check_graphs as check_graph_rules
from tests.support.models import moe_models, tiny_text
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.numbered_data import LENGTH, Numbers
from tests.support.worlds.gloo_world import run_world

ON = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
STEPS, BATCH = 5, 4

HOW: dict[str, dict[str, Any]] = {
    "fp32": {"fp32": True},
    "fp32, sharded": {"fp32": True, "use_distributed_optimizer": True},
    "bf16": {"bf16": True},
    "bf16, sharded": {"bf16": True, "use_distributed_optimizer": True},
    "bf16 sums": {"bf16": True, "use_distributed_optimizer": True, "grad_reduce_in_bf16": True},
    "half on the host": {"bf16": True, "optimizer_offload_fraction": 0.5},
    "a scale that falls": {"fp16": True, "initial_loss_scale": 2.0**22, "hysteresis": 1},
    "a scale that stays": {"fp16": True, "loss_scale": 1000.0, "use_distributed_optimizer": True},
    "full": {"fp32": True, "recompute_granularity": "full"},
    "selective": {"bf16": True, "recompute_granularity": "selective"},
    "delayed": {"bf16": True, "fp8_recipe": "delayed", "fp8_amax_history_len": 3},
    "tensorwise": {"fp32": True, "fp8_recipe": "tensorwise", "recompute_granularity": "full"},
    "lora": {"bf16": True, "lora_rank": 2},
    "frozen": {"fp32": True, "freeze": ("*embedding*",)},
    "muon": {"fp32": True, "optimizer": "muon"},
    "qat": {"fp32": True, "qat": "fp8_per_channel"},
    "dropout": {"bf16": True, "hidden_dropout": 0.2},
    "dropout again": {"fp32": True, "hidden_dropout": 0.2, "recompute_granularity": "full"},
    "fp8 alone": {"bf16": True, "fp8_recipe": "blockwise", "fp8_param_gather": True},
}


class Texts(Numbers):
    """As `Numbers`; the rows of every other step hold two texts, and those of the last are short.

    A run of these has graphs of three kinds.
    """

    def rows(self, first: int, count: int) -> PackedRows:
        """See `Numbers.rows`."""
        rows = super().rows(first, count)
        step = first // BATCH % STEPS
        if step % 2:
            half = np.arange(LENGTH) // (LENGTH // 2)
            positions = np.arange(LENGTH) % (LENGTH // 2)
            rows = replace(
                rows,
                documents_BS=rows.documents_BS * 2 + half,
                positions_BS=np.tile(positions, (count, 1)),
            )
        if step == STEPS - 1:
            valid = np.tile(np.arange(LENGTH) < LENGTH - 3, (count, 1))
            labels = np.where(valid, rows.labels_BS, -100)
            rows = replace(
                rows, labels_BS=labels, documents_BS=np.where(valid, rows.documents_BS, -1)
            )
        return rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save(tmp_path_factory.mktemp("made") / "model")


def job(model: Path, folder: Path, groups: ProcessGroups, **options: Any) -> TrainJob:
    torch.set_num_threads(1)
    usual = {"train_iters": STEPS, "lr": 1e-2, "global_batch_size": BATCH, "micro_batch_size": 2}
    settings = build_options(TrainConfig, usual | options)
    source = open_decoder(model)
    stages = load_for_training(
        source,
        groups,
        dtype="float16" if settings.fp16 else "bfloat16" if settings.bf16 else "float32",
        sequence_parallel=settings.parallel.sequence_parallel,
        threads=1,
    )
    for name, p in stages[0].named_parameters():
        p.requires_grad_(not any(glob.strip("*") in name for glob in settings.freeze))
    if settings.recompute_granularity is not None:
        recompute(stages, settings.recompute_granularity, settings.recompute_num_layers)
    plan = plan_run(settings, seq_length=LENGTH, num_samples=12, layout=groups.parallel)
    features = TrainingFeatures.prepare(settings, stages, FeatureInputs(source=source))
    return TrainJob(
        stages=stages,
        optimizer=make_optimizer(stages, settings, plan, groups),
        dataset=Texts(),
        plan=plan,
        settings=settings,
        schedule=plan.make_lr_schedule(settings.optimizer),
        log=RunLog(folder if groups.rank == 0 else None),
        features=features,
    )


def curve(
    model: Path, folder: Path, groups: ProcessGroups, **options: Any
) -> list[tuple[Any, ...]]:
    """Losses, norms of gradients, and loss scales of a run."""
    mine = job(model, folder, groups, **options)
    lines: list[dict[str, Any]] = []
    write = mine.log.write
    object.__setattr__(mine.log, "write", lambda line: (lines.append(line), write(line)))
    with mine.log, check_graph_rules(groups.device):
        train(mine, TrainState())
    keys = ("loss", "grad_norm", "loss_scale", "skipped")
    return [tuple(repr(x.get(key)) for key in keys) for x in lines]  # NaN is unlike itself


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("name", HOW)
def test_a_run_has_the_same_bits(
    name: str, device: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = curve(model, tmp_path / "plain", ProcessGroups.alone(device), **HOW[name])
    caplog.set_level("INFO", "megtool.train.cuda_graph")
    mine = curve(
        model,
        tmp_path / "graphed",
        ProcessGroups.alone(device),
        cuda_graph_impl="local",
        **HOW[name],
    )
    assert mine == plain
    assert len(plain) == STEPS
    # Those of one text, of two, and of rows that end early.
    assert sum("run as a CUDA graph" in text for text in caplog.messages) == 3
    if name == "a scale that falls":
        assert len({scale for _, _, scale, _ in plain}) > 1
        assert len({skipped for *_, skipped in plain}) == 2


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "experts"
    family, _, keys = moe_models.CASES["deepseek_v3"]
    keys = keys | {"vocab_size": tiny_text.VOCABULARY, "num_hidden_layers": 2}
    tiny_model(family, folder, sizes=moe_models.SIZES, **keys)
    return folder


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(
    "options",
    [
        {"fp32": True},
        {"bf16": True, "moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"},
        {"bf16": True, "fp8_recipe": "mxfp8"},
        {"bf16": True, "fp8_recipe": "delayed", "fp8_amax_history_len": 3},
    ],
    ids=["fp32", "balanced", "mxfp8", "delayed"],
)
def test_experts_have_the_same_bits(
    experts: Path,
    tmp_path: Path,
    options: dict[str, Any],
    device: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Dropless: routers decide how many rows each expert has, and graphs have room for any."""
    if device == "cuda" and "fp32" in options:
        pytest.skip("torch's grouped product is of bfloat16 there")
    plain = curve(experts, tmp_path / "plain", ProcessGroups.alone(device), **options)
    caplog.set_level("INFO", "megtool.train.cuda_graph")
    graphed = options | {"cuda_graph_impl": "local"}
    assert curve(experts, tmp_path / "graphed", ProcessGroups.alone(device), **graphed) == plain
    assert sum("run as a CUDA graph" in text for text in caplog.messages) == 3


def on_ranks(
    rank: int, size: int, model: str, folder: str, options: dict[str, Any]
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    torch.set_num_threads(1)
    settings = build_options(TrainConfig, options)
    dp = size // settings.layout.tp // settings.layout.cp // settings.layout.pp
    groups = ProcessGroups.start(replace(settings.layout, dp=dp))
    found = tuple(
        curve(Path(model), Path(folder) / f"{how}{rank}", groups, cuda_graph_impl=how, **options)
        for how in ("none", "local")
    )
    groups.stop()
    return found[0], found[1]


@pytest.mark.parametrize(
    "options",
    [
        {"fp32": True},
        pytest.param({"bf16": True}, marks=pytest.mark.slow),
        {"tp": 2},  # gloo scatters sums by operations of its own
        pytest.param({"pp": 2, "fp32": True}, marks=pytest.mark.slow),
        pytest.param(
            {"pp": 2, "bf16": True, "hidden_dropout": 0.1, "recompute_granularity": "full"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"pp": 2, "fp16": True, "initial_loss_scale": 2.0**22, "hysteresis": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param({"pp": 2, "vpp": 2, "bf16": True}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "overlap_p2p_communication": True}, marks=pytest.mark.slow),
        {"pp": 2, "bf16": True, "fp8_recipe": "delayed", "fp8_amax_history_len": 3},
    ],
    ids=["dp", "dp bf16", "tp", "pp", "pp dropout", "pp fp16", "vpp", "pp ahead", "pp fp8"],
)
def test_ranks_have_the_same_bits(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    if "vpp" in options:
        model = tiny_text.save(tmp_path / "deep", num_hidden_layers=4)
    for plain, mine in run_world(on_ranks, 2, str(model), str(tmp_path), options):
        assert mine == plain


def schedules(
    model: Path, folder: Path, device: str = "cpu", **options: Any
) -> list[tuple[TrainJob, PipelineSchedule]]:
    """The same model with passes as they are, and as graphs."""
    made: list[tuple[TrainJob, PipelineSchedule]] = []
    for how in ("none", "local"):
        mine = job(model, folder / how, ProcessGroups.alone(device), **options)
        numbers: dict[str, Any] = {"num_microbatches": mine.plan.num_microbatches}
        schedule: PipelineSchedule
        if how == "none":
            schedule = PipelineSchedule(mine.stages, scale=mine.optimizer.scale_loss, **numbers)
        else:
            with check_graph_rules(device):
                schedule = GraphedSchedule(
                    mine.stages, mine.optimizer, shape=(2, LENGTH), **numbers
                )
        made.append((mine, schedule))
    return made


def gradients(
    optimizer: Optimizer, schedule: PipelineSchedule, rows: PackedRows, device: str
) -> list[Any]:
    optimizer.zero_grad()
    optimizer.begin(schedule.num_microbatches)
    loss, count = schedule.step(*collate_rows(rows, torch.device(device)))
    optimizer.finish(count)
    return [loss, *(s.grad.clone() for s in optimizer.segments if s.grad is not None)]


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_batch_of_another_shape_goes_without_a_graph(
    is_sharded: bool, device: str, model: Path, tmp_path: Path
) -> None:
    made = schedules(model, tmp_path, device, use_distributed_optimizer=is_sharded)
    rows = [Numbers().rows(0, 4), Numbers().rows(4, 2), Numbers().rows(8, 4)]
    plain, graphed = (
        [gradients(mine.optimizer, schedule, r, device) for r in rows] for mine, schedule in made
    )
    for one, other in zip(plain, graphed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    schedule = made[1][1]
    assert isinstance(schedule, GraphedSchedule)
    assert (schedule.num_graphs, schedule.num_replays) == (1, 4)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_parameter_that_no_pass_uses_has_no_gradient(
    is_sharded: bool, model: Path, tmp_path: Path
) -> None:
    _, (mine, schedule) = schedules(model, tmp_path, use_distributed_optimizer=is_sharded)
    layers = mine.stages[0].decoder.layers
    rows = Numbers().rows(0, 4)
    gradients(mine.optimizer, schedule, rows, "cpu")
    layers["1"].forward = lambda x_TH, frame: x_TH  # type: ignore[method-assign]
    gradients(mine.optimizer, PipelineSchedule(mine.stages, num_microbatches=2), rows, "cpu")
    for segment in mine.optimizer.segments:
        for span in segment.spans:
            assert segment.grad is not None
            is_used = bool(segment.grad[span.offset : span.end].any())
            assert is_used == ("layers.1." not in span.param_info.name), span.param_info.name


def test_a_pass_that_is_no_graph_is_named(model: Path, tmp_path: Path) -> None:
    _, (mine, schedule) = schedules(model, tmp_path)
    mine.stages[0].dropout = Dropout(hidden=0.5)
    with pytest.raises(GraphRuleError, match="no waiting for the host"):
        gradients(mine.optimizer, schedule, Numbers().rows(0, 4), "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap_grad_reduce": True}, "--overlap-grad-reduce exclude"),
        ({"overlap_param_gather": True}, "--overlap-param-gather exclude"),
        ({"attention_dropout": 0.1}, "--attention-dropout exclude"),
        ({"lora_rank": 2, "lora_dropout": 0.1}, "--lora-dropout exclude"),
        ({"teacher": Path("big")}, "--teacher exclude"),
        ({"fp8_recipe": "delayed", "kernels": "te"}, "its own scales"),
    ],
)
def test_what_cannot_be_a_graph_is_refused(options: dict[str, Any], message: str) -> None:
    build_options(TrainConfig, options)
    with pytest.raises(UsageError, match=message) as caught:
        build_options(TrainConfig, {"cuda_graph_impl": "local", **options})
    assert caught.value.hint


def test_models_with_experts_and_cpus_are_refused(model: Path) -> None:
    config = open_decoder(model).config
    asked = build_options(TrainConfig, {"cuda_graph_impl": "local", "device": "cpu"})
    with pytest.raises(UsageError, match="on cpu: it needs a CUDA device"):
        check_graphs(asked, config)
    experts = config.with_fields(num_experts=4, num_experts_per_token=2, moe_ffn_hidden_size=8)
    apart = build_options(TrainConfig, {"cuda_graph_impl": "local", "device": "cpu", "ep": 2})
    with pytest.raises(UsageError, match="experts on other ranks"):
        check_graphs(apart, experts)
    check_graphs(TrainConfig(), experts)
