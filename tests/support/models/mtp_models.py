"""Families with layers of multi-token prediction, as published: transformers drops those layers.

Two of them transformers does not know; a model of a family that computes the same stands for the
rest of it (its twin), under their names.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.folders import Stored, read_config, stored_tensors
from tests.support.models import dense_cases, moe_cases, nested_cases
from tests.support.models.tiny_model import UNTIED, Case

LAYERS = 2
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_BAILING_KEYS = {
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_bias": False,
    "norm_head": False,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def glm4_moe(folder: Path) -> tuple[Any, str]:
    """A GLM-4.5, and the names of the layer that others are like."""
    case = next(c for c in moe_cases.CASES if c[0] == "glm4_moe")
    model = moe_cases.save(case, folder)
    add_layers(folder, "model.layers.3.", "model.layers.{}.", 4, DEEPSEEK)
    return model, "glm4_moe"


def deepseek_v32(folder: Path) -> tuple[Any, str]:
    """A DeepSeek-V3.2, whose further layers have indexers, too."""
    case = next(c for c in moe_cases.CASES if c[0] == "deepseek_v32")
    model = moe_cases.save(case, folder)
    add_layers(folder, "model.layers.3.", "model.layers.{}.", 4, DEEPSEEK)
    return model, "deepseek_v32"


def bailing_moe_v2(folder: Path) -> tuple[Any, str]:
    """The same GLM-4.5 as a Ling 2.0."""
    model, _ = glm4_moe(folder)
    rename_as_ling(folder)
    return model, "bailing_moe_v2"


def rename_as_ling(folder: Path) -> None:
    """Turn the folder of a GLM-4.5 without biases into one of a Ling 2.0."""
    held = load_file(folder / "model.safetensors")
    renamed: dict[str, Tensor] = {}
    for name, tensor in held.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        if name.endswith("q_proj.weight"):
            parts = [held[name.replace("q_proj", f"{x}_proj")] for x in "qkv"]
            tensor, name = torch.cat(parts), name.replace("q_proj", "query_key_value")
        for old, new in (
            ("embed_tokens", "word_embeddings"),
            ("self_attn.o_proj", "attention.dense"),
            ("self_attn.q_norm", "attention.query_layernorm"),
            ("self_attn.k_norm", "attention.key_layernorm"),
            ("self_attn.", "attention."),
            ("e_score_correction_bias", "expert_bias"),
            ("shared_head.norm", "final_layernorm"),
        ):
            name = name.replace(old, new)
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    config = read_config(folder)
    shared, experts = config.pop("n_shared_experts"), config.pop("n_routed_experts")
    config |= _BAILING_KEYS | {"num_shared_experts": shared, "num_experts": experts}
    config |= {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2"}
    (folder / "config.json").write_text(json.dumps(config))


def mimo(folder: Path) -> tuple[Any, str]:
    """A Qwen2 with MiMo's layers of multi-token prediction."""
    model = dense_cases.save(Case("qwen2", UNTIED), folder)
    rename_as_mimo(folder)
    return model, "mimo"


def rename_as_mimo(folder: Path) -> None:
    """Turn the folder of a Qwen2 into one of a MiMo, with further layers."""
    names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    add_layers(folder, "model.layers.1.", "model.mtp_layers.{}.", 0, names)
    config = read_config(folder) | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))


def qwen3_next(folder: Path) -> tuple[Any, str]:
    """A Qwen3-Next, whose layer lies beside the model, and of which no key says so."""
    model = moe_cases.save(moe_cases.FIRST["qwen3_next"], folder)
    add_outer_layer(folder, "model.layers.3.")
    return model, "qwen3_next"


def qwen3_5_text(folder: Path) -> tuple[Any, str]:
    """A text model of Qwen3.5."""
    case = next(c for c in dense_cases.CASES if c.model_type == "qwen3_5_text")
    model = dense_cases.save(case, folder)
    add_outer_layer(folder, "model.layers.3.")
    moe_cases.change_config(folder, mtp_num_hidden_layers=1)
    return model, "qwen3_5_text"


def qwen3_5_moe(folder: Path) -> tuple[Any, str]:
    """A Qwen3.5 with experts as it ships, with a vision tower."""
    case = next(c for c in nested_cases.CASES if c.family == "qwen3_5_moe")
    built = case.build(folder)
    model = type(built).from_pretrained(folder, dtype="float32")  # rotary frequencies, too
    add_outer_layer(folder, "model.language_model.layers.3.")
    nested_cases.edit_config(folder, lambda c: c["text_config"].update(mtp_num_hidden_layers=1))
    return model, "qwen3_5_moe"


