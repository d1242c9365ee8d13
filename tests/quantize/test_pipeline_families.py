"""Families that store weights turned, woven or stacked: quantized where their loaders look."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megtool import evaluate, export, generate, lint, quantize, reshard, verify
from megtool.convert.families.detection import families, family_names
from megtool.errors import FormatError, MappingError, RecipeError
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.quant.fake_quant.fake_quant_model import FakeQuantModel, StoredQuantization
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quant.qparams import QParams
from megtool.quant.resolve import ResolvedRecipe, resolve_recipe
from megtool.quantize.layout.write import check_storable
from megtool.quantize.verification.verify_folder import verify_folder
from tests.support.errors import raises
from tests.support.folders import contents, stored_tensors
from tests.support.models import family_models
from tests.support.quant.loaded import open_model_source, stored_quantization
from tests.support.quant.write_runs import (
    canonical_values,
    make_qparams,
    shared_amaxes,
    write_quantized,
)

pytest.importorskip("transformers")

TOKENS = torch.arange(48).view(2, 24) * 37 % 256


class SavedFamilies(dict[str, Path]):
    """Folders of models by family, each saved when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, name: str) -> Path:
        self[name] = family_models.save(name, self.folder / name)
        return self[name]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    return SavedFamilies(tmp_path_factory.mktemp("families"))


CASES = [
    ("gpt_neox", "fp8"),
    ("gpt_neox", "fp8_per_channel"),
    ("gpt_neox", "int8_sq"),
    ("gpt_neox", "int4_weight_only"),
    ("gpt_neox", "w4a8_awq"),
    ("gpt_neox", "mxfp8"),
    ("gpt_neox", "mxfp4"),
    ("gpt_neox", "nvfp4"),
    ("cohere", "fp8"),
    ("olmo2", "w4a8_awq"),
    ("gpt_oss", "mxfp4_experts"),
    ("llama4", "fp8"),
    ("llama4", "nvfp4"),
    ("llama4", "mxfp4_experts"),
    ("gpt2", "fp8"),
    ("qwen3_next", "fp8"),
    ("qwen3_next", "nvfp4"),
    ("nemotron_nas", "fp8"),
    ("nemotron_nas", "w4a8_awq"),
    ("gemma4", "fp8"),
    ("gemma4", "w4a8_awq"),
    ("gemma4-experts", "fp8"),
    pytest.param("gemma4-small", "fp8", marks=pytest.mark.slow),
    pytest.param("gemma4-experts", "nvfp4", marks=pytest.mark.slow),
    ("mistral4", "fp8"),
    ("nemotron_h", "fp8"),
    *(
        pytest.param("deepseek_v4", r, marks=pytest.mark.slow)
        for r in (
            *("fp8", "fp8_per_channel", "fp8_block128", "nvfp4", "w4a8_awq", "mxfp8", "int8_sq"),
            "mxfp4_experts",
        )
    ),
    pytest.param("olmo3", "nvfp4", marks=pytest.mark.slow),
    pytest.param("cohere2", "fp8", marks=pytest.mark.slow),
    pytest.param("seed_oss", "fp8", marks=pytest.mark.slow),
    pytest.param("ernie4_5", "nvfp4", marks=pytest.mark.slow),
    pytest.param("granitemoehybrid", "fp8", marks=pytest.mark.slow),
    *(
        pytest.param("granitemoehybrid-experts", r, marks=pytest.mark.slow)
        for r in ("fp8", "fp8_per_channel", "nvfp4")
    ),
    pytest.param("bamba", "fp8", marks=pytest.mark.slow),
    ("falcon_h1", "nvfp4"),
    ("qwen3_5_text", "nvfp4"),
    *(pytest.param("qwen3_5_text", r, marks=pytest.mark.slow) for r in ("fp8", "fp8_per_channel")),
    *(pytest.param("qwen3_5_moe_text", r, marks=pytest.mark.slow) for r in ("fp8", "nvfp4")),
    *(pytest.param(n, "fp8", marks=pytest.mark.slow) for n in family_models.MORE),
]


