"""Build the folders of `tests/foreign/` with the tools that people use, and record what they read.

    python tests/support/peers/foreign_folders.py TOOL...

Tools are bitsandbytes, mlx, gptqmodel and auto-round.

Each folder has the files that a tool wrote, and `truth.json`: the tool's version, and of a weight
the dtype and the SHA-256 of the bytes of what the same tool decodes. Recorded on a CPU with Python
3.11, torch 2.14.1, transformers 5.23.0, bitsandbytes 0.50.2, mlx 0.32.4, mlx-lm 0.32.2, GPTQModel
7.7.0 and auto-round 0.16.1, which do not install beside megtool's own constraints.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

FOLDERS = Path(__file__).parents[2] / "foreign/folders"
KEPT = ("config.json", "model.safetensors", "quantize_config.json", "truth.json")
VOCABULARY = 64

BITSANDBYTES: Mapping[str, dict[str, Any]] = {
    "bnb_nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bnb_nf4_double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
    "bnb_fp4_double_bf16": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "bnb_int8": {"load_in_8bit": True},
}
MLX: Mapping[str, dict[str, Any]] = {
    "mlx_2_g32": {"q_bits": 2, "q_group_size": 32},
    "mlx_3_g32": {"q_bits": 3, "q_group_size": 32},
    "mlx_4_g64": {"q_bits": 4, "q_group_size": 64},
    "mlx_5_g64": {"q_bits": 5, "q_group_size": 64},
    "mlx_6_g64": {"q_bits": 6, "q_group_size": 64},
    "mlx_8_g32": {"q_bits": 8, "q_group_size": 32},
    "mlx_mixed": {"q_bits": 4, "q_group_size": 64, "quant_predicate": lambda p, _: mixed(p)},
}
GPTQ: Mapping[str, dict[str, Any]] = {
    "gptq_2_g64": {"bits": 2, "group_size": 64, "sym": False, "desc_act": False},
    "gptq_3_g32": {"bits": 3, "group_size": 32, "sym": True, "desc_act": False},
    "gptq_4_sym_g32": {"bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    "gptq_4_asym_act_order": {"bits": 4, "group_size": 32, "sym": False, "desc_act": True},
    "gptq_8_g-1": {
        "bits": 8,
        "group_size": -1,
        "sym": True,
        "desc_act": False,
        "act_group_aware": False,
    },
    "gptq_v2_4_asym": {
        "bits": 4,
        "group_size": 64,
        "sym": False,
        "desc_act": False,
        "format": "gptq_v2",
    },
    "gptq_dynamic": {
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
        "dynamic": {"-:.*k_proj": {}, "+:.*down_proj": {"bits": 8, "group_size": 64}},
    },
}
AUTO_ROUND: Mapping[str, tuple[str, dict[str, Any]]] = {
    "ar_gptq_4": ("auto_gptq", {"bits": 4, "group_size": 32, "sym": False}),
    "ar_awq_4": ("auto_awq", {"bits": 4, "group_size": 32, "sym": False}),
    "ar_round_4": ("auto_round", {"bits": 4, "group_size": 32, "sym": True}),
    "ar_round_awq": ("auto_round:auto_awq", {"bits": 4, "group_size": 64, "sym": False}),
}


def mixed(path: str) -> bool | dict[str, int]:
    """Return MLX's settings of a module: none, others or the model's."""
    if "k_proj" in path:
        return False
    return {"bits": 8, "group_size": 32} if "down_proj" in path else True


def make_model(path: Path, dtype: torch.dtype, hidden: int = 64) -> Path:
    """Save a Llama of one layer and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.randn_like(parameter) * 0.08 + 0.004)
    model.to(dtype).save_pretrained(path)
    words = models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w2", unk_token="w2"
    ).save_pretrained(path)
    return path


def record(folder: Path, tool: str, truth: Mapping[str, torch.Tensor]) -> None:
    """Write `truth.json`, and remove files that no test needs."""
    tensors = {
        name: {
            "dtype": str(t.dtype).removeprefix("torch."),
            "sha256": hashlib.sha256(
                t.detach().contiguous().view(torch.uint8).numpy().tobytes()
            ).hexdigest(),
        }
        for name, t in sorted(truth.items())
    }
    text = json.dumps({"tool": f"{tool} {version(tool)}", "tensors": tensors}, indent=1)
    (folder / "truth.json").write_text(text + "\n")
    for file in folder.iterdir():
        if file.name not in KEPT:
            file.unlink()


def fed_with_ones(module: torch.nn.Module, inputs: int) -> torch.Tensor:
    """Return the weight that a layer computes with."""
    with torch.no_grad():
        return module(torch.eye(inputs, dtype=torch.float16)).T.contiguous()


