"""Falcon, StarCoder2, Nemotron and DeepSeek in legacy TensorRT-LLM, rank by rank, by torch alone.

What a rank holds is worked out from transformers' weights as TensorRT-LLM's conversion does it
(tensorrt_llm/models/{falcon,gpt,deepseek_v2}/convert.py), which was run beside ours on these
models: every tensor of every rank was equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.models.gguf_models import YARN
from tests.support.models.tiny_model import tiny_model

Weights = Mapping[str, Tensor]

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "rope_parameters": YARN,
    "max_position_embeddings": 64,
}
_FALCON: dict[str, Any] = {"ffn_hidden_size": 128, "tie_word_embeddings": True}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "falcon-7b": ("falcon", _FALCON | {"multi_query": True, "parallel_attn": True}),
    "falcon-40b": ("falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "falcon",
        _FALCON
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-sequential": (
        "falcon",
        _FALCON | {"multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "starcoder2": ("starcoder2", {"tie_word_embeddings": True}),
    "nemotron": ("nemotron", {}),
    "deepseek_v2": (
        "deepseek_v2",
        _LATENT | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    ),
    "deepseek_v2-lite": (
        "deepseek_v2",
        _LATENT | {"q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False},
    ),
    "deepseek_v3": ("deepseek_v3", _LATENT | {"first_k_dense_replace": 2}),
}


def save(folder: Path, case: str, *, dtype: str = "bfloat16", **more: Any) -> Path:
    """A model whose every weight, norms and biases among them, is random."""
    family, keys = CASES[case]

    def fill(model: Any) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data.copy_(torch.randn(tensor.shape) * 0.1)

    tiny_model(family, folder, sizes=_SIZES, dtype=dtype, fill=fill, **(keys | more))
    return folder


def settings(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder."""
    value: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return value


def expected_rank(
    weights: Weights, config: Mapping[str, Any], rank: int, *, tp: int, pp: int, ep: int = 1
) -> dict[str, Tensor]:
    """What a rank holds of a model of 4 layers: `weights` by transformers' names, of `config`."""
    stage, t = divmod(rank, tp)
    family = str(config["model_type"])
    is_falcon = family == "falcon"
    prefix = "transformer.h" if is_falcon else "model.layers"
    embedding = "transformer.word_embeddings" if is_falcon else "model.embed_tokens"
    last = "transformer.ln_f" if is_falcon else "model.norm"
    out: dict[str, Tensor] = {}
    table = weights[f"{embedding}.weight"]
    count = config["num_hidden_layers"] // pp
    if stage == 0:
        out["transformer.vocab_embedding.weight"] = table.chunk(tp)[t]
    for local in range(count):
        layer = _Layer(weights, f"{prefix}.{stage * count + local}.", config, t, tp, ep)
        make = layer.falcon if is_falcon else layer.gpt
        if family.startswith("deepseek"):
            make = layer.deepseek
        make()
        out |= {f"transformer.layers.{local}.{n}": w for n, w in layer.out.items()}
    if stage == pp - 1:
        out["lm_head.weight"] = weights.get("lm_head.weight", table).chunk(tp)[t]
        one = 1 if family == "nemotron" else 0
        out["transformer.ln_f.weight"] = weights[f"{last}.weight"] + one
        if f"{last}.bias" in weights:
            out["transformer.ln_f.bias"] = weights[f"{last}.bias"]
    return out


