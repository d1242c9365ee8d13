"""Tiny decoders recorded on the ranks of a layout, or in one process; and their inputs seen raw."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.calibration.recorder import ActivationRecorder
from megtool.quant.statistics.activation_sites import ActivationSite
from megtool.quant.statistics.site_statistics import ActivationStatistics
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from tests.support.worlds.moe_layouts import config_of, rank_part, whole_model

SAMPLES, LENGTH = 4, 10


def widths(config: ModelConfig, layer: int) -> dict[str, int]:
    """Points of a layer by the rest of their names, and how wide they are."""
    h, d = config.hidden_size, config.attention.head_dim
    if config.latent.kv_lora_rank:
        out = {
            "attn.down": h,
            "attn.q_up": config.latent.q_lora_rank,
            "attn.kv_up": config.latent.kv_lora_rank,
            "attn.kv": config.latent.kv_lora_rank + config.latent.qk_rope_head_dim,
            "attn.o": config.attention.num_heads * config.attention.v_head_dim,
        }
    else:
        out = {
            "attn.qkv": h,
            "attn.kv": config.attention.num_kv_heads * (d + config.attention.value_size),
            "attn.o": config.attention.num_heads * config.attention.value_size,
        }
    if layer not in layer_sets.moe_layers(config):
        return out | {"mlp.fc1": h, "mlp.down": config.mlp.ffn_hidden_size}
    out["mlp.router"] = h
    if config.moe.shared_ffn_hidden_size:
        out |= {"mlp.shared.fc1": h, "mlp.shared.down": config.moe.shared_ffn_hidden_size}
    for e in range(config.moe.num_experts):
        out[f"mlp.experts.{e}.fc1"] = h
        out[f"mlp.experts.{e}.down"] = config.moe.moe_ffn_hidden_size
    return out


def points_of(config: ModelConfig) -> tuple[ActivationSite, ...]:
    """All points of a tiny decoder."""
    found = [
        ActivationSite(
            name=f"layers.{layer}.{name}",
            kind="kv_cache" if name == "attn.kv" else "input",
            layer=layer,
            modules=(),
            width=width,
            expert=int(name.split(".")[2]) if ".experts." in name else None,
        )
        for layer in range(config.num_layers)
        for name, width in widths(config, layer).items()
    ]
    head = ActivationSite(
        name="head", kind="input", layer=None, modules=("head",), width=config.hidden_size
    )
    return (*found, head)


def batches(dp: int = 1, rank: int = 0) -> list[tuple[Batch, int]]:
    """This rank's samples, one batch for each two, with padding; and the first one's number."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 61, (2 * SAMPLES, LENGTH), generator=generator)
    valid = torch.ones(tokens.shape, dtype=torch.bool)
    valid[1, :3] = valid[4, 7:] = False
    pairs = [
        (Batch(tokens_BS=tokens[i : i + 2], valid_BS=valid[i : i + 2]), i)
        for i in range(0, len(tokens), 2)
    ]
    return pairs[rank::dp]


def record(
    decoder: Decoder,
    *,
    rank: int = 0,
    dp: int = 1,
    gram: bool = False,
    normalize_tokens: bool = False,
    calibrate_all_experts: bool = False,
    points: tuple[ActivationSite, ...] = (),
) -> dict[str, ActivationStatistics]:
    """Statistics of all points, layer by layer."""
    points = points or points_of(decoder.config)
    asked = [p.name for p in points if p.kind == "input"] if gram else []
    recorder = ActivationRecorder(
        decoder,
        points,
        gram=asked,
        normalize_tokens=asked if normalize_tokens else (),
        sample=asked,
        calibrate_all_experts=calibrate_all_experts,
    )
    found: dict[str, ActivationStatistics] = {}
    for layer in (*range(decoder.config.num_layers), None):
        recorder.start(layer)
        for batch, first in batches(dp, rank):
            recorder.set_batch(batch, first_sample=first)
            with torch.no_grad():
                decoder(batch)
        found |= recorder.collect()
    return found


def on_rank(
    rank: int, size: int, name: str, layout: dict[str, int], how: dict[str, Any]
) -> dict[str, ActivationStatistics]:
    """What one rank of a layout gets."""
    groups = ProcessGroups.start(ParallelConfig(**layout))
    config = config_of(name)
    made = Decoder(
        config,
        groups,
        device="cpu",
        vocab_multiple=64 // groups.tp.size,
        sequence_parallel=how.pop("sequence_parallel", False),
    )
    made.load_state_dict(
        {
            n: rank_part(n, p, config, groups).clone()
            for n, p in whole_model(name).state_dict().items()
        }
    )
    found = record(made, rank=groups.dp.rank, dp=groups.dp.size, **how)
    groups.stop()
    return found


def assert_equal(
    got: dict[str, ActivationStatistics], want: dict[str, ActivationStatistics]
) -> None:
    """Counts exactly, all else but for the order in which ranks add up."""
    assert list(got) == list(want)
    for name, w in want.items():
        g = got[name]
        assert g.num_tokens == w.num_tokens, name
        for field in ("amax", "abs_sum", "square_sum", "gram"):
            a, b = getattr(g, field), getattr(w, field)
            assert (a is None) == (b is None), (name, field)
            if b is not None:
                largest = max(float(np.abs(b).max()), 1e-30)
                np.testing.assert_allclose(
                    a, b, atol=1e-5 * largest, rtol=0, err_msg=f"{name}: {field}"
                )
        assert g.histogram.sum() == w.histogram.sum(), name
        # An activation that differs in its last bit may fall into the next bin.
        moved = np.abs(np.cumsum(g.histogram) - np.cumsum(w.histogram)).max()
        assert moved <= 2 + 1e-3 * w.histogram.sum(), name


def raw(decoder: Decoder, name: str) -> Tensor:
    """The inputs of one module by its name in the decoder, valid rows of all samples."""
    module, seen = decoder.get_submodule(name), []
    for batch, _ in batches():
        rows: list[Tensor] = []
        module.tap = lambda x, rows=rows: rows.append(x) or x
        with torch.no_grad():
            decoder(batch)
        assert batch.valid_BS is not None
        seen.append(rows[0][batch.valid_BS.flatten()])
    module.tap = None
    return torch.cat(seen)
