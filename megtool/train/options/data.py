"""Options of how texts become rows: what is masked, filled in, and built ahead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megtool.options.effects import requires
from megtool.options.field import OptionCondition, Options, option
from megtool.options.groups import INPUT

FIM = "Fill-in-the-middle"

_FILLS_IN = OptionCondition(
    holds=lambda options, facts: options.fim_rate > 0,
    reason="{has} no effect without fill-in-the-middle",
    hint="--fim-rate 0.5, for example",
)


@dataclass(frozen=True, kw_only=True)
class RowBuildingOptions(Options):
    """What is done to tokens before a model sees them, with Megatron's names."""

    mask_prob: float = option(
        INPUT,
        "Share of the tokens that an encoder (RoBERTa, ModernBERT) learns to predict, or that T5 "
        "is to fill in.",
        0.15,
        metavar="X",
        minimum=0,
    )
    mean_noise_span_length: float = option(
        INPUT,
        "Mean tokens of a span that T5 is to fill in, of plain texts.",
        3.0,
        metavar="X",
        minimum=1,
    )
    data_cache_path: Path | None = option(
        INPUT, "Where to cache tokenized data; default: in DST.", metavar="FOLDER"
    )
    prefetch_steps: int = option(
        INPUT,
        "Steps whose rows a thread builds ahead, while the model computes; 0 builds them in the "
        "step. Rows are the same.",
        2,
        metavar="N",
        minimum=0,
    )
    fim_rate: float = option(
        FIM,
        "Probability that a text becomes prefix, suffix and middle, in this order, so that the "
        "model learns to fill in (StarCoder, Code Llama, Qwen Coder).",
        0.0,
        metavar="X",
        minimum=0,
        maximum=1,
    )
    fim_spm_rate: float = option(
        FIM,
        "Probability that such a text is suffix, prefix and middle instead.",
        0.5,
        metavar="X",
        minimum=0,
        maximum=1,
        needs=(_FILLS_IN,),
    )
    fim_split_sample: str | None = option(
        FIM,
        "A token that separates the files of a text: each of them is filled in by itself.",
        metavar="TOKEN",
        needs=(_FILLS_IN, requires("fim_fragment_rate")),
    )
    fim_fragment_rate: float | None = option(
        FIM,
        "Probability for each file between --fim-split-sample tokens.",
        metavar="X",
        minimum=0,
        maximum=1,
        needs=(_FILLS_IN, requires("fim_split_sample")),
    )
    fim_no_prefix: str | None = option(
        FIM,
        "Texts that begin so stay as they are.",
        metavar="TEXT",
        needs=(_FILLS_IN,),
    )
    fim_prefix_token: str | None = option(
        FIM,
        "The token before a prefix; default: what the tokenizer calls so (<fim_prefix>, "
        "<|fim_prefix|>, <PRE>, ...).",
        metavar="TOKEN",
        needs=(_FILLS_IN,),
    )
    fim_middle_token: str | None = option(
        FIM,
        "The token before a middle; default: likewise.",
        metavar="TOKEN",
        needs=(_FILLS_IN,),
    )
    fim_suffix_token: str | None = option(
        FIM,
        "The token before a suffix; default: likewise.",
        metavar="TOKEN",
        needs=(_FILLS_IN,),
    )
