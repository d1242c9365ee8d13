"""A tiny model of a configuration by transformers and by megtool, and what either computes."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.convert.families.detection import detect_family
from megtool.errors import MegtoolError
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.source.open import open_source
from megtool.spec.model_config import ModelConfig
from tests.support.fidelity.hf_changes import Change, list_changes
from tests.support.models import dense_cases, moe_cases, nested_cases, tiny_t5
from tests.support.models.moe_cases import PUBLISHED, publish
from tests.support.models.tiny_model import CLASSES, class_of, sizes_of

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = moe_cases.SIZES | {"intermediate_size": 48, "head_dim": 8}
ROWS, LENGTH = 2, 48
EFFECT, TOLERANCE, ROUGH = 1e-5, 1e-4, 1e-3
"""Of the largest logit: what counts as a change of transformers' logits, and as ours being them, at
worst where a recurrence adds up what float32 rounds."""
RECURRENT = (
    "qwen3_5",
    "qwen3_next",
    "kimi_linear",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "granitemoeh",
)

KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
WINDOWED = {"sliding_window": 8, "layer_types": KINDS}

MANY_HEADS = {"index_n_heads": 32}
"""Heads of an indexer, so that with half of them no token scores 0 by all: megtool takes the first
of equal scores, and torch any."""

LIVE: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    | {"num_experts": 8, "norm_topk_prob": True},
    "qwen3": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3_moe": {"num_experts": 8},
    "llama4": {"attention_chunk_size": 8, "floor_scale": 4, "attn_scale": 0.5}
    | {"no_rope_layers": [1, 1, 0, 1]},
    "gpt_oss": {"sliding_window": 8}
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 16,
            "truncate": False,
        }
    },
    "gemma3": {"sliding_window": 8, "num_hidden_layers": 4, "layer_types": KINDS},
    "gemma4": {"num_hidden_layers": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "deepseek_v2": {"num_key_value_heads": 4, "topk_method": "group_limited_greedy"},
    "gemma2": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "mixtral": {"sliding_window": 8},
    "phi3": {"sliding_window": 32, "pad_token_id": 0},
    "starcoder2": {"sliding_window": 8},
    "cohere2": {"sliding_window": 8, "layer_types": KINDS},
    "exaone4": {"sliding_window": 8, "layer_types": KINDS},
    "olmo3": {"sliding_window": 8, "layer_types": KINDS},
    "smollm3": {"use_sliding_window": True, "sliding_window": 8},
    "granite": {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logits_scaling": 5.0},
    "deepseek_v32": MANY_HEADS,
    "glm_moe_dsa": MANY_HEADS,
    "deepseek_v4": MANY_HEADS,
    "openelm": {"num_query_heads": [4, 4, 6, 6], "num_kv_heads": [2] * 4}
    | {"ffn_multipliers": [1.0, 1.5, 2.0, 2.5]},
}
"""Keys that give more settings an effect, beside those of the first case of a family."""


NOT_RUN = {"bert": "Megatron's BERT is converted, and not run"}
"""Families without a forward pass of ours, and why."""


@dataclass(frozen=True)
class Pair:
    """A family's tiny model, whose configuration is changed."""

    name: str
    config_class: Any
    model_class: Any
    keys: Mapping[str, Any]
    nested: bool = False
    outer: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def stored(self) -> dict[str, Any]:
        """Keys of config.json as transformers writes them."""
        config = self.config_class(**deepcopy(dict(self.keys)))
        whole: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
        return whole | {"architectures": [self.model_class.__name__]}

    def model(self, stored: Mapping[str, Any]) -> Any:
        """transformers' model of a configuration; tensors of a name and shape are the same."""
        decoded = self.config_class._decode_special_floats(deepcopy(dict(stored)))
        config = self.config_class.from_dict(decoded)
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        config.dtype = None
        torch.manual_seed(0)
        model = self.model_class(config).float().eval()
        with torch.no_grad():
            fill(model)
        return model

    def logits(self, model: Any) -> Tensor:
        """transformers' logits of fixed tokens."""
        kwargs = {} if not model.config.is_encoder_decoder else {"decoder_input_ids": tokens()}
        with torch.no_grad():
            out = model(input_ids=tokens(), **kwargs)
        logits: Tensor = out.logits
        return logits

    def save(self, model: Any, stored: Mapping[str, Any], folder: Path) -> None:
        """Write the model's tensors as transformers saves them, and the keys as they are."""
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        if self.name in PUBLISHED:
            publish(self.name, folder)
        if self.name == "kimi_k25":
            saved = "language_model.model.blocks.", "model.mm_projector."
            published = "language_model.model.layers.", "mm_projector."
            nested_cases.rename(folder, tuple(zip(saved, published, strict=True)))
        (folder / "config.json").write_text(json.dumps(stored))


