"""`megtool quantize --to torch_dist`: Megatron checkpoints with ModelOpt's quantizers, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import export, inspect, quantize, reshard
from megtool.cli.app import main
from megtool.errors import FormatError, LayoutError, MappingError, UsageError
from megtool.export.report import ExportReport
from megtool.formats import open_checkpoint
from megtool.quantize.layout.megatron_source import read_quantized_megatron
from megtool.quantize.plan import QuantizePlan
from megtool.quantize.report import QuantizeReport
from megtool.storage.files import Files
from megtool.transport.reading.reader import CheckpointReader
from tests.support.errors import raises
from tests.support.models import tiny_text
from tests.support.quant.calibrated import random_moe
from tests.support.quant.quantize_sizes import SMALL

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
CALIBRATED = (
    "fp8_kv_fp8",
    "nvfp4_gptq",
    "int8_sq",
    "int4_awq",
    "w4a8_awq",
    "nvfp4_awq",
    "nvfp4",
    "int4_gptq",
)
LONG = ("nvfp4", "nvfp4_gptq", "int4_awq")
"""Formats and algorithms that others of `CALIBRATED` have, too."""
BY_WEIGHTS = (
    "fp8_block128",
    "fp8_per_channel",
    "int4_weight_only",
    "mxfp4",
    "mxfp8",
    "w4a16_nvfp4",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_text.save(tmp_path_factory.mktemp("source") / "hf", dtype="bfloat16", **SHAPE)


def both(
    source: Path, root: Path, recipe: str, data: dict[str, Any] | None = None, **layout: Any
) -> tuple[Path, Path]:
    """The folder that is written at once, and the Megatron checkpoint of the same parameters."""
    shared: dict[str, Any] = {"recipe": recipe, "threads": 1}
    if recipe in CALIBRATED or recipe == "fp8":
        calibration = root / "calibration"
        options = SMALL | (data or {}) | {"save_calibration": calibration}
        quantize(source, root / "direct", recipe=recipe, **options)
        shared["calibration"] = (calibration,)
    else:
        quantize(source, root / "direct", **shared)
    report = quantize(source, root / "megatron", to="torch_dist", **shared, **layout)
    assert isinstance(report, QuantizeReport)
    assert report.exit_status == 0
    return root / "direct", root / "megatron"


def model_files(folder: Path) -> dict[str, bytes]:
    """All files but the list of digests, which has the copied norms of a smoothed model, too."""
    files = (p for p in folder.rglob("*") if p.is_file() and p.name != "megtool.json")
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def assert_exports_the_same(direct: Path, megatron: Path, out: Path) -> None:
    report = export(megatron, out, to="unified", threads=1)
    assert isinstance(report, ExportReport)
    assert report.exact > 0
    want, have = model_files(direct), model_files(out)
    assert set(want) == set(have)
    assert [n for n in want if want[n] != have[n]] == []


@pytest.mark.parametrize(
    "recipe",
    [
        *(pytest.param(r, marks=pytest.mark.slow if r in LONG else ()) for r in CALIBRATED),
        *BY_WEIGHTS,
    ],
)
def test_export_gives_the_folder_that_is_written_at_once(
    source: Path, tmp_path: Path, recipe: str
) -> None:
    assert_exports_the_same(*both(source, tmp_path, recipe), tmp_path / "exported")


@pytest.mark.parametrize("recipe", ["fp8", "int4_weight_only", "mxfp4"])
def test_every_layout_exports_the_same(source: Path, tmp_path: Path, recipe: str) -> None:
    direct, megatron = both(source, tmp_path, recipe, dst_tp=2, dst_pp=2)
    args = open_checkpoint(megatron).metadata["args"]
    assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]) == (2, 2)
    assert_exports_the_same(direct, megatron, tmp_path / "exported")


@pytest.mark.parametrize("recipe", ["fp8", "int8_weight_only"])
def test_experts(tmp_path: Path, recipe: str) -> None:
    """Experts have names of their own, as ModelOpt names them; at another layout, too."""
    pytest.importorskip("transformers")
    model = random_moe(tmp_path / "moe")
    direct, megatron = both(model, tmp_path, recipe, {"synthetic": True}, dst_ep=2)
    names = {t.name for t in open_checkpoint(megatron).tensors}
    first = "decoder.layers.1.mlp.experts.experts.0.linear_fc1"
    assert {f"{first}.weight_w", f"{first}.weight_v", f"{first}.weight_quantizer._amax"} <= names
    assert_exports_the_same(direct, megatron, tmp_path / "exported")


def test_rows_of_gate_and_up_are_in_the_order_of_ranks(source: Path, tmp_path: Path) -> None:
    """ModelOpt cuts amaxes by row like one matrix: every rank's gate rows, then its up rows."""
    amaxes = []
    for tp in (1, 2):
        out = tmp_path / str(tp)
        quantize(source, out, recipe="int8_weight_only", to="torch_dist", dst_tp=tp, threads=1)
        name = "decoder.layers.1.mlp.linear_fc1.weight_quantizer._amax"
        with CheckpointReader(open_checkpoint(out), Files()) as reader:
            amaxes.append(np.array(reader.open_stored(name).read()).reshape(2, -1))
    (gate, up), two = amaxes[0], amaxes[1].reshape(2, 2, -1)
    assert np.array_equal(two[:, 0].reshape(-1), gate)
    assert np.array_equal(two[:, 1].reshape(-1), up)


