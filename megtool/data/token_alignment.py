"""The same text as tokens of two tokenizers: which tokens of one cover which of the other.

Tokens are compared by the bytes of the text they stand for, so tokenizers of different kinds
(byte-level BPE, SentencePiece) fit each other. A span lies between two places of the text at which
both tokenizers have a boundary, with none of these in between; it has one or more tokens of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from megtool.data.tokenizer import Tokenizer
from megtool.errors import MappingError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MARK = "\u2581"  # SentencePiece's space


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens of both sides that stand for the same bytes, as ranges `[begin, end)` of positions."""

    own: tuple[int, int]
    other: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AlignedTokens:
    """A text as tokens of another tokenizer, and the spans that both have in common, in order."""

    tokens: list[int]
    spans: list[TokenSpan]


class TokenBytes:
    """The bytes of each token of a tokenizer; `special` are the names of tokens that are no text.

    Raises:
        MappingError: it is no byte-level BPE, and no SentencePiece as transformers converts it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        vocabulary, added, self.marks_spaces = _read_rules(tokenizer)
        self.special = {i: text for i, (text, is_special) in added.items() if is_special}
        self._bytes: dict[int, bytes] = {
            i: text.encode() for i, (text, is_special) in added.items() if not is_special
        }
        decode = _sentencepiece_bytes if self.marks_spaces else _byte_level_bytes
        for piece, number in vocabulary.items():
            if number not in added:
                self._bytes[number] = decode(piece)
        first = tokenizer.encode("a")[:1]
        self.bos_id = tokenizer.bos_id if first == [tokenizer.bos_id] else None

    def of(self, token: int) -> bytes | None:
        """The bytes of a token; None for one that is no text."""
        return self._bytes.get(token)

    def shared(self, other: TokenBytes) -> list[tuple[int, int]]:
        """Tokens that both have, by bytes or by name if they are no text: the ids of each, in the
        order of the other's."""
        own = {data: i for i, data in sorted(self._bytes.items(), reverse=True)}
        names = {name: i for i, name in sorted(self.special.items(), reverse=True)}
        pairs: dict[int, int] = {}
        for i, data in sorted(other._bytes.items(), reverse=True):
            if data in own:
                pairs[own[data]] = i
        for i, name in sorted(other.special.items(), reverse=True):
            if name in names:
                pairs[names[name]] = i
        return sorted(((a, b) for a, b in pairs.items()), key=lambda pair: pair[1])


class TokenAligner:
    """Turns one tokenizer's tokens into another's, with the spans of both.

    Text goes through the other tokenizer between tokens that are no text. Of these, the end of a
    document becomes the other's, and one with a namesake there becomes that; others are left out.
    A text begins as the other tokenizer begins one (BOS). Text that the other tokenizer does not
    give back byte for byte has no spans.
    """

    def __init__(self, own: TokenBytes, other: TokenBytes) -> None:
        self._own, self._other = own, other
        names = {name: i for i, name in other.special.items()}
        self._special = {i: names[name] for i, name in own.special.items() if name in names}
        if other.tokenizer.eos_id is not None:
            self._special |= dict.fromkeys(own.tokenizer.eos_ids, other.tokenizer.eos_id)

    def align(self, tokens: Sequence[int], *, is_start: bool = True) -> AlignedTokens:
        """The text of `tokens` as tokens of the other tokenizer; `is_start`: they begin a text."""
        other = self._other
        out = AlignedTokens([], [])
        if is_start and other.bos_id is not None:
            out.tokens.append(other.bos_id)
        bos = self._own.tokenizer.bos_id
        for begin, end in _runs(tokens, self._own):
            if self._own.of(tokens[begin]) is not None:
                self._align_text(tokens, begin, end, out)
            elif tokens[begin] == bos and other.bos_id is not None:
                continue  # it has one already
            elif (mapped := self._special.get(tokens[begin])) is not None:
                place = len(out.tokens)
                out.tokens.append(mapped)
                out.spans.append(TokenSpan((begin, end), (place, place + 1)))
        return out

    def _align_text(self, tokens: Sequence[int], begin: int, end: int, out: AlignedTokens) -> None:
        """Add a run of text."""
        pieces = [self._own.of(token) or b"" for token in tokens[begin:end]]
        if self._own.marks_spaces and pieces[0].startswith(b" "):
            pieces[0] = pieces[0][1:]  # which SentencePiece puts before a text
        data = b"".join(pieces)
        cut, text = _valid_text(data)
        ids = self._other.tokenizer.encode(text, add_special=False)
        place = len(out.tokens)
        out.tokens.extend(ids)
        others = [self._other.of(i) for i in ids]
        if any(piece is None for piece in others):
            return
        lengths = [len(piece or b"") for piece in others]
        whole = b"".join(piece or b"" for piece in others)
        if whole != text.encode():
            if whole != b" " + text.encode():
                return
            lengths[0] -= 1
        own_ends = [0, *accumulate(map(len, pieces))]
        other_ends = [cut, *(cut + n for n in accumulate(lengths))]
        for (a, b), (c, d) in _spans(own_ends, other_ends):
            out.spans.append(TokenSpan((begin + a, begin + b), (place + c, place + d)))


