"""Verify where one side is quantized: sound folders are close, damaged ones are not."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import export, lint, quantize, reshard, verify
from megtool.cli.app import main
from megtool.errors import MappingError, UsageError
from megtool.quant.recipes.dialects import recipe_names
from tests.support.checkpoints.compressed_folder import compress, deepseek
from tests.support.checkpoints.quantized_folder import make_quantized, randomize
from tests.support.models import tiny_models

DOWN = "model.layers.2.mlp.down_proj"
KINDS = ("fp8", "nvfp4", "awq", "mixed", "ct int4", "ct nvfp4", "deepseek")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    at = tmp_path_factory.mktemp("verify")
    dense = randomize(tiny_models.llama(at / "llama"))
    make_quantized(dense, at / "fp8", algos="FP8")
    make_quantized(dense, at / "nvfp4", algos="NVFP4")
    make_quantized(dense, at / "awq", algos="W4A16_AWQ", group=64, smooth=True)
    make_quantized(dense, at / "mixed", algos={f".{n}": "FP8" for n in "qkvo"} | {"": "NVFP4"})
    compress(dense, at / "ct fp8", "fp8")
    compress(dense, at / "ct int4", "int4")
    compress(dense, at / "ct nvfp4", "nvfp4")
    deepseek(dense, at / "deepseek")
    reshard(dense, at / "megatron", to="torch_dist", tp=2, pp=2)
    return at


def changed(folder: Path, to: Path, work: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(folder, to)
    held = load_file(to / "model.safetensors")
    work(held)
    kept = {n: t.contiguous() for n, t in held.items()}
    save_file(kept, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("kind", KINDS)
def test_sound_ones_are_close(made: Path, kind: str) -> None:
    report = verify(made / "llama", made / kind, threads=1)
    assert report.verdict == "close", report.differences
    assert report.exit_status == 0
    assert len(report.weights) == 28
    assert [w.sqnr_db for w in report.weights] == sorted(w.sqnr_db for w in report.weights)
    assert all(w.least_db + 4 < w.sqnr_db < 60 and w.cosine > 0.97 for w in report.weights)
    assert report.num_tensors == 39 + 8 * (kind == "awq")
    shown = "\n".join(report.lines())
    assert report.weights[0].packing in shown
    assert report.weights[0].tensor in shown


def test_sides_and_layouts_do_not_matter(made: Path) -> None:
    one = verify(made / "llama", made / "nvfp4", threads=1)
    for a, b in (("nvfp4", "llama"), ("megatron", "nvfp4"), ("nvfp4", "megatron")):
        other = verify(made / a, made / b, threads=1)
        assert {w.tensor: w.sqnr_db for w in other.weights} == pytest.approx(
            {w.tensor: w.sqnr_db for w in one.weights}
        )


def test_two_formats(made: Path) -> None:
    report = verify(made / "fp8", made / "nvfp4", threads=1)
    assert report.verdict == "close"
    assert {w.packing for w in report.weights} == {"fp8:tensor over nvfp4:16"}
    assert {w.least_db for w in report.weights} == {11.0}


def test_one_format_is_compared_bit_by_bit(made: Path, tmp_path: Path) -> None:
    assert verify(made / "fp8", made / "fp8").weights == ()
    other = changed(made / "fp8", tmp_path / "x", lambda t: t[f"{DOWN}.weight_scale"].mul_(2))
    assert {d.kind for d in verify(made / "fp8", other).differences} == {"values"}


def test_factors_in_norms_are_undone(made: Path, tmp_path: Path) -> None:
    report = verify(made / "llama", made / "awq", threads=1)
    assert "8 norms differ by smoothing scales" in report.notes[-1]
    assert all(w.is_scaled for w in report.weights)
    norm = "model.layers.1.input_layernorm.weight"
    damaged = changed(made / "awq", tmp_path / "x", lambda t: t[norm][:64].mul_(-3))
    wrong = verify(made / "llama", damaged, threads=1)
    assert {d.tensor for d in wrong.differences} >= {
        "layers.1.attn_norm.weight",
        "layers.1.attn.q.weight",
    }
    assert "smoothing scales do not explain it" in str(wrong.differences)


def test_a_norm_that_nothing_explains(made: Path, tmp_path: Path) -> None:
    norm = "model.layers.1.input_layernorm.weight"
    other = changed(made / "fp8", tmp_path / "x", lambda t: t[norm].mul_(4))
    wrong = verify(made / "llama", other, threads=1)
    assert "layers.1.attn_norm.weight" in {d.tensor for d in wrong.differences}


DAMAGE: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "rows": ("weight", lambda w: w.flip(0)),
    "nibbles": ("weight", lambda w: (w << 4) | (w >> 4)),
    "scale": ("weight_scale_2", lambda w: w * 2),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(made: Path, tmp_path: Path, damage: str) -> None:
    last, work = DAMAGE[damage]

    def change(t: dict[str, torch.Tensor]) -> None:
        t[f"{DOWN}.{last}"] = work(t[f"{DOWN}.{last}"])

    other = changed(made / "nvfp4", tmp_path / "x", change)
    report = verify(made / "llama", other, threads=1)
    assert [(d.tensor, d.kind) for d in report.differences] == [
        ("layers.2.mlp.down.weight", "closeness")
    ]
    assert report.weights[0].tensor == "layers.2.mlp.down.weight"
    assert report.exit_status == 7


def zero_a_row(w: torch.Tensor) -> torch.Tensor:
    w.view(torch.uint8)[7] = 0
    return w


def ten_codes(w: torch.Tensor) -> torch.Tensor:
    w.view(torch.uint8)[7, :10] = 0x7E
    return w


@pytest.mark.parametrize(
    ("kind", "last", "work", "error"),
    [
        ("fp8", "weight", zero_a_row, 1.0),
        ("fp8", "weight", ten_codes, 0.3),
        ("nvfp4", "weight", zero_a_row, 1.0),
        ("mixed", "weight", zero_a_row, 1.0),
        ("ct nvfp4", "weight_packed", zero_a_row, 1.0),
        ("ct int4", "weight_packed", zero_a_row, 0.9),
        ("deepseek", "weight", zero_a_row, 1.0),
    ],
)
def test_a_row_is_lost(
    made: Path,
    tmp_path: Path,
    kind: str,
    last: str,
    work: Callable[[torch.Tensor], torch.Tensor],
    error: float,
) -> None:
    name = f"{DOWN}.{last}"
    other = changed(made / kind, tmp_path / "x", lambda t: t.update({name: work(t[name])}))
    report = verify(made / "llama", other, sqnr=3, threads=1)  # the whole is close all the same
    assert [(d.tensor, d.kind) for d in report.differences] == [
        ("layers.2.mlp.down.weight", "closeness")
    ]
    row = next(r for r in report.weights if not r.is_sound)
    assert (row.lost_row, row.worst_row) == (7, 7)
    assert row.lost_row_error >= error
    assert "row 7 has a relative error of" in report.differences[0].text


def test_small_rows_may_round_to_zeros(made: Path, tmp_path: Path) -> None:
    """Of a scale for the whole matrix nothing is left for a row that is a million times smaller."""
    source = changed(made / "llama", tmp_path / "a", lambda t: t[f"{DOWN}.weight"][7].mul_(1e-7))
    make_quantized(source, tmp_path / "b", algos="FP8")
    report = verify(source, tmp_path / "b", threads=1)
    assert report.verdict == "close", report.differences
    row = next(r for r in report.weights if r.tensor == "layers.2.mlp.down.weight")
    assert (row.worst_row, row.worst_row_error) == (7, 1.0)
    assert row.lost_row_error == 0


def test_keys_that_are_missing(made: Path, tmp_path: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        for name in [n for n in t if n.startswith(DOWN)]:
            del t[name]

    report = verify(made / "llama", changed(made / "fp8", tmp_path / "x", change), threads=1)
    assert ("layers.2.mlp.down.weight", "missing") in {
        (d.tensor, d.kind) for d in report.differences
    }


def test_kept_tensors_may_be_casts(made: Path, tmp_path: Path) -> None:
    def widen(t: dict[str, torch.Tensor]) -> None:
        t |= {n: w.float() for n, w in t.items()}

    wide = changed(made / "llama", tmp_path / "wide", widen)
    assert verify(wide, made / "fp8", threads=1).verdict == "close"
    head = changed(made / "fp8", tmp_path / "x", lambda t: t["lm_head.weight"][3].mul_(1.5))
    wrong = verify(wide, head, threads=1)
    assert [d.tensor for d in wrong.differences] == ["head"]


def test_words_against_tensors(made: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(made / "fp8", tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = [DOWN]
    (folder / "config.json").write_text(json.dumps(config))
    report = verify(folder)
    assert {d.kind for d in report.differences} == {"metadata"}
    told = " ".join(d.text for d in report.differences)
    assert "holds codes, and config.json excludes it" in told
    assert "holds no codes, and config.json declares FP8" in told
    assert verify(made / "fp8").differences == ()


def config(work: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        value = json.loads((folder / "config.json").read_text())
        work(value)
        (folder / "config.json").write_text(json.dumps(value))

    return change


def of_group(**said: Any) -> Callable[[Path], Any]:
    return config(
        lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(said)
    )


def stored(work: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        work(held)
        save_file(held, folder / "model.safetensors", {"format": "pt"})

    return change


ONE = torch.tensor(1.0)
K_SCALE = "model.layers.1.self_attn.k_proj.k_scale"


def list_a_stranger(folder: Path) -> None:
    for name, key in (
        ("config.json", "quantization_config"),
        ("hf_quant_config.json", "quantization"),
    ):
        value = json.loads((folder / name).read_text())
        value[key]["quantized_layers"]["model.layers.9.mlp.up_proj"] = {"quant_algo": "FP8"}
        (folder / name).write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("kind", "work", "text"),
    [
        ("ct nvfp4", of_group(group_size=32), "one scale per tensor_group of 32 has"),
        ("ct nvfp4", of_group(num_bits=8), "float of 8 bits has no such packing"),
        (
            "nvfp4",
            stored(lambda t: t.update({f"{DOWN}.weight_global_scale": ONE})),
            "NVFP4 does not have",
        ),
        (
            "fp8",
            stored(lambda t: t.update({f"{DOWN}.pre_quant_scale": torch.ones(256)})),
            "FP8 does not have",
        ),
        ("fp8", stored(lambda t: t.pop(K_SCALE)), "has v_scale, and no k_scale"),
        ("fp8", stored(lambda t: t.update({K_SCALE: torch.ones(2)})), "not one number"),
        ("mixed", list_a_stranger, "is in quantized_layers, and in no file"),
        ("fp8", config(lambda c: c.update(rope_theta=5e5)), "rope_base is 10000.0 in"),
        ("fp8", config(lambda c: c.update(num_hidden_layers=5)), "num_layers is 4 in"),
        ("fp8", config(lambda c: c.update(num_key_value_heads=1)), "num_kv_heads is 2 in"),
        ("fp8", config(lambda c: c.update(rms_norm_eps=1e-3)), "norm_eps is "),
    ],
)
def test_contradictions_are_differences(
    made: Path, tmp_path: Path, kind: str, work: Callable[[Path], Any], text: str
) -> None:
    work(shutil.copytree(made / kind, tmp_path / "x"))
    report = verify(made / "llama", tmp_path / "x", threads=1)
    assert {d.kind for d in report.differences} == {"metadata"}, report.differences
    assert text in " ".join(d.text for d in report.differences)
    assert report.exit_status == 7


def test_codes_of_four_bits_in_a_byte_each(made: Path, tmp_path: Path) -> None:
    """compressed-tensors' W4A8: they are no closer than four bits are, and need not be."""

    def spread(t: dict[str, torch.Tensor]) -> None:
        for name in [n for n in t if n.endswith("_proj.weight_packed")]:
            module = name.removesuffix(".weight_packed")
            plain = load_file(made / "llama" / "model.safetensors")[f"{module}.weight"].float()
            scale = t[f"{module}.weight_scale"].repeat_interleave(64, 1)
            t[f"{module}.weight"] = (plain / scale).round().clamp(-8, 7).to(torch.int8)
            del t[name], t[f"{module}.weight_shape"]

    folder = changed(made / "ct int4", tmp_path / "x", spread)
    config(lambda c: c["quantization_config"].update(format="int-quantized"))(folder)
    report = verify(made / "llama", folder, threads=1)
    assert report.verdict == "close", report.differences
    assert {w.packing for w in report.weights} == {"int4:64"}


