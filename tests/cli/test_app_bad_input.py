"""Bad input on the command line: one `error:` line, a hint, an exit status, and nothing written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megtool.cli.app import main
from megtool.convert.families.detection import family_names
from tests.support.folders import file_states, staging_folders
from tests.support.limits import is_within
from tests.support.models import tiny_llama
from tests.support.paths import ROOT

needs_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


class Told(NamedTuple):
    """What a command said."""

    status: int
    error: str
    hint: str


class Desk:
    """Runs `megtool reshard` in a folder of its own and proves that a refusal writes nothing."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root = root
        self.hf = tiny_llama.save(root / "hf")
        self._capsys = capsys

    def refused(self, *arguments: str | Path, source: Path | None = None) -> Told:
        """The refusal of a reshard to `out`, unless `arguments` begin with another destination."""
        paths: list[str | Path] = [self.hf if source is None else source]
        if not arguments or str(arguments[0]).startswith("-"):
            paths.append(self.root / "out")
        before, names = file_states(self.root), self.names()
        began = time.monotonic()
        status = main(["reshard", *map(str, [*paths, *arguments])])
        told = self._capsys.readouterr()
        # Nothing is built before it is refused.
        assert is_within(time.monotonic() - began, 60, time.monotonic)
        assert told.out == ""
        assert "Traceback" not in told.err
        lines = told.err.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        hints = [line.strip() for line in lines if line.strip().startswith("hint: ")]
        assert len(errors) == 1, told.err
        assert len(hints) <= 1, told.err
        assert file_states(self.root) == before
        assert self.names() == names
        assert staging_folders(self.root) == []
        return Told(status, errors[0], hints[0] if hints else "")

    def forget(self) -> None:
        """Drop what was printed so far."""
        self._capsys.readouterr()

    def names(self) -> list[str]:
        return sorted(str(p.relative_to(self.root)) for p in self.root.rglob("*"))


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    return Desk(tmp_path, capsys)


# ---- sources


def test_nothing_there(desk: Desk) -> None:
    told = desk.refused(source=desk.root / "missing")
    assert told.status == 3
    assert "does not exist" in told.error
    assert "missing" in told.error
    assert told.hint


@pytest.mark.parametrize("what", ["empty folder", "text", "empty file", "python", "image"])
def test_no_checkpoint(desk: Desk, what: str) -> None:
    place = desk.root / "thing"
    if what == "empty folder":
        place.mkdir()
    else:
        content = {"text": b"hello", "empty file": b"", "python": b"import os\n"}
        place.write_bytes(content.get(what, b"\x89PNG\r\n\x1a\n" + bytes(100)))
    told = desk.refused(source=place)
    assert told.status == 3
    assert "not a checkpoint" in told.error
    assert told.hint


def test_safetensors_under_another_name_are_explained(desk: Desk) -> None:
    (desk.hf / "model.safetensors").rename(desk.hf / "pytorch_model.bin")
    told = desk.refused("--to=torch_dist")
    assert told.status == 3
    assert "pytorch_model.bin" in told.error
    assert "safetensors" in told.hint


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b'{"a":{"dtype":"F13","shape":[1],"data_offsets":[0,4]}}', "F13"),
        (b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}', "[9]"),
        (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', "[-1]"),
        (b'{"a":{"dtype":"F32","shape":"1","data_offsets":[0,4]}}', "'1'"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}', "[4, 0]"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "a hole"),
        (b'{"a":{"dtype":"F32"}}', "F32"),
        (b'{"a":', "JSON"),
        (b"[1]", "b'['"),
    ],
)
def test_an_absurd_header(desk: Desk, header: bytes, says: str) -> None:
    file = desk.hf / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    told = desk.refused("--to=torch_dist")
    assert told.status == 3
    assert says in told.error
    assert "model.safetensors" in told.error
    assert told.hint
    file.write_bytes((1 << 62).to_bytes(8, "little") + header)
    told = desk.refused("--to=torch_dist")
    assert told.status == 3


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": 1}', "\ufeff{}"])
def test_an_absurd_index(desk: Desk, text: str) -> None:
    (desk.hf / "model.safetensors").rename(desk.hf / "model-00001-of-00001.safetensors")
    (desk.hf / "model.safetensors.index.json").write_text(text)
    told = desk.refused("--to=torch_dist")
    assert told.status == 3
    assert "model.safetensors.index.json" in told.error
    assert told.hint


