"""Beside ModelOpt 0.47's `export_tensorrt_llm_checkpoint`: the same tensors in every byte.

Quantized models are exported by it in both forms, and its unified folder is what ours are made of.
They are in float32 where its two exporters are to agree: in bfloat16 the unified one divides
weights in bfloat16 and the legacy one in float32, so that one code in thirty differs by one.

Known differences, in which ours is what engines ask for: single scales of NVFP4 have a dimension;
INT8 always has factors for inputs (ones where it says nothing); `rotary_base`, `rotary_scaling`,
`qwen_type` and biases stand in config.json; GPT-2's positions are learned, not rotary; the last of
several stages of a Gemma has its head; activations and the share of a head that rotates are what
TensorRT-LLM's own conversion writes (`gelu`, `squared-relu`, Nemotron's half).
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.checkpoints.trtllm_joined import config_of, ranks_of
from tests.support.runs.exports import export_trtllm_legacy

pytestmark = [pytest.mark.peers, pytest.mark.slow]

LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))
GROUP = 32
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "tie_word_embeddings": False,
}
SIBLINGS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)


KNOWN = {"producer", "rank", "logits_dtype"}
OF_GPT = {"hidden_act", "rotary_pct"}
"""What is known to differ in config.json."""


def grouped(settings: Any) -> Any:
    """Settings with groups of `GROUP` columns."""
    if isinstance(settings, dict):
        return {k: GROUP if k in (-1, "-1") else grouped(v) for k, v in settings.items()}
    return [grouped(s) for s in settings] if isinstance(settings, list) else settings


def preset(name: str) -> dict[str, Any]:
    import modelopt.torch.quantization as mtq

    found = copy.deepcopy(getattr(mtq, name))
    return found if isinstance(found, dict) else dict(found.model_dump())


def quantized(
    name: str, *, cache: bool, one_scale: bool, dtype: torch.dtype, family: str = "Llama"
) -> Any:
    """A model calibrated by ModelOpt; with `one_scale` siblings are given the largest amax."""
    pytest.importorskip("modelopt")
    import modelopt.torch.quantization as mtq
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, bos_token_id=0, eos_token_id=0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).to(dtype)
    model.config.architectures = [f"{family}ForCausalLM"]
    settings = preset(name)
    if "AWQ" in name or "INT4" in name:
        settings = grouped(settings)
    if cache:
        more = preset("FP8_KV_CFG")["quant_cfg"]
        settings["quant_cfg"] = [*settings["quant_cfg"], *more]
    runs = not name.startswith("NVFP4")
    if not runs:
        settings["algorithm"] = "max"
    tokens = torch.arange(32)[None]
    mtq.quantize(model, settings, (lambda m: m(tokens)) if runs else None)
    for module in model.modules():  # it cannot be run here: amax as if it had been
        quantizer = getattr(module, "input_quantizer", None)
        if not runs and quantizer is not None and quantizer.is_enabled:
            quantizer.amax = torch.tensor(3.0)
    for layer in model.model.layers if one_scale else ():
        for names in SIBLINGS if family == "Llama" else SIBLINGS[:1]:
            found = [layer.get_submodule(n).weight_quantizer for n in names]
            top = max(q.amax.max() for q in found)
            for q in found:
                q.amax = top.clone().reshape(q.amax.shape)
    return model


def both(model: Any, folder: Path, dtype: torch.dtype, decoder: str = "llama") -> Path:
    """ModelOpt's unified folder, and its legacy ones in all layouts beside it."""
    from modelopt.torch.export import export_hf_checkpoint, export_tensorrt_llm_checkpoint

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        export_hf_checkpoint(copy.deepcopy(model), dtype=dtype, export_dir=folder / "hf")
        for tp, pp in LAYOUTS:
            out = folder / f"theirs{tp}{pp}"
            export_tensorrt_llm_checkpoint(
                copy.deepcopy(model), decoder, torch.bfloat16, out, tp, pp
            )
    return folder


def pairs(folder: Path) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Ours and theirs, rank by rank, in all layouts; configs say the same."""
    out = []
    for tp, pp in LAYOUTS:
        ours, theirs = folder / f"ours{tp}{pp}", folder / f"theirs{tp}{pp}"
        export_trtllm_legacy(folder / "hf", ours, tp=tp, pp=pp, dtype="bf16", fsync=False)
        mine, other = config_of(ours), config_of(theirs)
        assert mine["quantization"] == other["quantization"]
        known = KNOWN if mine["decoder"] == "llama" else KNOWN | OF_GPT
        assert {k: mine.get(k) for k in other if k not in known} == {
            k: v for k, v in other.items() if k not in known
        }
        out += list(zip(ranks_of(ours), ranks_of(theirs), strict=True))
    return out


def bits(tensor: Tensor) -> Tensor:
    """What can be compared, of any type."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("FP8_DEFAULT_CFG", True),
        ("INT8_SMOOTHQUANT_CFG", False),
        ("NVFP4_DEFAULT_CFG", False),
        ("FP8_PER_CHANNEL_PER_TOKEN_CFG", False),
    ],
)
def test_equal_in_every_byte(tmp_path: Path, name: str, cache: bool) -> None:
    model = quantized(name, cache=cache, one_scale=name.startswith("FP8_D"), dtype=torch.float32)
    for ours, theirs in pairs(both(model, tmp_path, torch.float32)):
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            want = theirs[key].reshape(1) if theirs[key].ndim == 0 else theirs[key]
            assert (tensor.dtype, tensor.shape) == (want.dtype, want.shape), key
            assert torch.equal(bits(tensor), bits(want)), key


