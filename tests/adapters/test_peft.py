"""PEFT's adapters: what PEFT saves adds to weights what PEFT's own merge adds."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool.adapters.peft_config import PeftConfig
from megtool.adapters.read import read_adapter
from megtool.errors import FormatError, MappingError
from megtool.source.open import open_source
from tests.support.models import moe_models
from tests.support.models.adapted_models import (
    ATTENTION,
    CASES,
    EXPERTS,
    add_updates,
    read_canonical,
    read_updates,
    save_adapter,
)
from tests.support.models.tiny_model import tiny_model


def assert_merges_as_peft(base: Path, folder: Path, **settings: Any) -> None:
    model = save_adapter(base, folder / "adapter", **settings)
    updates = read_updates(base, folder / "adapter")
    ours = add_updates(read_canonical(base), updates)
    model.merge_and_unload().save_pretrained(folder / "merged")
    theirs = read_canonical(folder / "merged")
    assert ours.keys() == theirs.keys()
    plain = read_canonical(base)
    changed = {n for n in theirs if not torch.equal(theirs[n], plain[n])}
    assert changed == set(updates)
    for name in ours:
        torch.testing.assert_close(ours[name].float(), theirs[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_peft(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    tiny_model(family, tmp_path / "base", tie_word_embeddings=False)
    assert_merges_as_peft(tmp_path / "base", tmp_path, **settings)


MIXTURES = ["mixtral", "qwen3_moe", "gpt_oss", "llama4", "deepseek_v3", "qwen3_5_moe_text"]


@pytest.mark.parametrize("case", MIXTURES)
@pytest.mark.parametrize("parameters", [EXPERTS, EXPERTS[:1], EXPERTS[1:]], ids=["both", *EXPERTS])
def test_updates_of_experts_are_those_of_peft(
    case: str, parameters: list[str], tmp_path: Path
) -> None:
    family, _, keys = moe_models.CASES[case]
    tiny_model(family, tmp_path / "base", sizes=moe_models.SIZES, **keys)
    parameters = [p.replace("mlp", "feed_forward") if case == "llama4" else p for p in parameters]
    assert_merges_as_peft(
        tmp_path / "base", tmp_path, target_modules=["o_proj"], target_parameters=parameters
    )


def edit_config(folder: Path, **settings: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", folder)
    return folder


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa"},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"trainable_token_indices": [1, 2]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_peft_saves_beyond_lora_is_refused(
    settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    save_adapter(base, tmp_path, target_modules=ATTENTION, **settings)
    with pytest.raises(MappingError) as e:
        read_adapter(tmp_path)
    assert e.value.id == "unsupported-adapter"
    assert str(tmp_path) in str(e.value.file)


@pytest.mark.parametrize(
    "settings",
    [
        {"peft_type": "LOHA"},
        {"use_tomorrows_trick": True},
        {"tomorrows_trick_config": {"rank": 4}},
        {"init_lora_weights": "x"},
    ],
)
def test_settings_that_are_not_known_are_refused(
    settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    save_adapter(base, tmp_path, target_modules=ATTENTION)
    edit_config(tmp_path, **settings)
    with pytest.raises(MappingError) as e:
        read_adapter(tmp_path)
    assert e.value.id == "unsupported-adapter"


def test_settings_that_peft_ignores_are_ignored_with_a_warning_as_there(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_adapter(base, tmp_path, target_modules=ATTENTION, eva_config=None, loftq_config={})
    read_adapter(tmp_path)
    assert not caplog.records
    edit_config(tmp_path, tomorrows_size=16, tomorrows_mode="x", tomorrows_off=None)
    with pytest.warns(UserWarning, match="Unexpected keyword arguments"):
        peft.PeftConfig.from_pretrained(tmp_path)
    read_adapter(tmp_path)
    (message,) = caplog.messages
    assert "tomorrows_size" in message
    assert "tomorrows_mode" in message
    assert "tomorrows_off" not in message


def test_every_setting_of_peft_is_known(base: Path, tmp_path: Path) -> None:
    save_adapter(base, tmp_path, target_modules=ATTENTION)
    config = PeftConfig.read(tmp_path / "adapter_config.json")
    everything = dict.fromkeys((f.name for f in fields(peft.LoraConfig)), 1)
    assert replace(config, content=everything).unknown == ()


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 8},
        {"r": 0},
        {"r": 4.5},
        {"lora_alpha": "x"},
        {"lora_alpha": 10**400},
        {"lora_dropout": [0.1]},
        {"rank_pattern": {"(": 4}},
        {"rank_pattern": ["q_proj"]},
        {"alpha_pattern": {"q_proj": None}},
        {"alpha_pattern": {"k_proj": False}},
        {"target_parameters": [1]},
        {"target_parameters": "experts"},
        {"target_modules": 3},
        {"target_modules": "("},
        {"exclude_modules": [None]},
        {"layers_to_transform": "1"},
        {"layers_to_transform": [1.5]},
    ],
    ids=lambda settings: f"{settings}"[:40],
)
def test_a_configuration_that_is_wrong_is_refused(
    settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    save_adapter(base, tmp_path, target_modules=ATTENTION)
    edit_config(tmp_path, **settings)
    with pytest.raises(FormatError):
        read_adapter(tmp_path)


def edit_tensors(folder: Path, edit: Any) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(edit(load_file(path)), path)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("edit", "kind", "error_id", "tensor"),
    [
        (lambda t: {n: x for n, x in t.items() if n != Q}, FormatError, "format", "lora_B"),
        (lambda t: t | {Q: t[Q][:2].clone()}, FormatError, "format", "lora_A"),
        (lambda t: t | {Q: t[Q].long()}, FormatError, "format", "lora_A"),
        (lambda t: t | {Q: t[Q].flatten()}, FormatError, "format", "lora_A"),
        (lambda t: t | {"a.weight": t[Q].clone()}, MappingError, "unsupported-adapter", "a.weight"),
        (
            lambda t: t | {Q.replace("A.", "A.other."): t[Q].clone()},
            MappingError,
            "unsupported-adapter",
            None,
        ),
        (lambda t: {}, FormatError, "format", None),
    ],
    ids=["one of a pair", "rank", "integers", "vector", "other tensor", "two adapters", "empty"],
)
def test_damaged_matrices_are_refused(
    edit: Any, kind: type[Exception], error_id: str, tensor: str | None, base: Path, tmp_path: Path
) -> None:
    save_adapter(base, tmp_path, target_modules=ATTENTION)
    edit_tensors(tmp_path, edit)
    with pytest.raises(kind) as e:
        read_adapter(tmp_path)
    assert getattr(e.value, "id") == error_id  # noqa: B009
    assert tensor is None or tensor in str(getattr(e.value, "tensor"))  # noqa: B009


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": r".*\.(q|k|o)_proj"},
        {"exclude_modules": ["v_proj"]},
        {"layers_to_transform": [1]},
        {"layers_to_transform": 0, "layers_pattern": "layers"},
    ],
)
def test_matrices_that_peft_would_leave_out_are_refused(
    settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    save_adapter(base, tmp_path / "a", target_modules=["q_proj", "v_proj"])
    edit_config(tmp_path / "a", **settings)
    with pytest.raises(FormatError, match="leaves out"):
        read_adapter(tmp_path / "a")


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": r".*\.(q|v)_proj"},
        {"layers_to_transform": []},
        {"layers_to_transform": [0, 1], "layers_pattern": ["blocks", "layers"]},
        {"target_modules": "all-linear", "exclude_modules": "lm_head"},
    ],
)
def test_modules_are_named_in_every_way_of_peft(
    settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    save_adapter(base, tmp_path / "a", target_modules=["q_proj", "v_proj"])
    edit_config(tmp_path / "a", **settings)
    assert len(read_adapter(tmp_path / "a").weights) == 4


def test_names_with_the_adapters_name_are_read(base: Path, tmp_path: Path) -> None:
    save_adapter(base, tmp_path, target_modules=ATTENTION)
    plain = {w.name for w in read_adapter(tmp_path).weights}
    edit_tensors(
        tmp_path, lambda t: {n.replace(".weight", ".default.weight"): x for n, x in t.items()}
    )
    assert {w.name for w in read_adapter(tmp_path).weights} == plain


def test_an_adapter_of_another_model_is_refused(base: Path, tmp_path: Path) -> None:
    tiny_model("llama", tmp_path / "other", num_hidden_layers=3)
    tiny_model("llama", tmp_path / "wider", hidden_size=48)
    for name in ("other", "wider"):
        save_adapter(tmp_path / name, tmp_path / "adapter", target_modules=ATTENTION)
        source = open_source(base)
        assert source.model is not None
        with pytest.raises(MappingError) as e:
            read_adapter(tmp_path / "adapter").updates(source.config, source.model.family)
        assert e.value.id == "foreign-adapter"
        assert "lora_A" in str(e.value.tensor)


def test_a_folder_without_an_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError) as e:
        read_adapter(base)
    assert e.value.id == "not-an-adapter"
    with pytest.raises(FormatError) as e:
        read_adapter(tmp_path / "missing")
    save_adapter(base, tmp_path, target_modules=ATTENTION)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(FormatError) as e:
        read_adapter(tmp_path)
    assert e.value.id == "missing-shard"
