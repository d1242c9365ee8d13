"""Multi-token prediction from its formula: transformers' own layers, combined by hand.

A checkpoint's further layers are loaded as ordinary layers after its last one, which is what they
are inside; norms and projections around them are plain matrix products.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.folders import read_config
from tests.support.models import moe_models, mtp_models, tiny_text
from tests.support.models.tiny_model import tiny_model

FEW = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
MIMO_V2 = ("enorm", "hnorm", "eh_proj", "final_layernorm")
EXAONE = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


def _inside(name: str) -> str:
    """A tensor that lies beside the only further layer, as if it lay in it."""
    is_beside = name.startswith("mtp.") and not name.startswith("mtp.layers.")
    return name.replace("mtp.", "mtp.layers.0.", 1) if is_beside else name


class MtpReference(nn.Module):
    """A model in a folder, in float32, with its layers of multi-token prediction.

    `family` is deepseek_v3, glm4_moe, mimo, mimo_v2_flash or exaone_moe. All of it is parameters:
    `loss` has a backward pass. Of K-EXAONE, whose layer transformers leaves out, it is as
    TensorRT-LLM and vLLM have it: an MLP, and attention to all tokens; of MiMo-V2-Flash as
    Megatron-Bridge has it: an MLP, and attention within a window.
    """

    def __init__(self, folder: Path, scratch: Path, family: str) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        config = read_config(folder)
        self.num_layers, self.depths = (
            config["num_hidden_layers"],
            config.get("num_nextn_predict_layers", mtp_models.LAYERS),
        )
        self.hidden_first, self.turns_by_kind = family == "mimo", family == "mimo_v2_flash"
        stored = {n: t.float() for n, t in load_file(folder / "model.safetensors").items()}
        names, layer = DEEPSEEK, "model.layers.{}."
        if family == "mimo":
            names, layer = MIMO, "model.mtp_layers.{}."
            config |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
            config.pop("layer_types", None)
            config["max_window_layers"] = 0
        first = 0 if family == "mimo" else self.num_layers
        if family == "exaone_moe":
            names, layer = EXAONE, "mtp.layers.{}."
            first, stored = 0, {_inside(n): t for n, t in stored.items()}
            config["layer_types"] = [*config["layer_types"], "full_attention"]
            config["mlp_layer_types"] = [*config["mlp_layer_types"], "dense"]
        if family == "mimo_v2_flash":
            names, layer, first = MIMO_V2, "model.mtp.layers.{}.", 0
            stored = {
                n.replace(".pre_mlp_layernorm.", ".post_attention_layernorm."): t
                for n, t in stored.items()
            }
            config["layer_types"] += ["sliding_attention"] * self.depths
            config["mlp_layer_types"] += ["dense"] * self.depths
        ordinary = dict(stored)
        self.around = nn.ModuleList()
        for m in range(self.depths):
            prefix = layer.format(first + m)
            parts = {
                n: stored[f"{prefix}{part}.weight"] for n, part in zip("ehpn", names, strict=True)
            }
            self.around.append(nn.ParameterDict(parts))
            for name in [n for n in ordinary if n.startswith(prefix)]:
                value = ordinary.pop(name)
                rest = name.removeprefix(prefix)
                if not rest.startswith((*names, "embed_tokens", "shared_head")):
                    ordinary[f"model.layers.{self.num_layers + m}.{rest}"] = value
        shutil.copytree(folder, scratch)
        save_file(ordinary, scratch / "model.safetensors", metadata={"format": "pt"})
        config |= {"num_hidden_layers": self.num_layers + self.depths, "torch_dtype": "float32"}
        config |= {"num_nextn_predict_layers": 0, "dtype": "float32"}
        (scratch / "config.json").write_text(json.dumps(config))
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            scratch, dtype=torch.float32, attn_implementation="eager"
        )
        self.eps = config["rms_norm_eps"]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    def states(self, tokens_BS: Tensor) -> list[Tensor]:
        """States after the final norm, and after that of each further layer."""
        inner = self.model.model
        length = tokens_BS.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        h = inner.embed_tokens(tokens_BS)
        kinds = self.model.config.layer_types if self.turns_by_kind else [None] * len(inner.layers)
        turns = {k: inner.rotary_emb(h, positions, *([k] if k else [])) for k in set(kinds)}

        def run(layer: Any, x: Tensor) -> Tensor:
            seen, kind = mask, kinds[layer.self_attn.layer_idx]
            turn = turns[kind]
            if getattr(layer.self_attn, "is_sliding", kind == "sliding_attention"):
                far = torch.ones(length, length).tril(-layer.self_attn.sliding_window).bool()
                seen = mask.masked_fill(far, -torch.inf)
            out = layer(x, attention_mask=seen, position_embeddings=turn, position_ids=positions)
            y: Tensor = out[0] if isinstance(out, tuple) else out
            return y

        for layer in inner.layers[: self.num_layers]:
            h = run(layer, h)
        out = [inner.norm(h)]
        for m, around in enumerate(self.around):
            following = torch.cat(
                (tokens_BS[:, m + 1 :], torch.zeros_like(tokens_BS[:, : m + 1])), 1
            )
            embedded = self._norm(inner.embed_tokens(following), around["e"])
            hidden = self._norm(out[-1], around["h"])
            pair = (hidden, embedded) if self.hidden_first else (embedded, hidden)
            x = torch.cat(pair, -1) @ around["p"].T
            out.append(self._norm(run(inner.layers[self.num_layers + m], x), around["n"]))
        return out

    def loss(self, tokens_BS: Tensor, labels_BS: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        """The mean loss, and what is added to it: `factor` times the mean over depths of each
        depth's mean loss."""
        means = []
        for m, state in enumerate(self.states(tokens_BS)):
            length = tokens_BS.shape[1] - m
            logits = self.model.lm_head(state[:, :length])
            means.append(F.cross_entropy(logits.flatten(0, 1), labels_BS[:, m:].flatten()))
        return means[0], factor * torch.stack(means[1:]).mean()


def save_tunable(folder: Path, depths: int = 2, **keys: Any) -> None:
    """A DeepSeek-V3 of two layers, with `depths` further ones and a tokenizer, in float32."""
    sizes = moe_models.SIZES | {
        "vocab_size": tiny_text.VOCABULARY,
        "eos_token_id": tiny_text.END,
        "num_hidden_layers": 2,
    }
    tiny_model("deepseek_v3", folder, sizes=sizes, **moe_models.DEEPSEEK | FEW | keys)
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
    held = load_file(file)
    hidden = held["model.norm.weight"].shape[0]
    enorm, hnorm, proj, norm = DEEPSEEK
    for m in range(depths):
        prefix = f"model.layers.{2 + m}."
        for name in [n for n in held if n.startswith("model.layers.1.")]:
            noise = torch.randn(held[name].shape, generator=generator) * 0.02
            held[name.replace("model.layers.1.", prefix)] = held[name] + noise
        for part in (enorm, hnorm, norm):
            held[f"{prefix}{part}.weight"] = torch.ones(hidden)
        held[f"{prefix}{proj}.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2
        held[f"{prefix}embed_tokens.weight"] = held["model.embed_tokens.weight"].clone()
        held[f"{prefix}shared_head.head.weight"] = held["lm_head.weight"].clone()
    save_file(held, file, metadata={"format": "pt"})
    config = read_config(folder) | {"num_nextn_predict_layers": depths}
    (folder / "config.json").write_text(json.dumps(config))
    tiny_text.save_tokenizer(folder)
