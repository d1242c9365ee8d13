"""Audits of other layouts, formats and stores; while a run goes on; what is read of it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megtool import audit, reshard
from megtool.audit.element_sums import SumsCollector, Workspace, rows_at_once
from megtool.audit.run_saves import read_run
from megtool.audit.stored_rows import split_modules
from megtool.dtypes import dtype
from megtool.errors import FormatError, UsageError
from tests.support.checkpoints import extra_states, fp8_trained, run_faults
from tests.support.counted_reads import CountedReads
from tests.support.errors import raises


def iteration(run: Path, step: int) -> Path:
    return run / f"iter_{step:07d}"


def ids(report: Any) -> set[str]:
    return {f.id for f in report.findings}


# ---- sums of elements ----------------------------------------------------------------------------


def collect(
    values: torch.Tensor, kind: str, size: int = 16, *, is_signed: bool = True
) -> SumsCollector:
    array = values.view(torch.uint8).numpy().reshape(-1).view(dtype(kind).view)
    rows, width = values.shape
    collector = SumsCollector(dtype(kind), width, size, Workspace(), is_signed=is_signed)
    collector.open_box(0, width)
    step = rows_at_once(width, size)
    for start in range(0, rows, step):
        collector.add(array[start * width : (start + step) * width], start)
    collector.close_box()
    return collector


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn"])
def test_counts_and_norms_are_those_of_torch(kind: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(130, 37)
    values[3, 4], values[5, 6], values[7] = 0.0, 1e-7, 0.0
    if kind != "float8_e4m3fn":
        values[1, 2], values[2, 3] = float("nan"), float("inf")
    stored = values.to(getattr(torch, kind))
    sums = collect(stored, kind, 0).sums
    exact = stored.double()
    finite = exact[exact.isfinite()]
    assert sums.count == exact.numel()
    assert sums.nan == int(exact.isnan().sum())
    assert sums.inf == int(exact.isinf().sum())
    assert sums.zeros == int((exact == 0).sum())
    assert sums.largest == float(finite.abs().max())
    assert sums.norm == pytest.approx(float(finite.norm()), rel=1e-5)
    if kind in ("bfloat16", "float16", "float32"):
        tiny = torch.finfo(stored.dtype).smallest_normal
        assert sums.denormals == int(((exact != 0) & (exact.abs() < tiny)).sum())


@pytest.mark.parametrize("shape", [(40, 37), (1000, 16), (3, 5000)])
def test_sketches_of_boxes_add_up_and_estimate_distances(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    rows, width = shape
    a, b = torch.randn(shape), torch.randn(shape)
    whole = collect(a, "float32").sums.sketch
    cut = width // 3
    parts = np.zeros_like(whole)
    for columns in (slice(0, cut), slice(cut, width)):
        for lines in (slice(0, rows // 2), slice(rows // 2, rows)):
            part = a[lines, columns].contiguous().numpy()
            collector = SumsCollector(dtype("float32"), width, 16, Workspace())
            collector.open_box(columns.start, part.shape[1])
            for row in range(part.shape[0]):
                collector.add(part[row], lines.start + row)
            collector.close_box()
            parts += collector.sums.sketch
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-3)
    distance = np.linalg.norm(whole - collect(b, "float32").sums.sketch)
    assert distance == pytest.approx(float((a - b).norm()), rel=0.4)


def test_cells_of_unsigned_sketches_are_sums() -> None:
    torch.manual_seed(2)
    values = torch.rand(64, 48)
    sketch = collect(values, "float32", is_signed=False).sums.sketch
    expected = values.reshape(4, 16, 3, 16).sum((0, 2)).numpy()
    np.testing.assert_allclose(sketch, expected, rtol=1e-4)


def test_layers_and_experts_have_tensors_of_their_own() -> None:
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    names = list(split_modules(key, (2, 3, 4, 5), (1, 0, 0, 0), (2, 3, 4, 5)))
    assert names == [
        (f"decoder.layers.1.mlp.experts.experts.{e}.linear_fc1.weight", 2, e * 20) for e in range(3)
    ]
    plain = "decoder.layers.7.mlp.linear_fc1.weight"
    assert list(split_modules(plain, (4, 5), (0, 0), (2, 5))) == [(plain, 0, 0)]


# ---- runs ----------------------------------------------------------------------------------------


def test_every_byte_is_read_once_and_quick_reads_headers(healthy: Path, tmp_path: Path) -> None:
    with CountedReads() as reads:
        report = audit(healthy, threads=1)
    tensors = report.read_bytes
    assert tensors < reads.num_bytes < report.total_bytes * 1.6  # headers of tiny tensors
    with CountedReads() as reads:
        audit(healthy, quick=True, threads=1)
    assert reads.num_bytes < report.total_bytes
    large = tmp_path / "large"
    values = {f"layers.{i}.weight": torch.randn(1024, 1024) for i in range(4)}
    for step in (1, 2):
        folder = large / f"step_{step}"
        folder.mkdir(parents=True)
        save_file({n: v + step for n, v in values.items()}, folder / "model.safetensors")
    with CountedReads() as reads:
        report = audit(large, threads=1)
    assert report.read_bytes == 2 * 4 * 4 * (1 << 20)
    assert report.read_bytes <= reads.num_bytes < 1.01 * report.total_bytes
    with CountedReads() as reads:
        audit(large, quick=True, threads=1)
    assert reads.num_bytes < 0.01 * report.total_bytes


@pytest.mark.parametrize("to", ["megatron", "dcp", "zarr", "hf"])
def test_other_formats(healthy: Path, tmp_path: Path, to: str) -> None:
    run = tmp_path / "run"
    for step in (2, 4, 6):
        reshard(iteration(healthy, step), tmp_path / "one", to=to, overwrite=True)
        inner = tmp_path / "one" / f"iter_{step:07d}"
        run.mkdir(exist_ok=True)
        shutil.move(inner if inner.is_dir() else tmp_path / "one", run / f"step_{step}")
    report = audit(run)
    assert [f.text() for f in report.findings] == []
    assert [s.step for s in report.saves] == [2, 4, 6]
    assert all(s.read_bytes for s in report.saves)
    shutil.rmtree(run / "step_6")
    shutil.copytree(run / "step_2", run / "step_6")
    assert "identical-steps" in ids(audit(run))


def test_ranks_of_two_iterations_in_one_save(healthy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 4):
        name = f"iter_{step:07d}"
        reshard(iteration(healthy, step), run / f"{step}", to="megatron", tp=2)
        shutil.move(run / f"{step}" / name, run / name)
        shutil.rmtree(run / f"{step}")
    shutil.rmtree(iteration(run, 4) / "mp_rank_01")
    shutil.copytree(iteration(run, 2) / "mp_rank_01", iteration(run, 4) / "mp_rank_01")
    (iteration(run, 4) / "megtool.json").unlink()
    findings = [f for f in audit(run).findings if f.id == "mixed-save"]
    assert any("mp_rank_01" in f.tensor and "iteration 2" in f.message for f in findings)


def test_files_of_ranks_that_are_missing_or_truncated(healthy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 4, 6):
        reshard(iteration(healthy, step), tmp_path / "one", to="megatron", tp=2, overwrite=True)
        run.mkdir(exist_ok=True)
        shutil.move(tmp_path / "one" / f"iter_{step:07d}", iteration(run, step))
    shutil.rmtree(iteration(run, 2) / "mp_rank_01")
    path = next((iteration(run, 4) / "mp_rank_01").glob("*.pt"))
    path.write_bytes(path.read_bytes()[:-100])
    for quick in (False, True):
        found = {(f.id, f.step): f.text() for f in audit(run, quick=quick).findings}
        assert set(found) == {("missing-shard", 2), ("truncated-file", 4)}
        assert "mp_rank_01" in found["missing-shard", 2]
        assert path.name in found["truncated-file", 4]


def test_fp8_scales_that_saturate(tmp_path: Path) -> None:
    ranks = fp8_trained.rank_files(tmp_path)
    run = tmp_path / "run"
    for step in (1, 2):
        shutil.copytree(ranks / "release", run / f"step_{step}")
    assert "fp8-scale" not in ids(audit(run))

    def saturate(model: dict[str, Any], _: str) -> None:
        name = "decoder.layers.2.mlp.linear_fc1._extra_state"
        state = extra_states.unpack_state(model[name])
        state["scale_fwd"] = state["scale_fwd"] * 100
        model[name] = extra_states.pack_state(state)

    shutil.move(run / "step_2", tmp_path / "edited" / "release")
    fp8_trained.edit_ranks(tmp_path / "edited", saturate)
    shutil.move(tmp_path / "edited" / "release", run / "step_2")
    findings = [f for f in audit(run).findings if f.id == "fp8-scale"]
    assert [(f.step, f.tensor) for f in findings] == [(2, "decoder.layers.2.mlp.linear_fc1")]


def moe(folder: Path, step: int, dead: int | None) -> None:
    torch.manual_seed(step)
    experts = torch.randn(4, 8, 16)
    if dead is not None:
        experts[dead] = 0
    tensors = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": x for e, x in enumerate(experts)}
    folder.mkdir(parents=True)
    save_file({n: x.clone() for n, x in tensors.items()}, folder / "model.safetensors")


def test_an_expert_that_dies(tmp_path: Path) -> None:
    for step, dead in ((1, None), (2, None), (3, 2)):
        moe(tmp_path / "run" / f"checkpoint-{step}", step, dead)
    (finding,) = audit(tmp_path / "run").findings
    assert (finding.id, finding.step) == ("dead-expert", 3)
    assert "experts.2" in finding.tensor


def walk(run: Path, steps: int, *, mean_of: range | None = None) -> None:
    """Saves whose weights walk at random; the last may be the mean of others."""
    torch.manual_seed(5)
    weights = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(32, 32) for i in range(3)}
    seen = []
    for step in range(1, steps + 1):
        weights = {n: w + 0.01 * torch.randn_like(w) for n, w in weights.items()}
        seen.append(weights)
        if mean_of is not None and step == steps:
            chosen = [seen[s - 1] for s in mean_of]
            weights = {n: sum(w[n] for w in chosen) / len(chosen) for n in weights}
        folder = run / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file(weights, folder / "model.safetensors")


def test_an_average_of_many_saves(tmp_path: Path) -> None:
    walk(tmp_path / "walk", 12)
    assert audit(tmp_path / "walk").findings == ()
    walk(tmp_path / "run", 9, mean_of=range(3, 9))
    (finding,) = audit(tmp_path / "run").findings
    assert (finding.id, finding.step) == ("averaged-save", 9)
    assert "17% of step 3 + 17% of step 4" in finding.message


def test_idle_experts_and_frozen_weights_are_healthy(tmp_path: Path) -> None:
    torch.manual_seed(0)
    frozen = torch.randn(8, 8)
    for step in (1, 2, 3):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        moving = {"model.layers.0.mlp.up_proj.weight": torch.randn(8, 8)}
        save_file({"model.embed.weight": frozen.clone(), **moving}, folder / "model.safetensors")
    assert audit(tmp_path / "run").findings == ()


def test_a_save_that_was_not_finished(run: Path) -> None:
    (iteration(run, 8) / ".metadata").unlink()
    (run / "latest_checkpointed_iteration.txt").write_text("6")
    report = audit(run)
    assert {(f.id, f.step) for f in report.findings} == {("unfinished-save", 8)}


def test_a_save_that_is_none(run: Path) -> None:
    shutil.rmtree(iteration(run, 8))
    iteration(run, 8).mkdir()
    (iteration(run, 8) / "notes.txt").write_text("x")
    assert ("unreadable-save", 8) in {(f.id, f.step) for f in audit(run).findings}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("iter_0000100", 100),
        ("step_90", 90),
        ("step-90", 90),
        ("checkpoint-500", 500),
        ("global_step7", 7),
        ("model--val_loss=2.1-step=99-consumed_samples=800", 99),
    ],
)
def test_folders_of_other_trainers(tmp_path: Path, name: str, step: int) -> None:
    (tmp_path / name / "policy/weights/iter_0000000").mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    (save,) = read_run(tmp_path).saves
    assert save.step == step
    assert save.path == tmp_path / name / "policy/weights/iter_0000000"


def test_what_is_no_run(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(FormatError):
            audit(path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(FormatError):
        audit(tmp_path / "file")


def test_options_that_have_no_effect(healthy: Path) -> None:
    with pytest.raises(UsageError):
        audit(healthy, until=8)
    with pytest.raises(UsageError):
        audit(healthy, first=100)
    with pytest.raises(UsageError):
        audit(healthy, report="audit.txt")


def test_a_run_that_goes_on_is_watched(
    healthy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(iteration(healthy, 2), iteration(run, 2))
    (run / "latest_checkpointed_iteration.txt").write_text("2")

    def go_on() -> None:
        for step in (4, 6):
            time.sleep(0.3)
            source = iteration(healthy, step)
            iteration(run, step).mkdir()
            for path in source.iterdir():  # file by file, the tracker last
                if path.is_file():
                    shutil.copy(path, iteration(run, step) / path.name)
            if step == 6:
                run_faults.poke(
                    iteration(run, 6), "output_layer.weight", lambda v: v * float("nan")
                )
            (run / "latest_checkpointed_iteration.txt").write_text(str(step))

    training = threading.Thread(target=go_on)
    training.start()
    with caplog.at_level("WARNING", logger="megtool"):
        report = audit(run, watch=0.1, until=6)
    training.join()
    assert [s.step for s in report.saves] == [2, 4, 6]
    assert ("nan-or-inf", 6) in {(f.id, f.step) for f in report.findings}
    assert any("step 6, nan-or-inf" in r.message for r in caplog.records)


def test_memory_does_not_grow_with_the_saves(
    healthy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megtool.audit.run_audit import MIN_WINDOW, RunAudit
    from megtool.audit.save_scan import ScanPlan, scan_save

    monkeypatch.setattr("megtool.audit.run_audit.WINDOW_BYTES", 1)
    state = RunAudit()
    saves = read_run(healthy).saves
    for save in saves:
        state.add(scan_save(save, ScanPlan(threads=1)))
    assert len(state._window) == MIN_WINDOW < len(saves)
    assert all(not s.tensors for s in state.saves)


# ---- the threads that asked for it ---------------------------------------------------------------


def rl_run(healthy: Path, run: Path, stale: Callable[[int], int]) -> Path:
    """A run as NeMo-RL saves it: step_N/policy/weights/iter_0000000."""
    for step in (2, 4, 6, 8):
        into = run / f"step_{step}" / "policy/weights/iter_0000000"
        shutil.copytree(iteration(healthy, stale(step)), into)
        (run / f"step_{step}" / "training_info.json").write_text("{}")
    return run


def test_nemo_rl_3312_stale_saves_under_new_steps(healthy: Path, tmp_path: Path) -> None:
    """NVIDIA-NeMo/RL#3312: every save after the first wrote the first one's tensors."""
    report = audit(rl_run(healthy, tmp_path / "run", lambda step: min(step, 4)))
    identical = {f.step: f for f in report.findings if f.id == "identical-steps"}
    assert set(identical) == {6, 8}
    assert identical[8].steps == (4, 6, 8)
    assert "weights and optimizer state are those of step 4, 6" in identical[8].message
    quick = audit(tmp_path / "run", quick=True)
    assert {f.step for f in quick.findings if f.id == "identical-steps"} == {6, 8}


