"""The walk over the opcodes of bytes that may be a pickle, against what the C unpickler takes."""

from __future__ import annotations

import io
import pickle
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import FormatError
from megtool.pickles.payload import is_tar, read_payload, scan_pickle
from megtool.pickles.rules import payload_problems

CALL = b"cmycompany.tools\nrun\n(S'x'\ntR."
PREFIXES = (
    b"I0x10\n0",
    b"L0x10L\n0",
    b"\x80\x02I0x10\n0",
    b"I 1\x00\n0",
    b"S'\xc3\xa9'\n0",
    b"S'\\q'\n0",
    b"V\\ud800\n0",
    b"F1_0\n0",
    b"I1\np 1\n0",
    b"\x80\x04\x95\x02\0\0\0\0\0\0\0",
    b"\x80\x02L119547037146038801333356L\n.",  # a magic number, as another stream of torch has it
    b"N0" * (1 << 20),
)


class Seen(Exception):
    """A global that the C unpickler would have imported."""


class Loader(pickle.Unpickler):
    """The C unpickler, which stops at the first global."""

    def find_class(self, module: str, name: str) -> object:
        raise Seen(f"{module}.{name}")


@pytest.mark.parametrize("prefix", PREFIXES, ids=lambda p: repr(p[:12]))
def test_no_argument_hides_what_follows_it(prefix: bytes) -> None:
    for tail in (b"", b"\0", b"\xff" * 9, b"."):
        data = prefix + CALL + tail
        assert "mycompany.tools.run" in scan_pickle(data).names
        assert any("mycompany.tools.run" in p for p in payload_problems(data))


def test_a_name_from_the_stack_counts_whatever_lies_on_top_of_it() -> None:
    data = b"\x80\x04\x8c\x09mycompany\x8c\x03run\x8c\x01!\x8c\x01?00\x93)R."
    assert scan_pickle(data).names == ("a class by strings on its stack",)
    assert payload_problems(data)
    with pytest.raises(Seen, match=r"mycompany\.run"):
        Loader(io.BytesIO(data)).load()


def test_opcodes_without_end_are_refused() -> None:
    data = b"I1\n0" * (1 << 20) + CALL
    assert scan_pickle(data).names == ("more than can be checked",)
    assert payload_problems(data)


def test_a_module_of_python_counts_though_nothing_is_done_with_it() -> None:
    assert scan_pickle(b"cantigravity\nx\n\xff").names == ("antigravity.x",)
    assert scan_pickle(b"cat\nmat\nhat").names == ()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("has_magic", [True, False])
def test_a_tar_is_known_by_its_checksum(form: int, has_magic: bool) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        member = tarfile.TarInfo("pickle")
        member.size = len(CALL)
        tar.addfile(member, io.BytesIO(CALL))
    data = bytearray(file.getvalue())
    if not has_magic:  # as tar of 1979 wrote it
        data[257:265] = bytes(8)
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(data[:512])
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        assert tar.getnames() == ["pickle"]
    assert is_tar(bytes(data))
    with pytest.raises(FormatError, match=r"before 1\.6"):
        read_payload(bytes(data))
    data[150] ^= 1
    assert not is_tar(bytes(data))
    assert not is_tar(bytes(1024))


def loaded_global(data: bytes, encoding: str) -> str | None:
    """The first global that the C unpickler asks for; extension codes count too."""
    try:
        Loader(io.BytesIO(data), encoding=encoding).load()
    except Seen as e:
        return str(e)
    except Exception as e:
        return "extension" if "extension" in str(e) else None
    return None


OPCODES = st.sampled_from(
    [
        *(bytes((code,)) for code in range(256)),
        *(p for p in PREFIXES if len(p) < 100),
        b"\x8c\x02os",
        b"X\x02\0\0\0os",
        b"U\x02os",
        b"Vos\n",
        b"S'os'\n",
        b"q\1",
        b"h\1",
        b"I1\n",
        b"K\1",
        b"C\2ab",
        b"\x80\4",
        b"cos\nsystem\n",
        b"ios\nsystem\n",
        b"\x93",
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(OPCODES, max_size=12).map(b"".join), st.sampled_from(["ASCII", "utf-8", "latin1"]))
def test_whatever_the_c_unpickler_imports_is_found(data: bytes, encoding: str) -> None:
    seen = loaded_global(data, encoding)
    if seen is not None and seen.startswith("os."):
        assert scan_pickle(data).names
        assert payload_problems(data)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=300), st.text(max_size=100).map(str.encode)))
def test_bytes_and_text_are_not_refused_unless_they_name_something(data: bytes) -> None:
    """Refused is what names a global as far as its opcodes go, and nothing else."""
    names = scan_pickle(data).names
    if not names:
        assert read_payload(data) is None or not payload_problems(data)
    else:
        assert any(mark in data for mark in (b"c", b"i", b"\x93", b"\x82", b"\x83", b"\x84"))


def test_random_states_and_texts_pass() -> None:
    rng = np.random.default_rng(1)
    for number in range(3000):
        assert payload_problems(rng.bytes(200 + number % 50)) == ()
    for seed in range(20):
        key = np.random.RandomState(seed).get_state(legacy=False)["state"]["key"]
        assert payload_problems(key.tobytes()) == ()
    for text in (
        "the cat\nsat on\nthe mat.\n",
        "import os\nos.system('ls')\n",
        '{"a": 1}\n',
        "0 1 2",
    ):
        assert payload_problems(text.encode()) == ()
    assert payload_problems(bytes(1 << 20)) == ()
    assert payload_problems(b"0" * (3 << 20)) == ()