NOT_QUANTIZED = ("bert", "bert_post_norm", "roberta", "modernbert", "t5", "mt5", "umt5")
"""No engine loads these quantized."""


def test_every_decoder_family_is_here() -> None:
    covered = {name.partition("-")[0] for name in family_models.FAMILIES}
    covered |= {f.name for f in families() if f.nested}  # tests/commands: as their text models
    assert covered | set(NOT_QUANTIZED) == set(family_names())


def logits(folder: Path, quantization: QParams | StoredQuantization) -> Tensor:
    source, _, points = open_model_source(folder)
    decoder = load(source, dtype="float32")
    with (
        FakeQuantModel(decoder, points, quantization, dtype="bfloat16"),
        torch.inference_mode(),
    ):
        return decoder(Batch(tokens_BS=TOKENS))


def proved(decided: ResolvedRecipe, folder: Path, settlement: QParams) -> list[str]:
    found = verify_folder(decided.source, folder, decided.matched.decisions, settlement, threads=1)
    return [f"{f.id}: {f.module}: {f.message}" for f in found.findings]


@pytest.mark.parametrize(("family", "recipe"), CASES)
def test_decoded_it_is_what_simulation_says(
    sources: dict[str, Path], tmp_path: Path, family: str, recipe: str
) -> None:
    source, out = sources[family], tmp_path / "out"
    decided = resolve_recipe(source, recipe)
    settlement = make_qparams(decided)
    write_quantized(source, out, recipe, settlement)
    shared = shared_amaxes(decided, settlement)
    original, found = canonical_values(source), canonical_values(out)
    assert original.keys() == found.keys()
    for name, x in original.items():
        t = shared.get(name.removesuffix(".weight"))
        want = torch.from_numpy(x)
        if t is not None:
            want = fake_weight(want, t, dtype="bfloat16").to(torch.bfloat16).float()
        assert np.array_equal(want.numpy(), found[name]), name
    assert proved(decided, out, settlement) == []
    alike = dataclasses.replace(settlement, weights=shared)
    want_BSV = logits(source, alike)
    got_BSV = logits(out, stored_quantization(out, alike))
    error = float((got_BSV - want_BSV).norm() / want_BSV.norm())
    assert error < 2e-5, error


@pytest.mark.parametrize("family", ["gpt_neox", "phi3", "gpt2"])
def test_simulation_has_one_scale_of_what_is_stored_as_one(
    sources: dict[str, Path], tmp_path: Path, family: str
) -> None:
    decided = resolve_recipe(sources[family], "fp8")
    plain = make_qparams(decided)
    for name, t in plain.weights.items():  # one of them as if it had been settled
        if name.endswith("0.attn.k"):
            plain.weights[name] = dataclasses.replace(t, amax=np.asarray(0.5, np.float32))
    write_quantized(sources[family], tmp_path / "out", "fp8", plain)
    want_BSV = logits(tmp_path / "out", stored_quantization(tmp_path / "out", plain))
    got_BSV = logits(sources[family], plain)
    assert float((got_BSV - want_BSV).norm() / want_BSV.norm()) < 2e-5


@pytest.mark.parametrize(
    ("family", "recipe", "layout"),
    [
        ("gpt_neox", "fp8", {"tp": 2}),
        ("gpt_neox", "nvfp4", {"tp": 2, "pp": 2}),
        ("gpt_oss", "mxfp4_experts", {"tp": 2, "ep": 2}),
        ("llama4", "fp8_per_channel", {"tp": 2}),
        ("gpt2", "fp8", {"tp": 2}),
    ],
)
def test_any_layout_gives_the_same_bytes(
    sources: dict[str, Path], tmp_path: Path, family: str, recipe: str, layout: dict[str, int]
) -> None:
    source = sources[family]
    reshard(source, tmp_path / "dist", to="torch_dist", fsync=False, **layout)  # type: ignore[arg-type]
    write_quantized(source, tmp_path / "a", recipe)
    write_quantized(tmp_path / "dist", tmp_path / "b", recipe, threads=2, memory="1MiB")
    assert stored_tensors(tmp_path / "a") == stored_tensors(tmp_path / "b")
    assert (tmp_path / "a" / "config.json").read_bytes() == (
        tmp_path / "b" / "config.json"
    ).read_bytes()


