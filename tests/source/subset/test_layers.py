"""`--layers`: some layers become a model of their own, with their state, in any format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool import reshard, verify
from megtool.errors import LayoutError, MappingError, UsageError
from megtool.formats import open_checkpoint
from megtool.options.layout import ParallelConfig
from megtool.spec import layer_sets
from tests.support import folders
from tests.support.checkpoints.stored_arrays import stored_arrays
from tests.support.checkpoints.trained import config, write
from tests.support.checkpoints.trained_models import MODELS
from tests.support.models import tiny_llama

HOPS = (
    {"to": "torch_dist", "optimizer_format": "fully_reshardable", "tp": 2, "pp": 3},
    {"to": "torch_dist", "optimizer_format": "dp_reshardable", "pp": 3, "dp": 2},
    {"to": "megatron", "optimizer_format": "legacy", "tp": 2},
)


def chosen(before: dict[str, Any], layers: list[int], *, stacked: bool) -> dict[str, Any]:
    """What is to come of tensors, worked out on whole arrays."""
    out = {}
    for name, array in before.items():
        found = re.search(r"layers\.(\d+)\.", name)
        if stacked and ".layers." in name:
            out[name] = array[layers]
        elif found:
            for new in [k for k, old in enumerate(layers) if old == int(found[1])]:
                out[name.replace(found[0], f"layers.{new}.")] = array
        else:
            out[name] = array
    return out


@pytest.mark.parametrize("hop", HOPS, ids=lambda h: str(h["optimizer_format"]))
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if "mamba" in n else n for n in MODELS],
)
def test_layers_of_a_training_state(
    name: str, hop: dict[str, Any], tmp_path: Path, materialize: Any
) -> None:
    model = config(**MODELS[name])
    source = tmp_path / "source"
    write(source, model, ParallelConfig(), materialize)
    reshard(source, tmp_path / "some", layers="0-1,3", strict=True, **hop)
    reshard(
        tmp_path / "some",
        tmp_path / "back",
        to="torch_dist",
        optimizer_format="fully_reshardable",
        tp=1,
        pp=1,
        strict=True,
    )
    found, wanted = (
        stored_arrays(tmp_path / "back"),
        chosen(stored_arrays(source), [0, 1, 3], stacked=layer_sets.is_homogeneous(model)),
    )
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
    args = open_checkpoint(tmp_path / "some").metadata["args"]
    assert args["num_layers"] == args["encoder_num_layers"] == 3
    assert args["moe_layer_freq"] == (
        [0, 1, 1] if layer_sets.moe_layers(model) - {2} == {1, 3} else 1
    )


@pytest.mark.parametrize(
    "name", ["some experts", pytest.param("delta net", marks=pytest.mark.slow)]
)
def test_layers_of_a_model_that_numbers_branches(
    name: str, tmp_path: Path, materialize: Any
) -> None:
    """They are named as in the model of two branches each, and so are objects of theirs."""
    write(tmp_path / "gpt", config(**MODELS[name]), ParallelConfig(), materialize)
    reshard(tmp_path / "gpt", tmp_path / "hybrid", tp=2, model_class="hybrid", strict=True)
    for number, (source, options) in enumerate(
        (("gpt", {"layers": "3,0-1"}), ("0", {"tp": 2, "model_class": "hybrid"}))
    ):
        reshard(tmp_path / source, tmp_path / f"{number}", strict=True, **options)
    reshard(tmp_path / "hybrid", tmp_path / "some", layers="3,0-1", strict=True)
    assert verify(tmp_path / "0", tmp_path / "some").verdict == "equal"
    want, found = (open_checkpoint(tmp_path / folder) for folder in ("1", "some"))
    assert found.objects.keys() == want.objects.keys()
    for key in ("num_layers", "hybrid_layer_pattern", "moe_layer_freq"):
        assert found.metadata["args"][key] == want.metadata["args"][key], key


def test_layers_of_a_folder_and_what_transformers_makes_of_it(tmp_path: Path) -> None:
    source = tiny_llama.save(tmp_path / "hf", parts=2)
    report = reshard(source, tmp_path / "out", layers="1-2")
    before, after = folders.stored_tensors(source), folders.stored_tensors(tmp_path / "out")
    assert report.left_out == 18
    assert after == {
        re.sub(r"layers\.(\d)", lambda m: f"layers.{int(m[1]) - 1}", n): t
        for n, t in before.items()
        if not re.search(r"layers\.[03]\.", n)
    }
    kept = json.loads((tmp_path / "out/config.json").read_text())
    assert kept == json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 2}
    assert (tmp_path / "out/tokenizer.json").read_bytes() == tiny_llama.TOKENIZER
    assert verify(tmp_path / "out").exit_status == 0


def test_digests_follow_their_layers(tmp_path: Path) -> None:
    source = tiny_llama.save(tmp_path / "hf")
    reshard(source, tmp_path / "a", to="torch_dist", tp=2, digest="all")
    report = reshard(tmp_path / "a", tmp_path / "b", layers="3,0", tp=1)
    assert (report.unverified, report.digested + report.inherited) == (0, 21)
    assert verify(tmp_path / "b").exit_status == 0
    reshard(source, tmp_path / "c", layers="3,0")
    assert verify(tmp_path / "b", tmp_path / "c").exit_status == 0


@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 3}, {"tp": 4}])
@pytest.mark.parametrize("to", ["torch_dist", "megatron", "hf"])
def test_a_layer_named_twice_is_written_twice(
    to: str, layout: dict[str, int], tmp_path: Path
) -> None:
    source = tiny_llama.save(tmp_path / "hf")
    cut = layout if to != "hf" else {}
    reshard(source, tmp_path / "deep", to=to, layers="0-3,2-3", strict=True, **cut)
    reshard(tmp_path / "deep", tmp_path / "back", to="hf")
    before, after = folders.stored_tensors(source), folders.stored_tensors(tmp_path / "back")
    for name, tensor in after.items():
        old = re.sub(r"layers\.([45])", lambda m: f"layers.{int(m[1]) - 2}", name)
        assert before[old] == tensor
    assert len(after) == len(before) + 18
    assert json.loads((tmp_path / "back/config.json").read_text())["num_hidden_layers"] == 6
    assert verify(tmp_path / "deep", tmp_path / "back").exit_status == 0


def test_extra_states_are_numbered_anew(tmp_path: Path) -> None:
    source = tiny_llama.save(tmp_path / "hf")
    reshard(source, tmp_path / "a", to="torch_dist")
    reshard(tmp_path / "a", tmp_path / "b", layers="1,3")
    reshard(source, tmp_path / "c", to="torch_dist", layers="0-1")
    assert open_checkpoint(tmp_path / "b").objects.keys() == (
        open_checkpoint(tmp_path / "c").objects.keys()
    )


def test_what_cannot_be(tmp_path: Path) -> None:
    source = tiny_llama.save(tmp_path / "hf")
    with pytest.raises(UsageError, match="'0-4' of a model that has 4"):
        reshard(source, tmp_path / "out", layers="0-4")
    with pytest.raises(LayoutError):
        reshard(source, tmp_path / "out", layers="0-2", to="torch_dist", pp=2)
    (source / "config.json").unlink()
    with pytest.raises(MappingError):
        reshard(source, tmp_path / "out", layers="0-1")
    assert not (tmp_path / "out").exists()
