"""The verbs that run a model: options and help only; each calls its function in `commands`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from megtool.cli.options import (
    DryRun,
    Family,
    Iteration,
    Json,
    Like,
    Quiet,
    Source,
    Verbose,
    layout,
    option,
    source_option,
)
from megtool.cli.runner import Report, apart, put, run
from megtool.console import Bar, Progress, printable

if TYPE_CHECKING:
    from megtool.commands.generate_report import Answer

_LOG = logging.getLogger(__name__)
_TEXT, _RUN = "Text", "Running"

Tokenizer = Annotated[
    Path | None,
    source_option(
        "A folder with the tokenizer; default: the one beside SRC.", "--tokenizer", metavar="FOLDER"
    ),
]
Field = Annotated[
    str | None,
    source_option("The field of a record with its text.", "--field", metavar="NAME"),
]
BatchSize = Annotated[
    int | None,
    option(_RUN, "Texts worked on at once.", "--batch-size", metavar="N", min=1),
]
RunDtype = Annotated[
    str | None,
    option(
        _RUN,
        "bfloat16, float16 or float32; default: float32 on a CPU, elsewhere as stored.",
        "--dtype",
        metavar="NAME",
    ),
]
Device = Annotated[
    str | None,
    option(_RUN, "cpu, cuda or cuda:N; default: cuda where there is one.", "--device"),
]
OnDemand = Annotated[
    bool,
    option(_RUN, "Hold one layer in memory at a time: slow, and any size runs.", "--on-demand"),
]
Kernels = Annotated[
    Literal["auto", "torch", "triton", "compile", "te"],
    option(
        _RUN,
        "Which implementation of fused operations runs. te: Transformer Engine's norms and "
        "activations without limit and offset (no exact gelu); the rest is megtool's own.",
        "--kernels",
    ),
]
RunThreads = Annotated[
    int | None,
    option(_RUN, "Threads; default: torch's own number.", "--threads", metavar="N", min=1),
]
RunTp = Annotated[int | None, layout("Tensor-parallel ranks, started by torchrun.", "--tp")]
RunPp = Annotated[int | None, layout("Pipeline-parallel ranks, started by torchrun.", "--pp")]
RunEp = Annotated[int | None, layout("Expert-parallel ranks, started by torchrun.", "--ep")]
RunEtp = Annotated[int | None, layout("Tensor-parallel ranks of experts; default: --tp.", "--etp")]
RunCp = Annotated[
    int | None,
    layout(
        "Context-parallel ranks, which share each row's tokens out, started by torchrun.",
        "--cp",
        "--context-parallel-size",
    ),
]


def _generate(
    source: Source,
    prompt: Annotated[
        list[str] | None,
        source_option("A text to continue; repeatable.", "--prompt", "-p", metavar="TEXT"),
    ] = None,
    prompts: Annotated[
        Path | None,
        source_option(
            "Prompts, one a line, or JSON lines; answers come as JSON lines, in order.",
            "--prompts",
            metavar="FILE",
        ),
    ] = None,
    field: Field = None,
    iteration: Iteration = None,
    family: Family = None,
    like: Like = None,
    tokenizer: Tokenizer = None,
    chat: Annotated[
        bool, option(_TEXT, "Ask the prompt in the model's chat template.", "--chat")
    ] = False,
    system: Annotated[
        str | None, option(_TEXT, "The chat's system message.", "--system", metavar="TEXT")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        option(
            _TEXT, "Longest answer; default: 128 tokens.", "--max-new-tokens", metavar="N", min=1
        ),
    ] = None,
    temperature: Annotated[
        float, option(_TEXT, "0: always the likeliest token; more: more chance.", "--temperature")
    ] = 0.0,
    top_p: Annotated[
        float | None,
        option(_TEXT, "Draw among the likeliest tokens of this share in all.", "--top-p"),
    ] = None,
    top_k: Annotated[
        int | None, option(_TEXT, "Draw among so many likeliest tokens.", "--top-k")
    ] = None,
    seed: Annotated[int, option(_TEXT, "Same seed, same answer.", "--seed")] = 0,
    stop: Annotated[
        list[str] | None,
        option(_TEXT, "End before this string; repeatable.", "--stop", metavar="TEXT"),
    ] = None,
    batch_size: BatchSize = None,
    dtype: RunDtype = None,
    device: Device = None,
    on_demand: OnDemand = False,
    kernels: Kernels = "auto",
    threads: RunThreads = None,
    tp: RunTp = None,
    pp: RunPp = None,
    ep: RunEp = None,
    etp: RunEtp = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Continue prompts with a model in any format, or answer them with --chat.

    Example: megtool generate ./SmolLM2-135M-Instruct --chat --prompt "What is a checkpoint?"
    """
    given, manners = apart(locals())

    def work(progress: Progress) -> Report:
        from megtool.commands.generate import generate
        from megtool.commands.generate_report import GenerateReport

        if not as_json and not dry_run:
            screen = _Screen(progress)
            if prompts is not None:
                given["on_answer"] = screen.answer
            elif sys.stdout.isatty() and len(prompt or ()) == 1:
                given["on_text"] = screen.text
        report = generate(**given, progress=progress)
        if "on_text" in given and is_first_rank():
            put("")
        if isinstance(report, GenerateReport):
            _LOG.info("%s", report.summary())
        return report

    return run(work, **of_rank(manners))


