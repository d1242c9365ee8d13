"""`megtool.load_state_dict`: modules are filled in place, or left as they are with one error."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import megtool
from megtool.access import state_dict
from megtool.errors import MappingError, StorageError, UsageError
from megtool.source import open as open_source
from tests.support.errors import raises

Q = "model.layers.1.self_attn.q_proj.weight"


def build(llama: Path, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(llama)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def test_a_model_is_filled_from_every_format(
    anywhere: dict[str, Path], llama: Path, tensors: dict[str, torch.Tensor]
) -> None:
    for name, path in anywhere.items():
        model = build(llama)
        parameter = model.get_parameter(Q)
        report = megtool.load_state_dict(model, path, like=llama)
        assert report.num_tensors == len(tensors), name
        assert not report.missing
        assert not report.unused
        assert model.get_parameter(Q) is parameter
        assert all(t.equal(tensors[n]) for n, t in model.state_dict().items()), name


def test_values_become_the_models_type(llama: Path, tensors: dict[str, torch.Tensor]) -> None:
    model = build(llama, torch.float32)
    megtool.load_state_dict(model, llama)
    assert all(t.equal(tensors[n].float()) for n, t in model.state_dict().items())
    state = {Q: torch.zeros(32, 64)[:, ::2]}  # not contiguous
    megtool.load_state_dict(state, llama)
    assert state[Q].equal(tensors[Q].float())
    with raises(MappingError, Q, "int32"):
        megtool.load_state_dict({Q: torch.zeros(32, 32, dtype=torch.int32)}, llama)


def test_a_rank_is_filled_under_megatrons_names(llama: Path) -> None:
    wanted = dict(megtool.stream(llama, to="megatron", tp=2, pp=2, rank=3))
    state = {n: torch.empty_like(t) for n, t in wanted.items()}
    report = megtool.load_state_dict(state, llama, tp=2, pp=2, rank=3)
    assert report.naming == "megatron"
    assert all(t.equal(wanted[n]) for n, t in state.items())


def test_every_fault_is_named_and_nothing_is_loaded(llama: Path) -> None:
    model = build(llama)
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 47, bias=False)  # type: ignore
    model.model.more = nn.Linear(3, 4)  # type: ignore
    before = {n: t.clone() for n, t in model.state_dict().items()}
    names = ("model.more.weight", "model.more.bias", "model.layers.0.mlp.up_proj.weight")
    with raises(MappingError, *names, "[47, 32]", file=llama, id="missing-tensors", hint="nothing"):
        megtool.load_state_dict(model, llama)
    assert all(t.equal(before[n]) for n, t in model.state_dict().items())
    model.model.layers[0].mlp.up_proj = nn.Linear(32, 48, bias=False)  # type: ignore
    report = megtool.load_state_dict(model, llama, strict=False)
    assert set(report.missing) == set(names[:2])
    assert model.model.more.weight.equal(before["model.more.weight"])  # type: ignore


def test_names_of_no_naming_are_refused(llama: Path) -> None:
    with raises(MappingError, "nowhere", id="missing-tensors"):
        megtool.load_state_dict({"nowhere": torch.zeros(3)}, llama)


def test_tied_tensors_need_one_of_their_names(llama: Path, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(llama, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "tied")
    other = transformers.AutoModelForCausalLM.from_config(config)
    report = megtool.load_state_dict(other, tmp_path / "tied")
    assert not report.missing
    assert other.lm_head.weight.equal(model.lm_head.weight)


def test_whose_names_fit_needs_no_model_that_is_known(
    llama: Path, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """A configuration of another model is in nobody's way where names and shapes are the same."""
    folder = shutil.copytree(llama, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with raises(MappingError, file=folder):
        megtool.open(folder)
    model = build(llama)
    report = megtool.load_state_dict(model, folder)
    assert (report.naming, report.num_tensors) == ("stored", len(tensors))
    assert all(t.equal(tensors[n]) for n, t in model.state_dict().items())
    with raises(MappingError, file=folder):  # for one name more, whose model it is matters
        megtool.load_state_dict({**model.state_dict(), "more": torch.zeros(3)}, folder)


def test_headers_are_read_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it turns out only from them that the names are of another naming."""
    wanted = dict(megtool.stream(llama, to="megatron"))
    opened: list[Path] = []
    read = open_source.open_checkpoint

    def counted(path: Path, **options: Any) -> Any:
        opened.append(path)
        return read(path, **options)

    monkeypatch.setattr(open_source, "open_checkpoint", counted)
    state = {n: torch.empty_like(t) for n, t in wanted.items()}
    assert megtool.load_state_dict(state, llama).naming == "megatron"
    assert opened == [llama]
    assert all(t.equal(wanted[n]) for n, t in state.items())


def test_a_model_without_memory_is_told_how_to_get_some(llama: Path) -> None:
    with torch.device("meta"):
        model = build(llama)
    with raises(UsageError, hint="to_empty"):
        megtool.load_state_dict(model, llama)


def test_a_read_that_fails_says_that_the_model_is_filled_in_part(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("the disk failed", file=llama)

    monkeypatch.setattr(state_dict.BoxReader, "read", refuse)
    with raises(StorageError, hint="in part"):
        megtool.load_state_dict(build(llama), llama)
