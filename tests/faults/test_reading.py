"""Reading faults R1-R9: a damaged or hostile checkpoint ends in one typed error, nothing written.

What each format refuses is proved beside it; here the same damage goes through whole commands.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from megtool.checkpoint.formats import open_checkpoint
from megtool.cli import main
from megtool.commands.inspect import inspect
from megtool.commands.reshard import reshard
from megtool.commands.verify import verify
from megtool.errors import (
    CoverageError,
    DigestError,
    FormatError,
    MegtoolError,
)
from tests.commands import tiny_llama
from tests.commands.tiny_llama import contents, left_overs, tensors

SMALL = {"num_hidden_layers": 1, "vocab_size": 5}
FORMATS: dict[str, dict[str, Any]] = {
    "hf": {"to": "hf", "max_shard_size": "6KB"},
    "safetensors": {"to": "safetensors"},
    "torch_dist": {"to": "torch_dist", "tp": 2},
    "dcp": {"to": "dcp", "dp": 2},
}
DIGESTED = ("hf", "torch_dist", "dcp")


def save_gguf(path: Path, original: Path) -> None:
    """The same model as llama.cpp's tools write it."""
    writer = gguf.GGUFWriter(path, "llama")
    c = json.loads((original / "config.json").read_text())
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_vocab_size(c["vocab_size"])
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, (_, shape, data) in tensors(original).items():
        for old, new in names.items():
            name = name.replace(old, new)
        writer.add_tensor(name, np.frombuffer(data, np.float16).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound checkpoint of every format, of the same model; those in folders have digests."""
    root = tmp_path_factory.mktemp("sound")
    original = tiny_llama.save(root / "original", dtype="float16", **SMALL)
    out = {}
    for name, options in FORMATS.items():
        out[name] = root / (f"{name}.safetensors" if name == "safetensors" else name)
        reshard(original, out[name], digest="all", **options)
    out["gguf"] = root / "model.gguf"
    save_gguf(out["gguf"], original)
    return out


@pytest.fixture
def copied(sound: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a sound checkpoint, to be damaged."""

    def copy(kind: str) -> Path:
        target = tmp_path / sound[kind].name
        if sound[kind].is_dir():
            shutil.copytree(sound[kind], target)
        else:
            shutil.copy2(sound[kind], target)
        return target

    return copy


def files_of(path: Path) -> list[Path]:
    """All files of a checkpoint but the tokenizer, which is carried along unread."""
    found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return [p for p in found if p.name != "tokenizer.json"]


def attempt(path: Path, **options: Any) -> MegtoolError | None:
    """Reshard with every byte digested; the typed error it ends in, with nothing written."""
    out = path.parent / "result"
    try:
        reshard(path, out, fsync=False, threads=1, digest="all", **options)
    except MegtoolError as e:
        assert not out.exists()
        assert e.message
        assert e.exit_status in (2, 3, 5), e
        return e
    return None


def result(path: Path) -> dict[str, Any]:
    """The tensors that `attempt` wrote; they are removed."""
    out = path.parent / "result"
    if out.is_file():
        found: dict[str, Any] = tensors(out)
        out.unlink()
        return found
    if not list(out.glob("*.safetensors")):
        reshard(out, path.parent / "plain", to="hf")
        shutil.rmtree(out)
        out = path.parent / "plain"
    found = tensors(out)
    shutil.rmtree(out)
    return found


def put(file: Path, data: bytes) -> None:
    """Write a file and leave its times as they were."""
    found = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


def payload(path: Path) -> list[tuple[Path, int, int, str]]:
    """File, offset, length and name of all tensor data."""
    c = open_checkpoint(path)
    at = c.locate(np.arange(len(c.shards))).offset
    item = np.array([t.dtype.itemsize for t in c.tensors])[c.shards.tensor]
    length = c.shards.boxes.volume() * item
    file = c.extents.file.tolist()
    names = [c.tensors[t].name for t in c.shards.tensor.tolist()]
    rows = zip(file, at.tolist(), length.tolist(), names, strict=True)
    return [(c.path(f), a, n, name) for f, a, n, name in rows]


# ---- R1: flipped bits


@pytest.mark.parametrize("kind", DIGESTED)
def test_any_flipped_bit_of_a_tensor_is_found(
    copied: Callable[[str], Path], sound: dict[str, Path], kind: str
) -> None:
    rng = random.Random(kind)
    path = copied(kind)
    padding = ("word_embeddings", "output_layer")
    extents = [x for x in payload(path) if not any(p in x[3] for p in padding)]
    for file, at, length, name in extents * 2:
        whole = file.read_bytes()
        data = bytearray(whole)
        data[at + rng.randrange(length)] ^= 1 << rng.randrange(8)
        put(file, bytes(data))
        error = attempt(path)
        assert isinstance(error, DigestError), (file, at, name)
        assert error.tensor
        assert str(path) in (error.file or "")
        assert error.hint
        report = verify(path)
        assert (report.exit_status, report.verdict) == (7, "different")
        report = verify(sound[kind], path)
        assert report.exit_status == 7
        put(file, whole)
        shutil.rmtree(path.parent / ".result.megtool")
    assert verify(path).verdict == "ok"


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_checkpoint_without_digests_is_unverified_and_never_ok(
    sound: dict[str, Path], kind: str
) -> None:
    report = verify(sound[kind])
    assert (report.verdict, report.exit_status) == ("unverified", 0)


def test_a_hugging_face_folder_from_elsewhere_is_unverified(tmp_path: Path) -> None:
    original = tiny_llama.save(tmp_path / "hf", **SMALL)
    assert verify(original).verdict == "unverified"
    report = reshard(original, tmp_path / "out", to="torch_dist", digest="none")
    assert report.unverified == len(tensors(original))
    assert verify(tmp_path / "out").verdict == "unverified"


def harmless(path: Path, want: dict[str, Any], where: object) -> None:
    """What came through in spite of the damage holds exactly the original tensors."""
    assert result(path) == want, where


def check_flips(
    path: Path, want: dict[str, Any], *, every: int, options: dict[str, Any]
) -> tuple[int, int]:
    """Flip a bit of every n-th byte outside tensors; how many were refused and how many harmless.

    A changed value in config.json is not damage that anybody could see, unless the model changes.
    """
    rng = random.Random(every)
    data = {x[0]: set() for x in payload(path)}
    for file, at, length, _ in payload(path):
        data[file] |= set(range(at, at + length))
    refused = passed = 0
    for file in files_of(path):
        whole = file.read_bytes()
        for at in range(rng.randrange(every), len(whole), every):
            if at in data.get(file, ()):
                continue
            changed = bytearray(whole)
            changed[at] ^= 1 << rng.randrange(8)
            put(file, bytes(changed))
            if attempt(path, **options) is None:
                passed += 1
                harmless(path, want, (file.name, at, whole[max(0, at - 20) : at + 20]))
            else:
                refused += 1
            staging = path.parent / ".result.megtool"
            if staging.exists():
                shutil.rmtree(staging)
        put(file, whole)
    return refused, passed


@pytest.mark.parametrize("every", [53, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["hf", "torch_dist", "dcp", "gguf"])
def test_a_flipped_bit_anywhere_else_is_refused_or_harmless(
    copied: Callable[[str], Path], kind: str, every: int
) -> None:
    path = copied(kind)
    options = {"to": "hf"}
    assert attempt(path, **options) is None
    want = result(path)
    refused, passed = check_flips(path, want, every=every, options=options)
    assert refused > 10
    assert passed > 0


# ---- R2: truncation


def cuts(size: int, header: int, every: int) -> Iterator[int]:
    """Where to cut a file: in its header, at every 4 KiB, and at its last bytes."""
    yield from range(0, min(header, size), every)
    yield from range(0, size, 4096)
    yield from range(max(0, size - 3), size)


@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*FORMATS, "gguf"])
def test_every_truncation_is_refused(copied: Callable[[str], Path], kind: str, every: int) -> None:
    path = copied(kind)
    for file in files_of(path):
        if file.name == "latest_checkpointed_iteration.txt":
            continue
        whole = file.read_bytes()
        for size in sorted(set(cuts(len(whole), 2000, every))):
            put(file, whole[:size])
            error = attempt(path)
            if error is None:
                assert whole[size:].isspace(), (file.name, size)
                result(path)
            else:
                assert error.file or error.tensor, (file.name, size)
        put(file, whole)
    assert attempt(path) is None


