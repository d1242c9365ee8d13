"""Evaluation of models that score labels: on labeled texts, numbers, and pairs of answers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megtool.commands.options.models import EvaluateOptions
from megtool.commands.reports.evaluate import EvaluatePlan, LabelReport
from megtool.console import Progress
from megtool.convert.families.label_head import label_names
from megtool.convert.megatron.sharding import check_layout
from megtool.data.labeled_texts import LabeledDataset, LabelForm, read_labeled_texts
from megtool.errors import UsageError
from megtool.export.hf.engine_arithmetic import check_dequantize, run_as_engine
from megtool.inference.runtime import LESS_MEMORY, load_forward, on_ranks
from megtool.options.layout import LabelKind
from megtool.source.checkpoint import CheckpointSource
from megtool.staging.destination.check import check_file
from megtool.storage.files import Files

if TYPE_CHECKING:
    from torch import Tensor

    from megtool.data.labeled_texts import LabeledText

_MAX_WINDOW = 2048
_BATCH_TOKENS = 4096
_LESS_MEMORY = f"a smaller --batch-size or --window, --stream-layers, {LESS_MEMORY}"
_OF_TOKENS = ("against", "join", "all_turns", "stride", "max_tokens", "tasks")


def evaluate_labels(
    source: CheckpointSource, options: EvaluateOptions, progress: Progress
) -> LabelReport | EvaluatePlan:
    """Score the texts of `data`, and compare them with their labels.

    Raises:
        UsageError: an option is for models of tokens, or there are no data.
        DestinationError: the predictions cannot be written there.
        FormatError: a record has no label of the model's.
        MegtoolError: the tokenizer, the layout or the data cannot be used.
    """
    from megtool.inference.evaluation.labels import rate_scores, score_texts

    for name in _OF_TOKENS:
        if getattr(options, name):
            raise UsageError(
                f"--{name.replace('_', '-')} is for models of tokens, and this one scores labels",
                hint="leave it out",
            )
    if options.data is None:
        raise UsageError("there is nothing to evaluate on", hint="--data FILE")
    if options.predictions is not None:
        check_file(options.predictions)
    check_dequantize(options.dequantize, source)
    config = source.config
    names = label_names(config)
    tokenizer = source.tokenizer(options.tokenizer)
    label_settings = LabelForm(
        names=names,
        both_ways=config.bidirectional,
        field=options.field,
        split=options.split,
        needs_labels=options.predictions is None,
    )
    labeled = read_labeled_texts([options.data], tokenizer, label_settings)
    dataset = LabeledDataset(
        labeled,
        options.window or min(config.positions.max_positions, _MAX_WINDOW),
        both_ways=config.bidirectional,
        seed=None,
        pad_id=tokenizer.pad_id or 0,
        multiple=2 * options.layout.cp,
    )
    texts, kind = labeled.texts, labeled.kind
    batch_size = options.batch_size or max(1, _BATCH_TOKENS // dataset.length)
    if options.dry_run:
        check_layout(config, options.layout)
        return _plan(source, options.data, dataset, batch_size)
    start = time.monotonic()
    with on_ranks(options, less=_LESS_MEMORY) as groups:
        forward = load_forward(source, options, groups, progress)
        if not options.dequantize:
            run_as_engine(forward, source)
        loaded = time.monotonic()
        progress("evaluate", 0, len(texts))
        scores = score_texts(
            forward,
            dataset,
            batch_size=batch_size,
            counted=lambda n: progress("evaluate", n, len(texts)),
        )
        end = time.monotonic()
        known = [n for n, t in enumerate(texts) if t.label is not None or kind == "preferences"]
        score = rate_scores(kind, scores[known], [texts[n] for n in known]) if known else None
        if options.predictions is not None and groups.rank == 0:
            _write(options.predictions, _lines(kind, scores, texts, names))
        return LabelReport(
            path=str(source.path),
            format=source.format,
            family=source.family_name,
            data=options.data,
            device=str(groups.device),
            dtype=str(forward.decoder.dtype).removeprefix("torch."),
            kind=kind,
            texts=len(texts),
            labeled=len(known),
            tokens=dataset.counts.tokens,
            loss=None if score is None else score.loss,
            accuracy=None if score is None else score.accuracy,
            mean_error=None if score is None else score.mean_error,
            classes={
                name: {"texts": count, "right": hits, "predicted": times}
                for name, (count, hits, times) in zip(
                    names, () if score is None else score.class_counts, strict=False
                )
            },
            predictions=None if options.predictions is None else str(options.predictions),
            load_seconds=loaded - start,
            seconds=end - loaded,
            is_shown=groups.rank != 0,
        )


def _lines(
    kind: LabelKind, scores: Tensor, texts: Sequence[LabeledText], names: Sequence[str]
) -> list[dict[str, Any]]:
    """What is predicted of each text, as plain data."""
    lines: list[dict[str, Any]] = []
    for number, (of_text, text) in enumerate(zip(scores, texts, strict=True)):
        line: dict[str, Any] = {"number": number}
        if kind == "preferences":
            line |= {"chosen": float(of_text[0, 0]), "rejected": float(of_text[1, 0])}
        elif kind == "numbers":
            line["score"] = float(of_text[0, 0])
        else:
            shares = of_text[0].softmax(-1).tolist()
            line["label"] = names[int(of_text[0].argmax())]
            line["probabilities"] = {n: round(p, 6) for n, p in zip(names, shares, strict=True)}
            if text.label is not None:
                line["expected"] = names[text.label]
        lines.append(line)
    return lines


def _write(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write lines of JSON; the file appears when it is complete."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    Files().replace_file(path, text.encode(), f"{path.name}.part")


def _plan(
    source: CheckpointSource, data: str, dataset: LabeledDataset, batch_size: int
) -> EvaluatePlan:
    counts = dataset.counts
    return EvaluatePlan(
        path=str(source.path),
        format=source.format,
        family=source.family_name,
        data=data,
        documents=counts.documents,
        tokens=counts.tokens,
        window=dataset.length,
        stride=dataset.length,
        num_windows=counts.rows,
        batch_size=batch_size,
        weight_bytes=source.num_bytes,
    )
