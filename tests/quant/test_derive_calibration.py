"""Static FP8 scales from what training saw: derived, and taken by `quantize` with no data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megtool import derive_amax, fix_amax, inspect_amax, quantize, reshard, show_recipe
from megtool.errors import CalibrationError, DestinationError, UsageError
from megtool.formats import open_checkpoint
from megtool.options.layout import ParallelConfig
from megtool.quant.derive_calibration import InputAmaxes, _statistics
from megtool.quant.statistics.activation_sites import ActivationSite
from tests.support.checkpoints.extra_states import FC1, MOE, pack_state
from tests.support.checkpoints.extra_states import edit_ranks as edit_iteration
from tests.support.checkpoints.fp8_trained import (
    LINEAR,
    PARTS,
    amax_of,
    edit_ranks,
    input_of,
    rank_files,
    sites,
    state,
    with_buffers,
)
from tests.support.checkpoints.trained import config, write
from tests.support.errors import raises
from tests.support.models import tiny_llama


def assert_scales(quantized: Path, plain: Path) -> None:
    """Every input scale is amax / 448 exactly, every weight's that of its own amax."""
    found, weights = (load_file(p / "model.safetensors") for p in (quantized, plain))
    for site in sites():
        layer, name = site.layer or 0, site.module.split(".", 3)[3]
        parts = PARTS[name.partition(".")[2]]
        tops = [weights[f"model.layers.{layer}.{p}.weight"].abs().max().float() for p in parts]
        for part, own in zip(parts, tops, strict=True):
            at = f"model.layers.{layer}.{part}"
            assert found[f"{at}.input_scale"].item() == input_of(layer, name) / np.float32(448)
            shared = max(tops) if len(parts) > 1 else own  # fused siblings share one scale
            assert found[f"{at}.weight_scale"].item() in (
                (own / 448).item(),
                (shared / 448).item(),
            )
            assert found[f"{at}.weight"].dtype == torch.float8_e4m3fn


def quantized(source: Path, destination: Path, calibration: Path) -> Any:
    return quantize(source, destination, recipe="fp8", calibration=[calibration], fsync=False)


def test_objects_to_scales_with_no_data(tmp_path: Path) -> None:
    ranks = rank_files(tmp_path)
    reshard(ranks, tmp_path / "td", to="torch_dist", tp=2, pp=2, fsync=False)
    report = derive_amax(tmp_path / "td", tmp_path / "objects")
    assert len(report.derived) == len(sites())
    assert report.missing == ()
    assert "without data" in "\n".join(report.lines())
    quantized(tmp_path / "td", tmp_path / "q", tmp_path / "objects")
    assert_scales(tmp_path / "q", tmp_path / "hf")
    # From rank files the same file comes, and it is good for every format of the model.
    reshard(tmp_path / "td", tmp_path / "tp2", to="megatron", tp=2, pp=2, fsync=False)
    derive_amax(tmp_path / "tp2", tmp_path / "ranked")
    assert (tmp_path / "objects").read_bytes() == (tmp_path / "ranked").read_bytes()
    quantized(tmp_path / "hf", tmp_path / "q2", tmp_path / "ranked")
    assert_scales(tmp_path / "q2", tmp_path / "hf")


def test_recipes_that_ask_for_more_are_refused(tmp_path: Path) -> None:
    ranks = rank_files(tmp_path)
    derive_amax(ranks, tmp_path / "cal")
    percentile = tmp_path / "percentile.yaml"
    shown = "\n".join(show_recipe("fp8").lines())
    own = "algorithm: percentile"
    percentile.write_text(re.sub("algorithm: max.*", own, shown))
    for recipe, match in (
        (str(percentile), "only the amax of the inputs"),
        ("int8_sq", "needs the inputs of layers.0.attn.q themselves"),
        ("fp8_kv_fp8", "has no statistics of the inputs of layers.0.attn.kv"),
    ):
        with pytest.raises(CalibrationError, match=match):
            quantize(tmp_path / "hf", tmp_path / "q", recipe=recipe, calibration=[tmp_path / "cal"])
        assert not (tmp_path / "q").exists()
    other = tiny_llama.save(tmp_path / "other", seed=5)
    with raises(CalibrationError, id="foreign-calibration"):
        quantized(other, tmp_path / "q", tmp_path / "cal")


