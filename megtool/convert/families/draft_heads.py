"""Draft heads of speculative decoding: folders with a head of another model, and no model.

EAGLE-3 heads (arXiv 2503.01840) as ModelOpt exports them from Transformers (`layers.0.*`) and from
Megatron (`midlayer.*`); engines load both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

_KINDS = {
    "LlamaForCausalLMEagle": "EAGLE",
    "LlamaForCausalLMEagle3": "EAGLE-3",
    "LlamaForCausalLMEagle3Deep": "EAGLE-3",
    "Eagle3DeepseekV2ForCausalLM": "EAGLE-3",
    "DFlashDraftModel": "DFlash",
}
"""Names of ModelOpt's exporters (`modelopt.torch.export`)."""
_LLAMA_EAGLE3 = "LlamaForCausalLMEagle3"
_MIDDLE, _FIRST = "midlayer.", "layers.0."
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NUM_STATES = 3  # layers of the model that a head reads, unless its configuration lists them


def find_draft_head(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The architecture and the kind of a draft head by its config.json; None for anything else."""
    listed = config.get("architectures")
    for name in listed if isinstance(listed, list | tuple) else ():
        if isinstance(name, str) and name in _KINDS:
            return name, _KINDS[name]
    return None


def compare_head(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[str], list[tuple[str, str]], list[str]] | None:
    """Compare tensors, by name and shape, with the EAGLE-3 head that a config.json describes.

    Returns names of missing tensors, names with the shape that they should have, and unknown names;
    None for another head, or if `find_wrong_size` finds something.
    """
    head = find_draft_head(config)
    if head is None or head[0] != _LLAMA_EAGLE3 or find_wrong_size(config, len(shapes)):
        return None
    expected = dict(_expected(config))
    # A smaller vocabulary needs its table; the rest is the model's where a head has none.
    optional = {"t2d", "lm_head.weight", "embed_tokens.weight"}
    stored = {usual_name(name): name for name in shapes}
    missing = [n for n in expected if n not in stored and n not in optional]
    wrong = [
        (name, f"has the shape {list(shapes[name])}, and config.json says {list(expected[n])}")
        for n, name in stored.items()
        if n in expected and tuple(shapes[name]) != expected[n]
    ]
    return missing, wrong, [name for n, name in stored.items() if n not in expected]


def find_wrong_size(config: Mapping[str, Any], num_tensors: int) -> str | None:
    """What is wrong with the sizes of an EAGLE-3 head that has so many tensors.

    More layers than tensors are no head: nothing is listed, or allocated, for them.
    """
    section = config.get("eagle_config")
    if section is not None and not isinstance(section, dict):
        return f"eagle_config is {section!r:.80}"
    listed = (section or {}).get(_LAYER_IDS)
    if listed is not None and not isinstance(listed, list):
        return f"{_LAYER_IDS} is {listed!r:.80}"
    try:
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        vocabulary, layers = _size(config, "vocab_size"), _size(config, "num_hidden_layers")
        _size(config, "intermediate_size")
        _size(config, "head_dim", hidden // heads)
        _size(config, "target_hidden_size", hidden)
        groups = _size(config, "num_key_value_heads", heads)
        own = _size(config, "draft_vocab_size", vocabulary)
    except ValueError as e:
        return str(e)
    if layers > max(1, num_tensors):
        return f"num_hidden_layers is {layers}, more than there are tensors ({num_tensors})"
    if heads % groups:
        return f"num_key_value_heads is {groups}, and does not divide {heads} heads"
    if own > vocabulary:
        return f"draft_vocab_size is {own}, and vocab_size is only {vocabulary}"
    return None


def usual_name(name: str) -> str:
    """The name in an export from Transformers."""
    return _FIRST + name.removeprefix(_MIDDLE) if name.startswith(_MIDDLE) else name


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    number = default if value is None else value
    if type(number) is not int or number < 1:
        raise ValueError(f"{key} is {value!r:.80}" if value is not None else f"{key} is missing")
    return number


def _expected(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a head, by name, with their shapes."""

    size = partial(_size, config)
    hidden, heads, vocabulary = (
        size(key) for key in ("hidden_size", "num_attention_heads", "vocab_size")
    )
    per_head = size("head_dim", hidden // heads)
    rows = {"q": heads * per_head, "k": size("num_key_value_heads", heads) * per_head}
    rows["v"] = rows["k"]
    inner, own = size("intermediate_size"), size("draft_vocab_size", vocabulary)
    listed = (config.get("eagle_config") or {}).get(_LAYER_IDS)
    num_states = len(listed) if listed else _NUM_STATES
    yield "fc.weight", (hidden, num_states * size("target_hidden_size", hidden))
    for layer in range(size("num_hidden_layers")):
        prefix = f"layers.{layer}."
        for name, out in rows.items():
            # The first layer reads the token and the states side by side.
            yield f"{prefix}self_attn.{name}_proj.weight", (out, hidden if layer else 2 * hidden)
            if config.get("attention_bias"):
                yield f"{prefix}self_attn.{name}_proj.bias", (out,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, rows["q"])
        if config.get("attention_bias"):
            yield f"{prefix}self_attn.o_proj.bias", (hidden,)
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden))):
            yield f"{prefix}mlp.{name}_proj.weight", shape
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
        if config.get("mlp_bias"):
            for name, out in (("gate", inner), ("up", inner), ("down", hidden)):
                yield f"{prefix}mlp.{name}_proj.bias", (out,)
        norms = (
            "input_layernorm",
            "post_attention_layernorm",
            *(() if layer else ("hidden_norm",)),
        )
        for name in norms:
            yield f"{prefix}{name}.weight", (hidden,)
    yield "norm.weight", (hidden,)
    yield "lm_head.weight", (own, hidden)
    yield "embed_tokens.weight", (vocabulary, hidden)
    yield "t2d", (vocabulary,)
    if own < vocabulary:
        yield "d2t", (own,)
