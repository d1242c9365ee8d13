"""Rotated checkpoints compute what the originals do, from any layout; other models are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import quantize, reshard
from megtool.errors import FormatError, MappingError
from megtool.quant.recipes.rotation import RotationMatrices
from megtool.quant.rotation import rotated_tensors
from megtool.quant.rotation.rotate import rotate
from megtool.quantize.report import QuantizeReport
from megtool.source.open import open_source
from megtool.storage.files import Files
from megtool.transport.reading.reader import CheckpointReader
from tests.support.errors import raises
from tests.support.folders import contents

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 160,
    "hidden_size": 48,  # 12 x 4
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
SCALED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[1]),
    "gemma": lambda: transformers.GemmaConfig(**SIZES),
    "granite": lambda: transformers.GraniteConfig(**SIZES, **SCALED),
    "phi3": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, num_local_experts=4),
}
ROTATIONS = {
    "both": {"r1": "hadamard", "r2": "hadamard"},
    "blocks": {"r1": "random-hadamard", "block_size": 16, "seed": 3},
    "random": {"r1": "random-matrix", "r2": "random-matrix", "seed": 1},
    "values": {"r2": "random-hadamard", "seed": 5},
}
TOKENS = torch.arange(40).view(2, 20) * 37 % 160


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose norms, biases and sinks are random too."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[name]()).float()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.copy_(torch.rand_like(p) * 1.5 + (-0.8 if name == "gemma" else 0.2))
            elif "bias" in key or "sinks" in key:
                p.copy_(torch.randn_like(p) * 0.3)
            else:
                p.mul_(4)
    model.to(dtype).save_pretrained(folder)
    return model.eval()


def recipe_file(path: Path, rotation: dict[str, Any], *, algo: str = "", **more: Any) -> Path:
    """A recipe that rotates, and quantizes linear layers of layers to `algo` (empty: none)."""
    rules: list[dict[str, Any]] = [{"match": {"glob": "*"}, "format": "keep", "optional": True}]
    formats = {}
    if algo:
        chosen = {"match": {"kind": "linear", "not": {"role": ["lm_head", "router"]}}}
        rules, formats = [chosen | {"format": "f"}, *rules], {"f": {"algo": algo}}
    recipe = {"description": "d", "rotation": rotation, "formats": formats, "rules": rules}
    path.write_text(json.dumps(recipe | more))
    return path


def logits(folder: Path) -> torch.Tensor:
    """Of transformers' model of a folder that is not quantized, though it says how it would be."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    path.write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay(family: str, rotation: str, tmp_path: Path) -> None:
    model = save(family, tmp_path / "hf")
    recipe = recipe_file(tmp_path / "r.json", ROTATIONS[rotation])
    report = quantize(tmp_path / "hf", tmp_path / "out", recipe=recipe, fsync=False)
    assert isinstance(report, QuantizeReport)
    assert report.exit_status == 0
    with torch.no_grad():
        before = model(TOKENS).logits
    after = logits(tmp_path / "out")
    assert float((after - before).norm() / before.norm()) < 1e-5
    config = json.loads((tmp_path / "out/config.json").read_text())
    was_tied = model.config.tie_word_embeddings
    assert bool(config.get("tie_word_embeddings")) == (was_tied and rotation == "values")
    assert ("no longer tied" in report.rotation) == (was_tied and rotation != "values")


def canonical(source: Any) -> dict[str, np.ndarray]:
    with CheckpointReader(source.catalogue, Files()) as reader:
        return {n: reader.open_canonical(p).read() for n, p in source.view.placements.items()}


@pytest.mark.peers
def test_weights_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    """The library rotates transformers' model, once norms are in the weights after them."""
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 64}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)).double()
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.rand_like(p) + 0.2 if "norm" in key else torch.randn_like(p))
    model.save_pretrained(tmp_path / "hf")
    settings = RotationMatrices(r1="hadamard", r2="hadamard")
    ours = rotate(open_source(tmp_path / "hf"), settings)
    assert ours.rotation is not None
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, linears in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                for linear in linears:
                    linear.weight.mul_(norm.weight)
                norm.weight.fill_(1)
        model.lm_head.weight.mul_(model.model.norm.weight)
        model.model.norm.weight.fill_(1)
    config = TransformConfig.model_validate(ours.rotation["transform_config"])
    apply_transform_config(model, config)
    model.save_pretrained(tmp_path / "theirs")
    theirs = canonical(open_source(tmp_path / "theirs"))
    for name, values in canonical(ours).items():
        np.testing.assert_allclose(values, theirs[name].reshape(values.shape), atol=1e-12)