def test_broken_histories_are_refused_by_name(tmp_path: Path) -> None:
    ranks = rank_files(tmp_path)

    def spoil(model: dict[str, Any], _: str) -> None:
        for layer, value in ((1, 0.0), (2, float("nan"))):
            key = f"decoder.layers.{layer}.mlp.linear_fc2"
            held = state(1.0, amax_of(model, key))
            held["amax_history_fwd"][:, 0] = value
            model[f"{key}._extra_state"] = pack_state(held)

    edit_ranks(ranks, spoil)
    with pytest.raises(CalibrationError, match="2 of 16 modules") as e:
        derive_amax(ranks, tmp_path / "cal")
    assert "layers.1.mlp.linear_fc2 (only zeros" in str(e.value)
    assert "layers.2.mlp.linear_fc2 (NaN" in str(e.value)
    assert not (tmp_path / "cal").exists()


def test_refusals(tmp_path: Path) -> None:
    hf = tiny_llama.save(tmp_path / "plain")
    with pytest.raises(UsageError, match="has no FP8 scaling state"):
        derive_amax(hf, tmp_path / "cal")
    (tmp_path / "there").write_bytes(b"")
    with raises(DestinationError, id="destination-exists"):
        derive_amax(hf, tmp_path / "there")


@pytest.mark.parametrize("columns", ["blocked", "interleaved"])
def test_each_expert_has_its_own(columns: str, tmp_path: Path, materialize: Any) -> None:
    from megtool.quant.calibration.calibration_file import CalibrationFile

    write(tmp_path / "a", config(**MOE), ParallelConfig(), materialize)
    reshard(
        tmp_path / "a", tmp_path / "ep2", to="megatron", tp=1, ep=2, dp=2, optimizer_format="none",
        fsync=False,
    )  # fmt: skip

    def own(model: dict[str, Any], name: str) -> None:
        ep = int(name.split("_")[-1])
        for layer in range(4):
            for key in (FC1.format(layer), FC1.format(layer).replace("fc1", "fc2")):
                held = state(1.0, 1.0, gemms=2, columns=columns)
                inputs = [0, 3] if columns == "interleaved" else [0, 1]
                held["amax_history_fwd"][4, inputs] = torch.tensor([1.0, 2.0]) + 10 * ep + layer
                model[key] = pack_state(held)

    edit_iteration(tmp_path / "ep2", own)
    assert inspect_amax(tmp_path / "ep2", weights=False).modules[-1].expert is not None
    report = derive_amax(tmp_path / "ep2", tmp_path / "cal")
    assert any("attn.qkv" in name for name in report.missing)
    found = CalibrationFile.load(tmp_path / "cal").statistics
    for expert, want in enumerate((1.0, 2.0, 11.0, 12.0)):
        for part in ("fc1", "down"):
            at = f"layers.3.mlp.experts.{expert}.{part}"
            assert set(found[at].amax.tolist()) == {want + 3}
    reshard(tmp_path / "ep2", tmp_path / "td", to="torch_dist", ep=2, dp=2, fsync=False)
    derive_amax(tmp_path / "td", tmp_path / "again")
    other = CalibrationFile.load(tmp_path / "again").statistics
    assert all(np.array_equal(s.amax, other[name].amax) for name, s in found.items())