class _Layer:
    def __init__(
        self, weights: Weights, prefix: str, config: Mapping[str, Any], t: int, tp: int, ep: int
    ) -> None:
        self.own = {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
        self.config, self.t, self.tp, self.ep = config, t, tp, ep
        self.out: dict[str, Tensor] = {}

    def norm(self, name: str, stored: str, one: int = 0) -> None:
        for kind in ("weight", "bias"):
            if f"{stored}.{kind}" in self.own:
                out = self.own[f"{stored}.{kind}"]
                self.out[f"{name}.{kind}"] = out + one if kind == "weight" else out

    def column(self, name: str, stored: str) -> None:
        for kind in ("weight", "bias"):
            if f"{stored}.{kind}" in self.own:
                self.out[f"{name}.{kind}"] = self.own[f"{stored}.{kind}"].chunk(self.tp)[self.t]

    def row(self, name: str, stored: str) -> None:
        self.out[f"{name}.weight"] = self.own[f"{stored}.weight"].chunk(self.tp, dim=1)[self.t]
        if f"{stored}.bias" in self.own:
            self.out[f"{name}.bias"] = self.own[f"{stored}.bias"]

    def qkv(self, q: Tensor, k: Tensor, v: Tensor, kind: str) -> None:
        """Heads of a rank; `q`, `k` and `v` have a dimension of heads first."""
        heads = q.chunk(self.tp)[self.t]
        per = len(q) // len(k)
        first = self.t * len(heads) // per
        some = slice(first, first + max(1, len(heads) // per))
        parts = [x.flatten(0, 1) for x in (heads, k[some], v[some])]
        self.out[f"attention.qkv.{kind}"] = torch.cat(parts)

    def falcon(self) -> None:
        c, own = self.config, self.own
        size = c["hidden_size"] // c["num_attention_heads"]
        groups = c["num_kv_heads"] if c.get("new_decoder_architecture") else 0
        groups = groups or (1 if c.get("multi_query") else c["num_attention_heads"])
        for kind in ("weight", "bias"):
            fused = own.get(f"self_attention.query_key_value.{kind}")
            if fused is None:
                continue
            w = fused.unflatten(0, (groups, -1, size))
            self.qkv(w[:, :-2].flatten(0, 1), w[:, -2], w[:, -1], kind)
        self.row("attention.dense", "self_attention.dense")
        self.column("mlp.fc", "mlp.dense_h_to_4h")
        self.row("mlp.proj", "mlp.dense_4h_to_h")
        for name, stored in (
            ("input_layernorm", "input_layernorm"),
            ("input_layernorm", "ln_attn"),
            ("mlp_layernorm", "ln_mlp"),
            ("post_layernorm", "post_attention_layernorm"),
        ):
            self.norm(name, stored)

    def gpt(self) -> None:
        own, is_nemotron = self.own, self.config["model_type"] == "nemotron"
        size = self.config["hidden_size"] // self.config["num_attention_heads"]
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in own:
                q, k, v = (
                    own[f"self_attn.{n}_proj.{kind}"].unflatten(0, (-1, size)) for n in "qkv"
                )
                self.qkv(q, k, v, kind)
        up, down = ("up_proj", "down_proj") if is_nemotron else ("c_fc", "c_proj")
        self.row("attention.dense", "self_attn.o_proj")
        self.column("mlp.fc", f"mlp.{up}")
        self.row("mlp.proj", f"mlp.{down}")
        self.norm("input_layernorm", "input_layernorm", int(is_nemotron))
        self.norm("post_layernorm", "post_attention_layernorm", int(is_nemotron))

    def deepseek(self) -> None:
        c, own = self.config, self.own
        nope, value, rank = c["qk_nope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
        down = own["self_attn.kv_a_proj_with_mqa.weight"]
        name = "q_proj"
        if c["q_lora_rank"]:
            name = "q_b_proj"
            down = torch.cat([own["self_attn.q_a_proj.weight"], down])
            self.norm("attention.q_a_layernorm", "self_attn.q_a_layernorm")
        self.out["attention.fused_a.weight"] = down
        self.norm("attention.kv_a_layernorm", "self_attn.kv_a_layernorm")
        heads = (c["num_attention_heads"], -1)
        q = own[f"self_attn.{name}.weight"].unflatten(0, heads).chunk(self.tp)[self.t]
        kv = own["self_attn.kv_b_proj.weight"].unflatten(0, heads).chunk(self.tp)[self.t]
        k, v = kv.split([nope, value], dim=1)
        fused = torch.einsum("hdq,hdk->hkq", q[:, :nope].double(), k.double()).to(q.dtype)
        assert fused.shape[1] == rank
        self.out["attention.fused_q_proj"] = torch.cat([fused, q[:, nope:]], dim=1).flatten(0, 1)
        self.out["attention.q_b_proj"] = q.flatten(0, 1)
        self.out["attention.kv_b_proj"] = torch.cat([k.flatten(0, 1), v.flatten(0, 1)])
        self.row("attention.dense", "self_attn.o_proj")
        self.norm("input_layernorm", "input_layernorm")
        self.norm("post_layernorm", "post_attention_layernorm")
        if "mlp.gate.weight" in own:
            self._experts()
            return
        self.column("mlp.fc", "mlp.gate_proj")
        self.column("mlp.gate", "mlp.up_proj")
        self.row("mlp.proj", "mlp.down_proj")

    def _experts(self) -> None:
        own, ways = self.own, self.tp // self.ep
        first, part = self.t % self.ep, self.t // self.ep
        experts = torch.arange(self.config["n_routed_experts"]).chunk(self.ep)[first].tolist()

        def some(name: str, dim: int) -> Tensor:
            stack = torch.stack([own[f"mlp.experts.{e}.{name}_proj.weight"] for e in experts])
            return stack.chunk(ways, dim=dim)[part]

        self.out["mlp.fc.weight"] = torch.cat([some("up", 1), some("gate", 1)], dim=1)
        self.out["mlp.proj.weight"] = some("down", 2)
        self.out["mlp.router.weight"] = own["mlp.gate.weight"].float()
        if "mlp.gate.e_score_correction_bias" in own:
            bias = own["mlp.gate.e_score_correction_bias"]
            self.out["mlp.e_score_correction_bias"] = bias.float()
        halves = [
            own[f"mlp.shared_experts.{n}_proj.weight"].chunk(self.tp)[self.t]
            for n in ("up", "gate")
        ]
        self.out["mlp.shared_expert.fc.weight"] = torch.cat(halves)
        self.row("mlp.shared_expert.proj", "mlp.shared_experts.down_proj")