def test_an_output_layer_is_linear_for_compressed_tensors(made: Path, tmp_path: Path) -> None:
    def code(t: dict[str, torch.Tensor]) -> None:
        head = t["lm_head.weight"].float()
        scale = head.abs().amax(1, keepdim=True) / 448
        t["lm_head.weight"] = (head / scale).to(torch.float8_e4m3fn)
        t["lm_head.weight_scale"] = scale

    folder = changed(made / "ct fp8", tmp_path / "x", code)
    config(lambda c: c["quantization_config"].update(ignore=[]))(folder)
    assert verify(made / "llama", folder, threads=1).verdict == "close"
    config(lambda c: c["quantization_config"].update(ignore=["lm_head"]))(folder)
    assert {d.kind for d in verify(made / "llama", folder).differences} == {"metadata"}


def test_a_wrong_base_beside_megatron(made: Path, tmp_path: Path) -> None:
    config(lambda c: c.update(rope_theta=5e5))(shutil.copytree(made / "fp8", tmp_path / "x"))
    report = verify(made / "megatron", tmp_path / "x", threads=1)
    assert [d.kind for d in report.differences] == ["metadata"]


def test_oddities_are_notes(made: Path, tmp_path: Path) -> None:
    def scaled(t: dict[str, torch.Tensor]) -> None:
        for name in [n for n in t if n[-7:] in ("k_scale", "v_scale")]:
            del t[name]
        t[f"{DOWN}.input_scale"].mul_(1e6)

    report = verify(made / "llama", changed(made / "fp8", tmp_path / "x", scaled), threads=1)
    assert report.verdict == "close", report.differences
    told = " ".join(report.notes)
    assert "there is no k_scale or v_scale" in told
    assert "which means inputs up to" in told