def edit(desk: Desk, **changes: Any) -> None:
    path = desk.hf / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def test_an_unknown_family(desk: Desk) -> None:
    edit(desk, architectures=["ParrotForCausalLM"], model_type="parrot")
    told = desk.refused("--to=torch_dist")
    assert told.status == 5
    assert "'ParrotForCausalLM'" in told.error
    for name in family_names():
        assert name in told.hint
    assert "--family" in told.hint
    assert "converters/NAME.py" in told.hint
    told = desk.refused("--to=torch_dist", "--family=parrot")
    assert told.status == 5
    assert "'parrot'" in told.error
    assert "llama" in told.hint


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": ...}, "num_attention_heads"),
        ({"hidden_size": "large"}, "large"),
        ({"num_hidden_layers": -1}, "-1"),
        ({"num_key_value_heads": 3}, "3"),
        ({"num_hidden_layers": 5}, "missing"),
        ({"num_hidden_layers": 3}, "layers.3"),
        ({"intermediate_size": 64}, "48"),
        ({"hidden_act": "mish"}, "mish"),
        ({"vocab_size": 102}, "101"),
        ({"tie_word_embeddings": 7}, "7"),
        ({"architectures": 5, "model_type": []}, "model family is unknown"),
        ({"architectures": [["x"]], "model_type": {}}, "model family is unknown"),
        ({"rope_theta": "big"}, "big"),
        ({"rms_norm_eps": "tiny"}, "tiny"),
        ({"rope_scaling": 3}, "configuration"),
        ({"head_dim": ..., "num_attention_heads": 0}, "configuration"),
        ({"head_dim": ..., "hidden_size": "large"}, "configuration"),
        ({"num_hidden_layers": 9999}, "missing"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000"),
        ({"vocab_size": 10**30}, "101"),
    ],
    ids=str,
)
def test_a_configuration_of_another_model(desk: Desk, changes: dict[str, Any], says: str) -> None:
    edit(desk, **changes)
    told = desk.refused("--to=torch_dist")
    assert told.status in (3, 5)
    assert says in told.error + told.hint
    assert ("needs the model's family" in told.error) == ("architectures" in changes)
    assert told.hint


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_layers": "four"}, "four"),
        ({"num_layers": None}, "num_layers"),
        ({"num_layers": 10**9}, "num_layers"),
        ({"num_experts": 10**9}, "num_experts"),
        ({"num_attention_heads": 0, "kv_channels": None}, "configuration"),
        ({"hidden_size": [1]}, "configuration"),
        ({"normalization": {}}, "configuration"),
        ({"num_experts": -1}, "-1"),
        ({"moe_layer_freq": "x", "num_experts": 2}, "configuration"),
        ({"vocab_size": 10**30}, ""),
        ({"padded_vocab_size": "x", "vocab_size": None}, "configuration"),
    ],
    ids=str,
)
def test_args_of_another_model(desk: Desk, changes: dict[str, Any], says: str) -> None:
    import torch

    source = desk.root / "m"
    assert main(["reshard", str(desk.hf), str(source), "--to=torch_dist", "-q"]) == 0
    shutil.rmtree(source / "release" / "hf")
    common = torch.load(source / "release" / "common.pt", weights_only=False)
    for key, value in changes.items():
        setattr(common["args"], key, value)
    torch.save(common, source / "release" / "common.pt")
    desk.forget()
    told = desk.refused("--to=hf", "--family=llama", source=source)
    assert told.status in (3, 5)
    assert says in told.error + told.hint


def test_a_configuration_that_is_none(desk: Desk) -> None:
    (desk.hf / "config.json").write_text("[]")
    assert desk.refused("--to=torch_dist").status == 3
    (desk.hf / "config.json").unlink()
    told = desk.refused("--to=torch_dist")
    assert told.status == 5
    assert "--like" in told.hint or "--family" in told.hint


def test_like_that_leads_nowhere(desk: Desk) -> None:
    told = desk.refused("--to=torch_dist", f"--like={desk.root / 'nowhere'}")
    assert told.status == 3
    assert "nowhere" in told.error
    assert "config.json" in told.hint
    (desk.root / "empty").mkdir()
    told = desk.refused("--to=torch_dist", f"--like={desk.root / 'empty'}")
    assert told.status == 3
    assert "config.json" in told.hint


