"""Which models a legacy TensorRT-LLM checkpoint can hold, and how many ranks can share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from megtool.errors import LayoutError, MappingError
from megtool.export.trtllm_legacy.ranks import RankLayout
from megtool.model_config import ModelConfig

FAMILIES: Mapping[str, str] = {
    "llama": "Llama",
    "gpt2": "GPT (GPT-2)",
    "qwen2": "Qwen (2 and 3, dense)",
    "qwen3": "Qwen (2 and 3, dense)",
    "mixtral": "Mixtral",
    "gemma": "Gemma",
}
"""Families that are written, by the names of their files in converters/."""

_SCALINGS = ("linear", "llama3")
"""Those that the models of 1.x compute (layers/attention.py, `create_attention_const_params`): the
frequencies of any other kind they multiply by its factor, where the model divides."""


def check_family(name: str | None, config: ModelConfig) -> None:
    """Refuse what no legacy model computes.

    Raises:
        MappingError: another family, or one of these with what TensorRT-LLM's model lacks.
    """
    supported = ", ".join(dict.fromkeys(FAMILIES.values()))
    if name is None or name not in FAMILIES:
        raise MappingError(
            f"a legacy TensorRT-LLM checkpoint cannot hold {name or 'a model of unknown family'}"
            + ("" if name else ": nothing says which it is"),
            hint=f"known: {supported}; newer TensorRT-LLM loads Hugging Face folders: --to trtllm"
            + ("" if name else "; --family NAME and --like HF_FOLDER supply it"),
            error_id="unsupported-by-engine",
        )
    kind = (config.rope_scaling or {}).get("rope_type")
    if kind is not None and kind not in _SCALINGS:
        raise MappingError(
            f"rotary embedding is scaled as {kind!r}, which legacy {FAMILIES[name]} does not "
            "compute",
            hint=f"it does: {', '.join(_SCALINGS)}; newer TensorRT-LLM: --to trtllm",
            error_id="unsupported-by-engine",
        )
    if config.moe_layers and len(config.moe_layers) < config.num_layers:
        raise MappingError(
            "only some layers are mixtures of experts, and in a legacy checkpoint all are or none",
            hint="newer TensorRT-LLM loads it: --to trtllm",
            error_id="unsupported-by-engine",
        )


TpRequirement = tuple[str, Callable[[int], bool]]
"""What `tp` has to do, in words, and whether it does."""


def plan_rank_layout(
    config: ModelConfig,
    *,
    tp: int,
    pp: int,
    vocab_multiple: int = 1,
    requirements: Iterable[TpRequirement] = (),
) -> RankLayout:
    """How the model is cut, the vocabulary padded to a multiple of `vocab_multiple` and of `tp`.

    `needs` are what quantized weights ask for besides.

    Raises:
        LayoutError: `tp` or `pp` does not divide what it has to; the hint names those that do.
    """
    all_requirements = [*_model_requirements(config), *requirements]
    for subject, holds in all_requirements:
        if not holds(tp):
            most = config.num_heads
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
    padded = -(-config.vocab_size // vocab_multiple) * vocab_multiple
    rows = -(-padded // tp) * tp
    return RankLayout(config=config, tp=tp, pp=pp, vocab_size=padded, vocab_rows=rows)


def _model_requirements(config: ModelConfig) -> list[TpRequirement]:
    def divides(size: int) -> Callable[[int], bool]:
        return lambda tp: size % tp == 0

    kv = config.num_kv_heads
    out: list[TpRequirement] = [
        (f"{config.num_heads} attention heads", divides(config.num_heads)),
        (
            f"{kv} heads of keys and values, nor is it a multiple of them",
            lambda tp: kv % tp == 0 or tp % kv == 0,
        ),
    ]
    moe = bool(config.moe_layers)
    size = config.moe_ffn_hidden_size if moe else config.ffn_hidden_size
    out.append((f"an MLP of {size}", divides(size)))
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