def test_a_global_scale_of_its_own_is_a_note(made: Path, tmp_path: Path) -> None:
    """compressed-tensors itself gives every module one, whatever engines join."""

    def halve(t: dict[str, torch.Tensor]) -> None:
        module = "model.layers.1.self_attn.q_proj"
        t[f"{module}.weight_global_scale"] /= 2
        scale = t[f"{module}.weight_scale"].float() / 2
        t[f"{module}.weight_scale"] = scale.to(torch.float8_e4m3fn)

    folder = changed(made / "ct nvfp4", tmp_path / "x", halve)
    report = verify(made / "llama", folder, threads=1)
    assert report.verdict == "close", report.differences
    assert "weight_global_scale differs" in " ".join(report.notes)
    assert "siblings" in {f.id for f in lint(folder, target="vllm").findings}


def test_a_threshold_of_ones_own(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["verify", str(made / "llama"), str(made / "nvfp4"), "--threads", "1", "-q"]
    assert main([*args, "--sqnr", "30", "--json"]) == 7
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "different"
    assert len(told["weights"]) == len(told["differences"]) == 28
    assert main([*args, "--sqnr", "10"]) == 0
    assert "close" in capsys.readouterr().out
    with pytest.raises(UsageError):
        verify(made / "llama", sqnr=3)


def test_decoded_it_is_equal(made: Path, tmp_path: Path) -> None:
    reshard(made / "nvfp4", tmp_path / "plain", to="hf")
    report = verify(made / "nvfp4", tmp_path / "plain", threads=1)
    assert report.verdict == "equal"
    assert {w.sqnr_db for w in report.weights} == {math.inf}


def test_lint_on_the_command_line(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(made / "fp8"), "--target", "vllm", "--target", "trtllm@1.0.0"]) == 0
    assert "no findings" in capsys.readouterr().out
    assert main(["lint", str(made / "awq"), "--target", "vllm@0.16.0", "--json"]) == 7
    told = json.loads(capsys.readouterr().out)
    assert told["targets"] == ["vllm 0.16.0"]
    assert {"id", "severity", "module", "message", "hint", "source"} <= set(told["findings"][0])
    assert main(["lint", str(made / "fp8"), "--target", "ollama"]) == 2
    assert main(["lint", str(made / "fp8" / "config.json")]) == 3
    with pytest.raises(UsageError):
        lint(made / "fp8", tp=0)


