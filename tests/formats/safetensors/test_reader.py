"""Safetensors: real files in, valid files out, and every broken or hostile header refused."""

import contextlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool.dtypes import DTYPES, dtype
from megtool.errors import DestinationError, FormatError, UsageError
from megtool.formats.safetensors.reader import INDEX, open_checkpoint, plan_safetensors_layout
from megtool.tensors.sharded import GlobalTensor
from tests.support.checkpoints.reads import read_so_far
from tests.support.errors import raises


def contents(catalogue):
    """Raw bytes of every tensor, by name."""
    out = {}
    for row, t in enumerate(catalogue.tensors):
        e = catalogue.extents
        with catalogue.path(int(e.file[row])).open("rb") as f:
            f.seek(int(e.offset[row]))
            out[t.name] = f.read(int(e.length[row]))
    return out


def raw(tensor):
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def write(destination, root, data):
    """Write a destination's files, tensors out of `data` (bytes by name)."""
    catalogue = destination.catalogue
    for file in catalogue.files:
        with (root / file.path).open("wb") as f:
            f.truncate(file.size)
    for row, offset, fragment in destination.fragments:
        with (root / catalogue.files[row].path).open("r+b") as f:
            f.seek(offset)
            f.write(fragment)
    for row, t in enumerate(catalogue.tensors):
        e = catalogue.extents
        with (root / catalogue.files[int(e.file[row])].path).open("r+b") as f:
            f.seek(int(e.offset[row]))
            f.write(data[t.name])
            assert len(data[t.name]) == int(e.length[row])
    for name, small in destination.iter_small_files():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(small)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama as transformers saves it, in shards with an index, and its state."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    model = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder, max_shard_size="150KB")
    return folder, model.state_dict()


def pair(folder):
    """A folder of two shards with an index; returns the names of its tensors."""
    save = safetensors.torch.save_file
    save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5)}, folder / "m-1.safetensors")
    save({"c": torch.zeros(4, dtype=torch.int64)}, folder / "m-2.safetensors")
    names = {"a": "m-1.safetensors", "b": "m-1.safetensors", "c": "m-2.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return names


# -- reading real files


def test_opens_a_bare_file_of_every_dtype(tmp_path):
    state = {}
    for d in DTYPES:
        if d.safetensors and hasattr(torch, d.name):
            state[d.name] = torch.arange(24, dtype=torch.uint8).view(getattr(torch, d.name))
            if d.name == "bool":
                state[d.name] = torch.tensor([True, False])
    state |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 7), "grid": torch.ones(2, 3, 4)}
    path = tmp_path / "all.safetensors"
    safetensors.torch.save_file(state, path, {"format": "pt", "note": "ünï"})
    c = open_checkpoint(path)
    assert c.format == "safetensors"
    assert c.metadata["header"] == {"format": "pt", "note": "ünï"}
    assert {t.name: (t.shape, f"torch.{t.dtype}") for t in c.tensors} == {
        k: (tuple(v.shape), str(v.dtype)) for k, v in state.items()
    }
    assert contents(c) == {k: raw(v) for k, v in state.items()}
    assert len(state) > 15


def test_opens_what_transformers_saved(llama):
    folder, state = llama
    c = open_checkpoint(folder)
    assert c.format == "hf"
    assert c.metadata["config"]["num_key_value_heads"] == 2
    assert len(c.files) > 1
    assert contents(c) == {k: raw(v) for k, v in state.items()}
    assert set(c.auxiliary_files) == {"config.json", "generation_config.json"}
    assert c.warnings == []
    by_index = open_checkpoint(folder / INDEX)
    assert contents(by_index) == contents(c)
    assert (c.shards.owner == c.extents.file).all()


