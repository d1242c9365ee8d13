"""Finetune in FP8, and with optimizer state on the CPU: the same curve, stopped or not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megtool import finetune, verify
from megtool.commands.reports.finetune import FinetuneReport
from megtool.errors import UsageError
from megtool.fp8_state.inspect import inspect_amax
from megtool.megatron_state.saved_objects import saved_args
from megtool.optim.fp8.scaling import BlockwiseScaling, Operand
from megtool.source.open import open_source
from megtool.train.run_log import read_log


def tune(model: Path, folder: Path, text: Path, **more: Any) -> list[float]:
    options: dict[str, Any] = {
        "seq_length": 32,
        "train_iters": 6,
        "global_batch_size": 2,
        "lr": 1e-3,
        "threads": 1,
        "fsync": False,
    }
    report = finetune(model, folder, data=[str(text)], **(options | more))
    assert isinstance(report, FinetuneReport)
    return [line["loss"] for line in read_log(folder / "log.jsonl") if "loss" in line]


def test_a_run_in_fp8_that_was_stopped_is_the_one_that_was_not(
    model: Path, text: Path, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"fp8_recipe": "delayed", "bf16": True}
    how |= {"train_iters": 4, "lr_decay_iters": 4, "save_interval": 2}
    whole = tune(model, tmp_path / "whole", text, **how)
    tune(model, tmp_path / "cut", text, **(how | {"train_iters": 2}))
    cut = tune(model, tmp_path / "cut", text, **how)
    assert cut == whole
    assert verify(tmp_path / "cut", tmp_path / "whole").verdict == "equal"
    seen = inspect_amax(tmp_path / "whole")
    assert seen.modules
    assert seen.exit_status == 0, list(seen.lines())
    args = saved_args(open_source(tmp_path / "whole").catalogue)
    assert (args["fp8"], args["fp8_recipe"]) == ("hybrid", "delayed")
    assert args["fp8_amax_history_len"] == 1024


@pytest.mark.parametrize("more", [{}, {"bf16": True, "use_distributed_optimizer": True}])
def test_state_on_the_cpu_changes_nothing(
    more: dict[str, Any], model: Path, text: Path, tmp_path: Path
) -> None:
    want = tune(model, tmp_path / "none", text, **more)
    half = tune(model, tmp_path / "half", text, **more, optimizer_offload_fraction=0.5)
    whole = tune(model, tmp_path / "whole", text, **more, optimizer_cpu_offload=True)
    assert half == want
    assert whole == want
    for name in ("half", "whole"):
        assert verify(tmp_path / name, tmp_path / "none").verdict == "equal"


def test_what_does_not_go_with_fp8_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    for wrong, message in (
        ({"fp8_recipe": "mxfp8", "fp8_param_gather": True}, "rounds every weight twice"),
        ({"fp8_param_gather": True}, "without --fp8-recipe"),
        ({"fp8_recipe": "delayed", "fp16": True}, "--fp16"),
        ({"fp8_recipe": "delayed", "num_layers_at_end_in_bf16": 99}, "99 last"),
    ):
        with pytest.raises(UsageError, match=message):
            tune(model, tmp_path / "dst", text, **wrong)


def test_a_step_casts_each_weight_once_and_sums_gradients_in_place(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over several micro-batches; losses are those of gradients that autograd makes."""
    layers: list[int] = []
    cast = BlockwiseScaling.cast_weight

    def counted(scaling: BlockwiseScaling, w_OI: Tensor, *, is_training: bool) -> Operand:
        if is_training:
            layers.append(id(scaling))
        return cast(scaling, w_OI, is_training=is_training)

    monkeypatch.setattr(BlockwiseScaling, "cast_weight", counted)
    options = {
        "fp8_recipe": "blockwise",
        "train_iters": 3,
        "global_batch_size": 4,
        "micro_batch_size": 1,
    }
    losses = tune(model, tmp_path / "sums", text, **options)
    assert set(Counter(layers).values()) == {3}
    others = tune(model, tmp_path / "autograd", text, gradient_accumulation_fusion=False, **options)
    assert len(losses) == 3
    assert losses == others