def test_nemo_rl_4183_an_optimizer_that_never_moved(run: Path) -> None:
    """The optimizer state of another object than the one that steps: zeros, at step 0."""
    for step in (2, 4, 6, 8):
        for tensor in run_faults.tensor_names(iteration(run, step)):
            if ".exp_avg" in tensor:
                run_faults.poke(iteration(run, step), tensor, torch.zeros_like)
    report = audit(run)
    zero = [f for f in report.findings if f.id == "unmoved-moments"]
    assert {f.step for f in zero} == {4, 6, 8}
    assert all("all moments are zero" in f.message for f in zero)


def test_megatron_lm_1570_an_output_layer_of_denormals(run: Path) -> None:
    """NVIDIA/Megatron-LM#1570: output_layer.weight has values like 1e-42 in some saves."""

    def spoil(value: torch.Tensor) -> torch.Tensor:
        value[::7] = 1e-42
        return value

    run_faults.poke(iteration(run, 4), "output_layer.weight", spoil)
    report = audit(run)
    (finding,) = [f for f in report.findings if f.id == "denormals"]
    assert (finding.step, finding.tensor) == (4, "output_layer.weight")


def test_megatron_lm_5281_a_replica_that_is_not_what_was_saved(run: Path) -> None:
    """NVIDIA/Megatron-LM#5281: a local save that came from a replica is corrupt, and its loss NaN.

    Its bytes are not those that were saved: checksums say so without a global save to compare.
    """
    path = iteration(run, 6) / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    start = len(data) // 3
    data[start : start + 4096] = data[start + 8192 : start + 12288]
    path.write_bytes(data)
    report = audit(run)
    assert {f.step for f in report.findings if f.id == "flipped-bits"} == {6}
    assert report.exit_status == 7