def stacked(folder: Path, *, stale: int | None = None) -> Path:
    """The same in torch_dist, layers behind one another, in the shapes that ModelOpt gives them."""
    reshard(folder / "hf", folder / "td", to="torch_dist", fsync=False)
    held = load_file(folder / "hf" / "model.safetensors")
    buffers: dict[str, Any] = {}
    for name in LINEAR:
        at = f"decoder.layers.{name}"
        parts = PARTS[name.partition(".")[2]]
        tops = [
            max(held[f"model.layers.{n}.{p}.weight"].abs().max().float() for p in parts)
            for n in range(4)
        ]
        if stale is not None and name == "mlp.linear_fc1":
            tops[stale] = torch.tensor(0.09)
        seen = torch.tensor([float(input_of(n, name)) for n in range(4)])
        buffers[f"{at}.weight_quantizer._amax"] = torch.stack(tops).view(4, 1)
        buffers[f"{at}.input_quantizer._amax"] = seen.view(4, 1)
    for which, top in (("k", 4.0), ("v", 2.0)):
        at = f"decoder.layers.self_attention.core_attention.{which}_bmm_quantizer._amax"
        buffers[at] = torch.arange(4.0).view(4, 1) + top
    return with_buffers(next((folder / "td").glob("*/.metadata")).parent, folder / "mo", buffers)


@pytest.mark.parametrize("form", ["megatron", pytest.param("torch_dist", marks=pytest.mark.slow)])
def test_buffers_of_modelopt(form: str, tmp_path: Path) -> None:
    ranks = rank_files(tmp_path)

    def modelopt(model: dict[str, Any], _: str) -> None:
        for site in sites():
            layer, key = site.layer or 0, site.module
            del model[f"{key}._extra_state"]
            seen = float(input_of(layer, key.split(".", 3)[3]))
            model[f"{key}.input_quantizer._amax"] = torch.tensor([seen])
            model[f"{key}.weight_quantizer._amax"] = torch.tensor([amax_of(model, key)])
        for layer in range(4):
            for which, top in (("k", 4.0), ("v", 2.0)):
                key = f"decoder.layers.{layer}.self_attention.core_attention"
                model[f"{key}.{which}_bmm_quantizer._amax"] = torch.tensor([top + layer])

    edit_ranks(ranks, modelopt)
    source = ranks if form == "megatron" else stacked(tmp_path)
    assert inspect_amax(source).exit_status == 0
    assert len(derive_amax(source, tmp_path / "cal").derived) == len(sites()) + 4
    quantized(source, tmp_path / "q", tmp_path / "cal")
    assert_scales(tmp_path / "q", tmp_path / "hf")
    more: dict[str, Any] = dict(recipe="fp8_kv_fp8", calibration=[tmp_path / "cal"], fsync=False)
    quantize(source, tmp_path / "kv", **more)
    found = load_file(tmp_path / "kv" / "model.safetensors")
    scales = [found[f"model.layers.1.self_attn.{n}_proj.{n}_scale"].item() for n in "kv"]
    assert scales == [np.float32(5) / np.float32(448), np.float32(3) / np.float32(448)]


@pytest.mark.parametrize(("key_width", "expected"), [(3, [4, 4, 4, 2, 2]), (5, [4] * 5)])
def test_caches_of_wide_keys_and_latents(key_width: int, expected: list[int]) -> None:
    site = ActivationSite(
        name="kv", kind="kv_cache", layer=1, modules=("kv",), width=5, key_width=key_width
    )
    inputs = InputAmaxes(amax={}, errors={}, kv_caches={1: (4.0, 2.0)})
    statistics, _ = _statistics([site], inputs, {})
    assert statistics["kv"].amax.tolist() == expected


def test_stale_buffers_of_modelopt_are_put_right(tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "hf")
    source = stacked(tmp_path, stale=2)
    report = inspect_amax(source)
    assert report.exit_status == 7
    assert [(line.module, f.kind) for line, f in report.findings] == [
        ("decoder.layers.2.mlp.linear_fc1", "uncovered")
    ]
    fixed = fix_amax(source, tmp_path / "fixed", fsync=False)
    assert fixed.amax is not None
    assert fixed.amax.rebuilt == 1
    assert inspect_amax(tmp_path / "fixed").findings == []
    assert inspect_amax(tmp_path / "fixed").modules[0].amax == report.modules[0].amax
    before, after = (open_checkpoint(p) for p in (source, tmp_path / "fixed"))
    assert [(t.name, t.shape) for t in before.tensors] == [(t.name, t.shape) for t in after.tensors]