def build_bitsandbytes(work: Path) -> Iterator[str]:
    """Build folders of transformers with bitsandbytes."""
    import bitsandbytes as bnb
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    for name, settings in BITSANDBYTES.items():
        dtype = torch.float16 if name == "bnb_int8" else torch.bfloat16
        base = make_model(work / f"base_{name}", dtype)
        model = AutoModelForCausalLM.from_pretrained(
            base, quantization_config=BitsAndBytesConfig(**settings), device_map="cpu", dtype=dtype
        )
        model.save_pretrained(FOLDERS / name)
        model = AutoModelForCausalLM.from_pretrained(FOLDERS / name, device_map="cpu")
        truth = {}
        for path, module in model.named_modules():
            if isinstance(module, bnb.nn.Linear4bit):
                truth[f"{path}.weight"] = bnb.functional.dequantize_4bit(
                    module.weight.data, module.weight.quant_state
                )
            elif isinstance(module, bnb.nn.Linear8bitLt):
                truth[f"{path}.weight"] = bnb.functional.int8_vectorwise_dequant(
                    module.weight.data, module.weight.SCB
                )
        record(FOLDERS / name, "bitsandbytes", truth)
        yield name


def build_mlx(work: Path) -> Iterator[str]:
    """Build folders of mlx_lm."""
    import mlx.core as mx
    import numpy as np
    from mlx_lm import convert

    for name, settings in MLX.items():
        dtype = torch.float16 if name == "mlx_8_g32" else torch.bfloat16
        base = make_model(work / f"base_{name}", dtype)
        convert(str(base), mlx_path=str(FOLDERS / name), quantize=True, **settings)
        weights = mx.load(str(FOLDERS / name / "model.safetensors"))
        config = json.loads((FOLDERS / name / "config.json").read_text())["quantization"]
        truth = {}
        for key in weights:
            module = key.removesuffix(".scales")
            if module == key:
                continue
            own = config.get(module)
            sizes = own if isinstance(own, dict) else config
            values = mx.dequantize(
                weights[f"{module}.weight"],
                weights[key],
                weights[f"{module}.biases"],
                group_size=sizes["group_size"],
                bits=sizes["bits"],
            )
            truth[f"{module}.weight"] = torch.from_numpy(np.array(values.astype(mx.float32))).to(
                dtype
            )
        record(FOLDERS / name, "mlx", truth)
        yield name


def build_gptqmodel(work: Path) -> Iterator[str]:
    """Build folders of GPTQModel."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    base = make_model(work / "base_gptq", torch.float16)
    generator = torch.Generator().manual_seed(1)
    samples = [
        {
            "input_ids": torch.randint(3, VOCABULARY, (32,), generator=generator).tolist(),
            "attention_mask": [1] * 32,
        }
        for _ in range(4)
    ]
    for name, settings in GPTQ.items():
        model = GPTQModel.load(str(base), QuantizeConfig(device="cpu", **settings))
        model.quantize(samples, batch_size=1)
        model.save(str(FOLDERS / name))
        model = GPTQModel.load(
            str(FOLDERS / name), backend=BACKEND.TORCH, device="cpu", dtype=torch.float16
        )
        truth = {
            f"{path}.weight": module.dequantize_weight().T
            for path, module in model.model.named_modules()
            if hasattr(module, "qweight")
        }
        record(FOLDERS / name, "gptqmodel", truth)
        yield name


def build_auto_round(work: Path) -> Iterator[str]:
    """Build folders of auto-round in its own forms and in others', read by GPTQModel."""
    from auto_round import AutoRound
    from gptqmodel import BACKEND, GPTQModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = make_model(work / "base_ar", torch.float16, hidden=128)
    for name, (form, settings) in AUTO_ROUND.items():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16)
        tokenizer = AutoTokenizer.from_pretrained(base)
        AutoRound(
            model,
            tokenizer,
            iters=0,
            nsamples=1,
            seqlen=32,
            device_map="cpu",
            disable_opt_rtn=True,
            **settings,
        ).quantize_and_save(str(FOLDERS / name), format=form)
        if form.startswith("auto_round"):
            model = AutoModelForCausalLM.from_pretrained(
                FOLDERS / name, device_map="cpu", dtype=torch.float16
            )
        else:
            backend = BACKEND.TORCH_AWQ if form == "auto_awq" else BACKEND.TORCH
            model = GPTQModel.load(
                str(FOLDERS / name), backend=backend, device="cpu", dtype=torch.float16
            ).model
        truth = {
            f"{path}.weight": fed_with_ones(module, module.in_features)
            for path, module in model.named_modules()
            if hasattr(module, "qweight")
        }
        record(FOLDERS / name, "auto-round", truth)
        yield name


TOOLS = {
    "bitsandbytes": build_bitsandbytes,
    "mlx": build_mlx,
    "gptqmodel": build_gptqmodel,
    "auto-round": build_auto_round,
}


def main() -> None:
    """Build what the command line names."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.cpu_count = lambda: 8  # GPTQModel wants threads for each of its pools
    work = Path("foreign-work")
    for tool in sys.argv[1:]:
        for name in TOOLS[tool](work):
            print(name)
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
