"""llama.cpp's names for how a byte-level tokenizer splits text before it is encoded.

llama.cpp has an expression of its own for each name, and its converter finds the name by the tokens
that a sample text gives. Here it is told from tokenizer.json's own expressions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megtool.errors import MappingError

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"

_BY_EXPRESSION = {
    "|".join((_ENDINGS, _WORDS, r"\p{N}{1,3}", _SIGNS, _REST)): "llama-bpe",
    "|".join((_ENDINGS, _WORDS, r"\p{N}", _SIGNS, _REST)): "qwen2",
    "|".join((_LOWER, _UPPER, r"\p{N}", _SIGNS_AND_SLASH, _REST)): "tekken",
    "|".join(
        (f"{_LOWER}{_ENDINGS}?", f"{_UPPER}{_ENDINGS}?", r"\p{N}{1,3}", _SIGNS_AND_SLASH, _REST)
    ): "gpt-4o",
}

WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Names by which llama.cpp takes a word that is a token as it is, before it merges anything (its
`ignore_merges`); by any other name it merges always."""


def find_pre_tokenizer(cuts: Sequence[Mapping[str, Any]]) -> str:
    """The name for the stages of a pre-tokenizer whose last one makes bytes.

    Raises:
        MappingError: none is known here.
    """
    kinds = [c["type"] for c in cuts]
    uses_regex = bool(cuts[-1].get("use_regex", True))
    if not cuts[-1].get("add_prefix_space"):
        if kinds == ["ByteLevel"] and uses_regex:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and uses_regex and cuts[0].get("individual_digits"):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not uses_regex:
            pattern = cuts[0].get("pattern", {})
            is_isolated = cuts[0].get("behavior") == "Isolated" and not cuts[0].get("invert")
            if is_isolated and pattern.get("Regex") in _BY_EXPRESSION:
                return _BY_EXPRESSION[pattern["Regex"]]
    supported = ", ".join(["gpt-2", "smollm", *_BY_EXPRESSION.values()])
    raise MappingError(
        f"the tokenizer cuts text in a way that has no name here: {' then '.join(kinds)}",
        hint=f"known: {supported}; --pre-tokenizer NAME gives llama.cpp's name for it "
        "(LLAMA_VOCAB_PRE)",
        error_id="unsupported-by-engine",
    )