def _evaluate(
    source: Source,
    data: Annotated[
        str | None,
        source_option(
            "A text file, JSON lines, parquet, or a data set NAME[:CONFIG][:SPLIT].",
            "--data",
            metavar="FILE",
        ),
    ] = None,
    field: Field = None,
    split: Annotated[
        str | None, source_option("The split of a data set.", "--split", metavar="NAME")
    ] = None,
    against: Annotated[
        Path | None,
        source_option(
            "Another checkpoint, to be compared token by token.", "--against", metavar="OTHER"
        ),
    ] = None,
    iteration: Iteration = None,
    family: Family = None,
    like: Like = None,
    tokenizer: Tokenizer = None,
    join: Annotated[
        bool, option(_TEXT, "Score all texts of the data as a single one.", "--join")
    ] = False,
    all_turns: Annotated[
        bool,
        option(_TEXT, "Score what users say as well, not only the assistant.", "--all-turns"),
    ] = False,
    window: Annotated[
        int | None,
        option(
            _TEXT,
            "Tokens the model sees at once; default: 2048 at most, of tasks all.",
            "--window",
            min=1,
        ),
    ] = None,
    stride: Annotated[
        int | None,
        option(_TEXT, "A window begins every N tokens; default: --window.", "--stride", min=1),
    ] = None,
    max_tokens: Annotated[
        int | None, option(_TEXT, "Read no more tokens than this.", "--max-tokens", min=2)
    ] = None,
    tasks: Annotated[
        str | None,
        option(_TEXT, "Tasks of lm-eval, such as arc_easy,hellaswag.", "--tasks", metavar="LIST"),
    ] = None,
    chat: Annotated[
        bool, option(_TEXT, "Put the questions of tasks into the chat template.", "--chat")
    ] = False,
    limit: Annotated[
        int | None, option(_TEXT, "Questions of each task; default: all.", "--limit", min=1)
    ] = None,
    shots: Annotated[
        int | None,
        option(_TEXT, "Solved examples before each question; default: the task's.", "--shots"),
    ] = None,
    batch_size: BatchSize = None,
    dtype: RunDtype = None,
    device: Device = None,
    on_demand: OnDemand = False,
    kernels: Kernels = "auto",
    threads: RunThreads = None,
    tp: RunTp = None,
    pp: RunPp = None,
    ep: RunEp = None,
    etp: RunEtp = None,
    cp: RunCp = None,
    dry_run: DryRun = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Measure how well a model predicts a text, and how far it is from another model.

    Example: megtool evaluate ./out --data text.txt --against ./SmolLM2-135M-Instruct
    """
    given, manners = apart(locals())

    def work(progress: Progress) -> Report:
        from megtool.commands.evaluate import evaluate

        return evaluate(**given, progress=progress)

    return run(work, **of_rank(manners))


def is_first_rank() -> bool:
    """This process is alone, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def of_rank(manners: dict[str, Any]) -> dict[str, Any]:
    """How this process reports: of those that torchrun started only the first does."""
    return manners if is_first_rank() else {**manners, "quiet": True, "speaks": False}


class _Screen:
    """Answers on stdout as they come."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def text(self, piece: str) -> None:
        """A piece of the one text that a person is watching; the bar makes room."""
        if isinstance(self._progress, Bar):
            self._progress.close()
        put(printable(piece), end="")

    def answer(self, one: Answer) -> None:
        """A line of JSON."""
        put(printable(one.line()))