def test_formats_are_read_back(source: Path, tmp_path: Path) -> None:
    _, megatron = both(source, tmp_path, "fp8_kv_fp8")
    again = read_quantized_megatron(megatron)
    labels = {d.module.name: d.label for d in again.decisions}
    assert labels["layers.0.attn.q"] == "FP8"
    assert labels["layers.1.attn.kv"] == "KV FP8"
    assert labels["head"] == labels["embed"] == "keep"


def test_the_plain_weights_are_read_with_a_warning(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights whose scales no input has stay as they are: other verbs read them."""
    megatron = tmp_path / "megatron"
    quantize(source, megatron, recipe="int8_weight_only", to="torch_dist", threads=1)
    reshard(megatron, tmp_path / "hf", to="hf", threads=1)
    reshard(source, tmp_path / "copy", to="hf", threads=1)
    assert model_files(tmp_path / "hf") == model_files(tmp_path / "copy")
    assert "ModelOpt's quantizers are left out" in caplog.text
    with raises(MappingError, "at any layout"):
        reshard(megatron, tmp_path / "other", to="torch_dist", tp=2, threads=1)


def test_smoothed_weights_are_refused_elsewhere(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "megatron", recipe="int8_sq", to="torch_dist", **SMALL)
    with raises(MappingError, "smoothing scales"):
        reshard(tmp_path / "megatron", tmp_path / "hf", to="hf", threads=1)


def test_layouts_that_cut_blocks_are_refused(source: Path, tmp_path: Path) -> None:
    with raises(LayoutError, "cuts blocks of 128"):
        quantize(
            source, tmp_path / "x", recipe="int4_weight_only", to="torch_dist", dst_tp=4, threads=1
        )
    with raises(LayoutError, "equal on all ranks"):
        quantize(source, tmp_path / "x", recipe="nvfp4_awq", to="torch_dist", dst_tp=2, **SMALL)
    assert not (tmp_path / "x").exists()


def test_options_without_effect_are_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "x"
    with raises(UsageError, "has no ranks"):
        quantize(source, out, recipe="mxfp4", dst_tp=2, threads=1)
    for option in ({"eval_data": "text.txt"}, {"max_shard_size": "1GB"}):
        with raises(UsageError, "no effect with --to torch_dist"):
            quantize(source, out, recipe="mxfp4", to="torch_dist", threads=1, **option)  # type: ignore[arg-type]


def test_other_forms_take_two_steps(source: Path, tmp_path: Path) -> None:
    megatron = tmp_path / "megatron"
    quantize(source, megatron, recipe="fp8_per_channel", to="torch_dist", threads=1)
    with raises(UsageError, "in one step"):
        export(megatron, tmp_path / "x", to="compressed-tensors", threads=1)
    with raises(UsageError, "--dtype"):
        export(megatron, tmp_path / "x", to="unified", dtype="float16", threads=1)
    with raises(MappingError, "cannot load"):
        export(megatron, tmp_path / "x", to="sglang", threads=1)
    assert not (tmp_path / "x").exists()


def test_damaged_quantizers_are_named(source: Path, tmp_path: Path) -> None:
    """An amax that is NaN: the tensor is named, and nothing is written."""
    megatron = tmp_path / "megatron"
    quantize(source, megatron, recipe="int8_weight_only", to="torch_dist", threads=1)
    catalogue = open_checkpoint(megatron)
    name = "decoder.layers.0.mlp.linear_fc2.weight_quantizer._amax"
    with CheckpointReader(catalogue, Files()) as reader:
        values = np.array(reader.open_stored(name).read()).tobytes()
    path = next(megatron.rglob("*.distcp"))
    data = path.read_bytes()
    assert data.count(values) == 1
    path.write_bytes(data.replace(values, np.float32(np.nan).tobytes() + values[4:]))
    with raises(FormatError, "do not fit") as e:
        export(megatron, tmp_path / "x", to="unified", threads=1)
    assert e.value.tensor == name
    assert not (tmp_path / "x").exists()


def test_dry_run_json_and_inspect(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "megatron"
    arguments = [str(source), str(out), "--recipe", "mxfp8", "--to", "torch_dist", "--threads", "1"]
    plan = quantize(source, out, recipe="mxfp8", to="torch_dist", threads=1, dry_run=True)
    assert isinstance(plan, QuantizePlan)
    assert not out.exists()
    assert main(["quantize", *arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["destination"] == str(out)
    assert any("--to unified" in note for note in report["notes"])
    assert inspect(out).to_json()["format"] == "torch_dist"
    assert main(["export", str(out), str(tmp_path / "x"), "--to", "unified", "-n", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_dry"]
    assert not (tmp_path / "x").exists()
