"""A tokenizer loaded from the files that come with a checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megtool.errors import FormatError, MappingError, MissingPackageError
from megtool.formats.auxiliary_files import check_json_size
from megtool.storage.files import Files, read_file
from megtool.storage.location.path import location

if TYPE_CHECKING:
    from megtool.data.chat_template import TemplateRenderer

_LOG = logging.getLogger(__name__)
_TABLES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
"""Files of which one has to be there: each holds a vocabulary."""

_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_NOT_OURS = (".index.json", "megtool.json")
_GIVE = "give a folder that has them: --tokenizer FOLDER"
Message = Mapping[str, Any]
"""One turn of a conversation: `role`, `content`, and what else the chat template reads."""


@contextmanager
def _told_panics(place: str) -> Iterator[None]:
    """Raise an error for a panic of the tokenizers library, which is no `Exception`.

    A regular expression in tokenizer.json that backtracks too far ends so.
    """
    try:
        yield
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise FormatError(
            f"the rules of the tokenizer fail: {str(e)[:120]}",
            file=location(place) / "tokenizer.json",
            hint="a regular expression in it does not end; fetch the file again",
        ) from None


class Tokenizer:
    """A model's tokenizer, as transformers builds it; no code of a checkpoint is ever run.

    `vocab_size` is one more than the largest id. `eos_id` is the token that ends a document,
    `eos_ids` are all tokens at which generation stops: those of generation_config.json (or
    config.json), then the tokenizer's own. `sentinel_ids` stand for parts of a text that are left
    out (`<extra_id_0>` and so on). What the tokenizer does not have is None.
    """

    def __init__(
        self, full: Any, stop_ids: Sequence[int], place: str, template_file: str | None = None
    ) -> None:
        self._full = full
        self._template_file = template_file
        self._renderers: dict[str, TemplateRenderer] = {}
        self._fast = getattr(full, "backend_tokenizer", None)
        self._place = place
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()
        vocabulary: Mapping[str, int] = full.get_vocab()
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.sentinel_ids: tuple[int, ...] = _sentinels(vocabulary)
        self.bos_id: int | None = full.bos_token_id
        self.eos_id: int | None = full.eos_token_id
        self.pad_id: int | None = full.pad_token_id
        self.mask_id: int | None = getattr(full, "mask_token_id", None)
        self.special_ids: tuple[int, ...] = tuple(getattr(full, "all_special_ids", ()))
        eos_ids = () if self.eos_id is None else (self.eos_id,)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*stop_ids, *eos_ids)))
        self._has_told_doubles = False

    @classmethod
    def load(cls, files: Mapping[str, Path | bytes]) -> Tokenizer:
        """The tokenizer in `files`: small files of a Hugging Face folder by their name in it.

        Raises:
            FormatError: no vocabulary among them, or files that transformers cannot read.
            MissingPackageError: transformers, or what it needs for these files, is missing.
        """
        tokenizer_files = {n: f for n, f in files.items() if _belongs(n)}
        tables = [n for n in tokenizer_files if holds_vocabulary(n)]
        if not tables:
            raise FormatError(
                "the checkpoint has no tokenizer",
                hint=f"one of {', '.join(_TABLES)} would do; {_GIVE}",
                error_id="no-tokenizer",
            )
        first = tokenizer_files[tables[0]]
        place = str(first.parent) if isinstance(first, Path) else tables[0]
        with tempfile.TemporaryDirectory(prefix="megtool-tokenizer-") as folder:
            for name, content in tokenizer_files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_read(name, content))
            stop_ids = _stop_ids(Path(folder), place)
            template_files = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
            template_file = next((n for n in template_files if n in tokenizer_files), None)
            return cls(_from_folder(Path(folder), place), stop_ids, place, template_file)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer in a Hugging Face folder; a checkpoint in it is ignored.

        Raises:
            FormatError, MissingPackageError: as `load`.
        """
        root = location(folder)
        if not root.is_dir():
            raise FormatError(
                "it is not a folder with a tokenizer",
                file=root,
                hint=_GIVE,
                error_id="no-tokenizer",
            )
        files = [p for p in sorted(root.iterdir()) if p.is_file()]
        templates = root / "additional_chat_templates"
        files += sorted(templates.glob("*.jinja")) if templates.is_dir() else []
        try:
            return cls.load({p.relative_to(root).as_posix(): p for p in files})
        except FormatError as e:
            raise FormatError(
                e.message, file=e.file or root, hint=e.hint, error_id=e.error_id
            ) from e

    @property
    def fingerprint(self) -> str:
        """A digest of vocabulary, rules and chat template: equal ones give equal tokens."""
        rules = self._fast.to_str() if self._fast is not None else repr(self._full.get_vocab())
        facts = repr((rules, self._full.chat_template, self.eos_ids, self.bos_id))
        return hashlib.sha256(facts.encode()).hexdigest()

    @property
    def place(self) -> str:
        """The folder that it was read from."""
        return self._place

    def rules(self) -> Mapping[str, Any]:
        """The contents of its tokenizer.json; nothing where it has none."""
        rules: Mapping[str, Any] = {} if self._fast is None else json.loads(self._fast.to_str())
        return rules

    def vocabulary(self) -> Mapping[str, int]:
        """The number of every token, added ones among them, by its piece."""
        vocabulary: Mapping[str, int] = self._full.get_vocab()
        return vocabulary

    # ---- text and tokens

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The tokens of `text`; `add_special` adds what the tokenizer puts around a text."""
        return self.encode_batch([text], add_special=add_special)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True) -> list[list[int]]:
        """The tokens of each text. Other threads run meanwhile.

        A text may begin with the token that the tokenizer puts before every text (BOS), as chat
        templates write it, or end with the one that it puts behind: it is there once then.

        Raises:
            FormatError: the tokenizer's rules fail on a text.
        """
        ids = self._encode_batch(texts, add_special)
        if not add_special or self._added == (None, None):
            return ids
        return [self._without_doubles(tokens) for tokens in ids]

    def _encode_batch(self, texts: Sequence[str], add_special: bool) -> list[list[int]]:
        if self._fast is None:
            return [self._full.encode(t, add_special_tokens=add_special) for t in texts]
        with _told_panics(self._place):
            fast = self._fast.encode_batch_fast(list(texts), add_special_tokens=add_special)
        return [encoding.ids for encoding in fast]

    @cached_property
    def _added(self) -> tuple[int | None, int | None]:
        """The special tokens that the tokenizer puts before and behind a text; None for none."""
        (bare,), (full,) = (self._encode_batch(["a"], added) for added in (False, True))
        begin, end = full[:1], full[-1:]
        return (
            begin[0] if begin and bare[:1] != begin and begin[0] in self.special_ids else None,
            end[0] if end and bare[-1:] != end and end[0] in self.special_ids else None,
        )

    def _without_doubles(self, ids: list[int]) -> list[int]:
        begin, end = self._added
        first = 1 if begin is not None and ids[:2] == [begin, begin] else 0
        last = len(ids) - (1 if end is not None and ids[-2:] == [end, end] else 0)
        if first == 0 and last == len(ids):
            return ids
        if not self._has_told_doubles:
            self._has_told_doubles = True
            _LOG.warning(
                "texts have %s already, which the tokenizer adds: it is there once",
                self.decode([ids[0 if first else -1]], skip_special=False),
            )
        return ids[first:last]

    def token_id(self, token: str) -> int | None:
        """The number of a token of the vocabulary; None if it has none."""
        return self.vocabulary().get(token)

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of `text` without added ones, and the characters (begin, end) of each.

        Raises:
            MappingError: this kind of tokenizer does not know its characters.
            FormatError: the tokenizer's rules fail on the text.
        """
        if self._fast is None:
            raise MappingError(
                f"{type(self._full).__name__} does not map tokens to characters",
                file=self._place,
                hint="a folder with a tokenizer.json does: --tokenizer FOLDER",
            )
        with _told_panics(self._place):
            encoding = self._fast.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of `ids`, without cleanup; special tokens are omitted unless requested."""
        text: str = self._full.decode(
            [int(i) for i in ids],
            skip_special_tokens=skip_special,
            clean_up_tokenization_spaces=False,
        )
        return text

    def stream(self, after: Sequence[int] = (), *, skip_special: bool = True) -> Stream:
        """A decoder of tokens that come one by one `after` others, which it does not show."""
        return Stream(self, after, skip_special=skip_special)

    # ---- conversations

    def chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """The tokens of a conversation in the tokenizer's own chat template.

        `add_generation_prompt` opens the turn that the model is to write; `options` are variables
        of the template (`tools`, `enable_thinking`).

        Raises:
            MappingError: there is no template, or it refuses the conversation.
            MissingPackageError: jinja2 is missing.
        """
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt, **options)
        return self.encode(text, add_special=False)  # the template writes special tokens itself

    def chat_text(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """A conversation as the text that `chat` turns into tokens.

        Raises:
            MappingError, MissingPackageError: as `chat`.
        """
        return self.chat_prefixes(messages, [(len(messages), add_generation_prompt)], **options)[0]

    def chat_prefixes(
        self, messages: Sequence[Message], prefixes: Sequence[tuple[int, bool]], **options: Any
    ) -> list[str]:
        """The texts of the first messages of a conversation, each for a number of messages and
        whether the turn that the model is to write is opened.

        Raises:
            MappingError, MissingPackageError: as `chat`.
        """
        if not self._full.chat_template:
            raise MappingError(
                "the tokenizer has no chat template",
                file=self._place,
                hint="a base model continues plain text; or put a chat_template.jinja beside it",
            )
        try:
            import jinja2  # noqa: F401
        except ModuleNotFoundError as e:
            raise MissingPackageError(
                "chat templates need the jinja2 package", hint="pip install 'megtool[data]'"
            ) from e
        from megtool.data.chat_template import TemplateFault, TemplateRefusal

        if not all(n for n, _ in prefixes):
            raise MappingError(
                "a conversation has no message", file=self._place, hint="give at least one message"
            )
        variables = {
            **self._full.special_tokens_map,
            "tools": None,
            "documents": None,
            **options,
        }
        parts = [(n, variables | {"add_generation_prompt": opens}) for n, opens in prefixes]
        try:
            return self._renderer(options.get("tools")).render_prefixes(messages, parts)
        except TemplateFault as e:
            raise MappingError(
                f"the chat template cannot be used: {e}",
                file=self._template_place(),
                hint="repair or replace the template, whose loops and texts have limits; without "
                "--chat the text is continued as it is",
            ) from e
        except TemplateRefusal as e:
            raise MappingError(
                f"the chat template refuses these messages: {e}",
                file=self._template_place(),
                hint="each message needs a role and a content, in an order that the template "
                "supports",
            ) from e

    def _renderer(self, tools: Any) -> TemplateRenderer:
        """The renderer of the template for these tools, which starts a process at first use."""
        from megtool.data.chat_template import TemplateRenderer

        try:
            template = self._full.get_chat_template(None, tools)
        except ValueError as e:
            raise MappingError(
                f"the tokenizer has no default chat template: {e}",
                file=self._place,
                hint="name one of them default",
            ) from e
        if template not in self._renderers:
            self._renderers[template] = TemplateRenderer(template)
        return self._renderers[template]

    def _template_place(self) -> str:
        """The file that has the chat template."""
        return (
            str(location(self._place) / self._template_file) if self._template_file else self._place
        )

    # ---- with a model

    def check_vocabulary(self, model_vocab_size: int) -> None:
        """Refuse a model whose vocabulary ends before the tokenizer's.

        Raises:
            MappingError: the tokenizer has tokens that the model has no row for.
        """
        if self.vocab_size > model_vocab_size:
            raise MappingError(
                f"the tokenizer has a vocabulary of {self.vocab_size}, and the model one of "
                f"{model_vocab_size}",
                file=self._place,
                hint=f"the model's own tokenizer is needed; {_GIVE}",
            )

    def twin(self) -> Tokenizer:
        """A copy for another thread: fast tokenizers share locks inside."""
        import copy

        if self._fast is None:
            return self
        copied = copy.copy(self)
        copied._renderers = {}
        copied._fast = type(self._fast).from_str(self._fast.to_str())
        return copied


class Stream:
    """Incremental detokenization: text is emitted when it is certain, never half a character.

    What a token adds can depend on tokens before it (a character of several bytes, a space that
    only the next word shows), so a window of the last tokens is decoded with and without the new
    ones, and what is new is shown once it does not end within a character.
    """

    def __init__(
        self, tokenizer: Tokenizer, after: Sequence[int] = (), *, skip_special: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids = list(after[-_WINDOW:])
        self._shown = len(self._ids)  # so many of the window's tokens are shown

    def push(self, token: int) -> str:
        """The text that `token` makes certain; often "" and never half a character."""
        self._ids.append(int(token))
        old, new = self._texts()
        if len(new) <= len(old) or new.endswith("\ufffd"):
            return ""
        del self._ids[: self._shown]
        self._shown = len(self._ids)
        return new[len(old) :]

    def finish(self) -> str:
        """The remaining text at the end: bytes that never became a character, each shown as
        U+FFFD.
        """
        old, new = self._texts()
        self._shown = len(self._ids)
        return new[len(old) :]

    def _texts(self) -> tuple[str, str]:
        """The window's text that is shown already, and all of it."""

        def text(ids: list[int]) -> str:
            return self._tokenizer.decode(ids, skip_special=self._skip_special)

        return text(self._ids[: self._shown]), text(self._ids)


