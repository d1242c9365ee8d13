"""The texts that a model is evaluated on, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megtool.errors import UsageError
from megtool.storage.location.path import location

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megtool.data.documents import Document
    from megtool.data.tokenizer import Tokenizer
    from megtool.inference.windows import TokenDocument
    from megtool.spec.model_config import ModelConfig

    Ints = NDArray[np.int64]


def read_token_documents(
    data: str | Path,
    tokenizer: Tokenizer,
    *,
    field: str | None = None,
    split: str | None = None,
    join: bool = False,
    all_turns: bool = False,
    max_tokens: int | None = None,
) -> list[TokenDocument]:
    """Read a data set as tokens, up to `max_tokens` of them.

    `data` is what `megtool.data.documents.documents` reads, or a Megatron data set. With `join` all
    texts are one document. Of conversations only what the assistant says counts, unless
    `all_turns`.

    Raises:
        UsageError: `join` of conversations, or tokens that the tokenizer does not have.
        FormatError: the data cannot be read.
    """
    from megtool.data.documents import documents
    from megtool.data.tokenize_documents import encode
    from megtool.inference.windows import TokenDocument

    if location(data).suffix in (".bin", ".idx"):
        return _read_indexed(data, tokenizer, max_tokens)
    texts = documents(data, field=field, split=split)
    if join:
        joined = "\n\n".join(_plain_text(d, data) for d in texts)
        return [TokenDocument(tokens=tokenizer.encode(joined)[:max_tokens])]
    documents_read: list[TokenDocument] = []
    left = max_tokens
    for encoded in encode(texts, tokenizer, append_eos=False, answers_only=not all_turns):
        ids, is_target = encoded.ids.tolist()[:left], encoded.learned
        counted = None if is_target is None else is_target.tolist()[:left]
        documents_read.append(TokenDocument(tokens=ids, counted=counted))
        if left is not None and (left := left - len(ids)) <= 0:
            break
    return documents_read


def mask_documents(
    documents: Sequence[TokenDocument], tokenizer: Tokenizer, vocab_size: int
) -> list[TokenDocument]:
    """Texts with some tokens masked, for a model that predicts those; always the same ones.

    Raises:
        UsageError: the tokenizer has no mask token, or texts say themselves what counts.
    """
    import numpy as np

    from megtool.data.masking import Masking
    from megtool.inference.windows import TokenDocument

    masking, out = Masking.of(tokenizer, vocab_size), []
    for number, document in enumerate(documents):
        if document.counted is not None:
            raise UsageError(
                "the data has conversations or answers, and the model predicts masked tokens",
                hint="plain texts can be evaluated: --field NAME, or --all-turns for all turns",
            )
        inputs, labels = masking.masked(np.asarray(document.tokens, np.int64), number)
        out.append(TokenDocument(tokens=inputs.tolist(), labels=labels.tolist()))
    return out


def pair_documents(
    documents: Sequence[TokenDocument],
    tokenizer: Tokenizer,
    config: ModelConfig,
    source_length: int,
) -> list[TokenDocument]:
    """Targets with their sources, for a model of an encoder and a decoder.

    A prompt is the source of its completion. Plain texts are cut, and spans are left out of every
    part, whose source has at most `source_length` tokens; always the same ones.

    Raises:
        UsageError: the tokenizer lacks what ends texts or stands for spans, or a conversation is no
            pair.
    """
    import numpy as np

    from megtool.data.source_target import SourceTarget
    from megtool.inference.windows import TokenDocument

    form, out = SourceTarget.of(tokenizer, config), list[TokenDocument]()

    def add(pair: tuple[Ints, Ints]) -> None:
        source, target = (ids.tolist() for ids in pair)
        out.append(TokenDocument(tokens=[form.start_id, *target], source=source))

    for number, document in enumerate(documents):
        ids = np.asarray(document.tokens, np.int64)
        if document.counted is not None:
            pair = form.pair(ids, np.asarray(document.counted, np.bool_))
            if pair is None:
                raise UsageError(
                    f"text {number} is no source with a target",
                    hint="a record with a prompt and a completion is; of a plain text (--field "
                    "NAME, or --all-turns) spans are left out",
                )
            add(pair)
            continue
        size = form.text_length(source_length)
        for begin in range(0, len(ids), size):
            add(form.spans(ids[begin : begin + size], len(out)))
    return out


def _read_indexed(
    data: str | Path, tokenizer: Tokenizer, max_tokens: int | None
) -> list[TokenDocument]:
    """The documents of a Megatron data set, which are tokens already."""
    from megtool.data.indexed import IndexedDataset
    from megtool.inference.windows import TokenDocument

    dataset, documents_read, left = IndexedDataset(data), list[TokenDocument](), max_tokens
    for number in range(dataset.num_documents):
        ids = dataset.document(number).tolist()[:left]
        if ids and max(ids) >= tokenizer.vocab_size:
            raise UsageError(
                f"{data} holds the token {max(ids)}, and the tokenizer has {tokenizer.vocab_size}",
                hint="it was made with another tokenizer: tokenize the text again",
            )
        documents_read.append(TokenDocument(tokens=ids))
        if left is not None and (left := left - len(ids)) <= 0:
            break
    return documents_read


def _plain_text(document: Document, data: str | Path) -> str:
    if document.messages or document.completion is not None:
        raise UsageError(
            f"--join, and {data} holds conversations, not plain texts", hint="leave out --join"
        )
    return document.text
