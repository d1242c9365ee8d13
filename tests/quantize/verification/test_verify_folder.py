"""Proof of quantized folders: a right one gives no finding, each broken one gives the right one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool.quant.recipes.formats import FORMATS, RecipeFormat
from megtool.quantize.verification.verify_folder import FolderVerification, verify_folder
from tests.support.checkpoints.quantized_folder import (
    QuantizedFolder,
    Tensors,
    make_quantized,
    randomize,
)
from tests.support.models import tiny_models

Q = "model.layers.1.self_attn.q_proj"
K = "model.layers.1.self_attn.k_proj"
O = "model.layers.1.self_attn.o_proj"  # noqa: E741
UP = "model.layers.2.mlp.up_proj"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return randomize(tiny_models.llama(tmp_path_factory.mktemp("proof") / "llama"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = randomize(tiny_models.moe(tmp_path_factory.mktemp("proof") / "moe"))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def made(
    dense: Path, mixture: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, QuantizedFolder]:
    at = tmp_path_factory.mktemp("made")
    return {
        "fp8": make_quantized(dense, at / "fp8", algos="FP8"),
        "nvfp4": make_quantized(dense, at / "nvfp4", algos="NVFP4"),
        "awq": make_quantized(dense, at / "awq", algos="W4A16_AWQ", smooth=True),
        "sq": make_quantized(dense, at / "sq", algos="W8A8_SQ_PER_CHANNEL", smooth=True),
        "moe": make_quantized(mixture, at / "moe", algos="NVFP4"),
        "mixed": make_quantized(
            dense, at / "mixed", algos={"q": "FP8", "k": "FP8", "v": "FP8", "o": "FP8", "": "NVFP4"}
        ),
    }


def proof(one: QuantizedFolder, **more: Any) -> FolderVerification:
    return verify_folder(one.source, one.path, one.decisions, one.settlement, threads=1, **more)


WITHOUT_BRANCH = [a for a in FORMATS if not FORMATS[a].has_branch]
CASES = [(a, s, m) for a in WITHOUT_BRANCH for s in (False, True) for m in (False, True)]


@pytest.mark.parametrize(
    ("algo", "smooth", "moe"), [c for c in CASES if FORMATS[c[0]].smooths or not c[1]]
)
def test_every_format_of_a_right_folder_passes(
    algo: str, smooth: bool, moe: bool, dense: Path, mixture: Path, tmp_path: Path
) -> None:
    one = make_quantized(mixture if moe else dense, tmp_path / "out", algos=algo, smooth=smooth)
    found = proof(one)
    assert not found.findings
    assert found.exit_status == 0
    assert len(found.rows) == (4 * 4 + 3 + 3 * 4 * 3 if moe else 4 * 7)
    assert found.num_norms == (0 if not smooth else 5 if moe else 8)
    least = {4: 14.0 if smooth else 17.0, 8: 30.0}[FORMATS[algo].bits]
    for row in found.rows:
        assert row.sqnr_db > least
        assert row.num_clipped == 0
        bytes_said = FORMATS[algo].num_bytes(
            next(d.module.shape for d in one.decisions if d.module.name == row.name),
            next(iter(FORMATS[algo].groups), 0),
            smoothed=one.settlement.weights[row.name].stores_pre_quant_scale,
        )
        assert row.num_bytes == bytes_said


def test_figures_are_those_of_the_decoded_weight(made: dict[str, QuantizedFolder]) -> None:
    one = made["fp8"]
    row = next(r for r in proof(one).rows if r.name == "layers.1.attn.q")
    before = load_file(one.source.path / "model.safetensors")[f"{Q}.weight"].double()
    held = load_file(one.path / "model.safetensors")
    after = held[f"{Q}.weight"].double() * held[f"{Q}.weight_scale"].double()
    gap = before - after
    assert row.max_error == pytest.approx(gap.abs().max().item(), rel=1e-5)
    assert row.relative_error == pytest.approx((gap.norm() / before.norm()).item(), rel=1e-5)
    assert row.sqnr_db == pytest.approx(-20 * np.log10(row.relative_error), rel=1e-6)
    cosine = (before * after).sum() / before.norm() / after.norm()
    assert row.cosine == pytest.approx(cosine.item(), rel=1e-6)


def test_two_threads_and_one_find_the_same(made: dict[str, QuantizedFolder]) -> None:
    one = made["moe"]
    assert verify_folder(one.source, one.path, one.decisions, one.settlement, threads=2) == proof(
        one
    )


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("lm_head.weight", (3, 3), float("nan")),
        ("model.embed_tokens.weight", (7, 1), float("-inf")),
        ("model.norm.weight", (5,), float("inf")),
    ],
)
def test_what_is_kept_and_is_no_number_is_an_error(
    dense: Path, tmp_path: Path, name: str, place: tuple[int, ...], value: float
) -> None:
    source = shutil.copytree(dense, tmp_path / "hf")
    held = load_file(source / "model.safetensors")
    held[name][place] = value
    save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    one = make_quantized(source, tmp_path / "out", algos="FP8")
    if name == "lm_head.weight":  # in another type than the source's
        written = load_file(one.path / "model.safetensors")
        written[name] = written[name].float()
        save_file(written, one.path / "model.safetensors", metadata={"format": "pt"})
    found = proof(one)
    (finding,) = [f for f in found.findings if f.id.startswith("kept")]
    assert (finding.id, finding.severity) == ("kept-nan", "error")
    assert "1 elements" in finding.message
    assert found.exit_status == 7


def swapped(t: torch.Tensor) -> torch.Tensor:
    return (t << 4) | (t >> 4)


def set_to(name: str, value: float, index: tuple[int, ...] = ()) -> Callable[[Tensors], None]:
    def work(tensors: Tensors) -> None:
        t = tensors[name]
        if t.dtype == torch.float8_e4m3fn:
            wide = t.float()
            wide[index] = value
            tensors[name] = wide.to(t.dtype)
        else:
            t[index] = value

    return work


def permuted(name: str, rows: tuple[int, int]) -> Callable[[Tensors], None]:
    def work(tensors: Tensors) -> None:
        t = tensors[name].view(torch.uint8)
        t[list(rows)] = t[list(reversed(rows))].clone()

    return work


def other(name: str, like: str) -> Callable[[Tensors], None]:
    def work(tensors: Tensors) -> None:
        tensors[name] = tensors[like].clone()

    return work


def without(name: str) -> Callable[[Tensors], None]:
    def work(tensors: Tensors) -> None:
        del tensors[name]

    return work


def times(name: str, by: float) -> Callable[[Tensors], None]:
    def work(tensors: Tensors) -> None:
        tensors[name] = (tensors[name].float() * by).to(tensors[name].dtype)

    return work


def added(name: str, shape: tuple[int, ...] = ()) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def nibbles(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: swapped(tensors[name])})


NORM = "model.layers.1.input_layernorm.weight"
BROKEN: dict[str, tuple[str, Callable[[Tensors], None], str, str]] = {
    "scale zeroed": ("fp8", set_to(f"{Q}.weight_scale", 0), "scale-zero", "layers.1.attn.q"),
    "scale NaN": (
        "nvfp4",
        set_to(f"{UP}.weight_scale", float("nan"), (3, 2)),
        "scale-nan",
        "layers.2.mlp.up",
    ),
    "scale infinite": (
        "fp8",
        set_to(f"{UP}.input_scale", float("inf")),
        "scale-inf",
        "layers.2.mlp.up",
    ),
    "scale negative": (
        "awq",
        set_to(f"{UP}.weight_scale", -0.01, (3, 0)),
        "scale-negative",
        "layers.2.mlp.up",
    ),
    "scale subnormal": (
        "sq",
        set_to(f"{UP}.weight_scale", 1e-39, (3,)),
        "scale-underflow",
        "layers.2.mlp.up",
    ),
    "block scales flushed to zero": (
        "nvfp4",
        times(f"{O}.weight_scale", 1e-6),
        "scale-zero",
        "layers.1.attn.o",
    ),
    "block scales at the bottom of FP8": (
        "nvfp4",
        lambda ts: set_to(f"{O}.weight_scale", 2.0**-9, (slice(0, 100),))(ts),
        "scale-underflow",
        "layers.1.attn.o",
    ),
    "scale outlier": (
        "sq",
        set_to(f"{UP}.weight_scale", 90.0, (3,)),
        "scale-outlier",
        "layers.2.mlp.up",
    ),
    "input scale unlike other layers": (
        "fp8",
        times(f"{O}.input_scale", 1e5),
        "scale-outlier",
        "layers.1.attn.o",
    ),
    "input scale not as settled": (
        "fp8",
        times(f"{O}.input_scale", 1.5),
        "input-scale",
        "layers.1.attn.o",
    ),
    "nibbles swapped": ("nvfp4", nibbles(f"{UP}.weight"), "weight", "layers.2.mlp.up"),
    "nibbles swapped (rows)": ("awq", nibbles(f"{UP}.weight"), "weight", "layers.2.mlp.up"),
    "two rows exchanged": ("fp8", permuted(f"{UP}.weight", (7, 9)), "weight", "layers.2.mlp.up"),
    "two rows of scales exchanged": (
        "nvfp4",
        permuted(f"{UP}.weight_scale", (7, 9)),
        "weight",
        "layers.2.mlp.up",
    ),
    "one element": ("sq", set_to(f"{UP}.weight", 127, (17, 5)), "weight", "layers.2.mlp.up"),
    "tensor of another layer": (
        "fp8",
        other(f"{Q}.weight", "model.layers.3.self_attn.q_proj.weight"),
        "weight",
        "layers.1.attn.q",
    ),
    "scale halved": ("sq", times(f"{UP}.weight_scale", 0.5), "weight", "layers.2.mlp.up"),
    "scale a tenth less": ("fp8", times(f"{UP}.weight_scale", 0.8), "weight", "layers.2.mlp.up"),
    "siblings' second scales": (
        "nvfp4",
        times(f"{K}.weight_scale_2", 1.01),
        "siblings",
        "layers.1.attn.k",
    ),
    "siblings' input scales": (
        "nvfp4",
        times(f"{K}.input_scale", 1.01),
        "siblings",
        "layers.1.attn.k",
    ),
    "an expert's w1 and w3": (
        "moe",
        times("model.layers.2.mlp.experts.1.up_proj.weight_scale_2", 1.01),
        "siblings",
        "layers.2.mlp.experts.1.up",
    ),
    "expert without input scale": (
        "moe",
        without("model.layers.2.mlp.experts.3.down_proj.input_scale"),
        "scale-missing",
        "layers.2.mlp.experts.3.down",
    ),
    "input_scale missing": (
        "fp8",
        without(f"{O}.input_scale"),
        "scale-missing",
        "layers.1.attn.o",
    ),
    "weight_scale missing": (
        "fp8",
        without(f"{O}.weight_scale"),
        "scale-missing",
        "layers.1.attn.o",
    ),
    "weight missing": ("fp8", without(f"{O}.weight"), "missing", "layers.1.attn.o"),
    "pre_quant_scale dropped": (
        "awq",
        without(f"{O}.pre_quant_scale"),
        "pre-quant-scale",
        "layers.1.attn.o",
    ),
    "pre_quant_scale inverted": (
        "awq",
        lambda ts: ts.update({f"{O}.pre_quant_scale": 1 / ts[f"{O}.pre_quant_scale"]}),
        "columns",
        "layers.1.attn.o",
    ),
    "norm folded a little wrong": (
        "awq",
        set_to(NORM, 0.9, (5,)),
        "norm",
        "layers.1.attn_norm",
    ),
    "kept tensor changed": ("fp8", times("lm_head.weight", 1.01), "kept", "head"),
    "norm changed where none is folded": (
        "fp8",
        set_to(NORM, 3.0, (5,)),
        "kept",
        "layers.1.attn_norm",
    ),
    "k_scale missing": ("fp8", without(f"{K}.k_scale"), "kv-scale", "layers.1.attn.kv"),
    "scales of a kept module": (
        "fp8",
        added("model.norm.weight_scale"),
        "scale-extra",
        "model.norm",
    ),
    "second scale where none belongs": (
        "fp8",
        added(f"{UP}.weight_scale_2"),
        "scale-extra",
        "layers.2.mlp.up",
    ),
    "stray tensor": ("fp8", added("model.layers.9.mlp.up_proj.weight", (4, 4)), "unreadable", ""),
    "scale of another shape": (
        "nvfp4",
        lambda ts: ts.update({f"{UP}.weight_scale": ts[f"{UP}.weight_scale"][:, :4]}),
        "shape",
        "layers.2.mlp.up",
    ),
    "codes of another type": (
        "fp8",
        lambda ts: ts.update({f"{UP}.weight": ts[f"{UP}.weight"].view(torch.int8)}),
        "dtype",
        "layers.2.mlp.up",
    ),
    "plain weight where codes belong": (
        "fp8",
        lambda ts: ts.update({f"{UP}.weight": ts[f"{UP}.weight"].to(torch.bfloat16)}),
        "dtype",
        "layers.2.mlp.up",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_tensor_is_found_by_name(
    case: str, made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    which, work, check, module = BROKEN[case]
    one = made[which].copied(tmp_path / "broken")
    one.change(work)
    found = proof(one)
    hits = [f for f in found.findings if f.id == check and f.module.startswith(module)]
    assert hits, [(f.id, f.module, f.message) for f in found.findings]
    warns = {"scale-underflow", "scale-outlier"}
    assert hits[0].severity == ("warning" if check in warns else "error")
    if check not in warns:
        assert found.exit_status == 7


def test_a_norm_that_took_no_factors_is_found_with_all_it_feeds(
    made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    one = made["sq"].copied(tmp_path / "broken")
    before = load_file(one.source.path / "model.safetensors")[NORM]
    one.change(lambda tensors: tensors.update({NORM: before}))
    found = {(f.id, f.module): f.message for f in proof(one).findings}
    assert "its factors are not folded in" in found["norm", "layers.1.attn_norm"]
    assert {("weight", f"layers.1.attn.{p}") for p in "qkv"} <= found.keys()


def test_a_folder_of_another_model_is_found(
    made: dict[str, QuantizedFolder], dense: Path, tmp_path: Path
) -> None:
    seed = randomize(tiny_models.llama(tmp_path / "other"), seed=2)
    one = make_quantized(seed, tmp_path / "out", algos="FP8")
    found = verify_folder(made["fp8"].source, one.path, one.decisions, one.settlement, threads=1)
    wrong = {f.module for f in found.findings if f.id == "weight"}
    assert len(wrong) == 28
    assert {f.module for f in found.findings if f.id == "kept"} >= {"embed", "head", "norm"}


def test_codes_that_an_algorithm_chose_need_not_be_the_nearest(
    made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    from dataclasses import replace

    one = made["sq"].copied(tmp_path / "gptq")
    rng = torch.Generator().manual_seed(0)

    def shaken(tensors: Tensors) -> None:
        codes = tensors[f"{UP}.weight"]
        by = torch.randint(-2, 3, codes.shape, generator=rng)
        tensors[f"{UP}.weight"] = (codes.int() + by).clamp(-127, 127).to(torch.int8)

    one.change(shaken)
    assert "weight" in {f.id for f in proof(one).findings}
    codes = load_file(one.path / "model.safetensors")[f"{UP}.weight"].numpy()
    settled = one.settlement.weights["layers.2.mlp.up"]
    treatments = one.settlement.weights | {settled.module: replace(settled, codes=codes)}
    one.settlement = replace(one.settlement, weights=treatments)
    assert not proof(one).findings


def test_a_clip_that_was_settled_is_counted_and_no_error(dense: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    one = make_quantized(dense, tmp_path / "out", algos="W8A16")
    one.change(lambda ts: _rescaled(ts, f"{UP}", 0.9, dense))
    found = proof(one)
    assert {f.id for f in found.findings} == {"clipped"}
    settled = one.settlement.weights["layers.2.mlp.up"]
    weight = load_file(dense / "model.safetensors")[f"{UP}.weight"].float()
    amax = 0.9 * weight.abs().amax(dim=1)
    one.settlement.weights[settled.module] = replace(settled, amax=amax.numpy())
    again = proof(one)
    assert not again.findings
    row = next(r for r in again.rows if r.name == settled.module)
    assert row.num_clipped == next(r.num_clipped for r in found.rows if r.name == settled.module)
    assert 256 <= (row.num_clipped or 0) < 256 * 8


def _rescaled(tensors: Tensors, name: str, by: float, source: Path) -> None:
    weight = load_file(source / "model.safetensors")[f"{name}.weight"].float()
    scale = by * weight.abs().amax(dim=1) / 127
    codes = (weight / scale[:, None]).round().clamp(-127, 127)
    tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = codes.to(torch.int8), scale


@pytest.mark.parametrize("what", ["nothing", "garbage", "no config"])
def test_a_folder_that_cannot_be_read_is_a_finding(
    what: str, made: dict[str, QuantizedFolder], tmp_path: Path
) -> None:
    one = made["fp8"].copied(tmp_path / "broken")
    if what == "nothing":
        one.path = tmp_path / "none"
    elif what == "garbage":
        (one.path / "model.safetensors").write_bytes(b"x" * 4096)
    else:
        (one.path / "config.json").unlink()
    found = proof(one)
    assert found.exit_status == 7
    assert {"unreadable", "config"} & {f.id for f in found.findings}


def test_a_plan_for_another_format_is_found(made: dict[str, QuantizedFolder]) -> None:
    from dataclasses import replace

    one = made["fp8"]
    other_format = RecipeFormat(name="w8", algo="W8A16")
    decisions = [
        replace(d, format=other_format) if d.module.name == "layers.0.mlp.up" else d
        for d in one.decisions
    ]
    found = verify_folder(one.source, one.path, decisions, one.settlement, threads=1)
    assert {"algo", "dtype"} <= {f.id for f in found.findings if f.module == "layers.0.mlp.up"}
