"""Tokenizes documents and marks the tokens that a model is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megtool.data.answer_spans import answer_spans
from megtool.data.documents import Document
from megtool.data.tokenizer import Tokenizer
from megtool.errors import MappingError

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDocument:
    """One document's tokens; `learned` marks the labels, None if all tokens are."""

    ids: Ids
    learned: NDArray[np.bool_] | None = None


def encode(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    append_eos: bool = True,
    answers_only: bool = True,
) -> Iterator[EncodedDocument]:
    """Each document's tokens, in order; one without any text is left out.

    A text is encoded with the special tokens its tokenizer adds, and ends with the tokenizer's
    end-of-document token where `append_eos` (once, if the tokenizer adds it already). Of a prompt
    with a completion, and of a conversation, the completion and the assistant's turns alone are
    learned, unless `answers_only` is false. The end of a turn is part of it; a conversation ends as
    its template ends it.

    Raises:
        MappingError: no end-of-document token, no chat template, or one that cannot be followed.
    """
    for document in documents:
        if document.messages:
            conversation = _conversation(document, tokenizer, answers_only)
        elif document.completion is not None:
            conversation = _completion(document, tokenizer, append_eos)
        else:
            ids = with_eos(tokenizer.encode(document.text), tokenizer, append_eos)
            ids = ids if document.text else []  # not a beginning and an end of nothing
            conversation = EncodedDocument(ids=np.asarray(ids, np.int32))
        if len(conversation.ids):
            yield conversation if answers_only else EncodedDocument(ids=conversation.ids)


def with_eos(ids: list[int], tokenizer: Tokenizer, append: bool) -> list[int]:
    """`ids`, ended with the end-of-document token if `append` and they do not end with it.

    A document without tokens stays so.

    Raises:
        MappingError: the tokenizer has no such token.
    """
    if not append or not ids:
        return ids
    if tokenizer.eos_id is None:
        raise MappingError(
            "the tokenizer has no end-of-document token",
            hint="its tokenizer_config.json names none as eos_token; go without --append-eos",
        )
    return ids if ids[-1] == tokenizer.eos_id else [*ids, tokenizer.eos_id]


def _completion(document: Document, tokenizer: Tokenizer, append_eos: bool) -> EncodedDocument:
    """Prompt and completion, tokenized separately, as they meet when the model answers."""
    prompt = tokenizer.encode(document.text)
    if prompt and prompt[-1] == tokenizer.eos_id:
        bare = tokenizer.encode(document.text, add_special=False)
        if bare[-1:] != prompt[-1:]:  # the tokenizer ends every text so, but this one goes on
            prompt = prompt[:-1]
    answer = tokenizer.encode(document.completion or "", add_special=False)
    ids = with_eos([*prompt, *answer], tokenizer, append_eos)
    learned = np.arange(len(ids)) >= len(prompt)
    return EncodedDocument(ids=np.asarray(ids, np.int32), learned=learned)


def _conversation(document: Document, tokenizer: Tokenizer, answers_only: bool) -> EncodedDocument:
    if not answers_only:
        ids = tokenizer.chat(document.messages, add_generation_prompt=False)
        return EncodedDocument(ids=np.asarray(ids, np.int32))
    place = f"{document.file}:{document.number}"
    token_ids, spans = answer_spans(document.messages, tokenizer, place, first=document.num_given)
    ids, characters = tokenizer.encode_spans(token_ids)
    begins = np.asarray([begin for begin, _ in characters], np.int64)
    learned = np.zeros(len(ids), np.bool_)
    for begin, end in spans:
        learned |= (begins >= begin) & (begins < end)
    return EncodedDocument(ids=np.asarray(ids, np.int32), learned=learned)
