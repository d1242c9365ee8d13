"""Scores of a model's parts for pruning: megtool's, and those of ModelOpt's hooks."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megtool.console import silent
from megtool.convert.pruning_scores import PruningScores, model_sizes
from megtool.inference.evaluation.channel_importance import ChannelImportance
from megtool.inference.evaluation.layer_influence import LayerInfluence
from megtool.inference.runtime import RuntimeOptions, load_forward, on_ranks
from megtool.model.batch import Batch
from megtool.quant.modelopt.load import silence_output
from megtool.source.open import open_decoder

OURS = "megtool"
MINITRON, WEIGHTED, ITERATIVE, NORMS, GROUPS = (
    f"ModelOpt `{name}`"
    for name in (
        "L2NormHook",
        "IndependentChannelContributionHook",
        "IterativeChannelContributionHook",
        "LayerNormContributionHook",
        "IndependentKvHeadContributionHook",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Scores by method, and what they took: CPU seconds of the passes, peak resident bytes."""

    scores: Mapping[str, PruningScores]
    seconds: float
    peak_bytes: int


def alone(of: Callable[..., Measured], *arguments: Any) -> Measured:
    """A call in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(of, *arguments).result()


def by_megtool(model: Path, rows_NS: Tensor) -> Measured:
    """Our scores, as `evaluate --pruning-scores` measures them, a row in a pass."""
    source = open_decoder(model)
    options = RuntimeOptions(dtype="float32")
    with on_ranks(options, alone=True) as groups, torch.inference_mode():
        forward = load_forward(source, options, groups, silent)
        influence, importance = LayerInfluence(forward.decoder), ChannelImportance(forward.decoder)
        began = time.process_time()
        with influence.measured(), importance.measured():
            for row_S in rows_NS:
                forward.hidden(Batch(tokens_BS=row_S[None]))
        scores = PruningScores(
            sizes=model_sizes(source.config),
            layers=influence.scores(),
            hidden=importance.hidden(),
            ffn=importance.ffn(),
            heads=importance.heads(),
        )
        seconds = time.process_time() - began
        return Measured(scores={OURS: scores}, seconds=seconds, peak_bytes=peak_bytes())


def by_modelopt(model: Path, rows_NS: Tensor) -> Measured:
    """The scores of ModelOpt's hooks on transformers' Llama. Seconds are those of Minitron's, which
    are ours; the others have a pass of their own."""
    with silence_output():
        from modelopt.torch.prune import importance_hooks as hooks
        from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    config = open_decoder(model).config
    num_heads, num_groups = config.attention.num_heads, config.attention.num_kv_heads
    block = SimpleNamespace(attention=SimpleNamespace(num_key_value_heads=num_groups))
    options = {"validation_full_iters": len(rows_NS), "model": llama, "block_config": block}
    found: dict[str, dict[int, Tensor]] = {}

    def passes(watched: Sequence[tuple[str, int, Any, Any]], *, turned: bool) -> float:
        """Run rows with hooks on modules, add up their scores by kind and layer; CPU seconds.

        `turned`: the hooks take Megatron's order, the sequence first.
        """
        handles = [
            module.register_forward_hook(
                lambda m, args, out, hook=hook: hook(
                    m, (args[0].transpose(0, 1),) if turned else args, out
                )
            )
            for _, _, module, hook in watched
        ]
        began = time.process_time()
        with torch.inference_mode():
            for row_S in rows_NS:
                llama.model(row_S[None], use_cache=False)
        seconds = time.process_time() - began
        for handle in handles:
            handle.remove()
        for kind, n, _, hook in watched:
            scores = found.setdefault(kind, {})
            scores[n] = scores.get(n, 0) + hook.accumulate().float()
        return seconds

    layers = list(enumerate(llama.model.layers))
    minitron = [
        (kind, n, module, hooks.L2NormHook())
        for n, layer in layers
        for kind, module in (
            ("ffn", layer.mlp.down_proj),
            ("heads", layer.self_attn.o_proj),
            ("hidden", layer.self_attn.q_proj),
            ("hidden", layer.mlp.gate_proj),
        )
    ]
    seconds = passes(minitron, turned=True)
    peak = peak_bytes()
    others = []
    for n, layer in layers:
        down, out = layer.mlp.down_proj, layer.self_attn.o_proj
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        others += [
            (WEIGHTED, n, down, hooks.IndependentChannelContributionHook(down)),
            (ITERATIVE, n, down, hooks.IterativeChannelContributionHook(down, options)),
            (GROUPS, n, out, hooks.IndependentKvHeadContributionHook(out, options)),
            *((NORMS, n, norm, hooks.LayerNormContributionHook(norm, {})) for norm in norms),
        ]
    passes(others, turned=False)

    def plain(rows: Mapping[int, Tensor]) -> dict[int, tuple[float, ...]]:
        return {n: tuple(row.tolist()) for n, row in rows.items()}

    def added(rows: Mapping[int, Tensor]) -> tuple[float, ...]:
        return tuple(torch.stack(list(rows.values())).sum(0).tolist())

    base = PruningScores(sizes=model_sizes(config))
    norm_of = {n: row.view(num_heads, -1).norm(dim=1) for n, row in found["heads"].items()}
    of_heads = {
        n: row.repeat_interleave(num_heads // num_groups) for n, row in found[GROUPS].items()
    }
    scores = {
        MINITRON: replace(
            base, hidden=added(found["hidden"]), ffn=plain(found["ffn"]), heads=plain(norm_of)
        ),
        WEIGHTED: replace(base, ffn=plain(found[WEIGHTED])),
        ITERATIVE: replace(base, ffn=plain(found[ITERATIVE])),
        GROUPS: replace(base, heads=plain(of_heads)),
        NORMS: replace(base, hidden=added(found[NORMS])),
    }
    return Measured(scores=scores, seconds=seconds, peak_bytes=peak)


def peak_bytes() -> int:
    """Of the resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