def test_opening_reads_headers_only(tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({f"t{i}": torch.zeros(1 << 20) for i in range(8)}, path)
    open_checkpoint(tmp_path)

    before = read_so_far()
    open_checkpoint(tmp_path)
    assert read_so_far() - before < 16 << 10


def test_plain_opening_imports_no_torch(llama):
    code = (
        "import sys; from megtool.formats.safetensors.reader import open_checkpoint;"
        f"from pathlib import Path; open_checkpoint(Path({str(llama[0])!r}));"
        "sys.exit(bool({'torch', 'safetensors', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path.cwd()).returncode == 0


def test_attachments_are_the_small_files(tmp_path):
    pair(tmp_path)
    for name in ["config.json", "tokenizer.json", "README.md", "LICENSE", "chat_template.jinja"]:
        (tmp_path / name).write_text("{}")
    for name in ["x.bin", "optimizer.pt", "m.gguf", "tf.h5", ".gitattributes", "x.bin.index.json"]:
        (tmp_path / name).write_text("no")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("t")
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.json").write_text("no")
    with (tmp_path / "huge.json").open("wb") as f:
        f.truncate((64 << 20) + 1)
    (tmp_path / "secret.txt").symlink_to("/etc/hostname")
    c = open_checkpoint(tmp_path)
    assert sorted(c.auxiliary_files) == [
        "LICENSE",
        "README.md",
        "additional_chat_templates/rag.jinja",
        "chat_template.jinja",
        "config.json",
        "tokenizer.json",
    ]
    assert [w.split()[0] for w in c.warnings] == ["huge.json", "secret.txt"]


def test_extra_shards_are_warned_of(tmp_path):
    pair(tmp_path)
    safetensors.torch.save_file({"z": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    c = open_checkpoint(tmp_path)
    assert "z" not in c
    assert "consolidated.safetensors is skipped" in c.warnings[0]


def test_wrong_total_size_is_warned_of(tmp_path):
    names = pair(tmp_path)
    value = {"metadata": {"total_size": 1}, "weight_map": names}
    (tmp_path / INDEX).write_text(json.dumps(value))
    assert "the index declares 1 bytes" in open_checkpoint(tmp_path).warnings[0]


def test_shards_without_an_index(tmp_path):
    for i in (1, 2):
        name = f"model-{i:05d}-of-00002.safetensors"
        safetensors.torch.save_file({f"t{i}": torch.ones(i)}, tmp_path / name)
    assert len(open_checkpoint(tmp_path).tensors) == 2
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(FormatError, match=r"model-00001-of-00002.* is missing"):
        open_checkpoint(tmp_path)


def test_hugging_face_cache_links_are_followed(tmp_path):
    real, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    real.mkdir()
    snapshot.mkdir(parents=True)
    pair(real)
    (real / "config.json").write_text('{"model_type": "llama"}')
    for name in os.listdir(real):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    c = open_checkpoint(snapshot)
    assert sorted(t.name for t in c.tensors) == ["a", "b", "c"]
    assert c.metadata["config"] == {"model_type": "llama"}
    assert list(c.auxiliary_files) == ["config.json"]


# -- folders that lie


def test_links_out_of_the_folder_are_refused(tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    pair(folder)
    (folder / "m-2.safetensors").rename(out / "m-2.safetensors")
    (folder / "m-2.safetensors").symlink_to(out / "m-2.safetensors")
    with raises(FormatError, id="unsafe-path"):
        open_checkpoint(folder)
    (folder / "m-2.safetensors").unlink()
    (out / "m-2.safetensors").rename(folder / "m-2.safetensors")
    (folder / "config.json").symlink_to("/etc/hostname")
    with raises(FormatError, id="unsafe-path"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name",
    ["../m-1.safetensors", "/etc/passwd", "a/b", "..", "", ".", "a\\b", "C:x", "x\0y", None, 3, []],
)
def test_index_names_must_be_plain(tmp_path, name):
    names = pair(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names | {"a": name}}))
    with raises(FormatError, id="unsafe-path", hint=True) as e:
        open_checkpoint(tmp_path)
    assert e.value.file.endswith(INDEX)


def edited(tmp_path, change):
    names = pair(tmp_path)
    change(names)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda n: n.update(ghost="m-1.safetensors"), "'m-1.safetensors' does not hold it"),
        (lambda n: n.update(a="m-2.safetensors"), "does not hold it, 'm-1.safetensors' does"),
        (lambda n: n.pop("b"), "the index does not say so"),
        (lambda n: n.update(a="m-9.safetensors"), "cannot open 'm-9.safetensors'"),
        (lambda n: n.clear(), "names no tensors"),
    ],
)
def test_index_and_headers_must_agree(tmp_path, change, says):
    edited(tmp_path, change)
    with pytest.raises(FormatError, match=says):
        open_checkpoint(tmp_path)