def test_gpt_oss_is_in_the_form_openai_publishes(sources: dict[str, Path], tmp_path: Path) -> None:
    import transformers
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source, out = sources["gpt_oss"], tmp_path / "out"
    report = quantize(source, out, recipe="mxfp4_experts", target="vllm", threads=1, fsync=False)
    assert report.proof is not None
    assert not report.proof.findings
    assert all(row.num_clipped is not None for row in report.proof.rows), "each element was bounded"
    held = {n: t for file in out.glob("*.safetensors") for n, t in load_file(file).items()}
    experts = "model.layers.1.mlp.experts"
    assert held[f"{experts}.gate_up_proj_blocks"].shape == (4, 192, 4, 16)
    assert held[f"{experts}.gate_up_proj_scales"].shape == (4, 192, 4)
    assert held[f"{experts}.down_proj_blocks"].shape == (4, 128, 3, 16)
    assert held[f"{experts}.down_proj_blocks"].dtype == torch.uint8
    plain = load_file(source / "model.safetensors")
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        assert torch.equal(held[f"{experts}.{name}"], plain[f"{experts}.{name}"])
    assert f"{experts}.down_proj" not in held
    assert family_models.read_quantization_config(out) == {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "lm_head",
            "model.embed_tokens",
            "model.layers.*.mlp.router",
            "model.layers.*.self_attn",
        ],
    }
    assert not (out / "hf_quant_config.json").exists()
    ours = canonical_values(out)
    for name in ("gate_up_proj", "down_proj"):
        theirs = convert_moe_packed_tensors(
            held[f"{experts}.{name}_blocks"], held[f"{experts}.{name}_scales"]
        )
        parts = ("gate", "up") if name == "gate_up_proj" else ("down",)
        for e in range(4):
            for i, part in enumerate(parts):
                got = ours[f"layers.1.mlp.experts.{e}.{part}.weight"]
                assert np.array_equal(theirs[e, :, i :: len(parts)].T.float().numpy(), got)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    with torch.inference_mode():
        want_BSV = model(TOKENS).logits
    got_BSV = logits(out, StoredQuantization())
    assert float((got_BSV - want_BSV).norm() / want_BSV.norm()) < 2e-5


USED = [
    ("gpt_neox", "int4_weight_only"),
    ("gpt_oss", "mxfp4_experts"),
    ("llama4", "fp8_per_channel"),
    ("qwen3_next", "fp8"),
    ("nemotron_nas", "fp8"),
    ("gemma4", "fp8"),
    ("gemma4-small", "fp8"),
    pytest.param("gemma4-experts", "fp8", marks=pytest.mark.slow),
    ("mistral4", "fp8"),
    ("nemotron_h", "fp8"),
    *(
        pytest.param("deepseek_v4", r, marks=pytest.mark.slow)
        for r in ("fp8", "w4a16_nvfp4", "int4_weight_only")
    ),
    pytest.param("olmo3", "fp8", marks=pytest.mark.slow),
    pytest.param("cohere2", "fp8", marks=pytest.mark.slow),
    pytest.param("seed_oss", "int4_weight_only", marks=pytest.mark.slow),
    pytest.param("ernie4_5", "fp8", marks=pytest.mark.slow),
    pytest.param("granitemoehybrid", "fp8", marks=pytest.mark.slow),
    pytest.param("granitemoehybrid-experts", "fp8", marks=pytest.mark.slow),
    pytest.param("bamba", "int4_weight_only", marks=pytest.mark.slow),
    pytest.param("falcon_h1", "fp8", marks=pytest.mark.slow),
    ("qwen3_5_text", "fp8"),
    pytest.param("qwen3_5_moe_text", "fp8", marks=pytest.mark.slow),
    *(pytest.param(n, "fp8", marks=pytest.mark.slow) for n in family_models.MORE),
]


