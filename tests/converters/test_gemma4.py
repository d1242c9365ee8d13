"""Gemma 4: sizes by layer, keys and values that layers share, embeddings by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megtool import reshard
from megtool.convert.families.detection import family
from megtool.convert.layer_subset import of_layers
from megtool.convert.megatron.args import args_from_config, config_from_args
from megtool.errors import LayoutError, MappingError
from megtool.model.stacks.decoder import Decoder, StageLayers
from tests.support.errors import raises
from tests.support.folders import read_config
from tests.support.folders import stored_tensors as stored
from tests.support.models.dense_cases import CASES, GEMMA4, save
from tests.support.models.tiny_model import SIZES

pytest.importorskip("transformers")

GEMMA4_STORED = SIZES | GEMMA4 | {"num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 7},
            "vocab_size_per_layer_input is 7",
        ),
        ({"num_kv_shared_layers": 3}, "no layer before has keys and values"),
        ({"num_kv_shared_layers": 4}, "fewer than the 4 layers"),
        ({"use_bidirectional_attention": "all"}, "it is an encoder"),
        ({"per_layer_config": {"7": {"head_dim": 8}}}, "a layer '7'"),
        ({"per_layer_config": {"1": {"hidden_size": 8}}}, "says 'hidden_size' of a layer"),
        ({"per_layer_config": [16]}, "tables by layer"),
        ({"global_head_dim": -1}, "the heads of a layer are"),
    ],
)
def test_gemma4_of_other_sizes_is_refused(keys: dict[str, Any], said: str) -> None:
    with raises(MappingError, said):
        family("gemma4").read_config(GEMMA4_STORED | keys)


def test_unused_keys_and_values_of_published_files_are_left_out(tmp_path: Path) -> None:
    """Layers that attend to those of an earlier one may have weights for them, which are read by
    nobody; transformers leaves them out, too."""
    case = next(c for c in CASES if c.name == "gemma4-small")
    save(case, tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors, before = load_file(file), stored(tmp_path / "hf")
    extra = {
        n.replace(".1.", ".3."): t.clone() for n, t in tensors.items() if "layers.1.self_attn." in n
    }
    assert {*extra} - {*tensors} == {
        f"model.layers.3.self_attn.{n}.weight" for n in ("k_proj", "v_proj", "k_norm")
    }
    save_file(extra | tensors, file, {"format": "pt"})
    report = reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, fsync=False)
    assert {d.name.rpartition("self_attn.")[2] for d in report.dropped} == {
        "k_proj.weight",
        "v_proj.weight",
        "k_norm.weight",
    }
    assert not any(d.is_lost for d in report.dropped)
    reshard(tmp_path / "meg", tmp_path / "back", to="hf", fsync=False)
    assert stored(tmp_path / "back") == before


def test_layers_that_read_more_than_the_residual_stay_together(tmp_path: Path) -> None:
    case = next(c for c in CASES if c.name == "gemma4-small")
    save(case, tmp_path / "hf")
    with raises(MappingError, "one embedding of all layers"):
        reshard(tmp_path / "hf", tmp_path / "some", to="hf", layers="0-1", fsync=False)
    config = family("gemma4").read_config(read_config(tmp_path / "hf"))
    plain = config.with_fields(layer_input_size=0)
    with raises(MappingError, "layer 2 attends to keys and values of an earlier"):
        of_layers(plain, (1, 2))
    assert of_layers(plain, (0, 1)).attention.shared_kv is None
    pipeline = StageLayers(layers=(2, 3), embedding=False)
    with raises(LayoutError, "layer 2 attends to keys and values of layer 0"):
        Decoder(plain, stage=pipeline)
    with raises(LayoutError, "an embedding on the first stage"):
        Decoder(config.with_fields(shared_kv=None), stage=pipeline)
    with raises(MappingError, "shared_kv"):
        config.with_fields(shared_kv=(1, 0, 0, 0))
    with raises(MappingError, "in this family the last layers share"):
        family("gemma4").write_config(config.with_fields(shared_kv=(0, 1, 0, 1)))


def test_heads_of_layers_without_a_window() -> None:
    """As published files say them, as transformers 5 does, and as args do."""
    found = family("gemma4")
    config = found.read_config(GEMMA4_STORED)
    assert config.layer_sizes == {"head_dim": (8, 16, 8, 16), "num_kv_heads": (2, 1, 2, 1)}
    assert config.attention.tied_values == (0, 1, 0, 1)
    listed = {"per_layer_config": {n: {"head_dim": 16, "num_key_value_heads": 1} for n in "13"}}
    plain = {k: v for k, v in GEMMA4_STORED.items() if "global" not in k}
    assert found.read_config(plain | listed).layer_sizes == config.layer_sizes
    said = config_from_args(args_from_config(config))
    assert said.layer_sizes == config.layer_sizes
    assert said.attention.tied_values == config.attention.tied_values
    written = found.write_config(config.with_fields(extra={}))
    assert written["per_layer_config"] == listed["per_layer_config"]
    assert found.read_config(written).layer_sizes == config.layer_sizes
    with raises(MappingError, "which layers have heads of which size"):
        found.write_config(config.with_fields(layer_sizes=None))
    with raises(MappingError, "values are keys in every layer without a window"):
        found.write_config(config.with_fields(tied_values=(1, 1, 1, 1)))
    uneven = {"head_dim": (8, 16, 8, 8), "num_kv_heads": (2, 1, 2, 1)}
    assert "global_head_dim" not in args_from_config(config.with_fields(layer_sizes=uneven))