def test_blocks_and_panels_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("biases", tmp_path / "hf", torch.bfloat16)
    settings = RotationMatrices(r1="random-hadamard", r2="hadamard", seed=2)
    whole = canonical(rotate(open_source(tmp_path / "hf"), settings))
    monkeypatch.setattr(rotated_tensors, "BLOCK_BYTES", 600)
    monkeypatch.setattr(rotated_tensors, "NUM_PANELS", 3)
    monkeypatch.setattr(rotated_tensors, "PANEL_CACHE_BYTES", 1)
    parts = canonical(rotate(open_source(tmp_path / "hf"), settings))
    assert whole.keys() == parts.keys()
    for name, values in whole.items():
        near = values.view(np.uint16).astype(int) - parts[name].view(np.uint16).astype(int)
        assert np.abs(near).max() <= 1, name  # the order of sums decides ties


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", {"to": "torch_dist", "tp": 2, "pp": 2}),
        ("qwen3", {"to": "megatron", "tp": 2}),
        ("qwen3_moe", {"to": "torch_dist", "tp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_any_layout_gives_the_same_bytes(
    family: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    save(family, tmp_path / "hf", torch.bfloat16)
    reshard(tmp_path / "hf", tmp_path / "other", **layout)
    recipe = recipe_file(tmp_path / "r.json", ROTATIONS["both"], algo="FP8_PER_CHANNEL_PER_TOKEN")
    written = []
    for name in ("hf", "other"):
        report = quantize(tmp_path / name, tmp_path / f"{name}_out", recipe=recipe, fsync=False)
        assert isinstance(report, QuantizeReport)
        assert report.exit_status == 0, report.proof
        written.append(contents(tmp_path / f"{name}_out"))
    assert written[0]["model.safetensors"] == written[1]["model.safetensors"]


def test_a_quantized_source_is_decoded_first(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf", torch.bfloat16)
    plain = recipe_file(tmp_path / "plain.json", {}, algo="FP8_PER_CHANNEL_PER_TOKEN")
    recipe = json.loads(plain.read_text())
    plain.write_text(json.dumps({k: v for k, v in recipe.items() if k != "rotation"}))
    quantize(tmp_path / "hf", tmp_path / "fp8", recipe=plain, fsync=False)
    rotated = recipe_file(tmp_path / "r.json", ROTATIONS["both"], algo="W8A16")
    report = quantize(tmp_path / "fp8", tmp_path / "out", recipe=rotated, fsync=False)
    assert isinstance(report, QuantizeReport)
    assert report.exit_status == 0, report.proof


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "layer norms": (lambda: transformers.CohereConfig(**SIZES), {"r1": "hadamard"}, "LayerNorm"),
    "post norms": (lambda: transformers.Olmo2Config(**SIZES), {"r1": "hadamard"}, "normalizes"),
    "gemma": (lambda: transformers.Gemma2Config(**SIZES), {"r1": "hadamard"}, "normalizes"),
    "sizes": (
        lambda: transformers.LlamaConfig(**(SIZES | {"hidden_size": 94, "num_attention_heads": 2})),
        {"r1": "hadamard"},
        "order 94",
    ),
    "heads": (
        lambda: transformers.LlamaConfig(**(SIZES | {"head_dim": 6})),
        {"r2": "hadamard"},
        "order 6",
    ),
    "blocks": (
        lambda: transformers.LlamaConfig(**SIZES),
        {"r1": "hadamard", "block_size": 32},
        "block_size 32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_models_are_refused(case: str, tmp_path: Path) -> None:
    make, rotation, fact = REFUSED[case]
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(make()).save_pretrained(tmp_path / "hf")
    recipe = recipe_file(tmp_path / "r.json", rotation)
    with raises(MappingError, fact, file=tmp_path / "hf", hint=True, id="unsupported-rotation"):
        quantize(tmp_path / "hf", tmp_path / "out", recipe=recipe)
    assert not (tmp_path / "out").exists()


def test_latent_values_have_no_r2(tmp_path: Path) -> None:
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"num_key_value_heads": 6}
    latent = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    experts = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    config = transformers.DeepseekV3Config(
        **sizes, **latent, **experts, v_head_dim=8, num_experts_per_tok=2, moe_intermediate_size=24
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(tmp_path / "hf")
    source = open_source(tmp_path / "hf")
    with raises(MappingError, "R2", "latent", id="unsupported-rotation"):
        rotate(source, RotationMatrices(r2="hadamard"))
    recipe = recipe_file(tmp_path / "r.json", {"r1": "hadamard"})
    quantize(tmp_path / "hf", tmp_path / "out", recipe=recipe, fsync=False)
    with torch.no_grad():
        before = model(TOKENS).logits
    assert float((logits(tmp_path / "out") - before).norm() / before.norm()) < 1e-5


def test_a_number_that_is_none_is_found(tmp_path: Path) -> None:
    model = save("llama", tmp_path / "hf")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "hf")
    recipe = recipe_file(tmp_path / "r.json", {"r1": "hadamard"}, algo="FP8_PER_CHANNEL_PER_TOKEN")
    with raises(FormatError, tensor="layers.1.mlp.down.weight", id="nan-weights"):
        quantize(tmp_path / "hf", tmp_path / "out", recipe=recipe, fsync=False)