def tokens() -> Tensor:
    """Token ids `[2, 48]`; the last row has its own."""
    return torch.randint(3, 90, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def fill(model: Any) -> None:
    """Draw each tensor from its name and shape alone, so that every part counts."""
    for name, tensor in sorted(model.state_dict().items()):
        shape = tuple(tensor.shape)
        drawn = torch.Generator().manual_seed(zlib.crc32(f"{name}{shape}".encode()))
        noise = torch.randn(shape, generator=drawn)
        if not tensor.is_floating_point():
            if name.endswith("tid2eid"):
                experts = model.config.n_routed_experts
                order = torch.rand((shape[0], experts), generator=drawn).argsort(1)
                tensor.copy_(order[:, : shape[1]])
            continue
        last = name.rsplit(".", 1)[-1]
        if "norm" in name and last != "bias" and tensor.dim() == 1:
            tensor.copy_(1 + 0.3 * noise)
        elif "A_log" in name:
            tensor.copy_(noise.abs() * 0.5)
        elif "dt_bias" in name:
            tensor.copy_(noise * 0.5 - 1)
        elif tensor.dim() < 2:
            tensor.copy_(noise * 0.3 + (1.0 if last in ("D", "layer_scalar") else 0.0))
        elif "embed" in name or "wte" in name:
            tensor.copy_(noise)
        else:
            tensor.copy_(noise * 1.2 / shape[-1] ** 0.5)


@dataclass(frozen=True)
class Verdict:
    """What came of a change: `follows`, `refused`, `silent`, `ignored`, `refused in vain`,
    `acts alone`, or `not there` where transformers refuses it."""

    change: str
    kind: str
    effect: float = 0.0
    difference: float = 0.0
    message: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.kind in ("silent", "acts alone", "traceback")


def meaning(config: ModelConfig) -> dict[str, Any]:
    """The fields that a forward pass may read."""
    return {n: x for n, x in config.to_fields().items() if n != "extra"}


def ours(folder: Path) -> Tensor:
    """megtool's logits of the fixed tokens."""
    decoder = load(open_source(folder), dtype="float32")
    with torch.no_grad():
        if decoder.config.num_decoder_layers:
            batch = Batch(tokens_BS=tokens(), source_BE=tokens())
            return decoder(batch)
        return decoder(Batch(tokens_BS=tokens()))


def judge(pair: Pair, changes: Iterator[Change] | list[Change], folder: Path) -> Iterator[Verdict]:
    """Compare both programs on each change."""
    tolerance = ROUGH if pair.name.startswith(RECURRENT) else TOLERANCE
    base_model = pair.model(pair.stored)
    base = pair.logits(base_model)
    pair.save(base_model, pair.stored, folder)
    difference = largest(ours(folder), base)
    yield Verdict("as it is", "follows" if difference < tolerance else "silent", 0.0, difference)
    family = detect_family(pair.stored)
    before = meaning(family.read_config(pair.stored))
    shapes = shapes_of(base_model)
    for change in changes:
        try:
            model = pair.model(change.stored)
            want = pair.logits(model)
            if not torch.isfinite(want).all():
                raise ValueError("not finite")
        except Exception as error:  # transformers refuses it, with any error
            yield Verdict(str(change), "not there", message=str(error)[:100])
            continue
        effect = largest(want, base) if want.shape == base.shape else 1.0
        moves = effect > EFFECT
        same_tensors = shapes_of(model) == shapes
        try:
            config = detect_family(change.stored).read_config(deepcopy(change.stored))
            if meaning(config) == before and same_tensors and not moves:
                yield Verdict(str(change), "ignored")
                continue
            pair.save(model, change.stored, folder)
            got = ours(folder)
        except MegtoolError as error:
            kind = "refused" if moves or not same_tensors else "refused in vain"
            yield Verdict(str(change), kind, effect, message=error.message)
            continue
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            yield Verdict(str(change), "traceback", effect, message=said)
            continue
        difference = largest(got, want) if got.shape == want.shape else float("inf")
        if difference < tolerance:
            kind = "follows" if moves or not same_tensors else "ignored"
        else:
            kind = "silent" if moves else "acts alone"
        yield Verdict(str(change), kind, effect, difference)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's tensors by name."""
    return {n: tuple(t.shape) for n, t in model.state_dict().items()}


def largest(got: Tensor, want: Tensor) -> float:
    """The largest difference as a share of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def pair_names() -> list[str]:
    """Families (or model types of one) that transformers has a class of."""
    nested = [case.family for case in nested_cases.CASES]
    return sorted({*CLASSES, *nested} - {"nemotron_nas", "openelm"})


def pair_of(name: str) -> Pair:
    """The tiny model of a family, or of a model type."""
    for case in nested_cases.CASES:
        if case.family == name:
            return _nested(case)
    model, config = CLASSES[name]
    if name in ("t5", "mt5", "umt5"):
        keys = dict(tiny_t5.SIZES)
    else:
        keys = sizes_of(name, SIZES)
        cases = [*dense_cases.CASES, *dense_cases.MORE]
        first = next((c for c in cases if c.model_type == name and not c.model_class), None)
        if first is not None:
            keys |= first.keys
        elif name in moe_cases.FIRST:
            keys |= moe_cases.FIRST[name][2]
        if name not in moe_cases.FIRST:
            keys.pop("num_experts_per_tok", None)
        declared = class_of(config)().to_dict()
        if "head_dim" not in declared or "kv_lora_rank" in keys:
            keys.pop("head_dim", None)
        if "intermediate_size" not in declared:
            keys.pop("intermediate_size", None)
    keys |= LIVE.get(name, {})
    return Pair(name, class_of(config), class_of(model), keys)


def _nested(case: Any) -> Pair:
    sizes = {k: v for k, v in (dense_cases_sizes() | case.text).items() if v != "absent"}
    keys = {"text_config": sizes, "vision_config": case.vision, **case.keys}
    config = getattr(transformers, f"{case.model}Config")
    model = getattr(transformers, f"{case.model}ForConditionalGeneration")
    return Pair(case.family, config, model, keys, nested=True)


def nested_changes(pair: Pair) -> Iterator[Change]:
    """Yield the changes of a nested text model's settings, and of whether the outer ones tie."""
    for change in list_changes(pair.stored["text_config"]):
        yield change._replace(stored={**pair.stored, "text_config": change.stored})
    tied = {"tie_word_embeddings": (True, False, None)}
    for key, values in tied.items():
        for value in values:
            yield Change(f"outer {key}", str(value), {**pair.stored, key: value})


def dense_cases_sizes() -> dict[str, Any]:
    """Sizes of nested text models."""
    from tests.support.models.tiny_model import SIZES

    return dict(SIZES)
