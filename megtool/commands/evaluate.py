"""Evaluate: how well a model predicts a text, and how far it is from another model there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megtool.commands.evaluate_report import (
    Divergence,
    EvaluatePlan,
    EvaluateReport,
    WorstPosition,
)
from megtool.console import Progress, silent
from megtool.convert.sharding import check_layout
from megtool.errors import UsageError
from megtool.inference.runtime import (
    LESS_MEMORY,
    Manner,
    Runnable,
    Source,
    load_forward,
    on_ranks,
    open_runnable,
)

if TYPE_CHECKING:
    from megtool.data.documents import Document as Read
    from megtool.data.tokenizer import Tokenizer
    from megtool.inference.compare import Comparison
    from megtool.inference.windows import TokenDocument
    from megtool.kernels.dispatch import Implementation

_MOST_WINDOW = 2048
_BATCH_TOKENS = 4096
_LESS_MEMORY = f"a smaller --batch-size or --window, --on-demand, {LESS_MEMORY}"


def evaluate(
    source: str | Path,
    *,
    data: str | Path | None = None,
    field: str | None = None,
    split: str | None = None,
    join: bool = False,
    all_turns: bool = False,
    chat: bool = False,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch_size: int | None = None,
    against: str | Path | None = None,
    tasks: str | None = None,
    limit: int | None = None,
    shots: int | None = None,
    tokenizer: str | Path | None = None,
    dtype: str | None = None,
    device: str | None = None,
    on_demand: bool = False,
    kernels: Implementation = "auto",
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    etp: int | None = None,
    cp: int | None = None,
    iteration: str | None = None,
    family: str | None = None,
    like: str | Path | None = None,
    threads: int | None = None,
    dry_run: bool = False,
    progress: Progress = silent,
) -> EvaluateReport | EvaluatePlan:
    """Score a model on `data`, on tasks of lm-eval (`tasks`, separated by commas), or on both.

    `data` is a text file, JSON lines, parquet, or a data set of Hugging Face; `field` is where the
    text is. Each document is scored by itself, or all as one with `join`. Of conversations (put
    into the model's chat template) and of prompts with completions only what the assistant says
    counts, unless `all_turns`. `max_tokens` is how many tokens are read at most. `chat` puts the
    questions of tasks into the chat template too; `limit` is how many are asked of each task, and
    `shots` how many solved ones stand before each.

    A window of `window` tokens (the model's positions, 2048 at most; tasks may use all positions)
    begins every `stride` tokens
    (a window); each token counts once, in the first window that predicts it. `against` is a second
    model, in any format, that is run on the same windows and compared token by token.

    Raises:
        MegtoolError: a checkpoint, its tokenizer, the layout, the data or an option is no good.
    """
    if data is None and against is not None:
        raise UsageError("--against without --data", hint="--data FILE: a text for both models")
    if data is None and tasks is None:
        raise UsageError("nothing to evaluate on", hint="--data FILE, or --tasks NAMES")
    if chat and tasks is None:
        raise UsageError(
            "--chat without --tasks",
            hint="conversations in --data always go through the model's chat template",
        )
    given = Source(
        path=Path(source),
        iteration=iteration,
        family=family,
        like=None if like is None else Path(like),
    )
    manner = Manner(
        device=device,
        dtype=dtype,
        on_demand=on_demand,
        kernels=kernels,
        tp=tp,
        pp=pp,
        ep=ep,
        etp=etp,
        cp=cp,
        threads=threads,
    )
    runnable = open_runnable(given)
    spoken = runnable.tokenizer(tokenizer)
    other = None if against is None else _other(Path(against), given, runnable)
    most = runnable.config.max_positions
    longest = window or most
    window, stride = _windows(window, stride, most)
    at_once = batch_size or max(1, _BATCH_TOKENS // window)
    texts: list[TokenDocument] = []
    if data is not None:
        texts = read_texts(
            data,
            spoken,
            field=field,
            split=split,
            join=join,
            all_turns=all_turns,
            max_tokens=max_tokens,
        )
    if dry_run:
        check_layout(runnable.config, manner.layout)
        return _plan(runnable, str(data or tasks), texts, window, stride, at_once)
    return _evaluate(
        runnable,
        other,
        spoken,
        texts,
        manner,
        _Sizes(
            window=window,
            longest=longest,
            stride=stride,
            at_once=at_once,
            limit=limit,
            shots=shots,
            chat=chat,
        ),
        data=None if data is None else str(data),
        tasks=tasks,
        progress=progress,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """`longest`: so many tokens of a task's question are shown; of longer ones the last."""

    window: int
    longest: int
    stride: int
    at_once: int
    limit: int | None
    shots: int | None
    chat: bool


def _evaluate(
    runnable: Runnable,
    other: Runnable | None,
    spoken: Tokenizer,
    texts: list[TokenDocument],
    manner: Manner,
    sizes: _Sizes,
    *,
    data: str | None,
    tasks: str | None,
    progress: Progress,
) -> EvaluateReport:
    """Load what is to be scored, score it, and say what came of it."""
    from megtool.inference.compare import compare
    from megtool.inference.evaluate import Score, check_documents
    from megtool.inference.evaluate import evaluate as run

    total = check_documents(texts, runnable.config.vocab_size) if data is not None else 0
    began = time.monotonic()
    with on_ranks(manner, less=_LESS_MEMORY) as groups:
        forward = load_forward(runnable, manner, groups, progress)
        theirs = None if other is None else load_forward(other, manner, groups, progress)
        loaded = time.monotonic()
        score, comparison = Score(), None
        common: dict[str, Any] = {
            "window": sizes.window,
            "stride": sizes.stride,
            "batch_size": sizes.at_once,
            "graphed": groups.device.type == "cuda" and not manner.on_demand,
            "counted": lambda n: progress("evaluate", n, total),
        }
        if data is not None:
            progress("evaluate", 0, total)
            if theirs is None:
                score = run(forward, texts, **common)
            else:
                comparison = compare(forward, theirs, texts, **common)
                score = comparison.ours
        ended = time.monotonic()
        measured: dict[str, dict[str, Any]] = {}
        if tasks is not None:
            from megtool.inference.lm_eval import run_tasks

            names = [t.strip() for t in tasks.split(",") if t.strip()]
            measured = run_tasks(
                forward,
                spoken,
                names,
                batch_size=sizes.at_once,
                window=sizes.longest,
                limit=sizes.limit,
                shots=sizes.shots,
                chat=sizes.chat,
            )
        found = None
        if comparison is not None and other is not None:
            found = _divergence(comparison, other, texts, spoken)
        return EvaluateReport(
            path=str(runnable.opened.path),
            format=runnable.format,
            family=runnable.family,
            data=data,
            device=str(groups.device),
            dtype=str(forward.decoder.dtype).removeprefix("torch."),
            documents=len(texts),
            tokens=score.num_tokens,
            loss=score.loss if score.num_tokens else 0.0,
            perplexity=score.perplexity if score.num_tokens else 0.0,
            accuracy=score.accuracy if score.num_tokens else 0.0,
            window=sizes.window,
            stride=sizes.stride,
            load_seconds=loaded - began,
            seconds=ended - loaded,
            against=found,
            tasks=measured,
            shown=groups.rank != 0,
        )


def _other(path: Path, given: Source, runnable: Runnable) -> Runnable:
    """The second model; what the user said of the first one's model is tried where it needs it."""
    other = open_runnable(Source(path=path, family=given.family, like=given.like))
    sizes = runnable.config.vocab_size, other.config.vocab_size
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{given.path} has a vocabulary of {sizes[0]} tokens, and {path} one of {sizes[1]}",
            hint="models are compared token by token, and need the same vocabulary",
        )
    return other


def _windows(window: int | None, stride: int | None, most: int) -> tuple[int, int]:
    window = min(most, _MOST_WINDOW) if window is None else window
    stride = window if stride is None else stride
    if window > most:
        raise UsageError(
            f"a window of {window} tokens, and the model has {most} positions",
            hint=f"--window {most} is the largest",
        )
    if window < 1 or not 1 <= stride <= window:
        raise UsageError(
            f"a window of {window} tokens every {stride}",
            hint="the stride is at least 1, and at most the window",
        )
    return window, stride


def read_texts(
    data: str | Path,
    tokenizer: Tokenizer,
    *,
    field: str | None = None,
    split: str | None = None,
    join: bool = False,
    all_turns: bool = False,
    max_tokens: int | None = None,
) -> list[TokenDocument]:
    """The data as tokens, up to `max_tokens` of them."""
    from megtool.data.documents import documents
    from megtool.data.tokenize_documents import encode
    from megtool.inference.windows import TokenDocument

    if Path(data).suffix in (".bin", ".idx"):
        return _indexed(data, tokenizer, max_tokens)
    found = documents(data, field=field, split=split)
    if join:
        text = "\n\n".join(_plain(d, data) for d in found)
        return [TokenDocument(tokens=tokenizer.encode(text)[:max_tokens])]
    out: list[TokenDocument] = []
    left = max_tokens
    for one in encode(found, tokenizer, append_eos=False, answers_only=not all_turns):
        ids, learned = one.ids.tolist()[:left], one.learned
        counted = None if learned is None else learned.tolist()[:left]
        out.append(TokenDocument(tokens=ids, counted=counted))
        if left is not None and (left := left - len(ids)) <= 0:
            break
    return out


def _indexed(data: str | Path, tokenizer: Tokenizer, max_tokens: int | None) -> list[TokenDocument]:
    """The documents of a Megatron data set, which are tokens already."""
    from megtool.data.indexed import IndexedDataset
    from megtool.inference.windows import TokenDocument

    dataset, out, left = IndexedDataset(data), list[TokenDocument](), max_tokens
    for number in range(dataset.num_documents):
        ids = dataset.document(number).tolist()[:left]
        if ids and max(ids) >= tokenizer.vocab_size:
            raise UsageError(
                f"{data} holds the token {max(ids)}, and the tokenizer has {tokenizer.vocab_size}",
                hint="it was made with another tokenizer: tokenize the text again",
            )
        out.append(TokenDocument(tokens=ids))
        if left is not None and (left := left - len(ids)) <= 0:
            break
    return out


def _plain(document: Read, data: str | Path) -> str:
    if document.messages or document.completion is not None:
        raise UsageError(f"--join, and {data} holds no plain texts", hint="go without --join")
    return document.text


def _divergence(
    c: Comparison, other: Runnable, texts: Sequence[TokenDocument], tokenizer: Tokenizer
) -> Divergence:
    def show(*ids: int) -> str:
        return tokenizer.decode(ids, skip_special=False)

    worst = tuple(
        WorstPosition(
            document=p.document,
            place=p.place,
            kl=p.kl,
            before=show(*texts[p.document].tokens[max(0, p.place - 12) : p.place]),
            expected=show(p.expected),
            ours=show(p.ours),
            theirs=show(p.reference),
        )
        for p in c.worst
    )
    return Divergence(
        path=str(other.opened.path),
        format=other.format,
        family=other.family,
        perplexity=c.reference.perplexity,
        loss=c.reference.loss,
        accuracy=c.reference.accuracy,
        kl_mean=c.kl_mean,
        kl_median=c.kl_percentiles[0],
        kl_90=c.kl_percentiles[1],
        kl_99=c.kl_percentiles[2],
        kl_999=c.kl_percentiles[3],
        kl_max=c.kl_max,
        agreement=c.agreement,
        logits_mean_difference=c.logits_mean_difference,
        logits_max_difference=c.logits_max_difference,
        worst=worst,
    )


def _plan(
    runnable: Runnable, data: str, texts: list[TokenDocument], window: int, stride: int, at_once: int
) -> EvaluatePlan:
    from megtool.inference.windows import num_counted, windows

    return EvaluatePlan(
        path=str(runnable.opened.path),
        format=runnable.format,
        family=runnable.family,
        data=data,
        documents=len(texts),
        tokens=num_counted(texts),
        window=window,
        stride=stride,
        num_windows=sum(
            1 for t in texts for _ in windows(len(t.tokens), window=window, stride=stride)
        ),
        batch_size=at_once,
        weight_bytes=runnable.num_bytes,
    )
