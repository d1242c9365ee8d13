"""Rows of a source, for an encoder, and of a target: pairs, or texts with spans left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from megtool.data.dataset import Counts, TokenDataset, document_order
from megtool.data.packing import IGNORED, PackedRows
from megtool.data.sample_index import Mode, Overflow, SampleIndex
from megtool.data.span_corruption import MEAN_SPAN, SHARE, SpanCorruption
from megtool.data.token_cache import Documents
from megtool.errors import FormatError, UsageError

if TYPE_CHECKING:
    from megtool.data.tokenizer import Tokenizer
    from megtool.spec.model_config import ModelConfig

Int = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTarget:
    """How a source and a target begin and end, and which spans of a plain text are left out.

    A target begins with `start_id` and ends with `end_id`; a source ends with `source_end`, where
    the tokenizer ends texts so. Rows have targets of `target_length` tokens (None: of texts, as
    many as they need; of pairs, as many as sources).
    """

    start_id: int
    end_id: int
    source_end: int | None
    corruption: SpanCorruption
    target_length: int | None = None

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer | None,
        config: ModelConfig,
        *,
        share: float = SHARE,
        mean_span: float = MEAN_SPAN,
        seed: int = 1234,
    ) -> SourceTarget:
        """That of a model, with the tokens of its tokenizer.

        Raises:
            UsageError: there is no tokenizer, or none with a token that ends texts.
        """
        if tokenizer is None or tokenizer.eos_id is None:
            raise UsageError(
                "a decoder ends its target with a token, and there is no tokenizer that has one",
                hint="a folder with the model's own tokenizer has one: --tokenizer FOLDER",
            )
        ends = tokenizer.encode("")[-1:] == [tokenizer.eos_id]
        size = config.embedding.vocab_size
        return cls(
            start_id=start_token(config, tokenizer),
            end_id=tokenizer.eos_id,
            source_end=tokenizer.eos_id if ends else None,
            corruption=SpanCorruption(
                sentinel_ids=tuple(i for i in tokenizer.sentinel_ids if i < size),
                share=share,
                mean_span=mean_span,
                seed=seed,
            ),
        )

    def text_length(self, source_length: int) -> int:
        """Tokens of a plain text whose source has at most so many, as `SpanCorruption` says.

        Raises:
            UsageError: there is none, or there are too few sentinels.
        """
        return self.corruption.text_length(source_length - (self.source_end is not None))

    def spans(self, tokens_S: Int, row: int) -> tuple[Int, Int]:
        """Source and target of a plain text, with their ends."""
        if len(tokens_S) > 1 and tokens_S[-1] == self.end_id:
            tokens_S = tokens_S[:-1]
        return self.ended(*self.corruption.split(tokens_S, row))

    def pair(self, tokens_S: Int, learned_S: NDArray[np.bool_]) -> tuple[Int, Int] | None:
        """Source and target of a prompt with its completion, which is what is learned; None where
        that is not the end of the text."""
        first = int(np.argmax(learned_S)) if learned_S.any() else len(learned_S)
        if not 0 < first < len(learned_S) or not learned_S[first:].all():
            return None
        return self.ended(tokens_S[:first], tokens_S[first:])

    def ended(self, source_S: Int, target_S: Int) -> tuple[Int, Int]:
        """Both with the tokens that end them, unless they do already."""
        if self.source_end is not None:
            source_S = _with_last(source_S, self.source_end)
        return source_S.astype(np.int64), _with_last(target_S, self.end_id).astype(np.int64)

    def inputs(self, target_S: Int) -> Int:
        """What the decoder is given to predict a target."""
        return np.concatenate([[self.start_id], target_S[:-1]]).astype(np.int64)


def start_token(config: ModelConfig, tokenizer: Tokenizer | None) -> int:
    """The token that a decoder begins with: the configuration's, or the one that pads rows."""
    known = config.extra.get("decoder_start_token_id")
    if isinstance(known, int) and not isinstance(known, bool):
        return known
    return 0 if tokenizer is None else tokenizer.pad_id or 0