def other_tokens(own: Tokenizer, other: Tokenizer) -> dict[int, tuple[str, str]]:
    """Ordinary tokens with one number in both that are not the same one, as each calls them."""
    added = {
        int(entry["id"]) for t in (own, other) for entry in t.rules().get("added_tokens") or ()
    }
    names = {number: piece for piece, number in other.vocabulary().items() if number not in added}
    return {
        number: (piece, names[number])
        for piece, number in own.vocabulary().items()
        if names.get(number, piece) != piece
    }


def _runs(tokens: Sequence[int], pieces: TokenBytes) -> Iterator[tuple[int, int]]:
    """Runs of text, and between them single tokens that are none."""
    begin = 0
    for position, token in enumerate(tokens):
        if pieces.of(token) is None:
            if begin < position:
                yield begin, position
            yield position, position + 1
            begin = position + 1
    if begin < len(tokens):
        yield begin, len(tokens)


def _valid_text(data: bytes) -> tuple[int, str]:
    """The text of bytes that may begin or end within a character, and where it begins."""
    begin = 0
    while begin < min(3, len(data)) and data[begin] & 0xC0 == 0x80:
        begin += 1
    return begin, data[begin:].decode("utf-8", "ignore")


def _spans(
    own: Sequence[int], other: Sequence[int]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Ranges of tokens between common boundaries; token i lies between boundaries i and i + 1."""
    last_own, last_other = ({place: i for i, place in enumerate(ends)} for ends in (own, other))
    # Tokens of no bytes belong to the span that ends where they are.
    for a, b in pairwise(sorted(last_own.keys() & last_other.keys())):
        yield (last_own[a], last_own[b]), (last_other[a], last_other[b])


def _read_rules(
    tokenizer: Tokenizer,
) -> tuple[Mapping[str, int], dict[int, tuple[str, bool]], bool]:
    """The vocabulary, added tokens (text, and whether they are none), and the kind of pieces."""
    rules = tokenizer.rules()
    vocabulary: Mapping[str, int] = tokenizer.vocabulary()
    added = {
        int(entry["id"]): (str(entry["content"]), bool(entry["special"]))
        for entry in rules.get("added_tokens") or ()
    }
    kinds = {step.get("type") for step in _steps(rules.get("decoder"))}
    if "ByteLevel" in kinds:
        return vocabulary, added, False
    replaces = any(
        step.get("type") == "Replace" and (step.get("pattern") or {}).get("String") == _MARK
        for step in _steps(rules.get("decoder"))
    )
    if "Metaspace" in kinds or replaces:
        return vocabulary, added, True
    raise MappingError(
        "the tokenizer is neither a byte-level BPE nor SentencePiece's, so the bytes of its tokens "
        "are not known",
        file=tokenizer.place,
        hint="distillation between vocabularies aligns tokens by their bytes",
    )


def _steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """A decoder, or those of a sequence."""
    if isinstance(decoder, Mapping):
        yield from decoder.get("decoders") or (decoder,)


def _alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as: printable ones stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [n for n in range(256) if n not in plain]
    return {chr(n): n for n in plain} | {chr(256 + k): n for k, n in enumerate(others)}


_ALPHABET = _alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    if all(c in _ALPHABET for c in piece):
        return bytes(_ALPHABET[c] for c in piece)
    return piece.encode()


def _sentencepiece_bytes(piece: str) -> bytes:
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(_MARK, " ").encode()
