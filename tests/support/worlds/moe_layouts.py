"""Tiny decoders with experts on the ranks of a layout, against the whole model in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megtool.convert.megatron.rank_parameters import boxes_of_rank
from megtool.convert.megatron.sharding import rule_of
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.layers.param_attributes import finish_gradients, sum_over_replicas
from megtool.model.stacks.decoder import Decoder
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig

DENSE: dict[str, Any] = dict(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=61,
)
SIZES: dict[str, Any] = DENSE | dict(
    num_experts=8,
    num_experts_per_token=2,
    moe_ffn_hidden_size=8,
)
MODELS: dict[str, dict[str, Any]] = {
    "shared and gated": dict(
        shared_ffn_hidden_size=12,
        shared_expert_gate=True,
        qkv_bias=True,
        qk_norm=True,
        moe_layer_freq=(0, 1),
    ),
    "biases": dict(
        activation="quick_gelu",
        attn_sinks=True,
        qkv_bias=True,
        attn_out_bias=True,
        mlp_bias=True,
        router_bias=True,
        activation_limit=0.6,
        glu_offset=1.0,
    ),
    "latent": dict(
        num_kv_heads=4,
        head_dim=12,
        q_lora_rank=6,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        qk_norm=True,
        shared_ffn_hidden_size=8,
        router_score="sigmoid",
        router_expert_bias=True,
        router_fp32=True,
        router_num_groups=4,
        router_topk_groups=2,
        router_scaling=1.5,
        moe_layer_freq=(0, 1),
    ),
    "wide keys": dict(v_head_dim=2, shared_ffn_hidden_size=8),
    "scaled input": dict(
        num_experts_per_token=1,
        router_score="sigmoid",
        router_scales_input=True,
        shared_ffn_hidden_size=8,
    ),
    "not gated": dict(gated=False, activation="gelu", mlp_bias=True, attn_out_bias=True),
}


MODELS["sparse"] = MODELS["latent"] | dict(
    index_num_heads=8, index_head_dim=6, index_topk=3, shared_index_layers=(0, 1)
)


def config_of(name: str) -> ModelConfig:
    return ModelConfig.from_fields(**SIZES | MODELS[name])


def whole_model(name: str) -> Decoder:
    """All of a model in one process, with the same random weights everywhere."""
    decoder = Decoder(config_of(name), device="cpu", vocab_multiple=64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in decoder.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            wide = 1.0 if key.endswith("router.weight") else 0.3
            p.copy_(1 + 0.2 * noise if "norm" in key else noise * wide)
    return decoder


def rank_part(key: str, tensor: Tensor, config: ModelConfig, groups: ProcessGroups) -> Tensor:
    """What this rank holds of a parameter, by the rules that checkpoints are cut by."""
    is_glu = config.mlp.gated and "linear_fc1" in key and "layer_norm" not in key
    rule = rule_of(key, is_glu, config)
    group = groups.etp if rule.is_expert else groups.tp
    if rule.is_expert:
        tensor = tensor.chunk(groups.ep.size)[groups.ep.rank]
    shape = tuple(tensor.shape)
    boxes = boxes_of_rank(key, shape, rule, group.size, group.rank)
    pieces = [tensor[tuple(map(slice, lo, hi))] for lo, hi in boxes]
    return torch.cat(pieces, len(shape) + rule.tp_dim if rule.tp_dim else 0)


def compare(name: str, parallel: ParallelConfig, *, sequence_parallel: bool, odd: bool) -> float:
    """Loss, logits, cached logits and all gradients of a layout; the largest difference.

    `odd`: numbers of tokens that no group divides.
    """
    groups = ProcessGroups.start(parallel)
    config, dp = config_of(name), groups.dp
    one = whole_model(name)
    made = Decoder(
        config,
        groups,
        device="cpu",
        vocab_multiple=64 // groups.tp.size,
        sequence_parallel=sequence_parallel,
    )
    made.load_state_dict(
        {n: rank_part(n, p, config, groups).clone() for n, p in one.state_dict().items()},
        strict=True,
    )
    generator = torch.Generator().manual_seed(1)
    shape = (dp.size, 8 - odd)
    tokens = torch.randint(0, config.embedding.vocab_size, shape, generator=generator)
    labels = torch.randint(0, config.embedding.vocab_size, shape, generator=generator)
    mine = slice(dp.rank, dp.rank + 1)
    found: dict[str, float] = {}
    want_loss, _ = one.loss(Batch(tokens_BS=tokens), labels)
    want_loss.backward()
    loss, _ = made.loss(Batch(tokens_BS=tokens[mine]), labels[mine])
    loss.backward()
    finish_gradients(made, groups)
    sum_over_replicas(made, groups)
    grads = {n: p.grad for n, p in one.named_parameters()}
    for key, p in made.named_parameters():
        if (whole_grad := grads[key]) is None:
            assert p.grad is None or not p.grad.any()
            continue
        assert p.grad is not None, key
        want = rank_part(key, whole_grad, config, groups)
        scale = max(1.0, float(want.abs().max()))
        found[f"gradient of {key}"] = float((p.grad - want).abs().max()) / scale
    with torch.no_grad():
        want = one(Batch(tokens_BS=tokens))[mine]
        got = made(Batch(tokens_BS=tokens[mine]))
        found["logits"] = float((got - want).abs().max())
        if not sequence_parallel:
            cache = ContiguousCache(config, num_rows=1, max_tokens=8, tp=groups.tp.size)
            split = (tokens[mine, :4], *tokens[mine, 4:].split(1, 1))
            got = torch.cat([made(Batch(tokens_BS=t), cache) for t in split], 1)
            found["cached logits"] = float((got - want).abs().max())
    worst = max(found, key=found.__getitem__)
    assert found[worst] < 1e-5, f"{name} {parallel}: {worst} differs by {found[worst]}"
    return found[worst]
