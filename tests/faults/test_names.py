"""Folders whose names are no UTF-8, or look like markup: no verb fails because of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megtool import convert_adapter, export, inspect, reshard
from megtool.console import single_line
from megtool.errors import FormatError
from megtool.train.loss_plot import plot_loss
from tests.support.models import tiny_llama, tiny_tokenizer

NAME = os.fsdecode(b"o\xff\n\x1b[2J$\\frac$")


def test_a_loss_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot_loss(tmp_path / "loss.png", [(1, 2.0), (2, 1.0)], title=NAME)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_gguf_file_of_such_a_folder(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    source = tiny_llama.save(tmp_path / "hf", vocab_size=320, num_hidden_layers=1)
    tiny_tokenizer.save(source)
    export(source, tmp_path / f"{NAME}.gguf", to="gguf")
    (tmp_path / f"{NAME}.gguf").rename(tmp_path / "a.gguf")
    field = gguf.GGUFReader(tmp_path / "a.gguf").fields["general.name"]
    assert field.contents() == single_line(NAME)
    assert "\n" not in field.contents()


def test_a_database_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore", reason="tensorstore is not installed")
    source = tiny_llama.save(tmp_path / "hf", vocab_size=5, num_hidden_layers=1)
    reshard(source, tmp_path / "out", to="ocdbt")
    (tmp_path / "out").rename(tmp_path / NAME)
    with pytest.raises(FormatError, match="UTF-8"):
        inspect(tmp_path / NAME)


def test_an_adapter_in_such_a_folder(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    base = tiny_llama.save(tmp_path / "hf", vocab_size=5, num_hidden_layers=1)
    config = json.loads((base / "config.json").read_text())
    size, rows = config["hidden_size"], config["intermediate_size"]
    source = tmp_path / NAME
    source.mkdir()
    (source / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    stem = "base_model.model.model.layers.0.mlp.down_proj.lora_"
    save_file(
        {
            f"{stem}A.weight": np.ones((2, rows), np.float32),
            f"{stem}B.weight": np.ones((size, 2), np.float32),
        },
        source / "adapter_model.safetensors",
    )
    convert_adapter(source, tmp_path / f"{NAME}out", to="bridge", base=base)
    assert any((tmp_path / f"{NAME}out").iterdir())
