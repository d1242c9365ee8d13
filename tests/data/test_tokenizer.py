"""Tokenizers: transformers' own as the oracle, and what goes wrong in words."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from megtool.commands.demo import demo_weights
from megtool.data.documents import Document
from megtool.data.tokenize_documents import encode as encode_documents
from megtool.data.tokenizer import Tokenizer
from megtool.errors import FormatError, MappingError, MissingPackageError
from megtool.formats.auxiliary_files import MAX_AUXILIARY_BYTES
from megtool.source.find_tokenizer import find_tokenizer
from megtool.storage.stores.json_size import MAX_PARSED_BYTES
from tests.support.errors import raises
from tests.support.models import tiny_tokenizer

CHAT = [{"role": "user", "content": "the text"}, {"role": "assistant", "content": "it reads"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.save(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def test_tokens_are_those_of_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    peer = AutoTokenizer.from_pretrained(str(folder))
    text = "the model — writes <|eos|> words\n\n again"
    assert tokenizer.encode(text) == peer.encode(text)
    assert tokenizer.vocab_size == len(peer) == 300
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, None)
    said = peer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert tokenizer.chat(CHAT[:1]) == list(said)
    whole = peer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.chat_text(CHAT, add_generation_prompt=False) == whole


def test_what_a_tokenizer_puts_around_a_text_can_be_left_out(tmp_path: Path) -> None:
    with_bos = Tokenizer.from_folder(tiny_tokenizer.save(tmp_path, bos=True))
    assert with_bos.encode("word")[0] == 0
    assert with_bos.encode("word", add_special=False) == with_bos.encode("word")[1:]
    assert with_bos.chat(CHAT)[0] == 2  # the template writes its own special tokens


def test_a_text_that_has_the_special_tokens_has_them_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A text that a chat template rendered is what the conversation itself is in transformers."""
    from transformers import AutoTokenizer

    root = tiny_tokenizer.save(tmp_path, bos=True)
    peer = AutoTokenizer.from_pretrained(str(root))
    peer.chat_template = "{{ bos_token }}" + peer.chat_template
    rendered = peer.apply_chat_template(CHAT, tokenize=False)
    expected = list(peer.apply_chat_template(CHAT, return_dict=False))
    tokenizer = Tokenizer.from_folder(root)
    assert peer.encode(rendered)[:2] == [tokenizer.bos_id] * 2
    assert tokenizer.encode_batch([rendered, "the text", rendered]) == [
        expected,
        peer.encode("the text"),
        expected,
    ]
    assert [r.message for r in caplog.records] == [
        f"texts have {peer.bos_token} already, which the tokenizer adds: it is there once"
    ]
    rows = encode_documents(
        [Document(text=rendered, file="f", number=1)], tokenizer, append_eos=False
    )
    assert [row.ids.tolist() for row in rows] == [expected]
    twice = peer.encode(peer.bos_token * 2 + "word", add_special_tokens=False)
    assert tokenizer.encode(peer.bos_token * 2 + "word") == twice  # as it is written