# ---- selections


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--select=model.layers.0.*"], "needs every layer, and 'layers.1.attn_norm.weight'"),
        (["--exclude=*.2.*.up_proj.*"], "needs every layer, and 'layers.2.mlp.up.weight'"),
        (["--exclude=*.k_proj.*"], "'layers.0.attn.k.weight' is the first missing"),
    ],
)
def test_part_of_a_stacked_key(desk: Desk, options: list[str], says: str) -> None:
    told = desk.refused("--to=torch_dist", *options)
    assert told.status == 5
    assert says in told.error
    assert "in every layer" in told.hint


# ---- layouts


@pytest.mark.parametrize(
    ("layout", "says", "divisors"),
    [
        ("--tp=3", "4", ["1", "2", "4"]),
        ("--tp=8", "8", ["1", "2", "4"]),
        ("--pp=3", "num_layers=4", ["1", "2", "4"]),
        ("--pp=8", "num_layers=4", ["1", "2", "4"]),
        ("--pp=2 --vpp=3", "vpp=3", ["2"]),
        ("--vpp=2", "vpp is 2", []),
        ("--ep=2 --dp=3", "ep=2", ["2"]),
    ],
)
def test_layouts_that_do_not_divide(
    desk: Desk, layout: str, says: str, divisors: list[str]
) -> None:
    told = desk.refused("--to=torch_dist", *layout.split())
    assert told.status == 2
    assert says in told.error
    assert told.hint
    for number in divisors:
        assert number in told.hint


def test_key_value_heads_that_do_not_divide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4}
    desk = Desk(tmp_path, capsys)
    source = tiny_llama.save(tmp_path / "odd", hidden_size=48, **shape)
    told = desk.refused("--to=torch_dist", "--tp=4", source=source)
    assert told.status == 2
    assert "6" in told.error
    for number in ("1", "2", "3", "6", "12"):
        assert number in told.hint


def test_a_layout_for_files_without_one(desk: Desk) -> None:
    for axis in ("tp", "pp", "ep", "dp"):
        told = desk.refused("--to=hf", f"--{axis}=2")
        assert told.status == 2
        assert f"--{axis}" in told.error