def exaone_moe(folder: Path) -> tuple[Any, str]:
    """A K-EXAONE, whose layer has an MLP."""
    case = next(c for c in moe_cases.MORE if c[0] == "exaone_moe")
    model = moe_cases.save(case, folder)
    add_outer_layer(folder, "model.layers.0.")
    moe_cases.change_config(folder, num_nextn_predict_layers=1)
    return model, "exaone_moe"


def mimo_v2_flash(folder: Path) -> tuple[Any, str]:
    """A MiMo-V2-Flash, whose further layers have a window and an MLP, and which no key counts."""
    model = moe_cases.save(moe_cases.FIRST["mimo_v2_flash"], folder)
    to, config = "model.mtp.layers.{}.", read_config(folder)
    norms = ("enorm", "hnorm", "final_layernorm", "input_layernorm", "pre_mlp_layernorm")
    add_layers(folder, "model.layers.1.self_attn.", to + "self_attn.", 0, ())
    add_layers(folder, "model.layers.0.mlp.", to + "mlp.", 0, ())
    add_layers(folder, "model.layers.0.none", to, 0, (*norms, "eh_proj"))
    (folder / "config.json").write_text(json.dumps(config))
    return model, "mimo_v2_flash"


def nemotron_h(folder: Path) -> tuple[Any, str]:
    """A Nemotron-H: each of its two further layers is an attention layer and one of experts."""
    model = moe_cases.save(moe_cases.FIRST["nemotron_h"], folder)
    add_layers(folder, "backbone.layers.2.", "mtp.layers.{}.", 0, ("enorm", "hnorm", "eh_proj"), 2)
    add_layers(folder, "backbone.layers.1.", "mtp.layers.{}.", 1, ("final_layernorm",), 2)
    return model, "nemotron_h"


def save_numbered(folder: Path) -> tuple[Any, Stored]:
    """A Nemotron-H, each of whose two further layers has four inside: M*-E."""
    model = moe_cases.save(moe_cases.FIRST["nemotron_h"], folder)
    for k, (like, names) in enumerate(
        (
            (0, ("enorm", "hnorm", "eh_proj")),
            (2, ()),
            (3, ()),
            (1, ("final_layernorm",)),
        )
    ):
        add_layers(folder, f"backbone.layers.{like}.", "mtp.layers.{}.", k, names, 4)
    kinds = ["linear_attention", "full_attention", "mlp", "moe"]
    moe_cases.change_config(folder, mtp_layers_block_type=kinds)
    return model, stored_tensors(folder)


FAMILIES: dict[str, Callable[[Path], tuple[Any, str]]] = {
    f.__name__: f
    for f in (
        *(glm4_moe, deepseek_v32, bailing_moe_v2, mimo),
        *(qwen3_next, qwen3_5_text, qwen3_5_moe, nemotron_h, exaone_moe),
        mimo_v2_flash,
    )
}
"""Each saves a model to a folder, and returns its twin and the family's name."""

PROJECTIONS = {
    "glm4_moe": "model.layers.5.eh_proj.weight",
    "deepseek_v32": "model.layers.4.eh_proj.weight",
    "bailing_moe_v2": "model.layers.5.eh_proj.weight",
    "mimo": "model.mtp_layers.1.input_proj.weight",
    "nemotron_h": "mtp.layers.2.eh_proj.weight",
    "mimo_v2_flash": "model.mtp.layers.1.eh_proj.weight",
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe", "exaone_moe"), "mtp.fc.weight"),
}
"""The projection of both inputs of the last further layer, as it is stored."""


def save(name: str, folder: Path) -> tuple[Any, Stored]:
    """A model of a family, and what is stored."""
    model, _ = FAMILIES[name](folder)
    return model, stored_tensors(folder)


