"""A legacy folder read back by torch alone: ranks joined, layers numbered through, decoded.

What comes of it are a model's weights under Llama's names, whatever the family, with `w` of a
module in float32; scales and factors stand beside them under the names that the format gives them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def config_of(folder: Path) -> dict[str, Any]:
    """Its config.json."""
    value: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return value


def ranks_of(folder: Path) -> list[dict[str, Tensor]]:
    """The files of all ranks."""
    world = config_of(folder)["mapping"]["world_size"]
    assert sorted(p.name for p in folder.glob("*.safetensors")) == sorted(
        f"rank{r}.safetensors" for r in range(world)
    )
    return [load_file(folder / f"rank{r}.safetensors") for r in range(world)]


def decoded(rank: dict[str, Tensor], module: str) -> Tensor:
    """A module's weight on a rank as numbers, times what its inputs are multiplied by first."""
    out = _numbers(rank, module)
    factors = rank.get(f"{module}.prequant_scaling_factor")
    if factors is None:
        return out
    return out * factors.float().reshape(*factors.shape[:-1], *[1] * (out.ndim - factors.ndim), -1)


def _numbers(rank: dict[str, Tensor], module: str) -> Tensor:
    w = rank[f"{module}.weight"]
    scale = rank.get(f"{module}.weights_scaling_factor", rank.get(f"{module}.per_channel_scale"))
    if scale is None:
        return w.float()
    second = rank.get(f"{module}.weights_scaling_factor_2")
    if w.dtype == torch.uint8:  # two FP4 a byte
        codes = torch.stack([w & 15, w >> 4], dim=-1).flatten(-2).long()
        by = scale.float() * second.reshape(-1, *[1] * (scale.ndim - 1))
        return FP4[codes] * by.repeat_interleave(16, dim=-1)
    if w.dtype == torch.int8 and scale.ndim == w.ndim:  # two rows of INT4 a byte
        low, high = (w << 4) >> 4, w >> 4
        rows = torch.stack([low, high], dim=-2).flatten(-3, -2).float()
        return rows * scale.repeat_interleave(rows.shape[-1] // scale.shape[-1], dim=-1)
    if scale.numel() == 1:
        return w.float() * scale
    return w.float() * (scale[..., None] if scale.ndim < w.ndim else scale.reshape(-1, 1, 1))


def joined(folder: Path) -> dict[str, Tensor]:
    """All weights of the model."""
    c, ranks = config_of(folder), ranks_of(folder)
    tp, pp = c["mapping"]["tp_size"], c["mapping"]["pp_size"]
    out: dict[str, Tensor] = {}
    first, last = ranks[:tp], ranks[-tp:]
    table = torch.cat([r["transformer.vocab_embedding.weight"] for r in first])
    assert not table[c["vocab_size"] :].any()
    out["embed_tokens.weight"] = table[: c["vocab_size"]]
    if "lm_head.weight" in last[0]:
        out["lm_head.weight"] = torch.cat([decoded(r, "lm_head") for r in last])[: c["vocab_size"]]
    if "transformer.position_embedding.weight" in first[0]:
        both = [r["transformer.position_embedding.weight"] for r in first]
        out["positions.weight"] = torch.cat(both)[: c["max_position_embeddings"]]
    for kind in ("weight", "bias"):
        if f"transformer.ln_f.{kind}" in last[0]:
            out[f"norm.{kind}"] = same([r[f"transformer.ln_f.{kind}"] for r in last])
    count = c["num_hidden_layers"] // pp
    for layer in range(c["num_hidden_layers"]):
        stage, local = divmod(layer, count)
        own = ranks[stage * tp : (stage + 1) * tp]
        prefix = f"transformer.layers.{local}."
        some = [
            {n.removeprefix(prefix): t for n, t in r.items() if n.startswith(prefix)} for r in own
        ]
        found = _layer(some, c)
        out |= {f"layers.{layer}.{n}": t for n, t in found.items()}
    return out


def same(tensors: list[Tensor]) -> Tensor:
    """What all ranks hold alike."""
    assert all(torch.equal(t, tensors[0]) for t in tensors)
    return tensors[0]


def _layer(ranks: list[dict[str, Tensor]], c: dict[str, Any]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name in ("input_layernorm", "post_layernorm"):
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" in ranks[0]:
                out[f"{name}.{kind}"] = same([r[f"{name}.{kind}"] for r in ranks])
    for name in ("q", "k"):
        if f"attention.{name}_layernorm.weight" in ranks[0]:
            norms = [r[f"attention.{name}_layernorm.weight"] for r in ranks]
            out[f"{name}_norm.weight"] = same(norms)
    tp, d = len(ranks), c["head_size"]
    q = c["num_attention_heads"] // tp * d
    for kind in ("weight", "bias"):
        if f"attention.qkv.{kind}" not in ranks[0]:
            continue
        rows = [
            decoded(r, "attention.qkv") if kind == "weight" else r["attention.qkv.bias"]
            for r in ranks
        ]
        kv = (len(rows[0]) - q) // 2
        out[f"q.{kind}"] = torch.cat([r[:q] for r in rows])
        out[f"k.{kind}"] = _heads([r[q : q + kv] for r in rows], c)
        out[f"v.{kind}"] = _heads([r[q + kv :] for r in rows], c)
    out["o.weight"] = torch.cat([decoded(r, "attention.dense") for r in ranks], dim=1)
    if "attention.dense.bias" in ranks[0]:
        out["o.bias"] = same([r["attention.dense.bias"] for r in ranks])
    if "mlp.router.weight" in ranks[0]:
        assert ranks[0]["mlp.router.weight"].dtype == torch.float32
        out["router.weight"] = same([r["mlp.router.weight"] for r in ranks])
        halves = [decoded(r, "mlp.fc").chunk(2, dim=1) for r in ranks]
        up, gate = (torch.cat([h[i] for h in halves], dim=1) for i in (0, 1))
        down = torch.cat([decoded(r, "mlp.proj") for r in ranks], dim=2)
        for e in range(len(up)):
            some = {"up": up[e], "gate": gate[e], "down": down[e]}
            out |= {f"experts.{e}.{n}.weight": t for n, t in some.items()}
        return out
    names = {"fc": "gate", "gate": "up"} if "mlp.gate.weight" in ranks[0] else {"fc": "up"}
    for name, called in names.items():
        out[f"{called}.weight"] = torch.cat([decoded(r, f"mlp.{name}") for r in ranks])
        if f"mlp.{name}.bias" in ranks[0]:
            out[f"{called}.bias"] = torch.cat([r[f"mlp.{name}.bias"] for r in ranks])
    out["down.weight"] = torch.cat([decoded(r, "mlp.proj") for r in ranks], dim=1)
    if "mlp.proj.bias" in ranks[0]:
        out["down.bias"] = same([r["mlp.proj.bias"] for r in ranks])
    return out


def _heads(rows: list[Tensor], c: dict[str, Any]) -> Tensor:
    """Keys or values, of which ranks have some heads each, or several the same one."""
    tp, heads = len(rows), c["num_key_value_heads"]
    if heads >= tp:
        return torch.cat(rows)
    per = tp // heads
    return torch.cat([same(rows[i * per : (i + 1) * per]) for i in range(heads)])
