"""The registry: every format is found by its path, loaded when needed, and named once."""

import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy
import torch
import torch.distributed.checkpoint

from megtool.errors import FormatError, UsageError
from megtool.formats import FORMATS, detect_format, find_format, open_checkpoint
from tests.support.errors import raises


def test_names_are_unique_and_modules_complete():
    names = [n for f in FORMATS for n in f.names]
    assert len(set(names)) == len(names)
    assert set(names) >= {"hf", "safetensors", "gguf", "torch_dist", "dcp"}
    for one in FORMATS:
        module = one.load()
        assert callable(module.detect)
        assert callable(module.open_checkpoint)
        planners = [name for name in vars(module) if re.fullmatch(r"plan_\w+_layout", name)]
        assert bool(planners) == one.writable
        assert all(find_format(n) is one for n in one.names)


def test_an_unknown_name_lists_the_known():
    with raises(UsageError, match="no format 'npz'", hint="torch_dist"):
        find_format("npz")


def test_paths_open_as_what_they_are(tmp_path):
    data = {"t": np.ones((2, 3), np.float32)}
    safetensors.numpy.save_file(data, tmp_path / "x.safetensors")
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("t", data["t"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "blob").write_bytes((tmp_path / "x.safetensors").read_bytes())
    found = {
        n: open_checkpoint(tmp_path / n).format for n in ("", "x.safetensors", "x.gguf", "blob")
    }
    assert found == {
        "": "hf",
        "x.safetensors": "safetensors",
        "x.gguf": "gguf",
        "blob": "safetensors",
    }
    assert open_checkpoint(str(tmp_path / "x.gguf"))["t"].shape == (2, 3)


def test_a_folder_of_torch_is_not_taken_for_hugging_face(tmp_path):
    torch.distributed.checkpoint.save({"t": torch.ones(2, 3)}, checkpoint_id=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path).format == "dcp"


def test_what_is_no_checkpoint_is_told_what_was_looked_for(tmp_path):
    with pytest.raises(FormatError, match="does not exist"):
        detect_format(tmp_path / "nothing")
    with raises(
        FormatError,
        match=r"not a checkpoint.*\.metadata.*gguf.*safetensors",
        file=tmp_path,
        hint=True,
    ) as e:
        detect_format(tmp_path)
    (tmp_path / "notes.txt").write_text("hello, world")
    with raises(FormatError, id="not-a-checkpoint"):
        detect_format(tmp_path / "notes.txt")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with raises(FormatError, id="not-a-checkpoint") as e:
        detect_format(tmp_path)
    assert e.value.hint == f"name the file: {tmp_path / 'model.gguf'}"


def test_importing_the_registry_loads_no_format():
    code = (
        "import sys, megtool.formats;"
        "sys.exit(any(m.startswith('megtool.formats.') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path.cwd()).returncode == 0


def test_opening_a_folder_loads_the_modules_it_may_need_alone(tmp_path):
    safetensors.numpy.save_file({"t": np.ones(2, np.float32)}, tmp_path / "x.safetensors")
    code = (
        "import sys, pathlib; from megtool.formats import FORMATS, detect_format;"
        "detect_format(pathlib.Path(sys.argv[1]));"
        "print(*(f.names[0] for f in FORMATS if f.module in sys.modules))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=Path.cwd(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["hf"]


def test_training_data_of_retro_is_not_taken_for_a_model(tmp_path: Path) -> None:
    """It has a config.json, as folders of Hugging Face have."""
    for name in ("data", "db", "query"):
        (tmp_path / name).mkdir()
    (tmp_path / "config.json").write_text("{}")
    with raises(FormatError, file=tmp_path, hint="RetroProject", id="not-a-checkpoint"):
        open_checkpoint(tmp_path)