@pytest.mark.parametrize("kind", ["safetensors", "torch_dist", "dcp"])
def test_a_shard_size_for_files_that_are_no_shards(desk: Desk, kind: str) -> None:
    told = desk.refused(f"--to={kind}", "--max-shard-size=5GB")
    assert told.status == 2
    assert f"--max-shard-size has no effect with --to {kind}" in told.error
    assert "--to hf" in told.hint


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tp=0"],
        ["--tp=two"],
        ["--threads=0"],
        ["--digest=sha"],
        ["--no-such-option"],
        ["out2", "out3"],
        ["--dtype=f13"],
        ["--max-shard-size=-1"],
        ["--memory=0"],
        ["--to=zip"],
        ["--to=gguf"],
        ["--iteration=x"],
    ],
)
def test_usage(desk: Desk, arguments: list[str]) -> None:
    before = desk.names()
    extra = [] if arguments[0].startswith("-") else arguments
    options = arguments if arguments[0].startswith("-") else []
    command = [sys.executable, "-m", "megtool", "reshard", str(desk.hf), str(desk.root / "out")]
    done = subprocess.run(
        [*command, *extra, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert desk.names() == before


# ---- destinations


def test_a_destination_that_exists(desk: Desk) -> None:
    (desk.root / "out").mkdir()
    (desk.root / "out" / "mine").write_text("mine")
    told = desk.refused("--to=torch_dist")
    assert told.status == 2
    assert "exists" in told.error
    assert "--overwrite" in told.hint
    assert desk.refused("--to=torch_dist", "--dry-run").status == 2
    (desk.root / "file").write_text("mine")
    assert desk.refused(desk.root / "file", "--to=torch_dist").status == 2
    told = desk.refused(desk.root / "file", "--to=torch_dist", "--overwrite")
    assert told.status == 2
    assert "a file" in told.error
    assert "new folder" in told.hint
    told = desk.refused("--to=safetensors")
    assert told.status == 2
    assert "out/model.safetensors" in told.hint


def test_a_destination_inside_the_source_or_around_it(desk: Desk) -> None:
    (desk.root / "link").symlink_to("hf")
    for place in (desk.hf / "out", desk.hf, desk.root / "link" / "deep" / "out", desk.root):
        for more in ([], ["--overwrite"], ["--dry-run"]):
            told = desk.refused(place, "--to=torch_dist", *more)
            assert told.status == 2
            assert "inside the other" in told.error
            assert told.hint
    file = desk.hf / "model.safetensors"
    assert desk.refused(file, "--to=safetensors", "--overwrite", source=file).status == 2


def test_beside_the_source_is_fine(desk: Desk) -> None:
    file = desk.hf / "model.safetensors"
    assert main(["reshard", str(file), str(desk.hf / "copy.safetensors"), "-q"]) == 0
    assert (desk.hf / "copy.safetensors").exists()


def test_a_folder_above_that_is_a_file(desk: Desk) -> None:
    (desk.root / "file").write_text("mine")
    told = desk.refused(desk.root / "file" / "out", "--to=torch_dist")
    assert told.status == 2
    assert "file" in told.error
    assert told.hint


def test_a_name_that_is_too_long(desk: Desk) -> None:
    told = desk.refused(desk.root / ("x" * 300), "--to=torch_dist")
    assert told.status in (2, 3)


@needs_user
def test_a_folder_that_may_not_be_written(desk: Desk) -> None:
    (desk.root / "closed").mkdir(mode=0o500)
    told = desk.refused(desk.root / "closed" / "out", "--to=torch_dist")
    assert told.status == 2
    assert "cannot be written" in told.error
    assert told.hint


def test_a_source_that_may_not_be_read(desk: Desk) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read anything")
    (desk.hf / "model.safetensors").chmod(0)
    told = desk.refused("--to=torch_dist")
    assert told.status == 3
    assert "permission" in told.error.lower()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system in memory with some options; skips where that is not allowed."""
    place = tmp_path / "mounted"
    place.mkdir()

    def make(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.strip()}")
        return place

    yield make
    subprocess.run(["umount", str(place)], capture_output=True, check=False)


@needs_root
def test_a_disk_too_small(desk: Desk, mount: Callable[[str], Path]) -> None:
    told = desk.refused(mount("size=64k") / "out", "--to=torch_dist")
    assert told.status == 3
    assert "not enough space" in told.error
    assert "free" in told.hint


@needs_root
def test_a_disk_that_fills_up(
    desk: Desk, mount: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    place = mount("size=400k")
    (place / "other").write_bytes(bytes(280 << 10))
    before = file_states(desk.hf)
    status = main(["reshard", str(desk.hf), str(place / "out"), "--to=torch_dist"])
    told = capsys.readouterr()
    if status == 0:
        pytest.fail(f"it fitted: {told.out}")
    assert status == 3
    assert "space" in told.err
    assert not (place / "out").exists()
    assert file_states(desk.hf) == before
    (place / "other").unlink()
    assert main(["reshard", str(desk.hf), str(place / "out"), "--to=torch_dist", "-q"]) == 0
    assert [p.name for p in place.iterdir()] == ["out"]


@needs_root
def test_a_read_only_disk(desk: Desk, mount: Callable[[str], Path]) -> None:
    told = desk.refused(mount("ro,size=1m") / "out", "--to=torch_dist")
    assert told.status == 2
    assert "read-only" in told.error.lower() or "read-only" in told.hint
    assert told.hint


@needs_root
def test_a_mount_point_is_not_replaced(desk: Desk, mount: Callable[[str], Path]) -> None:
    told = desk.refused(mount("size=1m"), "--to=torch_dist")
    assert told.status == 2
    assert "mount point" in told.error
    assert told.hint


# ---- meanwhile


def test_a_source_that_is_replaced_meanwhile(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megtool.plan import execute

    real = execute.plan_units

    def units(*arguments: Any, **options: Any) -> Any:
        shutil.copy(desk.hf / "model.safetensors", desk.hf / "new")
        os.replace(desk.hf / "new", desk.hf / "model.safetensors")
        return real(*arguments, **options)

    monkeypatch.setattr(execute, "plan_units", units)
    status = main(["reshard", str(desk.hf), str(desk.root / "out"), "--to=torch_dist"])
    told = capsys.readouterr()
    assert status == 3
    assert "model.safetensors" in told.err
    assert told.err.count("error: ") == 1
    assert "hint: " in told.err
    assert not (desk.root / "out").exists()