def test_swapped_shards_of_equal_size_are_noticed(tmp_path):
    for i in (1, 2):
        safetensors.torch.save_file({f"t{i}": torch.ones(4)}, tmp_path / f"m-{i}.safetensors")
    names = {"t1": "m-2.safetensors", "t2": "m-1.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(FormatError, match="does not hold it"):
        open_checkpoint(tmp_path)


def test_a_single_file_beside_an_index_is_ambiguous(tmp_path):
    pair(tmp_path)
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="do not belong together"):
        open_checkpoint(tmp_path)
    assert len(open_checkpoint(tmp_path / INDEX).tensors) == 3
    assert len(open_checkpoint(tmp_path / "model.safetensors").tensors) == 1


def test_one_name_in_two_shards_is_refused(tmp_path):
    for i in (1, 2):
        safetensors.torch.save_file({"same": torch.ones(i)}, tmp_path / f"m{i}.safetensors")
    with pytest.raises(FormatError, match=r"is also in 'm1\.safetensors'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("weights.pth", "name the file"), ("m.gguf", "name the file"), (None, "complete")],
)
def test_folders_without_safetensors(tmp_path, name, hint):
    (tmp_path / "config.json").write_text("{}")
    if name:
        (tmp_path / name).write_bytes(b"x")
    with raises(FormatError, id="not-a-checkpoint") as e:
        open_checkpoint(tmp_path)
    assert hint in e.value.hint


def test_iterations_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no iteration 7"):
        open_checkpoint(tmp_path, iteration=7)


# -- damaged files


def test_truncation_at_every_byte_is_noticed(tmp_path):
    pair(tmp_path)
    path = tmp_path / "m-1.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            open_checkpoint(tmp_path)


def test_a_flipped_header_bit_is_noticed_or_harmless(tmp_path):
    pair(tmp_path)

    def meaning():
        c = open_checkpoint(tmp_path)
        return c.tensors, c.extents.offset.tolist(), c.extents.length.tolist()

    path = tmp_path / "m-1.safetensors"
    whole = path.read_bytes()
    want, harmless = meaning(), 0
    (length,) = struct.unpack("<Q", whole[:8])
    for at in range(8 + length):
        for bit in range(8):
            broken = bytearray(whole)
            broken[at] ^= 1 << bit
            path.write_bytes(broken)
            try:
                assert meaning() == want
                harmless += 1
            except FormatError:
                continue
    assert harmless < 0.05 * 8 * length


def test_a_flipped_index_bit_is_noticed_or_harmless(tmp_path):
    pair(tmp_path)
    want = open_checkpoint(tmp_path).tensors
    whole = (tmp_path / INDEX).read_bytes()
    for at in range(len(whole)):
        for bit in range(8):
            broken = bytearray(whole)
            broken[at] ^= 1 << bit
            (tmp_path / INDEX).write_bytes(broken)
            with contextlib.suppress(FormatError):
                assert open_checkpoint(tmp_path).tensors == want


# -- writing


def tensors_of(state):
    return [
        GlobalTensor(name=k, shape=tuple(v.shape), dtype=dtype(str(v.dtype)))
        for k, v in state.items()
    ]