_WINDOW = 8
"""So many tokens of a prompt decide how the first new one is shown."""


@contextmanager
def single_threaded() -> Iterator[None]:
    """Keep fast tokenizers from starting threads while several threads of ours use them."""
    key = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(key)
    os.environ[key] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


def _sentinels(vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """The tokens `<extra_id_0>`, `<extra_id_1>` and so on, as far as there are any."""
    out: list[int] = []
    while (token := vocabulary.get(f"<extra_id_{len(out)}>")) is not None:
        out.append(token)
    return tuple(out)


def holds_vocabulary(name: str) -> bool:
    """Whether a file of this name is enough to make a tokenizer of."""
    return name in _TABLES or name.endswith(".tiktoken")


def _belongs(name: str) -> bool:
    return name.endswith(_SUFFIXES) and not name.endswith(_NOT_OURS)


def _read(name: str, content: Path | bytes) -> bytes:
    """The contents of a file, checked before it is parsed."""
    if isinstance(content, Path):
        status = Files().stat(content)
        check_json_size(status.st_size if status else 0, content)
        data = read_file(content)
    else:
        data = content
    if name.endswith(".json"):
        check_json_size(data, content if isinstance(content, Path) else name)
    return data


def _from_folder(folder: Path, place: str) -> Any:
    """The tokenizer that transformers builds from the files: by their class, or from
    tokenizer.json.
    """
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ModuleNotFoundError as e:
        raise MissingPackageError(
            "tokenizers need the transformers package", hint="pip install 'megtool[hf]'"
        ) from e
    reason: BaseException | None = None
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        if reason is not None and not (folder / "tokenizer.json").is_file():
            break  # else it is complete by itself, whatever class its folder names
        try:
            return kind.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        except BaseException as e:
            if not _is_refusal(e):
                raise
            reason = e
    text = f"there is no {reason}" if isinstance(reason, KeyError) else str(reason)
    message = " ".join(text.split()).replace(str(folder), place)
    for package in ("sentencepiece", "tiktoken", "protobuf"):
        if package in message and not (folder / "tokenizer.json").is_file():
            raise MissingPackageError(
                f"this tokenizer needs the {package} package [file {place}]",
                hint="pip install sentencepiece tiktoken protobuf; or give a folder with a "
                "tokenizer.json: --tokenizer FOLDER",
            ) from reason
    raise FormatError(
        f"transformers cannot read the tokenizer: {message}", file=place, hint=_GIVE
    ) from reason


_REFUSALS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError)
"""What transformers raises on files that it cannot use."""


def _is_refusal(error: BaseException) -> bool:
    """Whether the files are at fault: tokenizers raises bare exceptions, huggingface_hub its
    own.
    """
    is_hub_error = type(error).__module__.partition(".")[0] == "huggingface_hub"
    return isinstance(error, _REFUSALS) or type(error) is Exception or is_hub_error


def _stop_ids(folder: Path, place: str) -> list[int]:
    """The ids at which generation stops, by generation_config.json, or else by config.json."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            config = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as e:
            raise FormatError(f"the JSON is invalid: {e}", file=location(place) / name) from e
        eos = config.get("eos_token_id") if isinstance(config, dict) else None
        ids = eos if isinstance(eos, list) else [eos]
        if ids := [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]:
            return ids
    return []