@pytest.mark.parametrize("family", ["Starcoder2", "Nemotron"])
@pytest.mark.parametrize("name", ["FP8_DEFAULT_CFG", "NVFP4_DEFAULT_CFG"])
def test_families_of_gpt(tmp_path: Path, family: str, name: str) -> None:
    model = quantized(name, cache=False, one_scale=True, dtype=torch.float32, family=family)
    for ours, theirs in pairs(both(model, tmp_path, torch.float32, "gpt")):
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            want = theirs[key].reshape(1) if theirs[key].ndim == 0 else theirs[key]
            assert (tensor.dtype, tensor.shape) == (want.dtype, want.shape), key
            assert torch.equal(bits(tensor), bits(want)), key


def test_siblings_of_several_scales(tmp_path: Path) -> None:
    """Encoded again out of codes, where theirs are out of weights: codes differ by one at most."""
    model = quantized("FP8_DEFAULT_CFG", cache=True, one_scale=False, dtype=torch.float32)
    for ours, theirs in pairs(both(model, tmp_path, torch.float32)):
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            if tensor.dtype != torch.float8_e4m3fn:
                assert torch.equal(tensor, theirs[key]), key
                continue
            a, b = (t.view(torch.uint8).int() for t in (tensor, theirs[key]))
            alone = "dense" in key or "proj" in key
            assert torch.equal(a, b) if alone else int((a - b).abs().max()) <= 1, key


def test_awq(tmp_path: Path) -> None:
    """The unified folder has factors of inputs in norms, the legacy one beside weights: codes and
    scales of `qkv` are equal, those of `dense` and `proj` with their factors too; `fc` and `gate`
    had factors of their own, which the unified exporter averages."""
    model = quantized("INT4_AWQ_CFG", cache=False, one_scale=False, dtype=torch.float32)
    for ours, theirs in pairs(both(model, tmp_path, torch.float32)):
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            want = theirs[key]
            assert (tensor.dtype, tensor.shape) == (want.dtype, want.shape), key
            if "norm.weight" in key and "ln_f" not in key:
                module = "attention.qkv" if "input" in key else "mlp.fc"
                at = key.rpartition(".")[0].rpartition(".")[0]
                if module == "mlp.fc":
                    continue
                factors = theirs[f"{at}.{module}.prequant_scaling_factor"].float()
                torch.testing.assert_close(
                    tensor.float(), want.float() * factors, rtol=2.0**-7, atol=0
                )
            elif ".mlp.fc." in key or ".mlp.gate." in key:
                continue
            elif key.endswith("qkv.prequant_scaling_factor"):
                assert (tensor == 1).all()
            else:
                assert torch.equal(bits(tensor), bits(want)), key


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma", "gpt2", "starcoder2", "nemotron"]
)
def test_plain(tmp_path: Path, family: str) -> None:
    pytest.importorskip("modelopt")
    import transformers
    from modelopt.torch.export import export_tensorrt_llm_checkpoint

    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    sizes |= {"tie_word_embeddings": family == "gemma"}
    gpt = {"n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "vocab_size": 101}
    kinds: dict[str, tuple[str, str, dict[str, Any]]] = {
        "llama": ("llama", "Llama", sizes | {"attention_bias": True, "mlp_bias": True}),
        "qwen2": ("qwen", "Qwen2", sizes),
        "qwen3": ("qwen", "Qwen3", sizes),
        "gemma": ("gemma", "Gemma", sizes),
        "starcoder2": ("gpt", "Starcoder2", sizes),
        "nemotron": ("gpt", "Nemotron", sizes),
        "gpt2": ("gpt", "GPT2", {**gpt, "n_positions": 63, "bos_token_id": 0, "eos_token_id": 0}),
    }
    kind, name, said = kinds[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**said)
    end = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    model = getattr(transformers, name + end)(config).to(torch.bfloat16)
    for p in model.parameters():
        p.data.normal_().mul_(0.1)
    model.save_pretrained(tmp_path / "hf")
    for tp, pp in ((1, 1), (2, 2), (4, 1)):
        ours, theirs = tmp_path / f"ours{tp}{pp}", tmp_path / f"theirs{tp}{pp}"
        export_trtllm_legacy(tmp_path / "hf", ours, tp=tp, pp=pp, fsync=False)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            export_tensorrt_llm_checkpoint(
                copy.deepcopy(model), kind, torch.bfloat16, theirs, tp, pp
            )
        for mine in sorted(ours.glob("*.safetensors")):
            a, b = load_file(mine), load_file(theirs / mine.name)
            more = {"lm_head.weight"} if family == "gemma" and pp > 1 else set()
            assert a.keys() - more == b.keys()
            for key, tensor in b.items():
                assert tensor.dtype == a[key].dtype, key
                assert torch.equal(a[key], tensor), key
        mine, other = config_of(ours), config_of(theirs)
        known = set(KNOWN)
        if family in ("starcoder2", "nemotron"):
            known |= OF_GPT
        if family == "gpt2":
            known |= {"hidden_act", "position_embedding_type"}
        assert {k for k, v in other.items() if k not in known and mine.get(k) != v} == set()