def test_transformers_loads_what_we_lay_out(llama, tmp_path):
    from transformers import AutoModelForCausalLM

    folder, state = llama
    source = open_checkpoint(folder)
    small = {name: path.read_bytes() for name, path in source.auxiliary_files.items()}
    for name, limit, files in [("many", 100_000, 5), ("one", 10**9, 1)]:
        root = tmp_path / name
        root.mkdir()
        destination = plan_safetensors_layout(
            tensors_of(state), max_shard_bytes=limit, small_files=small
        )
        assert (INDEX in destination.small_files) == (files > 1)
        write(destination, root, contents(source))
        assert len(open_checkpoint(root).files) == files
        assert open_checkpoint(root).warnings == []
        model = AutoModelForCausalLM.from_pretrained(root)
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_a_shard_holds_no_more_than_asked(llama):
    _, state = llama
    for limit in (1, 20_000, 70_000, 10**9):
        catalogue = plan_safetensors_layout(tensors_of(state), max_shard_bytes=limit).catalogue
        for file in range(len(catalogue.files)):
            rows = np.flatnonzero(catalogue.extents.file == file)
            assert catalogue.extents.length[rows].sum() <= limit or len(rows) == 1


shapes = st.lists(st.sampled_from([0, 1, 3, 32, 64]), max_size=3)
kinds = st.sampled_from([d for d in DTYPES if d.safetensors])


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    parts=st.lists(st.tuples(shapes, kinds), min_size=1, max_size=12),
    limit=st.sampled_from([1, 5000, 20_000, 10**9]),
    bare=st.booleans(),
)
def test_layouts_reopen_as_laid_out(tmp_path_factory, parts, limit, bare):
    root = tmp_path_factory.mktemp("laid")
    tensors = [
        GlobalTensor(name=f"t{i}", shape=tuple(s), dtype=d) for i, (s, d) in enumerate(parts)
    ]
    rng = np.random.default_rng(0)
    data = {t.name: rng.integers(0, 2, t.num_bytes, np.uint8).tobytes() for t in tensors}
    destination = plan_safetensors_layout(
        tensors, max_shard_bytes=limit, single_file="x.safetensors" if bare else None
    )
    laid = destination.catalogue
    write(destination, root, data)
    again = open_checkpoint(root / "x.safetensors" if bare else root)
    assert contents(again) == data
    assert again.format == laid.format
    assert again.tensors == laid.tensors
    assert (again.extents.offset == laid.extents.offset).all()
    assert (again.extents.file == laid.extents.file).all()
    assert [f.size for f in again.files] == [f.size for f in laid.files]
    for t, offset in zip(laid.tensors, laid.extents.offset.tolist(), strict=True):
        page = t.num_bytes % 4096 == 0
        assert offset % (4096 if page else t.dtype.itemsize) == 0
    for file in laid.files:
        with safetensors.safe_open(root / file.path, "pt") as f:
            for name in f.keys():  # noqa: SIM118
                assert raw(f.get_tensor(name)) == data[name]


def test_layouts_are_deterministic(llama):
    _, state = llama
    a, b = (plan_safetensors_layout(tensors_of(state), max_shard_bytes=90_000) for _ in range(2))
    assert a.fragments == b.fragments
    assert a.small_files == b.small_files


def test_layouts_that_cannot_be_written_are_refused():
    t = GlobalTensor(name="t", shape=(2,), dtype=dtype("float32"))
    packed = GlobalTensor(name="t", shape=(32,), dtype=dtype("float32"), packing="gguf:Q4_1")
    odd = GlobalTensor(name="t", shape=(2,), dtype=dtype("float8_e4m3fnuz"))
    with pytest.raises(FormatError, match="two tensors of one name"):
        plan_safetensors_layout([t, t])
    with pytest.raises(FormatError, match="cannot hold gguf:Q4_1"):
        plan_safetensors_layout([packed])
    with pytest.raises(FormatError, match="cannot hold float8_e4m3fnuz"):
        plan_safetensors_layout([odd])
    with pytest.raises(UsageError, match="0 bytes"):
        plan_safetensors_layout([t], max_shard_bytes=0)
    with pytest.raises(DestinationError, match=r"model\.safetensors"):
        plan_safetensors_layout([t], small_files={"model.safetensors": b""})