class SourceTargetDataset(TokenDataset):
    """Rows of sources of `length` tokens, with targets of the form's `target_length`.

    Prompts with completions are pairs, a row each. Plain texts fill rows one after the other (or,
    with `mode` "padded", each begins a row), and spans are left out of what a row has, other ones
    in every epoch. Tokens of one row attend to all of it.

    Raises:
        FormatError: there is nothing to learn, a pair is too long, and is not to be truncated, or
            what is learned is not the end of a document.
        UsageError: there are too few sentinels, or targets are longer than `target_length`.
    """

    def __init__(
        self,
        documents: Documents,
        length: int,
        form: SourceTarget,
        *,
        seed: int | None = 1234,
        mode: Mode = "packed",
        overflow: Overflow = "split",
        pad_id: int = 0,
        source: str = "",
    ) -> None:
        self.form, self._overflow = form, overflow
        self.has_pairs = documents.is_partly_learned
        text_length = length
        self.target_length = form.target_length or length
        if not self.has_pairs:
            text_length = form.text_length(length)
            longest = form.corruption.sizes(text_length)[1] + 1
            self.target_length = form.target_length or longest
            if self.target_length < longest:
                raise UsageError(
                    f"texts of {text_length} tokens have targets of {longest}",
                    hint=f"--decoder-seq-length {longest}, or a smaller --seq-length",
                )
        super().__init__(
            documents,
            text_length,
            seed=seed,
            mode="padded" if self.has_pairs else mode,
            overflow="split" if self.has_pairs else overflow,
            pad_id=pad_id,
            source=source,
        )
        self.length = length
        self._facts = (*self._facts, form, self.target_length)

    @property
    def ahead(self) -> int:
        """A row has whole texts, not pairs of a token and the next."""
        return 0

    def make_index(self, mode: Mode, overflow: Overflow) -> SampleIndex:
        """Rows of texts; of pairs, one for each that fits."""
        if not self.has_pairs:
            return super().make_index(mode, overflow)
        order = document_order(self._documents, self._seed)
        lengths, truncated = self._documents.lengths, 0
        self._num_learned = np.zeros(len(lengths), np.int64)
        for number in order.tolist():
            ids, learned = self._whole(number)
            if learned is None or (pair := self.form.pair(ids, learned)) is None:
                raise FormatError(
                    f"document {number + 1} is no source with a target",
                    file=self._source or None,
                    hint="records with a prompt and a completion are; a conversation is not",
                )
            self._num_learned[number] = np.count_nonzero(learned)
            if len(pair[0]) > self.length or len(pair[1]) > self.target_length:
                truncated += 1
                if self._overflow != "truncate":
                    raise FormatError(
                        f"document {number + 1} has {len(pair[0])} tokens of source and "
                        f"{len(pair[1])} of target, and a row has {self.length} and "
                        f"{self.target_length}",
                        file=self._source or None,
                        hint="--overflow truncate, or a larger --seq-length or "
                        "--decoder-seq-length",
                    )
        return SampleIndex(
            document=order,
            begin=np.zeros_like(order),
            end=lengths[order],
            first=np.arange(len(order) + 1),
            truncated=truncated,
        )

    def _whole(self, document: int) -> tuple[Int, NDArray[np.bool_] | None]:
        """A document's tokens, and which of them are learned."""
        end = int(self._documents.lengths[document])
        ids = np.asarray(self._documents.tokens(document, 0, end), np.int64)
        return ids, self._documents.learned(document, 0, end)

    def _row(self, sample: int) -> PackedRows:
        c, row = self._cut, self.row_of(sample)
        pieces = range(int(c.first[row]), int(c.first[row + 1]))
        if self.has_pairs:
            ids, learned = self._whole(int(c.document[pieces.start]))
            pair = None if learned is None else self.form.pair(ids, learned)
            source, target = (ids, ids) if pair is None else pair
        else:
            parts = [
                self._documents.tokens(int(c.document[p]), int(c.begin[p]), int(c.end[p]))
                for p in pieces
            ]
            source, target = self.form.spans(np.concatenate(parts).astype(np.int64), sample)
        return self._padded(source[: self.length], target[: self.target_length])

    def _padded(self, source: Int, target: Int) -> PackedRows:
        inputs = self.form.inputs(target)
        sources, size = np.full(self.length, self._pad_id, np.int64), self.target_length
        tokens, labels = np.full(size, self._pad_id, np.int64), np.full(size, IGNORED)
        documents = np.full(size, -1)
        sources[: len(source)], tokens[: len(target)] = source, inputs
        labels[: len(target)], documents[: len(target)] = target, 0
        return PackedRows(
            tokens_BS=tokens[None],
            labels_BS=labels[None],
            positions_BS=np.arange(size)[None],
            documents_BS=documents[None],
            sources_BE=sources[None],
            source_valid_BE=(np.arange(self.length) < len(source))[None],
        )

    @property
    def counts(self) -> Counts:
        """Statistics of one epoch; tokens are those of sources and targets."""
        c, out = self._cut, super().counts
        if self.has_pairs:
            part = c.document[self._part.start : self._part.stop]
            learned = int(self._num_learned[part].sum())
            tokens = out.tokens
        else:
            sums = np.concatenate([[0], np.cumsum(c.end - c.begin)])
            sizes = np.diff(sums[c.first[self._part.start : self._part.stop + 1]])
            pairs = [self.form.corruption.sizes(int(n)) for n in sizes]
            learned = sum(target + 1 for _, target in pairs)
            tokens = learned + sum(source for source, _ in pairs)
        room = len(self) * (self.length + self.target_length)
        return replace(out, labels=learned, tokens=tokens, filled=tokens / room)


def _with_last(tokens_S: Int, last: int) -> Int:
    if len(tokens_S) and tokens_S[-1] == last:
        return tokens_S
    return np.append(tokens_S, last)