# ---- R4: files that are missing, too many, swapped or old


@pytest.mark.parametrize("kind", DIGESTED)
def test_a_missing_file_is_named(copied: Callable[[str], Path], kind: str) -> None:
    path = copied(kind)
    for file in files_of(path):
        if not file.name.endswith((".distcp", ".safetensors")):
            continue
        file.rename(path.parent / "away")
        error = attempt(path)
        assert isinstance(error, FormatError)
        assert file.name in str(error)
        (path.parent / "away").rename(file)
    assert attempt(path) is None


@pytest.mark.parametrize("kind", ["hf", "torch_dist", "dcp"])
def test_an_extra_shard_changes_nothing(
    copied: Callable[[str], Path], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    path = copied(kind)
    assert attempt(path, to="hf") is None
    want = result(path)
    one = next(f for f in files_of(path) if f.name.endswith((".distcp", ".safetensors")))
    name = "__9_0.distcp" if one.suffix == ".distcp" else "extra.safetensors"
    shutil.copy(one, one.with_name(name))
    caplog.set_level("WARNING")
    assert attempt(path, to="hf") is None
    assert result(path) == want
    assert name in caplog.text


@pytest.mark.parametrize("kind", DIGESTED)
def test_swapped_files_are_refused(copied: Callable[[str], Path], kind: str) -> None:
    path = copied(kind)
    one, two, *_ = [f for f in files_of(path) if f.name.endswith((".distcp", ".safetensors"))]
    a, b = one.read_bytes(), two.read_bytes()
    put(one, b)
    put(two, a)
    assert isinstance(attempt(path), FormatError | DigestError)


@pytest.mark.parametrize("kind", DIGESTED)
def test_a_shard_of_an_older_iteration_is_refused(
    copied: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    path = copied(kind)
    older = tiny_llama.save(tmp_path / "older", seed=3, dtype="float16", **SMALL)
    reshard(older, tmp_path / "old", **FORMATS[kind])
    stale = next(f for f in files_of(path) if f.name.endswith((".distcp", ".safetensors")))
    put(stale, (tmp_path / "old" / stale.relative_to(path)).read_bytes())
    assert isinstance(attempt(path), DigestError)
    assert verify(path).verdict == "different"


def test_an_unfinished_save_is_refused(copied: Callable[[str], Path]) -> None:
    path = copied("torch_dist")
    (path / "release" / "metadata.json").unlink()
    error = attempt(path)
    assert isinstance(error, FormatError)
    assert "unfinished" in error.message


# ---- R5: coverage


def change_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    """Edit the metadata that torch reads."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def drop_chunk(metadata: Any) -> None:
    key = next(k for k in metadata.storage_data if k.fqn.endswith("linear_proj.weight"))
    del metadata.storage_data[key]
    chunks = metadata.state_dict_metadata[key.fqn].chunks
    chunks[:] = [c for c in chunks if c.offsets != key.offset]


def move_chunk(metadata: Any) -> None:
    import torch

    key = next(
        k
        for k in metadata.storage_data
        if k.fqn.endswith("linear_proj.weight") and k.offset[-1] > 0
    )
    at = torch.Size([*key.offset[:-1], key.offset[-1] - 1])
    metadata.storage_data[type(key)(key.fqn, at, key.index)] = metadata.storage_data.pop(key)
    for chunk in metadata.state_dict_metadata[key.fqn].chunks:
        if chunk.offsets == key.offset:
            chunk.offsets = at


@pytest.mark.parametrize("change", [drop_chunk, move_chunk])
def test_holes_and_overlaps_are_refused(
    copied: Callable[[str], Path], change: Callable[[Any], None]
) -> None:
    path = copied("torch_dist")
    change_metadata(path / "release", change)
    error = attempt(path)
    assert isinstance(error, CoverageError)
    assert "linear_proj.weight" in (error.tensor or "")


# ---- R6, R7, R8: hostile headers, pickles and zips


def hostile_headers() -> dict[str, bytes]:
    def frame(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text

    def one(dtype: str, shape: str, offsets: str) -> bytes:
        entry = f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'
        return frame(f'{{"lm_head.weight":{entry}}}'.encode())

    return {
        "length of 2**63": (1 << 63).to_bytes(8, "little") + b"{}",
        "overflow": one("F32", f"[{1 << 40},{1 << 40}]", "[0,0]"),
        "negative": one("F32", "[-1]", "[0,4]"),
        "unknown dtype": one("F13", "[1]", "[0,4]"),
        "reversed": one("F32", "[1]", "[4,0]"),
        "nan": one("F32", "[NaN]", "[0,4]"),
        "deep": frame(b"[" * 100_000),
        "duplicate": frame(b'{"a":1,"a":2}'),
        "not text": frame(b'{"\xff":1}'),
        "empty": b"",
    }


HEADERS = hostile_headers()


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_headers_are_refused(tmp_path: Path, case: str) -> None:
    original = tiny_llama.save(tmp_path / "hf", **SMALL)
    (original / "model.safetensors").write_bytes(HEADERS[case])
    error = attempt(original, to="torch_dist")
    assert isinstance(error, FormatError)
    assert str(original) in (error.file or "")
    assert left_overs(tmp_path) == []


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


PICKLES = {
    "system": pickle.dumps(Call(os.system, "touch pwned"), protocol=2),
    "eval": pickle.dumps(Call(eval, "1"), protocol=2),
    "open": pickle.dumps(Call(open, "/etc/passwd"), protocol=2),
    "getattr": b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\nX\x01\0\0\0a\x86R.",
    "import": b"\x80\x02csubprocess\nPopen\nX\x04\0\0\0true\x85R.",
    "memo bomb": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "noise": bytes(range(256)),
}


def replace_pickle(file: Path, data: bytes) -> None:
    """Put another pickle into a zip that torch wrote."""
    with zipfile.ZipFile(file) as z:
        members = {n: z.read(n) for n in z.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as z:
        for name, old in members.items():
            z.writestr(name, data if name.endswith("data.pkl") else old)


@pytest.mark.parametrize("place", [".metadata", "common.pt"])
@pytest.mark.parametrize("case", PICKLES)
def test_nothing_a_pickle_names_is_run(
    copied: Callable[[str], Path], audit: Any, case: str, place: str
) -> None:
    path = copied("torch_dist")
    out = path.parent / "result"
    commands: list[Callable[[], Any]] = [
        lambda: inspect(path),
        lambda: verify(path),
        lambda: reshard(path, out, overwrite=True),
    ]
    for command in commands:
        command()  # what has to be imported is imported now
    shutil.rmtree(out)
    if place == ".metadata":
        (path / "release" / place).write_bytes(PICKLES[case])
    else:
        replace_pickle(path / "release" / place, PICKLES[case])
    for command in commands:
        audit.seen.clear()
        audit.watching = True
        try:
            with pytest.raises(FormatError) as e:
                command()
        finally:
            audit.watching = False
        assert place in (e.value.file or "")
        assert {event for event, _ in audit.seen} <= {"open", "os.listdir", "os.scandir"}
        opened = [str(x) for event, x in audit.seen if event == "open"]
        assert [x for x in opened if not x.startswith(str(path))] == []
    assert not Path("pwned").exists()
    assert not out.exists()


def test_compressed_items_are_refused(copied: Callable[[str], Path]) -> None:
    path = copied("torch_dist")
    file = path / "release" / "common.pt"
    with zipfile.ZipFile(file) as z:
        members = {n: z.read(n) for n in z.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as z:
        for name, data in members.items():
            z.writestr(name, data)
    assert isinstance(attempt(path), FormatError)


# ---- R9: paths


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/etc/passwd", "a/../../b", "C:\\x", "a\0b"]
)
def test_an_index_that_leads_out_is_refused(copied: Callable[[str], Path], name: str) -> None:
    path = copied("hf")
    index = path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["lm_head.weight"] = name
    index.write_text(json.dumps(value))
    error = attempt(path)
    assert isinstance(error, FormatError)
    assert error.file == str(index)


@pytest.mark.parametrize("kind", DIGESTED)
def test_a_data_file_that_is_a_link_out_is_refused(
    copied: Callable[[str], Path], kind: str
) -> None:
    path = copied(kind)
    file = next(f for f in files_of(path) if f.name.endswith((".distcp", ".safetensors")))
    away = path.parent / "elsewhere"
    away.mkdir()
    file.rename(away / file.name)
    file.symlink_to(away / file.name)
    error = attempt(path)
    assert isinstance(error, FormatError)
    assert file.name in str(error)


def test_links_out_are_not_carried_along(
    copied: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = copied("torch_dist")
    secret = path.parent / "secret"
    secret.write_text("secret")
    (path / "release" / "hf" / "notes.txt").symlink_to(secret)
    caplog.set_level("WARNING")
    assert attempt(path) is None
    written = contents(path.parent / "result")
    assert written
    assert b"secret" not in written.values()
    assert "notes.txt" in caplog.text


def test_names_of_tensors_are_never_paths(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    odd = ["../../evil", "/etc/evil", "a/b", "nul\0", "é" * 300, " ", "__x__"]
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({n: np.arange(3.0) for n in odd}, folder / "odd.safetensors")
    reshard(folder / "odd.safetensors", folder / "out.safetensors")
    reshard(folder / "odd.safetensors", folder / "dcp", to="dcp")
    reshard(folder / "dcp", folder / "back.safetensors", to="safetensors")
    assert tensors(folder / "back.safetensors") == tensors(folder / "odd.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


# ---- the command line says it in one line


@pytest.mark.parametrize("verb", ["inspect", "reshard", "verify"])
@pytest.mark.parametrize("kind", [*FORMATS, "gguf"])
def test_the_command_line_tells_damage_in_one_line(
    copied: Callable[[str], Path], capsys: pytest.CaptureFixture[str], kind: str, verb: str
) -> None:
    path = copied(kind)
    first = (".metadata", "model-00001-of-", path.name)
    file = next(f for f in files_of(path) if f.name.startswith(first))
    put(file, file.read_bytes()[:100])
    out = path.parent / "result"
    status = main([verb, str(path), *([str(out)] if verb == "reshard" else [])])
    told = capsys.readouterr()
    assert status == 3
    assert told.out == ""
    errors = [line for line in told.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "Traceback" not in told.err
    assert file.name in told.err
    assert not out.exists()
    assert left_overs(path.parent) == []
