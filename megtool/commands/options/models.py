"""Options of the verbs that run or train a model, and of `tokenize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megtool.options.effects import requires
from megtool.options.field import REQUIRED, OptionCondition, Options, argument, group, option
from megtool.options.groups import (
    INPUT,
    OUTPUT,
    RUNNING,
    SOURCE,
    TEXT,
    AdaptedSource,
    DryRun,
    HtmlPage,
    Publishing,
    RuntimeOptions,
    TokenizerChoice,
)
from megtool.options.sampling import Sampling

_FIELD = "The field of a record with its text."
_SPLIT = "The split of a data set."
_BATCH_SIZE = "Texts processed at once."


@dataclass(frozen=True, kw_only=True)
class QuantizedArithmetic(Options):
    """How quantized folders are computed."""

    dequantize: bool = option(
        RUNNING,
        "Of a quantized folder: compute with decoded weights alone; default: round inputs and KV "
        "cache as an engine that loads it does.",
        False,
    )


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AdaptedSource, TokenizerChoice, RuntimeOptions, QuantizedArithmetic, DryRun):
    """Continue prompts with a model in any format, or answer them with --chat.

    Example: megtool generate ./SmolLM2-135M-Instruct --chat --prompt "What is a checkpoint?"
    """

    not_offered: ClassVar = frozenset({"cp_comm_type", "hierarchical_context_parallel_sizes"})

    source: Path = argument(SOURCE, "SRC")
    prompt: tuple[str, ...] = option(
        INPUT,
        "A text to continue; repeatable.",
        (),
        metavar="TEXT",
        flags=("--prompt", "-p"),
        needs=(
            OptionCondition(
                holds=lambda options, facts: options.prompts is None,
                reason="and --prompts exclude each other",
                hint="give one of them",
            ),
        ),
    )
    prompts: Path | None = option(
        INPUT,
        "Prompts, one per line, or JSON lines; answers come as JSON lines, in order.",
        metavar="FILE",
    )
    field: str | None = option(
        INPUT,
        _FIELD,
        metavar="NAME",
        needs=(requires("prompts", "--prompts FILE says what to read"),),
    )
    chat: bool = option(TEXT, "Put the prompt into the model's chat template.", False)
    system: str | None = option(
        TEXT,
        "The chat's system message.",
        metavar="TEXT",
        needs=(requires("chat", "a system message belongs to a chat"),),
    )
    max_new_tokens: int | None = option(
        TEXT, "Longest answer; default: 128 tokens.", metavar="N", minimum=1
    )
    sampling: Sampling = group(Sampling)
    stop: tuple[str, ...] = option(TEXT, "End before this string; repeatable.", (), metavar="TEXT")
    logprobs: int | None = option(
        TEXT,
        "Log-probabilities of the answer's tokens, and of so many likeliest ones; answers come as "
        "JSON lines.",
        metavar="N",
        minimum=0,
        needs=(
            OptionCondition(
                holds=lambda options, facts: options.speculative == "none",
                reason="has no effect with --speculative",
                hint="--speculative none: drafts are verified several at a time",
            ),
        ),
    )
    prompt_logprobs: bool = option(
        TEXT,
        "Log-probabilities of the prompt's tokens, too.",
        False,
        needs=(requires("logprobs", "--logprobs N (0: no others) says how many likeliest ones"),),
    )
    speculative: str = option(
        RUNNING,
        "What drafts tokens, which each step verifies: mtp, the model's multi-token prediction "
        "layers; or the folder of an EAGLE-3 head. The text is the same (sampled: its "
        "distribution).",
        "none",
        metavar="none|mtp|FOLDER",
    )
    num_drafts: int | None = option(
        RUNNING,
        "Tokens that a head drafts in a step; default: 3.",
        metavar="N",
        minimum=1,
        needs=(
            OptionCondition(
                holds=lambda options, facts: options.speculative not in ("none", "mtp"),
                reason="has no effect without a draft head",
                hint="--speculative FOLDER; layers of multi-token prediction make one draft each",
            ),
        ),
    )
    batch_size: int | None = option(RUNNING, _BATCH_SIZE, metavar="N", minimum=1)


_NEEDS_DATA = requires("data", "--data FILE is the text to score")
_NEEDS_TASKS = requires("tasks", "--tasks LIST names tasks of lm-eval")


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(
    AdaptedSource,
    TokenizerChoice,
    RuntimeOptions,
    QuantizedArithmetic,
    DryRun,
    HtmlPage,
):
    """Measure how well a model predicts a text, and how far it is from another model.

    Example: megtool evaluate ./out --data text.txt --against ./SmolLM2-135M-Instruct
    """

    source: Path = argument(SOURCE, "SRC")
    data: str | None = option(
        INPUT,
        "A text file, JSON lines, parquet, or a data set NAME[:CONFIG][:SPLIT].",
        metavar="FILE",
    )
    field: str | None = option(INPUT, _FIELD, metavar="NAME", needs=(_NEEDS_DATA,))
    split: str | None = option(INPUT, _SPLIT, metavar="NAME", needs=(_NEEDS_DATA,))
    against: Path | None = option(
        INPUT,
        "Another checkpoint, to be compared token by token.",
        metavar="OTHER",
        needs=(requires("data", "--data FILE: a text for both models"),),
    )
    join: bool = option(
        TEXT, "Score all texts of the data as a single one.", False, needs=(_NEEDS_DATA,)
    )
    all_turns: bool = option(
        TEXT, "Score what users say as well, not only the assistant.", False, needs=(_NEEDS_DATA,)
    )
    window: int | None = option(
        TEXT,
        "Tokens in the model's context at once; default: at most 2048, for tasks all positions.",
        metavar="N",
        minimum=1,
    )
    stride: int | None = option(
        TEXT,
        "A window begins every N tokens; default: --window.",
        metavar="N",
        minimum=1,
        needs=(_NEEDS_DATA,),
    )
    max_tokens: int | None = option(
        TEXT,
        "Read no more tokens than this.",
        metavar="N",
        minimum=2,
        needs=(_NEEDS_DATA,),
    )
    layer_scores: bool = option(
        TEXT,
        "Measure how much each layer changes the states of tokens.",
        False,
        needs=(_NEEDS_DATA,),
    )
    pruning_scores: Path | None = option(
        TEXT,
        "Measure how much layers, channels, neurons, heads and experts matter, and write their "
        "scores here; `reshard --pruning-scores` leaves out those with the lowest.",
        metavar="FILE",
        needs=(_NEEDS_DATA,),
        is_written=True,
    )
    predictions: Path | None = option(
        TEXT,
        "Of a model that scores labels: write the best label and the scores of each text here, as "
        "JSON lines; texts need no label then.",
        metavar="FILE",
        needs=(_NEEDS_DATA,),
        is_written=True,
    )
    tasks: str | None = option(
        TEXT, "Tasks of lm-eval, such as arc_easy,hellaswag.", metavar="LIST"
    )
    chat: bool = option(
        TEXT,
        "Put the questions of tasks into the chat template.",
        False,
        needs=(
            requires(
                "tasks", "conversations in --data always go through the model's chat template"
            ),
        ),
    )
    limit: int | None = option(
        TEXT,
        "Questions of each task; default: all.",
        metavar="N",
        minimum=1,
        needs=(_NEEDS_TASKS,),
    )
    num_fewshot: int | None = option(
        TEXT,
        "Solved examples before each question; default: the task's.",
        metavar="N",
        minimum=0,
        needs=(_NEEDS_TASKS,),
    )
    batch_size: int | None = option(RUNNING, _BATCH_SIZE, metavar="N", minimum=1)


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(Publishing):
    """Turn text into tokens for training: Megatron's .bin and .idx, one sequence per document.

    Example: megtool tokenize corpus.jsonl ./corpus --tokenizer ./SmolLM2-135M-Instruct --append-eos
    """

    sources: tuple[str, ...] = argument(
        "Files of text, JSON lines or parquet, folders of them, or NAME[:CONFIG][:SPLIT].", "SRC"
    )
    destination: Path = argument(
        "Writes DST.bin and DST.idx; they appear when complete.", "DST", is_written=True
    )
    tokenizer: Path = option(
        INPUT,
        "A folder with a tokenizer, or a checkpoint that has one.",
        REQUIRED,
        metavar="FOLDER",
    )
    field: str | None = option(
        INPUT,
        "The field of a record; default: messages, prompt and completion, or text.",
        metavar="NAME",
    )
    split: str | None = option(INPUT, _SPLIT, metavar="NAME")
    append_eos: bool = option(
        OUTPUT, "End each document with the tokenizer's end-of-sequence token.", False
    )
    add_special_tokens: bool = option(
        OUTPUT, "Add the special tokens that the tokenizer puts around a text, such as BOS.", True
    )
    workers: int | None = option(
        OUTPUT,
        "Threads; default: one per core, at most 8.",
        metavar="N",
        minimum=1,
    )
