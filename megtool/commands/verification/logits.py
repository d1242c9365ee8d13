"""Comparison of two models by what they compute: the logits of fixed tokens, in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Final

from megtool.commands.options.checkpoints import VerifyOptions
from megtool.commands.reports.verify import Difference, LogitsCheck, PartCheck
from megtool.console import Progress
from megtool.errors import CheckpointError, MappingError, UsageError
from megtool.formats.save_folder import is_save_folder
from megtool.options.groups import SourceOptions
from megtool.source.checkpoint import CheckpointSource
from megtool.source.open import open_decoder

if TYPE_CHECKING:
    from torch import Tensor

    from megtool.inference.forward import Forward

PART: Final = "logits"

_ROW_TOKENS = 512
_MOST_LOGITS = 1 << 23
_RELATIVE = 1e-4
"""The part of the largest logit that two correct programs may differ by in float32."""


def compare_logits(
    options: VerifyOptions, sources: Sequence[CheckpointSource], *, progress: Progress
) -> tuple[PartCheck, LogitsCheck | None, list[Difference]]:
    """Run both models on `options.logits` tokens, one layer of each in memory at a time.

    The tokens are the same in every run: a fixed walk through the vocabulary. With `atol` or
    `rtol` these decide, otherwise a part of the largest logit; where one of the two is quantized,
    the figures are told and decide nothing.

    Raises:
        MegtoolError: a model is not known, cannot run, or its logits hold a NaN.
    """
    a, b = sources
    count = options.logits or 0
    first, second = _load(a, b, options), _load(b, a, options)
    sizes = [f.config.embedding.vocab_size for f in (first, second)]
    if sizes[0] != sizes[1]:
        text = f"vocabularies of {sizes[0]} and {sizes[1]} tokens: no token means the same to both"
        return PartCheck.of(PART, (), {PART: text}, ()), None, []
    most = min(f.config.positions.max_positions or _ROW_TOKENS for f in (first, second))
    largest = worst = 0.0
    num_equal = 0
    place = 0
    progress("verify logits", 0, count)
    for tokens in _token_rows(count, min(_ROW_TOKENS, most), sizes[0]):
        for start, x_TV, y_TV in _logits_of(first, second, tokens):
            distance = (x_TV - y_TV).abs()
            if not bool(distance.isfinite().all()):
                path = options.b if bool(x_TV.isfinite().all()) else options.a
                raise CheckpointError("its logits hold NaN or Inf", file=path)
            largest = max(largest, float(y_TV.abs().max()))
            if float(distance.max()) > worst:
                worst = float(distance.max())
                place = start + int(distance.amax(1).argmax())
            num_equal += int((x_TV.argmax(1) == y_TV.argmax(1)).sum())
        progress("verify logits", len(tokens), count)
    is_quantized = any(s.catalogue.packed for s in sources)
    allowed = options.atol + options.rtol * largest
    tolerance = None if is_quantized else allowed or _RELATIVE * largest
    check = LogitsCheck(
        num_tokens=count,
        largest=largest,
        largest_abs=worst,
        tolerance=tolerance,
        num_equal_choices=num_equal,
    )
    differences = []
    if tolerance is not None and worst > tolerance:
        differences = [
            Difference(
                tensor=PART,
                stored=PART,
                kind="logits",
                text=f"{check.describe()}; worst at token {place}",
                largest_abs=worst,
                part=PART,
            )
        ]
    part = PartCheck.of(PART, (str(n) for n in range(count)), {}, differences)
    is_close = is_quantized and part.verdict == "equal"
    return part.with_verdict("close") if is_close else part, check, differences


def _load(source: CheckpointSource, other: CheckpointSource, options: VerifyOptions) -> Forward:
    """Open one of the two models for a forward pass; the other says its family if need be."""
    from megtool.inference.forward import Forward
    from megtool.inference.load import load

    like = SourceOptions(**{f.name: getattr(options, f.name) for f in fields(SourceOptions)})
    if like.iteration is not None and not is_save_folder(source.path):
        like = replace(like, iteration=None)
    family = other.family_name
    if source.family_name is None and like.family is None and family is not None:
        like = replace(like, family=family)
    path = source.path
    decoder_source = open_decoder(path, like, encoders=True, two_stacks=True)
    config = decoder_source.config
    try:
        decoder = load(decoder_source, dtype="float32", stream_layers=not config.num_decoder_layers)
    except MappingError as e:
        e.file = e.file or str(path)
        raise
    return Forward(decoder)


def _token_rows(count: int, length: int, vocab_size: int) -> Iterator[list[int]]:
    """Yield rows of fixed token ids, `count` in all, that visit the whole vocabulary."""
    if length < 1:
        raise UsageError("the model has no positions", hint="leave out --logits")
    ids = [(13 + 7919 * i) % vocab_size for i in range(count)]
    for start in range(0, count, length):
        yield ids[start : start + length]


def _logits_of(
    first: Forward, second: Forward, tokens: Sequence[int]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the logits [T, V] of both models for some tokens of a row at a time."""
    import torch

    from megtool.model.batch import Batch

    row_BS = torch.tensor([list(tokens)])
    has_source = first.config.num_decoder_layers > 0
    batch = Batch(tokens_BS=row_BS, source_BE=row_BS if has_source else None)
    with torch.inference_mode():
        states = [f.hidden(batch) for f in (first, second)]
        step = max(1, _MOST_LOGITS // first.config.embedding.vocab_size)
        for start in range(0, len(tokens), step):
            x_TV, y_TV = (
                f.logits(x_TH[start : start + step]).float()[:, : f.config.embedding.vocab_size]
                for f, x_TH in zip((first, second), states, strict=True)
                if x_TH is not None
            )
            yield start, x_TV, y_TV
