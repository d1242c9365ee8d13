"""Planted faults: each is found, and named with its step and tensor; a healthy run has none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import audit
from megtool.audit.rules import AUDIT_RULES
from megtool.cli.app import main
from megtool.formats import open_checkpoint
from tests.support.checkpoints import run_faults

FC2 = "decoder.layers.mlp.linear_fc2.weight"
Values = dict[str, Any]


def save(run: Path, step: int) -> Path:
    return run / f"iter_{step:07d}"


def change(run: Path, step: int, name: str, value: Callable[[Any], Any]) -> None:
    run_faults.poke(save(run, step), name, value)


def as_bfloat16(run: Path) -> None:
    def put(values: Values) -> None:
        values[FC2] = values[FC2].bfloat16()

    run_faults.edit(save(run, 8), put)


def in_state(part: str) -> Callable[[str], bool]:
    return lambda name: part in name


def freeze(run: Path) -> None:
    run_faults.copy_tensors(
        save(run, 6), save(run, 8), lambda n: n.endswith(FC2) and "exp" not in n
    )


def stop_moment(run: Path) -> None:
    run_faults.copy_tensors(save(run, 6), save(run, 8), in_state(f"exp_avg.{FC2}"))


def zero_moments(run: Path) -> None:
    for step in (4, 6, 8):
        for tensor in open_checkpoint(save(run, step)).tensors:
            if ".exp_avg" in tensor.name:
                change(run, step, tensor.name, torch.zeros_like)


def stale_masters(run: Path) -> None:
    run_faults.copy_tensors(save(run, 6), save(run, 8), in_state("optimizer.state.param."))


def swap_moments(run: Path) -> None:
    name = "decoder.layers.self_attention.linear_proj.weight"
    for state in ("exp_avg", "exp_avg_sq"):
        change(run, 8, f"optimizer.state.{state}.{name}", lambda v: v.flip(0, 1))


def average(run: Path) -> None:
    for tensor in open_checkpoint(save(run, 8)).tensors:
        if ".exp_avg" not in tensor.name:
            a, b = (run_faults.read(save(run, s), tensor.name) for s in (4, 6))
            change(run, 8, tensor.name, lambda v, a=a, b=b: (a + b) / 2)  # type: ignore[misc]


def scheduler_stays(run: Path) -> None:
    run_faults.edit_common(save(run, 8), lambda c: c["opt_param_scheduler"].update(num_steps=12))


def step_stays(run: Path) -> None:
    def set_step(common: Values) -> None:
        for group in common["optimizer"]["optimizer"]["param_groups"]:
            group["step"] = 6

    run_faults.edit_common(save(run, 8), set_step)


def with_dropout(run: Path) -> None:
    for step in (2, 4, 6, 8):
        run_faults.edit_common(save(run, step), lambda c: setattr(c["args"], "hidden_dropout", 0.1))


def flip(run: Path) -> None:
    path = save(run, 6) / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncate(run: Path) -> None:
    path = save(run, 6) / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[: -path.stat().st_size // 4])


def drop_tensor(run: Path) -> None:
    run_faults.edit(save(run, 8), lambda values: values.pop(f"optimizer.state.exp_avg.{FC2}"))


def rename(run: Path) -> None:
    save(run, 8).rename(save(run, 9))
    (run / "latest_checkpointed_iteration.txt").write_text("9")


def kill_rows(value: torch.Tensor) -> torch.Tensor:
    value[1, 3:5] = 0
    return value


def poison(value: torch.Tensor) -> torch.Tensor:
    value[0, 0] = float("nan")
    return value


FAULTS: dict[str, tuple[Callable[[Path], None], str, int, str]] = {
    "a stale saver": (
        lambda run: run_faults.replace_folder(save(run, 4), save(run, 8)),
        *("identical-steps", 8, ""),
    ),
    "a frozen weight": (freeze, "unmoved-weights", 8, "layers.0.mlp.linear_fc2"),
    "a moment that stays": (stop_moment, "unmoved-moments", 8, "layers.1.mlp.linear_fc2"),
    "an optimizer that never moved": (zero_moments, "unmoved-moments", 8, ""),
    "masters of another step": (stale_masters, "foreign-masters", 8, "linear_qkv"),
    "moments that are too large": (
        lambda run: change(run, 6, f"optimizer.state.exp_avg.{FC2}", lambda v: v * 1000),
        *("foreign-moments", 6, "mlp.linear_fc2"),
    ),
    "negative squares": (
        lambda run: change(run, 6, f"optimizer.state.exp_avg_sq.{FC2}", lambda v: -v),
        *("foreign-moments", 6, "mlp.linear_fc2"),
    ),
    "moments at wrong places": (swap_moments, "foreign-moments", 8, "linear_proj"),
    "a missing file": (
        lambda run: (save(run, 6) / "__0_0.distcp").unlink(),
        *("missing-shard", 6, ""),
    ),
    "a truncated file": (truncate, "truncated-file", 6, ""),
    "a flipped bit": (flip, "flipped-bits", 6, ""),
    "a tracker of a step that is not there": (
        lambda run: (run / "latest_checkpointed_iteration.txt").write_text("10"),
        *("wrong-tracker", 10, "latest_checkpointed_iteration.txt"),
    ),
    "a tracker that stays": (
        lambda run: (run / "latest_checkpointed_iteration.txt").write_text("6"),
        *("wrong-tracker", 6, "latest_checkpointed_iteration.txt"),
    ),
    "an empty tracker": (
        lambda run: (run / "latest_checkpointed_iteration.txt").write_text("\n"),
        *("wrong-tracker", 8, "latest_checkpointed_iteration.txt"),
    ),
    "a renamed save": (rename, "wrong-iteration", 9, ""),
    "NaN": (lambda run: change(run, 6, FC2, poison), "nan-or-inf", 6, "layers.0.mlp.linear_fc2"),
    "memory that was no tensor": (
        lambda run: change(run, 8, "output_layer.weight", lambda v: torch.full_like(v, 1e-42)),
        *("denormals", 8, "output_layer.weight"),
    ),
    "rows of zeros": (
        lambda run: change(run, 8, FC2, kill_rows),
        *("dead-rows", 8, "layers.1.mlp.linear_fc2"),
    ),
    "a norm that explodes": (
        lambda run: change(run, 8, FC2, lambda v: v * 1e4),
        *("exploding-norm", 8, "layers.0.mlp.linear_fc2"),
    ),
    "a scheduler that stays": (scheduler_stays, "unmoved-scheduler", 8, "num_steps"),
    "an optimizer step that stays": (step_stays, "wrong-step", 8, "param_groups"),
    "random state that stays": (with_dropout, "stale-rng", 8, "rng_state"),
    "another dtype": (as_bfloat16, "changed-dtype", 8, FC2),
    "a tensor less": (drop_tensor, "changed-layout", 8, FC2),
    "an average": (average, "averaged-save", 8, ""),
}


def test_a_healthy_run_has_no_findings(healthy: Path, on_ranks: Path) -> None:
    for run in (healthy, on_ranks):
        for quick in (False, True):
            report = audit(run, quick=quick)
            assert report.findings == ()
            assert report.exit_status == 0
            assert [s.step for s in report.saves] == [2, 4, 6, 8]
    assert audit(healthy).read_bytes <= audit(healthy).total_bytes
    assert audit(healthy, quick=True).read_bytes == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_with_step_and_tensor(run: Path, fault: str) -> None:
    plant, rule, step, tensor = FAULTS[fault]
    plant(run)
    report = audit(run)
    assert report.exit_status == 7
    matching = [f for f in report.findings if f.id == rule]
    assert matching, [(f.id, f.step, f.text()) for f in report.findings]
    assert {f.step for f in matching} >= {step}
    names = [n for f in matching if f.step == step for n in (f.tensor, *f.other_tensors)]
    assert any(tensor in name for name in names), names
    assert all(f.rule.hint for f in matching)


def test_a_shard_of_another_step(ranked_run: Path) -> None:
    name = "__1_0.distcp"
    shutil.copy(save(ranked_run, 4) / name, save(ranked_run, 6) / name)
    (save(ranked_run, 6) / "megtool.json").unlink()
    report = audit(ranked_run)
    (finding,) = [f for f in report.findings if f.id == "mixed-save"]
    assert (finding.step, finding.tensor) == (6, name)
    assert "step 4" in finding.message


def test_the_first_of_identical_steps_is_named(run: Path) -> None:
    for step in (6, 8):
        run_faults.replace_folder(save(run, 2), save(run, step))
    report = audit(run)
    steps = {f.step: f.steps for f in report.findings if f.id == "identical-steps"}
    assert steps == {6: (2, 6), 8: (2, 6, 8)}
    quick = audit(run, quick=True)
    assert {f.step for f in quick.findings if f.id == "identical-steps"} == {6, 8}


def test_a_layout_that_changes_is_named_and_nothing_else(ranked_run: Path, healthy: Path) -> None:
    shutil.rmtree(save(ranked_run, 8))
    shutil.copytree(save(healthy, 8), save(ranked_run, 8))
    report = audit(ranked_run)
    assert {f.id for f in report.findings} == {"changed-layout"}
    assert any("tp 2 became 1" in f.message for f in report.findings)


def test_every_rule_is_planted_somewhere() -> None:
    planted = {rule for _, rule, _, _ in FAULTS.values()} | {"mixed-save"}
    elsewhere = {"dead-expert", "fp8-scale", "unfinished-save", "unreadable-save"}
    assert planted | elsewhere == {rule.id for rule in AUDIT_RULES}


def test_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run)
    assert main(["audit", str(run), "-q"]) == 7
    text = capsys.readouterr().out
    assert "step 6, flipped-bits" in text
    assert "What to do" in text
    assert main(["audit", str(run), "--first", "8", "-q"]) == 0
    assert main(["audit", str(run / "iter_0000002"), "-q"]) == 3
    assert main(["audit", str(run), "--until", "8", "-q"]) == 2
    assert main(["audit", str(run / "missing"), "-q"]) == 3
