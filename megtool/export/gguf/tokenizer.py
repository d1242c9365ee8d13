"""Convert a `tokenizer.json` to the `tokenizer.*` keys of a GGUF file.

Two kinds are written: byte-level BPE (`gpt2` to llama.cpp) and SentencePiece's BPE with bytes to
fall back on (`llama`). llama.cpp merges the latter by scores, so a token's score is minus the rank
of the first merge that makes it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megtool.errors import FormatError, MappingError

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BYTES = re.compile(r"<0x[0-9A-F]{2}>")
_ROLES = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "mask": "mask",
}
"""Special tokens as Hugging Face calls them, and as GGUF does (it does spell it so)."""

_LAST = 1_000_000
_HINT = "give a folder that has it: --like HF_FOLDER"


def build_tokenizer_keys(
    files: Mapping[str, bytes], vocab_size: int, *, pre_tokenizer: str | None = None
) -> dict[str, Any]:
    """The keys of the tokenizer in the small files of a Hugging Face folder.

    Rows of the embedding beyond the last token get unused tokens. `pre_tokenizer` is llama.cpp's
    name for how text is split before it is encoded, if tokenizer.json does not tell.

    Raises:
        FormatError: there is no tokenizer.json, or a broken one.
        MappingError: it is of a kind that is not written, or has more tokens than the model.
    """
    if "tokenizer.json" not in files:
        raise FormatError(
            "no tokenizer.json, and llama.cpp takes the tokenizer from the GGUF file",
            hint=_HINT,
            error_id="no-tokenizer",
        )
    tokenizer = _json(files, "tokenizer.json")
    settings = _json(files, "special_tokens_map.json") | _json(files, "tokenizer_config.json")
    try:
        tokens = _Tokens(tokenizer, vocab_size)
        out: dict[str, Any] = (
            _byte_level_keys(tokenizer, pre_tokenizer)
            if _is_byte_level(tokenizer)
            else _sentencepiece_keys(tokenizer)
        )
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise FormatError(f"tokenizer.json cannot be used: {e!r}", hint=_HINT) from e
    is_llama = out["tokenizer.ggml.model"] == "llama"
    out["tokenizer.ggml.tokens"] = tokens.texts(blanks=is_llama)
    if is_llama:
        out["tokenizer.ggml.scores"] = tokens.scores(tokenizer["model"]["merges"])
    out["tokenizer.ggml.token_type"] = tokens.kinds
    if merges := [] if is_llama else list(_merges(tokenizer["model"]["merges"])):
        out["tokenizer.ggml.merges"] = merges
    out |= _special_token_keys(tokenizer, settings, files, tokens.ids)
    return out | _chat_template_keys(settings, files)


class _Tokens:
    """Tokens by number, with their kinds."""

    def __init__(self, tokenizer: Mapping[str, Any], vocab_size: int) -> None:
        self.ids: dict[str, int] = dict(tokenizer["model"]["vocab"])
        self.kinds = [_UNUSED] * vocab_size
        self._texts: list[str | None] = [None] * vocab_size
        added = {a["content"]: a for a in tokenizer.get("added_tokens") or ()}
        unknown = tokenizer["model"].get("unk_token")
        for text, token in added.items():
            self.ids[text] = int(token["id"])
        if self.ids and max(self.ids.values()) >= vocab_size:
            raise MappingError(
                f"the tokenizer has {max(self.ids.values()) + 1} tokens, and the model's embedding "
                f"{vocab_size} rows",
                hint="give the tokenizer of this model: --like HF_FOLDER",
                error_id="unsupported-by-engine",
            )
        falls_back = bool(tokenizer["model"].get("byte_fallback"))
        for text, number in self.ids.items():
            self._texts[number] = text
            kind = _NORMAL
            if text in added:
                kind = _CONTROL if added[text].get("special") else _USER
            if falls_back and _BYTES.fullmatch(text):
                kind = _BYTE
            elif falls_back and text == unknown:
                kind = _UNKNOWN
            self.kinds[number] = kind

    def texts(self, *, blanks: bool) -> list[str]:
        """All tokens; where a vocabulary writes blanks as U+2581, a user's tokens have blanks."""
        return [
            f"[PAD{i}]"
            if t is None
            else (t.replace("\u2581", " ") if blanks and self.kinds[i] == _USER else t)
            for i, t in enumerate(self._texts)
        ]

    def scores(self, merges: list[Any]) -> list[float]:
        """Minus the rank of the first merge that makes a token."""
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(merges):
            ranks.setdefault("".join(_pair(pair)), rank)
        return [
            0.0 if t is None or self.kinds[i] != _NORMAL else -float(ranks.get(t, _LAST))
            for i, t in enumerate(self._texts)
        ]