@pytest.mark.parametrize(("family", "recipe"), USED)
def test_the_result_is_a_model_like_any(
    sources: dict[str, Path], tmp_path: Path, family: str, recipe: str
) -> None:
    source, out, text = sources[family], tmp_path / "out", tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n")
    report = quantize(source, out, recipe=recipe, eval_data=text, threads=1, fsync=False)
    assert report.proof is not None
    assert not report.proof.num_errors
    assert verify(source, out).exit_status == 0
    assert not lint(out, target="vllm").num_errors or recipe.startswith("int4")
    measured = evaluate(out, data=text, dtype="float32")
    assert report.evaluation is not None
    assert measured.perplexity == pytest.approx(report.evaluation.perplexity_after, rel=1e-6)
    said = generate(out, prompt=["The quick"], max_new_tokens=3, device="cpu")
    assert said.num_tokens
    if family == "gpt_oss":
        with pytest.raises(FormatError, match="MXFP4 blocks, which no other form has"):
            export(out, tmp_path / "unified", to="unified", fsync=False)
    else:
        export(out, tmp_path / "unified", to="unified", fsync=False)
        assert verify(out, tmp_path / "unified").exit_status == 0
    reshard(out, tmp_path / "plain", to="hf", fsync=False)
    assert {n: t[:2] for n, t in stored_tensors(tmp_path / "plain").items()} == {
        n: t[:2] for n, t in stored_tensors(source).items()
    }


def test_llama4_experts_lie_one_by_one(sources: dict[str, Path], tmp_path: Path) -> None:
    write_quantized(sources["llama4"], tmp_path / "out", "fp8")
    raw, expert = (
        stored_tensors(tmp_path / "out"),
        "model.layers.1.feed_forward.experts.3.down_proj",
    )
    assert {n.removeprefix(expert) for n in raw if n.startswith(expert)} == {
        ".weight",
        ".weight_scale",
        ".input_scale",
    }
    assert raw[f"{expert}.weight"][:2] == ("F8_E4M3", (128, 256))
    assert not any("gate_up_proj" in n for n in raw)
    said = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert said["exclude_modules"] == ["lm_head", "model.layers.1.feed_forward.router"]


def test_experts_that_are_kept_stay_as_they_are(sources: dict[str, Path], tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "description: attention\nformats: {a: {algo: FP8_PER_CHANNEL_PER_TOKEN}}\nrules:\n"
        "  - {match: {glob: '*.attn.[qkvo]'}, format: a}\n  - {match: {glob: '*'}, format: keep}\n"
    )
    for family in ("llama4", "gpt_oss"):
        write_quantized(sources[family], tmp_path / family, str(recipe))
        raw, plain = stored_tensors(tmp_path / family), stored_tensors(sources[family])
        stacked = [n for n in plain if n.endswith("gate_up_proj")]
        assert stacked
        assert all(raw[n] == plain[n] for n in stacked)


def rules(*lines: str) -> str:
    body = "".join(f"  - {line}\n" for line in (*lines, "{match: {glob: '*'}, format: keep}"))
    known = {
        "m": "{algo: MXFP4}",
        "f": "{algo: FP8_PER_CHANNEL_PER_TOKEN}",
        "kv": "{kv_algo: FP8}",
    }
    used = (f"{n}: {f}" for n, f in known.items() if f"format: {n}}}" in body)
    formats = f"{{{', '.join(used)}}}"
    return f"description: odd\nformats: {formats}\nrules:\n{body}"