SOUND = ("vllm", "sglang", "trtllm")
LOADS = {"fp8": SOUND, "fp8_kv_fp8": SOUND, "nvfp4": SOUND, "int4_awq": ("trtllm",)}
"""Engines that load what a recipe makes, and have no findings."""

OF_THE_FOLDER = frozenset(
    (
        *("tensors-missing", "sizes-said", "tensors-unknown", "layout", "scale-range"),
        *("scale-outlier", "scale-extra", "kv-scales-half", "kv-scale-shape", "kv-bias"),
        *("mixed-names", "config-agree", "siblings", "method", "w1-w3", "scale-value"),
    )
)
"""Rules that are about the folder itself, which hold for whatever any recipe makes."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from tests.support.models import tiny_text
    from tests.support.quant.quantize_sizes import SIZES

    sizes = SIZES | {"num_hidden_layers": 6}  # the first and the last two are kept by some
    return tiny_text.save(tmp_path_factory.mktemp("text") / "hf", dtype="bfloat16", **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", sorted({*recipe_names()} - {"mxfp4_experts", "nvfp4_from_mxfp4"})
)
def test_what_quantize_and_export_write(text: Path, tmp_path: Path, recipe: str) -> None:
    from tests.support.quant.quantize_sizes import SMALL

    quantize(text, tmp_path / "out", recipe=recipe, **SMALL)
    for engine in LOADS.get(recipe, ()):
        assert lint(tmp_path / "out", target=engine).findings == ()
    folders = [tmp_path / "out"]
    for to in ("unified", "compressed-tensors", "hf"):
        try:
            export(tmp_path / "out", tmp_path / to, to=to, threads=1)
        except MappingError:
            continue  # a form that has no words for the recipe refuses it
        folders.append(tmp_path / to)
    assert len(folders) > 1
    for folder in folders:
        told = [f for f in lint(folder).findings if f.id in OF_THE_FOLDER]
        assert told == [], folder
        source = tmp_path / "out" if folder.name == "hf" else text
        report = verify(source, folder, threads=1)
        assert report.exit_status == 0, (folder, report.differences)
        assert not [n for n in report.notes if str(folder) in n], report.notes
