"""Verify where one side is quantised: sound folders are close, damaged ones are not."""

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

from megtool.cli import main
from megtool.commands.lint import lint
from megtool.commands.reshard import reshard
from megtool.commands.verify import verify
from megtool.errors import UsageError
from tests.export.lint.compressed_folder import compress, deepseek
from tests.quant import tiny_models
from tests.quant.quantised_folder import quantise, randomised

DOWN = "model.layers.2.mlp.down_proj"
KINDS = ("fp8", "nvfp4", "awq", "mixed", "ct int4", "ct nvfp4", "deepseek")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    at = tmp_path_factory.mktemp("verify")
    dense = randomised(tiny_models.llama(at / "llama"))
    quantise(dense, at / "fp8", algos="FP8")
    quantise(dense, at / "nvfp4", algos="NVFP4")
    quantise(dense, at / "awq", algos="W4A16_AWQ", group=64, smooth=True)
    quantise(dense, at / "mixed", algos={f".{n}": "FP8" for n in "qkvo"} | {"": "NVFP4"})
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
    assert "8 norms differ by factors" in report.notes[-1]
    assert all(w.is_scaled for w in report.weights)
    norm = "model.layers.1.input_layernorm.weight"
    damaged = changed(made / "awq", tmp_path / "x", lambda t: t[norm][:64].mul_(-3))
    wrong = verify(made / "llama", damaged, threads=1)
    assert {d.tensor for d in wrong.differences} >= {
        "layers.1.attn_norm.weight",
        "layers.1.attn.q.weight",
    }
    assert "no factors of columns explain it" in str(wrong.differences)


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
    assert "holds codes, and config.json says that it is not quantised" in told
    assert "holds no codes, and config.json says that it is FP8" in told
    assert verify(made / "fp8").differences == ()


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
    assert "nothing against it" in capsys.readouterr().out
    assert main(["lint", str(made / "awq"), "--target", "vllm@0.16.0", "--json"]) == 7
    told = json.loads(capsys.readouterr().out)
    assert told["targets"] == ["vllm 0.16.0"]
    assert {"rule", "severity", "module", "message", "hint", "source"} <= set(told["findings"][0])
    assert main(["lint", str(made / "fp8"), "--target", "ollama"]) == 2
    assert main(["lint", str(made / "fp8" / "config.json")]) == 3
    with pytest.raises(UsageError):
        lint(made / "fp8", tp=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "engines"),
    [
        ("fp8", ("vllm", "sglang", "trtllm")),
        ("nvfp4", ("vllm", "sglang", "trtllm")),
        ("int4_awq", ("trtllm",)),
    ],
)
def test_what_quantize_writes(tmp_path: Path, recipe: str, engines: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    from megtool.commands.quantize import quantize
    from tests.commands.test_quantize import SIZES, SMALL
    from tests.inference import tiny_text

    source = tiny_text.save(tmp_path / "hf", dtype="bfloat16", **SIZES)
    quantize(source, tmp_path / "out", recipe=recipe, **SMALL)
    for engine in engines:
        assert [f for f in lint(tmp_path / "out", target=engine).findings] == []
    assert verify(source, tmp_path / "out", threads=1).verdict == "close"