@pytest.mark.parametrize(
    ("family", "recipe", "told", "hint"),
    [
        (
            "gpt_oss",
            "fp8_per_channel",
            "for which loaders only support MXFP4",
            "--recipe mxfp4_exp",
        ),
        ("gpt_oss", "mxfp4", r"layers.0.attn.q is MXFP4, but only experts", "--recipe mxfp4_exp"),
        (
            "gpt_oss",
            rules("{match: {role: expert, layers: 0}, format: m}"),
            "layers.1.mlp.experts.0.gate is not quantized, but other experts are MXFP4",
            "--recipe mxfp4_experts",
        ),
        (
            "gpt_oss",
            rules("{match: {role: expert}, format: m}", "{match: {kind: kv_cache}, format: kv}"),
            "layers.0.attn.kv is KV FP8, but",
            "--recipe mxfp4_experts",
        ),
        (
            "gpt_oss",
            rules("{match: {role: expert}, format: m}", "{match: {glob: '*.o'}, format: f}"),
            "layers.0.attn.o is FP8_PER_CHANNEL_PER_TOKEN, but",
            "--recipe mxfp4_experts",
        ),
        ("gpt_neox", "fp8_block128", "64 rows at a time .* packs 128 rows together", "another"),
        ("gpt2", "nvfp4", "transposed, for which loaders only support FP8", "--recipe fp8"),
        (
            "gpt2",
            "fp8_per_channel",
            "transposed, for which loaders only support FP8",
            "--recipe fp8",
        ),
    ],
)
def test_refused_before_any_work(
    sources: dict[str, Path], tmp_path: Path, family: str, recipe: str, told: str, hint: str
) -> None:
    if "\n" in recipe:
        (tmp_path / "odd.yaml").write_text(recipe)
        recipe = str(tmp_path / "odd.yaml")
    decided = resolve_recipe(sources[family], recipe)
    with pytest.raises(MappingError, match=told) as e:
        check_storable(decided.source, decided.matched.decisions)
    assert hint in (e.value.hint or "")
    with pytest.raises(MappingError, match=told):
        write_quantized(sources[family], tmp_path / "out", recipe)
    assert not (tmp_path / "out").exists()


def test_parts_of_a_block_have_to_be_whole(tmp_path: Path) -> None:
    source = family_models.save("gpt_oss", tmp_path / "odd", intermediate_size=80)
    with raises(RecipeError, "32", "MXFP4", "80 columns"):
        resolve_recipe(source, "mxfp4_experts")


