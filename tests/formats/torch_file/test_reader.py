"""Files of torch.save with a state dict in them, as training programs write them."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megtool import inspect, reshard, verify
from megtool.errors import FormatError, MappingError, UsageError
from megtool.formats import open_checkpoint
from tests.support.errors import raises
from tests.support.folders import torch_tensors
from tests.support.models import tiny_llama

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("hf") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def weights(original: Path) -> Tensors:
    return load_file(original / "model.safetensors")


OPTIMIZER = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}
FORMS: dict[str, Callable[[Tensors], Any]] = {
    "plain": lambda w: w,
    "ordered": OrderedDict,
    "parameters": lambda w: {n: torch.nn.Parameter(t) for n, t in w.items()},
    "model": lambda w: {"model": w, "optimizer": OPTIMIZER, "iter_num": 7},
    "module": lambda w: {f"module.{n}": t for n, t in w.items()},
    "lightning": lambda w: {
        "state_dict": {f"model.{n}": t for n, t in w.items()},
        "optimizer_states": [OPTIMIZER],
        "hyper_parameters": {"lr": 1e-4},
    },
    "app": lambda w: {"app": {"model": w}},
    "actor": lambda w: {f"actor.module.{n}": t for n, t in w.items()},
    "compiled": lambda w: {f"_orig_mod.{n}": t for n, t in w.items()},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_state_dict_is_read_under_any_keys(
    tmp_path: Path, original: Path, weights: Tensors, form: str, is_zip: bool
) -> None:
    file = tmp_path / "weights.pt"
    torch.save(FORMS[form](weights), file, _use_new_zipfile_serialization=is_zip)
    reshard(file, tmp_path / "out", to="hf", like=original, fsync=False)
    out = torch_tensors(tmp_path / "out")
    assert out.keys() == weights.keys()
    assert all(torch.equal(t, out[n]) for n, t in weights.items())
    assert verify(file, original, like=original).verdict == "equal"


def test_what_is_not_read_is_named(tmp_path: Path, original: Path, weights: Tensors) -> None:
    file = tmp_path / "nano.ckpt"
    torch.save(FORMS["model"](weights), file)
    opened = open_checkpoint(file)
    assert {t.name for t in opened.tensors} == {f"model.{n}" for n in weights}
    assert [t.name for t in opened.ignored] == ["optimizer.state.0.exp_avg"]
    assert any("optimizer" in w and "iter_num" in w for w in opened.warnings)


def test_views_of_a_storage_are_read_as_they_are(
    tmp_path: Path, original: Path, weights: Tensors
) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    whole = torch.stack([weights[name], weights[name] + 1]).transpose(1, 2).contiguous()
    changed = weights | {
        name: whole[0].T,
        name.replace("gate", "up"): whole[1].T,
    }
    assert not changed[name].is_contiguous()
    torch.save(changed, tmp_path / "w.pth")
    reshard(tmp_path / "w.pth", tmp_path / "out", to="hf", like=original, fsync=False)
    out = torch_tensors(tmp_path / "out")
    assert all(torch.equal(t, out[n]) for n, t in changed.items())


def test_tied_weights_share_their_bytes(tmp_path: Path, weights: Tensors) -> None:
    tied = tiny_llama.save(tmp_path / "tied", num_hidden_layers=2, tie_word_embeddings=True)
    state = load_file(tied / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, tmp_path / "w.pt")
    opened = open_checkpoint(tmp_path / "w.pt")
    assert "lm_head.weight" in opened
    assert verify(tmp_path / "w.pt", tied, like=tied).verdict == "equal"
    # Of a model whose configuration does not tie them, both are there.
    untied = tiny_llama.save(tmp_path / "untied", num_hidden_layers=2)
    reshard(tmp_path / "w.pt", tmp_path / "out", to="hf", like=untied, fsync=False)
    out = torch_tensors(tmp_path / "out")
    assert torch.equal(out["lm_head.weight"], out["model.embed_tokens.weight"])


def test_a_second_model_is_not_taken_for_the_first(
    tmp_path: Path, original: Path, weights: Tensors
) -> None:
    ema = {n: t + 1 for n, t in weights.items()}
    torch.save({"model": weights, "model_ema": ema}, tmp_path / "two.pt")
    with raises(MappingError, "model_ema", hint="--exclude"):
        reshard(tmp_path / "two.pt", tmp_path / "out", to="hf", like=original)
    reshard(
        tmp_path / "two.pt",
        tmp_path / "out",
        to="hf",
        like=original,
        exclude=["model_ema.*"],
        fsync=False,
    )
    assert torch.equal(
        torch_tensors(tmp_path / "out")["model.norm.weight"], weights["model.norm.weight"]
    )


class Thing:
    """A class that no checkpoint needs."""


def test_other_files_are_refused_by_what_they_are(tmp_path: Path, weights: Tensors) -> None:
    linear = torch.nn.Linear(2, 2)
    cases: dict[str, tuple[Any, str]] = {
        "model": (linear, "torch.nn.modules.linear.Linear"),
        "tensor": (torch.zeros(3), "one tensor"),
        "list": ([torch.zeros(3)], "a list"),
        "empty": ({"epoch": 3}, "no tensors by name"),
    }
    for name, (value, text) in cases.items():
        file = tmp_path / f"{name}.pt"
        torch.save(value, file)
        with raises(FormatError, text, file=file, hint=True, id="not-a-checkpoint"):
            open_checkpoint(file)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"a": 1}))
    with raises(FormatError, "a pickle that torch.save has not written", hint=True):
        open_checkpoint(tmp_path / "plain.pt")
    torch.save(weights, tmp_path / "w.pt")
    with raises(UsageError, hint="--iteration"):
        open_checkpoint(tmp_path / "w.pt", iteration=3)


def test_a_tensor_of_another_class_is_refused(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    torch.save({"a": sparse}, tmp_path / "s.pt")
    with raises(FormatError, "not supported", tensor="a", hint=True):
        open_checkpoint(tmp_path / "s.pt")


@pytest.mark.parametrize("is_zip", [True, False])
def test_damage_is_an_error(tmp_path: Path, weights: Tensors, is_zip: bool) -> None:
    file = tmp_path / "w.pt"
    torch.save(weights, file, _use_new_zipfile_serialization=is_zip)
    whole = file.read_bytes()
    for size in [0, 1, 20, 200, 2000, *range(5000, len(whole), 40_013), len(whole) - 1]:
        file.write_bytes(whole[:size])
        with raises(FormatError):
            open_checkpoint(file)
    file.write_bytes(whole + b"x")
    with raises(FormatError):
        open_checkpoint(file)


def test_a_storage_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    torch.save({"a": torch.arange(5)}, file, _use_new_zipfile_serialization=False)
    data = bytearray(file.read_bytes())
    at = len(data) - 5 * 8 - 8
    assert int.from_bytes(data[at : at + 8], "little") == 5
    data[at : at + 8] = (1 << 40).to_bytes(8, "little")
    file.write_bytes(data)
    with raises(FormatError, str(1 << 40)):
        open_checkpoint(file)


@pytest.mark.parametrize("is_zip", [True, False])
def test_no_code_of_the_file_runs(tmp_path: Path, is_zip: bool) -> None:
    target = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> Any:
            return Path.touch, (target,)

    class System:
        def __reduce__(self) -> Any:
            return eval, (f"open({str(target)!r}, 'w')",)

    for value in (Hostile(), System()):
        file = tmp_path / "w.bin"
        torch.save({"a": torch.zeros(2), "b": value}, file, _use_new_zipfile_serialization=is_zip)
        try:
            report = inspect(file)
        except FormatError as e:
            assert e.error_id == "hostile-pickle"
        else:
            assert report
        assert not target.exists()