def _save_dcp(folder: Path, part: str, step: int) -> None:
    import torch.distributed.checkpoint as dcp

    values = torch.Generator().manual_seed(step)
    tensors = {f"layers.{i}.weight": torch.randn(8, 8, generator=values) for i in range(2)}
    dcp.save({part: tensors}, checkpoint_id=folder, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_weights_in_a_folder_of_the_step_are_found(tmp_path: Path) -> None:
    for step in (2, 4):
        accelerate = tmp_path / "accelerate" / f"checkpoint-{step}"
        _save_dcp(accelerate / "pytorch_model_fsdp_0", "model", step)
        _save_dcp(accelerate / "optimizer_0", "optimizer", step)
        torch.save({"last_epoch": step}, accelerate / "scheduler.pt")
        olmo = tmp_path / "olmo" / f"step{step}"
        _save_dcp(olmo / "model_and_optim", "model", step)
        (olmo / "config.json").write_text('{"model": {}}')
        (olmo / "train").mkdir()
    for run, folder in (("accelerate", "pytorch_model_fsdp_0"), ("olmo", "model_and_optim")):
        report = audit(tmp_path / run)
        assert report.findings == ()
        assert [Path(s.path).name for s in report.saves] == [folder, folder]
        assert all(s.read_bytes == 2 * 8 * 8 * 4 for s in report.saves)
    assert "step 2: not read: optimizer_0, scheduler.pt" in audit(tmp_path / "accelerate").notes


def test_a_kind_that_is_not_read_is_no_damage(tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "weights.ot").write_bytes(b"weights")
    with raises(FormatError, match="none of the 2 saves is read", id="not-a-checkpoint"):
        audit(tmp_path)
