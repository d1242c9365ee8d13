"""PEFT's adapters as we write them: PEFT loads them, and computes what we add to weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool.adapters.peft_writer import PeftNames, make_peft_adapter
from megtool.errors import MappingError
from megtool.source.open import open_source
from megtool.transport.weight_update import WeightUpdate
from tests.support.models import moe_models
from tests.support.models.adapted_models import (
    CASES,
    EXPERTS,
    add_updates,
    load_model,
    logits,
    read_canonical,
    read_updates,
    save_adapter,
)
from tests.support.models.tiny_model import tiny_model


def write(base: Path, folder: Path, updates: dict[str, WeightUpdate], **options: Any) -> Any:
    source = open_source(base)
    assert source.model is not None
    assert source.model.family is not None
    names = PeftNames(source.config, source.model.family)
    adapter = make_peft_adapter(updates, names, base=str(base), **options)
    folder.mkdir()
    save_file(dict(adapter.tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_bytes(adapter.config_file)
    return adapter


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_what_became_of_its_own_adapter(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    base = tmp_path / "base"
    tiny_model(family, base, tie_word_embeddings=False)
    wanted = logits(save_adapter(base, tmp_path / "theirs", **settings))
    adapter = write(base, tmp_path / "ours", read_updates(base, tmp_path / "theirs"))
    assert adapter.rounded == ()
    model = peft.PeftModel.from_pretrained(load_model(base), tmp_path / "ours").eval()
    torch.testing.assert_close(logits(model), wanted, atol=1e-6, rtol=1e-6)
    theirs, ours = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "ours")
    )
    assert theirs.keys() == ours.keys()
    for name in theirs:
        assert torch.equal(theirs[name], ours[name]), name


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe", "gpt_oss", "llama4", "deepseek_v3"])
@pytest.mark.parametrize("parameters", [EXPERTS, EXPERTS[:1], EXPERTS[1:]], ids=["both", *EXPERTS])
def test_peft_loads_adapters_of_experts(case: str, parameters: list[str], tmp_path: Path) -> None:
    family, _, keys = moe_models.CASES[case]
    base = tmp_path / "base"
    tiny_model(family, base, sizes=moe_models.SIZES, **keys)
    parameters = [p.replace("mlp", "feed_forward") if case == "llama4" else p for p in parameters]
    wanted = logits(
        save_adapter(
            base, tmp_path / "theirs", target_modules=["o_proj"], target_parameters=parameters
        )
    )
    write(base, tmp_path / "ours", read_updates(base, tmp_path / "theirs"))
    model = peft.PeftModel.from_pretrained(load_model(base), tmp_path / "ours").eval()
    torch.testing.assert_close(logits(model), wanted, atol=1e-6, rtol=1e-6)


def random_update(out: int, inner: int, rank: int, scale: float, seed: int) -> WeightUpdate:
    generator = torch.Generator().manual_seed(seed)
    return WeightUpdate(
        down=torch.randn(rank, inner, generator=generator) * 0.1,
        up=torch.randn(out, rank, generator=generator) * 0.1,
        scale=scale,
    )


@pytest.mark.parametrize(("scale", "is_exact"), [(1.5, True), (3.0, True), (1.7, False)])
def test_updates_of_projections_become_one_of_a_fused_module(
    scale: float, is_exact: bool, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    tiny_model("phi3", base)
    updates = {
        "layers.0.attn.q.weight": random_update(32, 32, 4, 1.5, 1),
        "layers.0.attn.k.weight": random_update(16, 32, 2, scale, 2),
        "layers.1.mlp.up.weight": random_update(48, 32, 3, 1.5, 3),
    }
    adapter = write(base, tmp_path / "ours", updates)
    assert adapter.rounded == (() if is_exact else ("model.layers.0.self_attn.qkv_proj",))
    model = peft.PeftModel.from_pretrained(load_model(base), tmp_path / "ours").eval()
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    ours, theirs = add_updates(read_canonical(base), updates), read_canonical(tmp_path / "merged")
    for name in ours:
        torch.testing.assert_close(ours[name].float(), theirs[name], atol=1e-6, rtol=1e-5)


def test_what_peft_has_no_place_for_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model("llama", base, tie_word_embeddings=True)
    with pytest.raises(MappingError) as e:
        write(base, tmp_path / "0", {"embed.weight": random_update(101, 32, 2, 1.0, 0)})
    assert e.value.id == "unsupported-adapter"
    with pytest.raises(MappingError) as e:
        write(base, tmp_path / "1", {"layers.0.attn.q.weight": random_update(33, 32, 2, 1.0, 0)})
    assert e.value.id == "foreign-adapter"
    with pytest.raises(MappingError):
        write(base, tmp_path / "2", {"layers.9.attn.q.weight": random_update(32, 32, 2, 1.0, 0)})
    family, _, keys = moe_models.CASES["mixtral"]
    tiny_model(family, tmp_path / "moe", sizes=moe_models.SIZES, **keys)
    some = {"layers.0.mlp.experts.1.down.weight": random_update(32, 24, 2, 1.0, 0)}
    with pytest.raises(MappingError) as e:
        write(tmp_path / "moe", tmp_path / "3", some)
    assert e.value.id == "unsupported-adapter"
