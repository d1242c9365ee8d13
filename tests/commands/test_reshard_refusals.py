"""Requests that make no sense are refused before anything is written, with what to say instead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import reshard, verify
from megtool.digests.crc32c import SIDECAR
from megtool.errors import FormatError, LayoutError, MappingError, MegtoolError, UsageError
from megtool.options.layout import ParallelConfig
from tests.support import folders
from tests.support.errors import raises
from tests.support.models import tiny_llama

safetensors = pytest.importorskip("safetensors.torch")


def refused(kind: type[MegtoolError], source: Path, **options: Any) -> MegtoolError:
    out = source.parent / "out"
    with raises(kind, hint=True) as e:
        reshard(source, out, **options)
    assert not out.exists()
    assert list(folders.staging_folders(source.parent)) == []
    return e.value


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory": "1KiB"}, "1,024 bytes"),
        ({"memory": "1MiB", "threads": 3}, "3 threads"),
        ({"core_version": "0.1"}, "'0.1'"),
        ({"core_version": "0.12"}, "'0.12'"),
        ({"dtype": "float8_e4m3fn"}, "8 bits"),
        ({"dtype": "float8_e5m2", "to": "hf"}, "8 bits"),
        ({"optimizer_format": "fully_reshardable"}, "no optimizer state"),
        ({"optimizer_format": "dp_reshardable"}, "no optimizer state"),
        ({"optimizer_format": "legacy", "to": "megatron"}, "no optimizer state"),
        ({"etp": 2}, "etp=2"),
        ({"etp": 4, "tp": 2}, "etp=4"),
        ({"dp": 0}, "--dp is 0"),
        ({"tp": 0}, "--tp is 0"),
    ],
    ids=str,
)
def test_options_that_ask_for_nothing_that_is(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    source = tiny_llama.save(tmp_path / "hf")
    error = refused(UsageError, source, **{"to": "torch_dist"} | options)
    assert says in error.message


def test_less_memory_means_fewer_threads(tmp_path: Path) -> None:
    source = tiny_llama.save(tmp_path / "hf")
    reshard(source, tmp_path / "out", to="torch_dist", memory="384KiB", etp=2, tp=2)


def test_a_pipeline_layout_without_stages() -> None:
    with raises(LayoutError, "2 chunks", "1", hint="--pp"):
        ParallelConfig(pipeline_layout="Ett|ttL")
    assert ParallelConfig(pipeline_layout="EttttL").vpp == 1


def test_the_file_that_holds_a_wrong_configuration_is_named(tmp_path: Path) -> None:
    source = tiny_llama.save(tmp_path / "hf", seed=1)
    config = source / "config.json"
    config.write_text(json.dumps(tiny_llama.config(num_attention_heads=3)))
    assert refused(MappingError, source, to="torch_dist").file == str(config)
    other = tiny_llama.save(tmp_path / "other")
    assert refused(MappingError, other, to="torch_dist", like=source).file == str(config)


@pytest.mark.parametrize("name", ["mlp.up_proj.weight_scale_inv", "mlp.experts.down_proj_blocks"])
def test_scales_without_a_quantization_config(tmp_path: Path, name: str) -> None:
    source = tiny_llama.save(tmp_path / "hf")
    held = safetensors.load_file(source / "model.safetensors")
    held[f"model.layers.0.{name}"] = torch.ones(2)
    safetensors.save_file(held, source / "model.safetensors", metadata={"format": "pt"})
    error = refused(MappingError, source, to="torch_dist")
    assert "quantization_config" in (error.hint or "")
    assert "exclude" not in (error.hint or "")


@pytest.mark.parametrize("cut", [0, 10, 400])
def test_a_damaged_common_state(tmp_path: Path, cut: int) -> None:
    reshard(tiny_llama.save(tmp_path / "hf"), tmp_path / "m", to="torch_dist")
    path = tmp_path / "m" / "release" / "common.pt"
    path.write_bytes(path.read_bytes()[:cut])
    error = refused(FormatError, tmp_path / "m", tp=2)
    assert error.file == str(path)


def t5(folder: Path) -> Path:
    """What Megatron would store of a model whose decoder attends to an encoder, as plain data."""
    import torch.distributed.checkpoint as dcp

    tiny = tiny_llama.save(folder.parent / "like")
    reshard(tiny, folder, to="torch_dist")
    held = {
        "embedding.word_embeddings.weight": torch.randn(128, 32),
        "position_embeddings.weight": torch.ones(64, 32),
        "encoder.layers.self_attention.linear_proj.weight": torch.randn(4, 32, 32),
        "decoder.layers.self_attention.linear_proj.weight": torch.randn(4, 32, 32),
        "decoder.layers.cross_attention.linear_proj.weight": torch.randn(4, 32, 32),
    }
    inside = folder / "release"
    kept = {p: p.read_bytes() for p in inside.iterdir() if p.suffix in (".pt", ".json")}
    kept.pop(inside / SIDECAR, None)
    for path in inside.rglob("*"):
        if path.is_file():
            path.unlink()
    dcp.save(held, checkpoint_id=inside, no_dist=True)
    for path, data in kept.items():
        path.write_bytes(data)
    return folder


def test_stages_of_an_encoder_with_a_decoder_are_named(tmp_path: Path) -> None:
    source = t5(tmp_path / "t5")
    error = refused(LayoutError, source, to="megatron", pp=2)
    assert "encoder_pp does not say how many stages" in error.message
    assert "--encoder-pp" in (error.hint or "")
    reshard(source, tmp_path / "ranks", to="megatron", tp=2, pp=2, encoder_pp=1)
    reshard(tmp_path / "ranks", tmp_path / "out", to="torch_dist", tp=1)
    assert verify(source, tmp_path / "ranks").verdict == "equal"
    assert verify(source, tmp_path / "out").verdict == "equal"


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("*-*", "the layer pattern has 3 layers, and num_layers is 8"),
        ("*-*-*-*-*-", "the layer pattern has 10 layers, and num_layers is 8"),
        ("*E*-*-*-", "num_experts is 0"),
        ("*-Q-*-*-", "has the symbol 'Q'"),
        ("M-*-*-*-", "not known to 'megatron': 'decoder.layers.0.self_attention.linear_qkv"),
    ],
)
def test_a_pattern_that_does_not_fit_the_layers_is_told(
    pattern: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a HybridModel that says nothing but its arguments: no table can name its tensors."""
    source, options = tmp_path / "source", {"to": "torch_dist", "model_class": "hybrid"}
    reshard(tiny_llama.save(tmp_path / "hf"), source, fsync=False, **options)
    (file,) = source.rglob("common.pt")
    state = torch.load(file, weights_only=False)
    state["args"].hybrid_layer_pattern = pattern
    torch.save(state, file)
    shutil.rmtree(file.parent / "hf")
    for sidecar in source.rglob(SIDECAR):
        sidecar.unlink()
    reshard(source, tmp_path / "same", to="torch_dist", fsync=False)
    assert why in caplog.text
    with raises(MappingError, why, hint=True):
        reshard(source, tmp_path / "gpt", to="torch_dist", model_class="gpt", fsync=False)
    if "M" not in pattern:
        with raises(MappingError, why, hint="--like"):
            reshard(source, tmp_path / "ranks", to="megatron", fsync=False)