def test_an_end_that_the_tokenizer_adds_is_there_once(tmp_path: Path) -> None:
    rules = json.loads((tiny_tokenizer.save(tmp_path) / "tokenizer.json").read_text())
    end = next(t for t in rules["added_tokens"] if t["id"] == 1)["content"]
    rules["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": end, "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {end: {"id": end, "ids": [1], "tokens": [end]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("word" + end) == tokenizer.encode("word")
    assert tokenizer.encode("word")[-1] == 1
    assert tokenizer.encode("") == [1]


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "config.json", "special_tokens_map.json"]
)
def test_files_that_would_take_gigabytes_are_not_parsed(
    folder: Path, tmp_path: Path, name: str
) -> None:
    root = shutil.copytree(folder, tmp_path / "copy")
    with (root / name).open("wb") as file:
        file.truncate(MAX_AUXILIARY_BYTES + 1)
    with raises(FormatError, "bytes", file=root / name, hint=True):
        Tokenizer.from_folder(root)
    (root / name).write_bytes(b"[" + b"[]," * (MAX_PARSED_BYTES // 88 + 1) + b"[]]")
    with raises(FormatError, "values", file=root / name, hint=True):
        Tokenizer.from_folder(root)


def test_deeply_nested_json_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("generation_config.json", "tokenizer.json"):
        root = shutil.copytree(folder, tmp_path / name)
        (root / name).write_bytes(b"[" * 100_000)
        with pytest.raises(FormatError):
            Tokenizer.from_folder(root)


def test_stop_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    root = tiny_tokenizer.save(tmp_path)
    assert Tokenizer.from_folder(root).eos_ids == (3, 1)
    (root / "generation_config.json").unlink()
    assert Tokenizer.from_folder(root).eos_ids == (1,)
    (root / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert Tokenizer.from_folder(root).eos_ids == (2, 1)


@given(st.text(max_size=40))
def test_a_stream_shows_the_text_and_never_half_a_character(
    tokenizer: Tokenizer, text: str
) -> None:
    stream = tokenizer.stream()
    ids = tokenizer.encode(text)
    shown = [stream.push(i) for i in ids]
    last = stream.finish()
    assert "".join(shown) + last == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(shown)


def test_a_stream_ends_with_what_never_became_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("word €")[:-1]
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) == "word "
    assert set(stream.finish()) == {"\ufffd"}
    assert stream.finish() == ""


def test_a_stream_goes_on_after_a_prompt(tokenizer: Tokenizer) -> None:
    prompt, answer = tokenizer.encode("the model"), tokenizer.encode(" reads")
    stream = tokenizer.stream(prompt)
    assert "".join(map(stream.push, answer)) == " reads"


def test_a_twin_gives_the_same_tokens(tokenizer: Tokenizer) -> None:
    text = "every word is counted"
    assert tokenizer.twin().encode(text) == tokenizer.encode(text)


def test_a_vocabulary_must_fit_the_model(tokenizer: Tokenizer) -> None:
    tokenizer.check_vocabulary(300)
    with pytest.raises(MappingError, match=r"vocabulary of 300, and the model one of 299"):
        tokenizer.check_vocabulary(299)


def test_no_tokenizer_says_what_would_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with raises(FormatError, id="no-tokenizer", hint="tokenizer.json") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "--tokenizer FOLDER" in str(caught.value.hint)
    with raises(FormatError, id="no-tokenizer"):
        Tokenizer.from_folder(tmp_path / "missing")


@pytest.mark.parametrize(
    "data",
    [b"{", b"{}", b'{"added_tokens": [], "model": {"type": "Foo"}}', b"\xff\xfe", b"[]", b""],
)
def test_a_broken_tokenizer_is_a_format_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with raises(FormatError, match="cannot read the tokenizer", file=tmp_path):
        Tokenizer.from_folder(tmp_path)


def test_code_of_a_tokenizer_never_runs(folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    root = tiny_tokenizer.save(tmp_path / "t")
    (root / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (root / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.from_folder(root).encode("the")  # of its tokenizer.json alone
    (root / "tokenizer.json").rename(root / "vocab.json")
    with pytest.raises((FormatError, MissingPackageError)):
        Tokenizer.from_folder(root)
    assert not ran.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(999999999) %}x{% endfor %}",
        "{% if %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_a_template_that_is_broken_or_hostile_is_to_blame(tmp_path, template):
    tokenizer = Tokenizer.from_folder(tiny_tokenizer.save(tmp_path, template=template))
    with pytest.raises(MappingError, match="the chat template cannot be used"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_chat_without_a_template_or_with_wrong_messages(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    base = Tokenizer.from_folder(tiny_tokenizer.save(tmp_path, template=None))
    with pytest.raises(MappingError, match="no chat template"):
        base.chat(CHAT)
    with pytest.raises(MappingError, match="role robot"):
        tokenizer.chat([{"role": "robot", "content": "x"}])
    with pytest.raises(MappingError, match="'role'"):
        tokenizer.chat([{"content": "x"}])


@pytest.mark.parametrize("package", ["transformers", "jinja2"])
def test_a_missing_package_is_named(
    folder: Path, tokenizer: Tokenizer, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name: str, *args: object, **kinds: object) -> object:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *args, **kinds)

    monkeypatch.setattr(builtins, "__import__", without)
    call = (lambda: tokenizer.chat(CHAT)) if package == "jinja2" else None
    with raises(MissingPackageError, match=package, hint="pip install 'megtool["):
        (call or (lambda: Tokenizer.from_folder(folder)))()


@pytest.mark.slow
def test_a_gguf_file_has_its_tokenizer_inside() -> None:
    pytest.importorskip("gguf")
    try:
        found = find_tokenizer(demo_weights())
    except MissingPackageError as e:
        pytest.skip(e.message)
    assert found.vocab_size == 49152
    assert found.decode(found.encode("日本語 text")) == "日本語 text"
    assert found.chat([{"role": "user", "content": "hi"}])[-4:] == found.encode(
        "<|im_start|>assistant\n"
    )


def test_a_rule_that_backtracks_without_end_is_an_error(tmp_path: Path) -> None:
    folder = tiny_tokenizer.save(tmp_path)
    path = folder / "tokenizer.json"
    rules = json.loads(path.read_text())
    rules["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(x+x+)+y"},
        "behavior": "Isolated",
        "invert": False,
    }
    path.write_text(json.dumps(rules))
    tokenizer = Tokenizer.from_folder(folder)
    for encode in (tokenizer.encode, tokenizer.encode_spans):
        with raises(FormatError, file="tokenizer.json"):
            encode("x" * 60)