def test_a_woven_weight_is_quantized_whole(sources: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(rules("{match: {glob: '*.attn.q'}, format: f}"))
    decided = resolve_recipe(sources["gpt_neox"], str(tmp_path / "r.yaml"))
    with raises(MappingError, "attn.q", "FP8", "layers.0.attn.k"):
        check_storable(decided.source, decided.matched.decisions)


def test_what_cannot_be_quantized_is_told_of_the_stored_tensor(tmp_path: Path) -> None:
    source = family_models.save("gpt_neox", tmp_path / "source")
    held, name = (
        load_file(source / "model.safetensors"),
        "layers.1.attention.query_key_value.weight",
    )
    held[f"gpt_neox.{name}"][70, 5] = float("nan")  # of keys
    save_file(held, source / "model.safetensors", {"format": "pt"})
    with raises(FormatError, id="nan-weights", tensor=f"gpt_neox.{name}"):
        write_quantized(source, tmp_path / "out", "int8_weight_only")


Change = Callable[[dict[str, Tensor]], Any]
EXPERTS = "model.layers.0.mlp.experts"


def flipped(t: Tensor) -> Tensor:
    return t.flip(0).contiguous()


def one_byte(t: Tensor) -> Tensor:
    out = t.clone()
    out[1, 3, 2, 5] ^= 0x35
    return out


DAMAGED: list[tuple[str, Change]] = [
    (
        "weight",
        lambda t: t.update(
            {f"{EXPERTS}.down_proj_blocks": flipped(t[f"{EXPERTS}.down_proj_blocks"])}
        ),
    ),
    (
        "weight",
        lambda t: t.update(
            {f"{EXPERTS}.gate_up_proj_blocks": one_byte(t[f"{EXPERTS}.gate_up_proj_blocks"])}
        ),
    ),
    (
        "kept",
        lambda t: t.update({f"{EXPERTS}.down_proj_bias": flipped(t[f"{EXPERTS}.down_proj_bias"])}),
    ),
    ("scale-nan", lambda t: t[f"{EXPERTS}.down_proj_scales"].fill_(255)),
    ("scale-missing", lambda t: t.pop(f"{EXPERTS}.down_proj_scales")),
    (
        "dtype",
        lambda t: t.update(
            {f"{EXPERTS}.down_proj_scales": t[f"{EXPERTS}.down_proj_scales"].short()}
        ),
    ),
    (
        "shape",
        lambda t: t.update(
            {f"{EXPERTS}.down_proj_scales": t[f"{EXPERTS}.down_proj_scales"][..., :2].contiguous()}
        ),
    ),
    (
        "scale-extra",
        lambda t: t.update({"model.layers.0.self_attn.q_proj.weight_scale": torch.ones(())}),
    ),
]


SAID_OF = {
    "not-excluded": "layers.0.attn.q: is not quantized, and",
    "excluded": "layers.0.mlp.experts.0.gate: is quantized, and",
    "config": "config.json: has quant_method 'modelopt', and",
}
"""Module and message of a finding about config.json."""


def test_damage_of_blocks_is_found(sources: dict[str, Path], tmp_path: Path) -> None:
    source, out = sources["gpt_oss"], tmp_path / "out"
    decided = resolve_recipe(source, "mxfp4_experts")
    settlement = make_qparams(decided)
    write_quantized(source, out, "mxfp4_experts", settlement)
    file = next(out.glob("*.safetensors"))
    right = load_file(file)
    for check, change in DAMAGED:
        held = dict(right)
        change(held)
        save_file(held, file, {"format": "pt"})
        told = proved(decided, out, settlement)
        assert any(t.startswith(f"{check}: ") for t in told), (check, told)
        right = {n: t.clone() for n, t in right.items()}
        if check == "scale-nan":
            shutil.rmtree(out)
            write_quantized(source, out, "mxfp4_experts", settlement)
            file = next(out.glob("*.safetensors"))
            right = load_file(file)
    save_file(right, file, {"format": "pt"})
    assert proved(decided, out, settlement) == []
    config = json.loads((out / "config.json").read_text())
    for check, new in {
        "not-excluded": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        "excluded": {"quant_method": "mxfp4", "modules_to_not_convert": ["model", "lm_head"]},
        "config": {"quant_method": "modelopt", "quant_algo": "MXFP4"},
    }.items():
        (out / "config.json").write_text(json.dumps(config | {"quantization_config": new}))
        told = proved(decided, out, settlement)
        assert any(t.startswith(f"{check}: {SAID_OF[check]}") for t in told), (check, told)
    (out / "config.json").write_text(json.dumps(config))
    (out / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "MXFP4"}}')
    assert any(
        "does not belong to a folder of MXFP4 blocks" in t for t in proved(decided, out, settlement)
    )


@pytest.mark.parametrize(
    ("family", "recipe"), [("gpt_neox", "int4_gptq"), ("llama4", "nvfp4_awq"), ("gpt2", "fp8")]
)
@pytest.mark.slow
def test_calibrated_it_is_proved(
    sources: dict[str, Path], tmp_path: Path, family: str, recipe: str
) -> None:
    out = tmp_path / "out"
    report = quantize(
        sources[family], out, recipe=recipe, samples=4, seq_length=32, threads=1, fsync=False
    )
    assert report.proof is not None
    assert not report.proof.findings
    assert verify(sources[family], out).exit_status == 0
    assert contents(out)


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("gpt_neox", "gpt_neox.layers.1.attention.query_key_value.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.weight"),
    ],
)
def test_one_code_among_others_is_missed(
    sources: dict[str, Path], tmp_path: Path, family: str, tensor: str
) -> None:
    out = tmp_path / "out"
    decided = resolve_recipe(sources[family], "fp8")
    settlement = make_qparams(decided)
    write_quantized(sources[family], out, "fp8", settlement)
    file = next(out.glob("*.safetensors"))
    held = load_file(file)
    codes = held[tensor].view(torch.uint8).clone()
    codes[70, 5] ^= 0x20
    save_file(held | {tensor: codes.view(torch.float8_e4m3fn)}, file, {"format": "pt"})
    (told,) = proved(decided, out, settlement)
    at = "attn.k: 1 of 16,384 elements .* first at \\[6, 5\\]"
    if family == "gpt2":  # row 70 there is column 70 here
        at = "attn.q: 1 of 16,384 elements .* first at \\[5, 70\\]"
    assert re.search(at, told)
