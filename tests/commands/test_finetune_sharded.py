"""Finetune with gradients and parameters sharded over replicas: checkpoints, features, refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megtool import verify
from megtool.commands.reports.finetune import FinetunePlan
from megtool.errors import LayoutError, UsageError
from megtool.options.config_file import build_options
from megtool.train.options.config import TrainConfig
from megtool.train.run_log import read_log
from tests.support.errors import raises
from tests.support.models import every_family, moe_models, tiny_text
from tests.support.models.tiny_model import tiny_model
from tests.support.runs.finetune_runs import tune
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.sharded_training import ZERO_2, ZERO_3

BASE: dict[str, Any] = {
    "seq_length": 16,
    "train_iters": 8,
    "global_batch_size": 4,
    "eval_split": 0.1,
    "eval_interval": 4,
    "save_interval": 4,
}


def sharded(strategy: str = ZERO_3, **more: Any) -> dict[str, Any]:
    return {"data_parallel_sharding_strategy": strategy, **more}


def on_rank(rank: int, size: int, *places: str, more: dict[str, Any]) -> int:
    return tune(*places, **BASE | more).start_iteration


def run(size: int, model: Path, out: Path, data: Path, more: dict[str, Any]) -> set[int]:
    """A run on so many ranks; the iteration that it starts from."""
    return set(run_world(_rank, size, str(model), str(out), str(data), more))


def _rank(rank: int, size: int, *args: Any) -> int:
    *places, more = args
    return on_rank(rank, size, *places, more=more)


def interrupted(saved: Path, out: Path) -> Path:
    """A copy of a finished run as it was after four steps."""
    shutil.copytree(saved, out)
    shutil.rmtree(out / "iter_0000008")
    (out / "latest_checkpointed_iteration.txt").write_text("4")
    return out


def losses(folder: Path) -> list[float]:
    """The losses of all steps and evaluations."""
    return [x.get("loss", x.get("eval_loss")) for x in read_log(folder / "log.jsonl")]


def shard_files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (folder / "iter_0000008").glob("*.distcp")}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save(tmp_path_factory.mktemp("wide") / "model", num_hidden_layers=4)


@pytest.fixture(scope="module")
def runs(wide: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of two processes in bfloat16: by the distributed optimizer, and with ZeRO-2 and 3."""
    place = tmp_path_factory.mktemp("runs")
    kinds = {"optim": {}, ZERO_2: sharded(ZERO_2), ZERO_3: sharded()}
    for name, more in kinds.items():
        run(2, wide, place / name, data, {"bf16": True, **more})
    return {name: place / name for name in kinds}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [ZERO_2, ZERO_3])
def test_it_is_the_run_of_the_distributed_optimizer(strategy: str, runs: dict[str, Path]) -> None:
    assert losses(runs[strategy]) == pytest.approx(losses(runs["optim"]), abs=1e-5)
    assert verify(runs[strategy], runs["optim"], atol=1e-3).exit_status == 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [ZERO_2, ZERO_3])
def test_a_run_goes_on_with_the_same_bits(
    strategy: str, runs: dict[str, Path], wide: Path, data: Path, tmp_path: Path
) -> None:
    out = interrupted(runs[strategy], tmp_path / "out")
    assert run(2, wide, out, data, {"bf16": True, **sharded(strategy)}) == {4}
    assert losses(out) == losses(runs[strategy])
    assert shard_files(out) == shard_files(runs[strategy])


MOVES: list[tuple[str, int, dict[str, Any]]] = [
    (ZERO_3, 1, {}),
    (ZERO_3, 2, {}),
    (ZERO_3, 2, {"tp": 2}),
    (ZERO_3, 2, {"dist_ckpt_optim_format": "dp_reshardable"}),
    (ZERO_3, 4, sharded()),
    (ZERO_3, 4, sharded(ZERO_2, pp=2)),
    (ZERO_2, 4, sharded(num_distributed_optimizer_instances=2)),
    ("optim", 2, sharded()),
    ("optim", 4, sharded(tp=2, sequence_parallel=True)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("start", "size", "more"), MOVES, ids=str)
def test_a_run_goes_on_at_another_layout_or_with_another_optimizer(
    start: str,
    size: int,
    more: dict[str, Any],
    runs: dict[str, Path],
    wide: Path,
    data: Path,
    tmp_path: Path,
) -> None:
    out = interrupted(runs[start], tmp_path / "out")
    assert run(size, wide, out, data, {"bf16": True, **more}) == {4}
    assert losses(out) == pytest.approx(losses(runs["optim"]), abs=1e-3)
    assert verify(out, runs["optim"], atol=1e-3, rtol=2**-7).exit_status == 0  # a bit of bf16


FEATURES: dict[str, dict[str, Any]] = {
    "adapters": {"lora_rank": 4},
    "frozen layers": {"freeze": ("embedding.*", "*layernorm*")},
    "a teacher": {"teacher": "SRC"},
    "recomputation": {"recompute_granularity": "full"},
    "fp8": {"bf16": True, "fp8_recipe": "delayed"},
    "mxfp8": {"bf16": True, "fp8_recipe": "mxfp8"},
    "muon": {"optimizer": "muon"},
    "fp16": {"fp16": True, "initial_loss_scale": 256.0},
    "buckets": {"dist_ckpt_optim_format": "dp_reshardable"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_features_change_nothing_about_it(
    name: str, wide: Path, data: Path, tmp_path: Path
) -> None:
    more = FEATURES[name]
    if "teacher" in more:
        more = {"teacher": str(wide)}
    run(2, wide, tmp_path / "ref", data, more)
    run(2, wide, tmp_path / "out", data, more | sharded())
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "ref"), abs=2e-5)
    assert verify(tmp_path / "out", tmp_path / "ref", atol=1e-3).exit_status == 0


@pytest.mark.slow
def test_adapters_are_sharded_beside_tensor_parallelism(
    wide: Path, data: Path, tmp_path: Path
) -> None:
    run(1, wide, tmp_path / "ref", data, {"lora_rank": 4})
    run(4, wide, tmp_path / "out", data, {"lora_rank": 4, "tp": 2, **sharded()})
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "ref"), abs=1e-5)
    out = interrupted(tmp_path / "out", tmp_path / "on")
    assert run(2, wide, out, data, {"lora_rank": 4}) == {4}
    assert losses(out) == pytest.approx(losses(tmp_path / "ref"), abs=1e-5)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"overlap_grad_reduce": True}, "always reduces gradients"),
    ({"overlap_param_gather": True}, "always gathers parameters"),
    ({"ddp_bucket_size": 1000}, "a layer at a time"),
    ({"bf16": True, "store_param_remainders": True}, "their own master weights"),
    ({"optimizer_cpu_offload": True}, "over replicas instead"),
    ({"qat": "nvfp4"}, "rounds whole weights"),
    ({"cuda_graph_impl": "local"}, "a graph cannot gather"),
    ({"bf16": True, "fp8_recipe": "tensorwise", "fp8_param_gather": True}, "in the model's dtype"),
    ({"use_distributed_optimizer": True}, "exclude each other"),
    ({"use_distributed_optimizer": False}, "exclude each other"),
]


