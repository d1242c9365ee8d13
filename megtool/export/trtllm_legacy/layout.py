"""Which models a legacy TensorRT-LLM checkpoint can hold, and how many ranks can share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megtool.errors import LayoutError, MappingError
from megtool.export.trtllm_legacy.families import ACTIVATIONS, FAMILIES, LATENT
from megtool.export.trtllm_legacy.ranks import RankLayout
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig


def check_family(name: str | None, config: ModelConfig) -> None:
    """Refuse what no legacy model computes.

    Kinds of rotary scaling are those of layers/attention.py, `create_attention_const_params`: the
    frequencies of any other kind it multiplies by its factor, where the model divides. Latent
    attention has YaRN alone, whose numbers models/deepseek_v2/model.py reads of every model.

    Raises:
        MappingError: another family, or one of these with what TensorRT-LLM's model lacks.
    """
    supported = ", ".join(dict.fromkeys(f.label for f in FAMILIES.values()))
    if name is None or name not in FAMILIES:
        raise MappingError(
            f"a legacy TensorRT-LLM checkpoint cannot hold {name or 'a model of unknown family'}"
            + ("" if name else ": nothing says which it is"),
            hint=f"known: {supported}; newer TensorRT-LLM loads Hugging Face folders: --to trtllm"
            + ("" if name else "; --family NAME and --like HF_FOLDER supply it"),
            error_id="unsupported-by-engine",
        )
    family = FAMILIES[name]
    kind = (config.positions.rope_scaling or {}).get("rope_type")
    if name in LATENT:
        _check_latent(name, config)
    elif kind is not None and kind not in family.scalings:
        raise MappingError(
            f"rotary embedding is scaled as {kind!r}, which legacy {family.label} does not compute",
            hint=(f"it does: {', '.join(family.scalings)}; " if family.scalings else "")
            + "newer TensorRT-LLM: --to trtllm",
            error_id="unsupported-by-engine",
        )
    elif layer_sets.moe_layers(config) and len(layer_sets.moe_layers(config)) < config.num_layers:
        raise MappingError(
            "only some layers are mixtures of experts, and in a legacy checkpoint all are or none",
            hint="newer TensorRT-LLM loads it: --to trtllm",
            error_id="unsupported-by-engine",
        )
    if family.activation is None and config.mlp.activation not in ACTIVATIONS:
        raise MappingError(
            f"the activation is {config.mlp.activation!r}, which legacy TensorRT-LLM does not know",
            hint=f"it knows: {', '.join(sorted(ACTIVATIONS))}; newer TensorRT-LLM: --to trtllm",
            error_id="unsupported-by-engine",
        )
    biases = {config.attention.qkv_bias, config.attention.attn_out_bias, config.mlp.mlp_bias}
    if family.has_one_bias and len(biases) > 1:
        raise MappingError(
            f"some linear layers have biases, and in legacy {family.label} all have one or none",
            hint="newer TensorRT-LLM loads it: --to trtllm",
            error_id="unsupported-by-engine",
        )


def _check_latent(name: str, config: ModelConfig) -> None:
    """Refuse what the two models of DeepSeek lack.

    Raises:
        MappingError: rotary scaling that is not YaRN, dense layers elsewhere than a model has them,
            or scores that no routing method makes so.
    """
    label, hint = FAMILIES[name].label, "newer TensorRT-LLM loads it: --to trtllm"
    kind = (config.positions.rope_scaling or {}).get("rope_type")
    if kind != "yarn":
        raise MappingError(
            f"rotary embedding is scaled as {kind!r}, and legacy {label} computes YaRN alone",
            hint=hint,
            error_id="unsupported-by-engine",
        )
    layers, last = tuple(layer_sets.moe_layers(config)), config.num_layers
    first = layers[0] if layers else last
    if layers != tuple(range(first, last)) or not layers or (name == LATENT[0] and first != 1):
        dense = "only the first layer is" if name == LATENT[0] else "layers before all others are"
        raise MappingError(
            f"mixtures of experts are the layers {', '.join(map(str, layers)) or 'none'}, and in "
            f"legacy {label} {dense} dense",
            hint=hint,
            error_id="unsupported-by-engine",
        )
    is_greedy = config.router.router_score == "softmax" and not config.router.router_num_groups
    if is_greedy and config.router.router_scaling != 1:
        raise MappingError(
            f"the shares of experts are multiplied by {config.router.router_scaling:g}, which "
            f"legacy {label} does only where groups of experts are chosen first",
            hint=hint,
            error_id="unsupported-by-engine",
        )


TpRequirement = tuple[str, Callable[[int], bool]]
"""What `tp` has to do, in words, and whether it does."""


def plan_rank_layout(
    config: ModelConfig,
    *,
    tp: int,
    pp: int,
    ep: int = 1,
    vocab_multiple: int = 1,
    requirements: Iterable[TpRequirement] = (),
) -> RankLayout:
    """How the model is cut, the vocabulary padded to a multiple of `vocab_multiple` and of `tp`.

    `requirements` are what quantized weights ask for besides.

    Raises:
        LayoutError: `tp`, `pp` or `ep` does not divide what it has to; the hint names those that
            do.
    """
    _check_expert_ranks(config, tp, ep)
    all_requirements = [*_model_requirements(config, ep), *requirements]
    for subject, holds in all_requirements:
        if not holds(tp):
            most = config.attention.num_heads
            good = [n for n in range(1, most + 1) if all(ok(n) for _, ok in all_requirements)]
            raise LayoutError(
                f"tp={tp} does not divide {subject}",
                hint=f"tp may be {', '.join(map(str, good))}" if good else "no tp does",
            )
    if config.num_layers % pp:
        good = [n for n in range(1, config.num_layers + 1) if config.num_layers % n == 0]
        raise LayoutError(
            f"pp={pp} does not divide {config.num_layers} layers",
            hint=f"pp may be {', '.join(map(str, good))}",
        )
    padded = -(-config.embedding.vocab_size // vocab_multiple) * vocab_multiple
    rows = -(-padded // tp) * tp
    return RankLayout(config=config, tp=tp, pp=pp, ep=ep, vocab_size=padded, vocab_rows=rows)


def _check_expert_ranks(config: ModelConfig, tp: int, ep: int) -> None:
    """Refuse groups of ranks that cannot share the experts evenly.

    Raises:
        LayoutError: there are no experts, or `ep` divides `tp` or their number not.
    """
    if ep == 1:
        return
    if not layer_sets.moe_layers(config):
        raise LayoutError(f"ep={ep}, and the model has no experts", hint="leave ep out")
    if tp % ep or config.moe.num_experts % ep:
        good = [n for n in range(1, tp + 1) if tp % n == 0 and config.moe.num_experts % n == 0]
        raise LayoutError(
            f"ep={ep} does not divide tp={tp} and {config.moe.num_experts} experts",
            hint=f"the ranks of tp share the experts: ep may be {', '.join(map(str, good))}",
        )


def _model_requirements(config: ModelConfig, ep: int) -> list[TpRequirement]:
    def divides(size: int) -> Callable[[int], bool]:
        return lambda tp: size % tp == 0

    kv = config.attention.num_kv_heads
    out: list[TpRequirement] = [
        (f"{config.attention.num_heads} attention heads", divides(config.attention.num_heads)),
    ]
    if not config.latent.kv_lora_rank:
        subject = f"{kv} heads of keys and values, nor is it a multiple of them"
        out.append((subject, lambda tp: kv % tp == 0 or tp % kv == 0))
    if len(layer_sets.moe_layers(config)) < config.num_layers:
        out.append((f"an MLP of {config.mlp.ffn_hidden_size}", divides(config.mlp.ffn_hidden_size)))
    if layer_sets.moe_layers(config):
        size, shared = config.moe.moe_ffn_hidden_size, config.moe.shared_ffn_hidden_size
        text = f"an MLP of {size}" if ep == 1 else f"an MLP of {size} times ep={ep}"
        out.append((text, lambda tp: tp % ep == 0 and size % (tp // ep) == 0))
        if shared:
            out.append((f"a shared expert of {shared}", divides(shared)))
    return out


def require_column_groups(name: str, width: int, group: int) -> TpRequirement:
    """Columns of `name` are cut between groups of `group` of them."""
    return (
        f"{width} columns of {name} into whole groups of {group}",
        lambda tp: width % (tp * group) == 0,
    )


def require_row_grain(name: str, rows: int, grain: int) -> TpRequirement:
    """Rows of `name` are cut between those that are packed together."""
    return (
        f"{rows} rows of {name} into pairs" if grain == 2 else f"{rows} rows by {grain}",
        lambda tp: rows % (tp * grain) == 0,
    )