def _pair(merge: Any) -> tuple[str, str]:
    first, second = merge if isinstance(merge, list) else merge.split(" ")
    return first, second


def _merges(merges: list[Any]) -> Iterator[str]:
    """Merges as one string each; a blank inside a token is the letter that stands for its byte."""
    for merge in merges:
        first, second = (part.replace(" ", chr(ord(" ") + 256)) for part in _pair(merge))
        yield f"{first} {second}"


def _stages(stage: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The stages of a normalizer, pre-tokenizer or decoder, which may be a sequence."""
    if not stage:
        return []
    return list(stage[key]) if stage["type"] == "Sequence" else [stage]


def _is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    kind = tokenizer["model"]["type"]
    if kind != "BPE":
        raise MappingError(
            f"the tokenizer is of the kind {kind!r}",
            hint="BPE is written to GGUF, and no other",
            error_id="unsupported-by-engine",
        )
    cuts = _stages(tokenizer.get("pre_tokenizer"), "pretokenizers")
    if any(s["type"] == "ByteLevel" for s in cuts):
        return True
    if not tokenizer["model"].get("byte_fallback"):
        raise MappingError(
            "the tokenizer is a BPE neither of bytes nor with bytes to fall back on",
            hint="llama.cpp knows these two",
            error_id="unsupported-by-engine",
        )
    return False


def _byte_level_keys(tokenizer: Mapping[str, Any], pre_tokenizer: str | None) -> dict[str, Any]:
    cuts = _stages(tokenizer.get("pre_tokenizer"), "pretokenizers")
    for stage in _stages(tokenizer.get("normalizer"), "normalizers"):
        # llama.cpp takes text as it is, which mostly is NFC; its own converter lets that pass too.
        if stage["type"] != "NFC":
            raise _unsupported(f"the normalizer {stage['type']}")
    name = pre_tokenizer or find_pre_tokenizer(cuts)
    _check_merging(tokenizer, takes_words=name in WHOLE_WORDS, name=name)
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name}


def _unsupported(feature: str) -> MappingError:
    return MappingError(
        f"the tokenizer has {feature}, and llama.cpp none: it would give other tokens",
        hint="a GGUF file cannot say it; --to hf keeps it",
        error_id="unsupported-by-engine",
    )


def _check_merging(tokenizer: Mapping[str, Any], *, takes_words: bool, name: str) -> None:
    """Refuse a BPE that llama.cpp would carry out otherwise.

    `takes_words` says that it looks a word up before it merges. Where the tokenizer does not, or
    the other way round, it matters for tokens that merging does not give, and for no others.
    """
    model = tokenizer["model"]
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _unsupported(f"the {key} {model[key]!r}")
    if bool(model.get("ignore_merges")) == takes_words:
        return
    added = {a["content"] for a in tokenizer.get("added_tokens") or ()}
    ranks = {_pair(m): i for i, m in enumerate(model["merges"])}
    for text in model["vocab"]:
        if text not in added and not _BYTES.fullmatch(text) and len(_apply_merges(text, ranks)) > 1:
            does = "looks words up before it merges" if takes_words else "always merges"
            raise MappingError(
                f"ignore_merges is {str(not takes_words).lower()}, and llama.cpp {does} ({name}): "
                f"merging does not give the token {text!r}",
                hint="a GGUF file cannot say it; --to hf keeps it",
                error_id="unsupported-by-engine",
            )


def _apply_merges(text: str, ranks: Mapping[tuple[str, str], int]) -> list[str]:
    """A word's tokens: of all neighbors, the pair of the least rank is merged first."""
    parts = list(text)
    while len(parts) > 1:
        rank, index = min(
            (ranks.get(pair, len(ranks)), i) for i, pair in enumerate(itertools.pairwise(parts))
        )
        if rank == len(ranks):
            break
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts


_BLANK = "\u2581"


def _is_known(stage: Mapping[str, Any]) -> bool:
    """A stage of a SentencePiece model as llama.cpp computes it: blanks become U+2581, one is put
    before the text, and nothing is cut at blanks that are none any more."""
    kind, pattern = stage["type"], (stage.get("pattern") or {}).get("String")
    if kind == "Prepend":
        return bool(stage.get("prepend") == _BLANK)
    if kind == "Replace":
        return bool(pattern == " " and stage.get("content") == _BLANK)
    if kind == "Split":
        return bool(pattern == " ")
    return bool(kind == "Metaspace" and stage.get("replacement", _BLANK) == _BLANK)


def _sentencepiece_keys(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    stages = _stages(tokenizer.get("normalizer"), "normalizers")
    stages += _stages(tokenizer.get("pre_tokenizer"), "pretokenizers")
    for stage in stages:
        if not _is_known(stage):
            raise _unsupported(f"the stage {stage['type']}")
    _check_merging(tokenizer, takes_words=False, name="SentencePiece")
    prefixed = any(
        s["type"] == "Prepend"
        or (s["type"] == "Metaspace" and s.get("prepend_scheme", "always") != "never")
        for s in stages
    )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": prefixed,
    }


def _special_token_keys(
    tokenizer: Mapping[str, Any],
    settings: Mapping[str, Any],
    files: Mapping[str, bytes],
    ids: Mapping[str, int],
) -> dict[str, Any]:
    """Numbers of the special tokens, and which of them every text gets."""
    config = _json(files, "config.json")
    out: dict[str, Any] = {}
    for role, name in _ROLES.items():
        text = settings.get(f"{role}_token")
        text = text.get("content") if isinstance(text, dict) else text
        number = ids.get(text) if isinstance(text, str) else config.get(f"{role}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(number, int) and not isinstance(number, bool) and number in ids.values():
            out[f"tokenizer.ggml.{name}_token_id"] = number
    single = [
        stage
        for p in _stages(tokenizer.get("post_processor"), "processors")
        if p["type"] == "TemplateProcessing"
        for stage in p["single"]
    ]
    ends = {"bos": single[:1], "eos": single[-1:]}
    for role, end in ends.items():
        adds_token = settings.get(f"add_{role}_token")
        token_id = out.get(f"tokenizer.ggml.{_ROLES[role]}_token_id")
        if not isinstance(adds_token, bool):
            adds_token = any(
                ids.get(s.get("SpecialToken", {}).get("id", ""), -1) == token_id for s in end
            )
        out[f"tokenizer.ggml.add_{role}_token"] = adds_token
    return out


def _chat_template_keys(settings: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    """The chat template, and those that have names."""
    template = settings.get("chat_template")
    if "chat_template.jinja" in files:
        try:
            template = files["chat_template.jinja"].decode()
        except UnicodeDecodeError as e:
            raise FormatError(
                f"chat_template.jinja is not UTF-8 at byte {e.start}", hint=_HINT
            ) from e
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    out, names = {}, []
    for entry in template if isinstance(template, list) else ():
        if not isinstance(entry, dict):
            continue
        name, text = str(entry.get("name")), str(entry.get("template"))
        if name == "default":
            out["tokenizer.chat_template"] = text
        elif re.fullmatch(r"\w+", name):
            names.append(name)
            out[f"tokenizer.chat_template.{name}"] = text
    return out | ({"tokenizer.chat_templates": names} if names else {})


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A JSON object among the files; an empty one where there is none.

    Raises:
        FormatError: it is something else.
    """
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{name} is no JSON: {e}", hint=_HINT) from e
    if not isinstance(value, dict):
        raise FormatError(f"{name} holds no JSON object", hint=_HINT)
    return value


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
    "|".join(
        (
            _ENDINGS,
            r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
            _REST,
        )
    ): "qwen35",
}
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "|".join(
        (
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            r" ?[\p{P}\p{S}]+[\r\n]*",
            _REST,
        )
    ),
)
_BY_EXPRESSIONS: dict[tuple[str, ...], str] = {
    **{(e,): name for e, name in _BY_EXPRESSION.items()},
    _DEEPSEEK: "deepseek-v3",
}
"""By the expressions that cut text one after the other."""

WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Names by which llama.cpp takes a word that is a token as it is, before it merges anything (its
`ignore_merges`); by any other name it merges always."""


def _isolating(cut: Mapping[str, Any]) -> str:
    """The expression whose matches a stage isolates, with ends of lines written out; "" if it does
    something else."""
    expression = (cut.get("pattern") or {}).get("Regex")
    if cut.get("behavior") != "Isolated" or cut.get("invert") or not isinstance(expression, str):
        return ""
    return expression.replace("\r", r"\r").replace("\n", r"\n")


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
        if set(kinds[:-1]) == {"Split"} and not uses_regex:
            expressions = tuple(_isolating(c) for c in cuts[:-1])
            if expressions in _BY_EXPRESSIONS:
                return _BY_EXPRESSIONS[expressions]
    supported = ", ".join(["gpt-2", "smollm", *_BY_EXPRESSIONS.values()])
    raise MappingError(
        f"the tokenizer cuts text in a way that has no name here: {' then '.join(kinds)}",
        hint=f"known: {supported}; --pre-tokenizer NAME gives llama.cpp's name for it "
        "(LLAMA_VOCAB_PRE)",
        error_id="unsupported-by-engine",
    )