@pytest.mark.parametrize(("more", "message"), REFUSED, ids=str)
def test_what_does_not_go_with_it_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_options(
            TrainConfig, {"data_parallel_sharding_strategy": "optim_grads_params", **more}
        )


def test_instances_need_replicas_to_share_out(model: Path, data: Path, tmp_path: Path) -> None:
    with raises(UsageError, "no effect without sharded"):
        build_options(
            TrainConfig,
            {
                "data_parallel_sharding_strategy": "no_shard",
                "num_distributed_optimizer_instances": 2,
            },
        )
    with raises(LayoutError, "3 instances", "dp x cp=4", "1, 2, 4"):
        tune(
            model, tmp_path / "out", data, dp=4, num_distributed_optimizer_instances=3, dry_run=True
        )


def test_a_plan_counts_shards(model: Path, data: Path, tmp_path: Path) -> None:
    from megtool import finetune

    def plan(**more: Any) -> FinetunePlan:
        how = {"seq_length": 16, "bf16": True, "dry_run": True} | more
        made = finetune(model, tmp_path / "out", data=[str(data)], **how)
        assert isinstance(made, FinetunePlan)
        return made

    one, two, four = (plan(dp=n, **sharded()) for n in (1, 2, 4))
    assert four.optimizer_bytes * 4 == two.optimizer_bytes * 2 == one.optimizer_bytes
    assert one.optimizer_bytes == 8 * one.rank_trainable
    assert four.weight_bytes < two.weight_bytes < one.weight_bytes
    assert four.gradient_bytes < two.gradient_bytes < one.gradient_bytes
    kept = plan(dp=4, **sharded(ZERO_2))
    assert kept.weight_bytes >= four.weight_bytes
    assert kept.gradient_bytes == four.gradient_bytes
    instances = plan(dp=4, num_distributed_optimizer_instances=2)
    assert instances.optimizer_bytes == plan(dp=2).optimizer_bytes


def test_zeros_in_the_gradient_are_logged(model: Path, data: Path, tmp_path: Path) -> None:
    more = {"train_iters": 1, "log_num_zeros_in_grad": True, "freeze": ("embedding.*",)}
    tune(model, tmp_path / "out", data, **more)
    tune(model, tmp_path / "without", data, train_iters=1)
    (line,) = [x for x in read_log(tmp_path / "out/log.jsonl") if "loss" in x]
    assert isinstance(line["num_zeros"], int)
    assert "num_zeros" not in read_log(tmp_path / "without/log.jsonl")[0]


def family_losses(rank: int, size: int, folder: str, strategy: str) -> list[float]:
    """Losses and norms of three steps in bfloat16, with layers computed twice."""
    from tests.support.runs.family_runs import family_steps

    return family_steps(Path(folder), strategy)


FAMILIES = ["llama", "gemma4", "falcon_h1", "qwen3_5_text", "deepseek_v4", "gpt_oss", "umt5"]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_by_the_distributed_optimizer(family: str, tmp_path: Path) -> None:
    every_family.MODELS[family](tmp_path / "model")
    want, got = (
        run_world(family_losses, 2, str(tmp_path / "model"), strategy)
        for strategy in ("optim", ZERO_3)
    )
    for mine, theirs in zip(got, want, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_experts_in_fp8(recipe: str, data: Path, tmp_path: Path) -> None:
    family, _, keys = moe_models.CASES["mixtral"]
    keys = keys | {"vocab_size": tiny_text.VOCABULARY, "eos_token_id": tiny_text.END}
    tiny_model(family, tmp_path / "model", sizes=moe_models.SIZES, **keys)
    tiny_text.save_tokenizer(tmp_path / "model")
    more = {"bf16": True, "fp8_recipe": recipe}
    for name, sharding in {"ref": {}, "out": sharded()}.items():
        run(2, tmp_path / "model", tmp_path / name, data, more | sharding)
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "ref"), abs=2e-4)