def add_layers(
    folder: Path, like: str, to: str, first: int, names: tuple[str, ...], step: int = 1
) -> None:
    """Further layers, named `to`, like one of a stored model; `names`: norms, and what projects."""
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(1 + first % step)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    held = load_file(file)
    for name in [n for n in held if n.startswith(like)]:
        for m in range(LAYERS):
            held[name.replace(like, to.format(first + m * step))] = new(*held[name].shape).to(
                held[name].dtype
            )
    hidden = read_config(folder)["hidden_size"]
    for m in range(LAYERS):
        for part in names:
            shape = (hidden, 2 * hidden) if "proj" in part else (hidden,)
            held[f"{to.format(first + m * step)}{part}.weight"] = new(*shape)
    save_file(held, file, metadata={"format": "pt"})
    config = read_config(folder) | {"num_nextn_predict_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))


def add_outer_layer(folder: Path, like: str) -> None:
    """Qwen's layer: its parts are beside the model."""
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
    held = load_file(file)
    hidden = held[f"{like}input_layernorm.weight"].shape[0]
    shapes = {n.replace(like, "mtp.layers.0."): t.shape for n, t in held.items() if like in n}
    shapes |= {
        f"mtp.{part}.weight": torch.Size([hidden])
        for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    shapes["mtp.fc.weight"] = torch.Size([hidden, 2 * hidden])
    held |= {n: torch.randn(s, generator=generator).bfloat16() for n, s in shapes.items()}
    save_file(held, file, metadata={"format": "pt"})


def save_deepseek_v4(folder: Path) -> Stored:
    """A DeepSeek-V4 as published: in float32 what is no matrix, and a layer of multi-token
    prediction of two projections, with copies of both ends. Returns what is stored."""
    moe_cases.save(moe_cases.FIRST["deepseek_v4"], folder)
    add_deepseek_v4_layer(folder)
    return stored_tensors(folder)


def add_deepseek_v4_layer(folder: Path) -> None:
    """Give a published DeepSeek-V4, whose first layer has a window alone, a layer of multi-token
    prediction, and float32 where it ships."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    held = load_file(folder / "model.safetensors")
    for name in [n for n in held if n.startswith("layers.0.") and not n.endswith("tid2eid")]:
        held[name.replace("layers.0.", "mtp.0.")] = draw(*held[name].shape).bfloat16()
    experts, hidden = held["layers.0.ffn.gate.weight"].shape
    held["mtp.0.ffn.gate.bias"] = draw(experts)
    for part in ("e_proj", "h_proj"):
        held[f"mtp.0.{part}.weight"] = draw(hidden, hidden).bfloat16()
    for part in ("enorm", "hnorm", "norm"):
        held[f"mtp.0.{part}.weight"] = draw(hidden).bfloat16()
    for part in ("fn", "base", "scale"):
        name = f"hc_head_{part}"
        held[f"mtp.0.{name}"] = draw(*held[name].shape)
    held["mtp.0.emb.tok_emb.weight"] = held["embed.weight"].clone()
    held["mtp.0.head.weight"] = held["head.weight"].clone()
    for name, tensor in held.items():
        if name.endswith((".ape", ".attn_sink", ".gate.bias")) or "hc_" in name:
            held[name] = tensor.float()
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})


def save_deepseek_v4_quantized(folder: Path) -> Stored:
    """A DeepSeek-V4 as it ships: experts in MXFP4, other linear layers in FP8 by blocks of 128 with
    powers of two as scales. Returns what is stored once it is decoded, by transformers for FP4."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    name, model, keys = moe_cases.FIRST["deepseek_v4"]
    sizes = {"hidden_size": 160, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    kinds = ("layer_types", "mlp_layer_types")
    keys = keys | sizes | {k: keys[k][:2] for k in kinds} | {"num_nextn_predict_layers": 0}
    moe_cases.save((name, model, keys), folder)
    generator = torch.Generator().manual_seed(2)
    decoder, held, want = Fp8Dequantize(None), {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        rows, columns = (tensor.shape[0], tensor.shape[-1])
        is_fp4 = ".experts." in name
        is_fp8 = tensor.ndim == 2 and any(
            x in name for x in (".attn.w", ".shared_experts.", ".indexer.wq_b.")
        )
        held[name] = want[name] = tensor
        if not is_fp4 and not is_fp8:
            continue
        grid = (rows, columns // 32) if is_fp4 else (-(-rows // 128), -(-columns // 128))
        powers = torch.randint(118, 130, grid, generator=generator).to(torch.uint8)
        scale = powers.view(torch.float8_e8m0fnu)
        if is_fp4:
            codes = torch.randint(0, 256, (rows, columns // 2), generator=generator)
            held[name] = codes.to(torch.uint8).view(torch.int8)
            want[name] = decoder._dequantize_one(held[name], scale, torch.bfloat16)
        else:
            drawn = torch.randn((rows, columns), generator=generator) * 30
            held[name] = drawn.to(torch.float8_e4m3fn)
            blocks = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            want[name] = (held[name].float() * blocks[:rows, :columns]).bfloat16()
        held[name.replace(".weight", ".scale")] = scale
    file = folder / "model.safetensors"
    save_file(want, file, metadata={"format": "pt"})
    decoded = stored_tensors(folder)
    save_file(held, file, metadata={"format": "pt"})
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    blocks |= {"scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    moe_cases.change_config(folder, quantization_config=blocks, expert_dtype="fp4")
    return decoded
