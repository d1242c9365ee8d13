"""`--adapter`: a folder with an adapter of PEFT's merged in equals what PEFT's own merge saves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from megtool import convert_adapter, export, quantize, reshard
from megtool.cli.app import main
from megtool.errors import DestinationError, FormatError, MappingError, UsageError
from megtool.options.layout import ParallelConfig
from tests.support.checkpoints.trained import config, write
from tests.support.errors import raises
from tests.support.folders import contents, torch_tensors
from tests.support.models import gguf_models, moe_models, tiny_llama
from tests.support.models.adapted_models import read_canonical, save_adapter
from tests.support.models.tiny_model import tiny_model

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"to": "torch_dist", "tp": 2, "pp": 2},
    {"to": "megatron", "tp": 2},
    {"to": "dcp"},
)


def merge_by_peft(base: Path, adapter: Path, folder: Path, dtype: torch.dtype) -> Path:
    """What PEFT saves of a base in `dtype` with the adapter merged."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    merged = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    merged.save_pretrained(folder)
    return folder


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {"target_modules": "all-linear"}),
    "rslora": ("llama", {}, {"target_modules": ATTENTION, "use_rslora": True, "r": 8}),
    "embeddings": ("llama", {}, {"target_modules": ["embed_tokens", "lm_head", "up_proj"]}),
    "fused": ("phi3", {}, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "transposed": ("gpt2", {}, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
}
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"target_parameters": ["mlp.experts.gate_up_proj"]}),
    "qwen3_moe": ("qwen3_moe", {"target_parameters": ["mlp.experts.down_proj"]}),
    "gpt_oss": ("gpt_oss", {"target_parameters": ["mlp.experts.gate_up_proj"]}),
    "mla": ("deepseek_v3", {"target_modules": ["q_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]}),
}


def assert_equals_peft(
    base: Path, folder: Path, layouts: Sequence[dict[str, Any]], **settings: Any
) -> None:
    """float32: within 1e-6 of what PEFT saves, from and to Megatron's formats the same bits."""
    adapter = folder / "adapter"
    save_adapter(base, adapter, **settings)
    merge_by_peft(base, adapter, folder / "theirs", torch.float32)
    report = reshard(base, folder / "ours", adapter=adapter, verify=True)
    assert report.plan.num_bytes.merge > 0
    ours, theirs = read_canonical(folder / "ours"), read_canonical(folder / "theirs")
    plain = read_canonical(base)
    assert ours.keys() == theirs.keys()
    assert {n for n in ours if not torch.equal(ours[n], plain[n])} == set(report.merges[0].updates)
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-6, rtol=1e-6)
    for number, layout in enumerate(layouts):
        there, back = folder / f"there{number}", folder / f"back{number}"
        reshard(base, there, adapter=adapter, **layout)
        reshard(there, back, to="hf")
        assert torch_tensors(back).keys() == torch_tensors(folder / "ours").keys()
        assert all(torch.equal(w, ours[n]) for n, w in read_canonical(back).items())
        plain_there, merged = folder / f"plain{number}", folder / f"merged{number}"
        reshard(base, plain_there, **layout)
        reshard(plain_there, merged, to="hf", adapter=adapter)
        assert all(torch.equal(w, ours[n]) for n, w in read_canonical(merged).items())


@pytest.mark.parametrize("case", CASES)
def test_a_merged_model_equals_that_of_peft(case: str, tmp_path: Path) -> None:
    family, keys, settings = CASES[case]
    tiny_model(family, tmp_path / "base", tie_word_embeddings=False, **keys)
    assert_equals_peft(tmp_path / "base", tmp_path, LAYOUTS, **settings)


@pytest.mark.parametrize("case", EXPERTS)
def test_merged_experts_and_latent_attention_equal_those_of_peft(case: str, tmp_path: Path) -> None:
    name, settings = EXPERTS[case]
    family, _, keys = moe_models.CASES[name]
    sizes = moe_models.SIZES | {"num_hidden_layers": 2}
    tiny_model(family, tmp_path / "base", sizes=sizes, **keys)
    settings = {"target_modules": ["o_proj"]} | settings
    assert_equals_peft(tmp_path / "base", tmp_path, LAYOUTS[:1], **settings)


def test_several_merged_adapters_equal_those_of_peft(tmp_path: Path) -> None:
    """Of other ranks and scales, some for the same weights, one in Megatron-Bridge's format."""
    base, folders = tmp_path / "base", [tmp_path / name for name in "abc"]
    tiny_model("llama", base, tie_word_embeddings=False)
    save_adapter(base, folders[0], target_modules=ATTENTION)
    save_adapter(base, folders[1], target_modules=["q_proj", "up_proj"], r=2, use_rslora=True)
    save_adapter(base, folders[2], target_modules=["q_proj", "lm_head"], r=8, lora_alpha=4)
    convert_adapter(folders[1], tmp_path / "bridge", to="bridge", base=base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(model, folders[0], adapter_name="a")
    for folder in folders[1:]:
        theirs.load_adapter(folder, folder.name)
    theirs.merge_and_unload(adapter_names=["a", "b", "c"]).save_pretrained(tmp_path / "theirs")
    report = reshard(base, tmp_path / "ours", adapter=folders, verify=True)
    assert [len(m.updates) for m in report.merges] == [8, 4, 3]
    assert [words.split(" with ")[0] for name, words in report.rows() if name == "merged"] == [
        *("8 weights", "4 weights", "3 weights")
    ]
    ours, wanted = read_canonical(tmp_path / "ours"), read_canonical(tmp_path / "theirs")
    assert ours.keys() == wanted.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, wanted[name], atol=1e-6, rtol=1e-6)
    reshard(base, tmp_path / "single", adapter=folders[:1])
    assert any(not torch.equal(w, ours[n]) for n, w in read_canonical(tmp_path / "single").items())
    for number, layout in enumerate(LAYOUTS):
        there, back = tmp_path / f"there{number}", tmp_path / f"back{number}"
        reshard(base, there, adapter=folders[::-1], verify=True, **layout)
        reshard(there, back, to="hf")
        assert all(torch.equal(w, ours[n]) for n, w in read_canonical(back).items())
    mixed = [folders[2], tmp_path / "bridge", folders[0]]
    reshard(base, tmp_path / "mixed", adapter=mixed)
    for name, weight in read_canonical(tmp_path / "mixed").items():
        torch.testing.assert_close(weight, wanted[name], atol=1e-6, rtol=1e-6)


def test_a_sum_of_adapters_equals_one_that_peft_combines(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_model("llama", base)
    save_adapter(base, tmp_path / "a", target_modules=ATTENTION)
    save_adapter(base, tmp_path / "b", target_modules=ATTENTION, r=6)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "a", adapter_name="a")
    theirs.load_adapter(tmp_path / "b", "b")
    theirs.add_weighted_adapter(["a", "b"], [1.0, 1.0], "both", combination_type="cat")
    theirs.save_pretrained(tmp_path / "saved", selected_adapters=["both"])
    reshard(base, tmp_path / "ours", adapter=[tmp_path / "a", tmp_path / "b"])
    reshard(base, tmp_path / "combined", adapter=tmp_path / "saved" / "both")
    combined = read_canonical(tmp_path / "combined")
    for name, weight in read_canonical(tmp_path / "ours").items():
        torch.testing.assert_close(weight, combined[name], atol=1e-6, rtol=1e-6)


def ulp(values: torch.Tensor) -> torch.Tensor:
    """The distance of bfloat16 numbers at the size of `values`."""
    _, exponent = torch.frexp(values.abs().float())
    return torch.pow(2.0, exponent.float() - 8)


def test_bfloat16_differs_from_that_of_peft_by_an_ulp_in_rare_elements(tmp_path: Path) -> None:
    """PEFT's product is rounded to float32, so that some sums near a tie go the other way."""
    tiny_model("llama", tmp_path / "single", hidden_size=256, intermediate_size=512)
    reshard(tmp_path / "single", tmp_path / "base", dtype="bfloat16")
    adapter = tmp_path / "adapter"
    save_adapter(tmp_path / "base", adapter, target_modules="all-linear")
    merge_by_peft(tmp_path / "base", adapter, tmp_path / "theirs", torch.bfloat16)
    reshard(tmp_path / "base", tmp_path / "ours", adapter=adapter)
    ours, theirs = torch_tensors(tmp_path / "ours"), torch_tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    differing = total = 0
    for name, weight in ours.items():
        assert weight.dtype == theirs[name].dtype == torch.bfloat16
        a, b = weight.float(), theirs[name].float()
        bound = ulp(torch.maximum(a.abs(), b.abs())) + 1e-7  # for sums that nearly cancel
        assert ((a - b).abs() <= bound).all(), name
        differing += int((a != b).sum())
        total += a.numel()
    assert differing < 1e-4 * total
    exact = tmp_path / "exact"
    reshard(tmp_path / "base", exact, adapter=adapter, dtype="float32")
    for name, weight in torch_tensors(exact).items():
        assert torch.equal(weight.bfloat16(), ours[name]), name


def test_an_adapter_of_a_quantized_base_is_merged_into_decoded_weights(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    tiny_llama.save(tmp_path / "base", **sizes)
    quantize(tmp_path / "base", tmp_path / "fp8", recipe="fp8_block128", fsync=False)
    reshard(tmp_path / "fp8", tmp_path / "plain", dtype="float32")
    save_adapter(tmp_path / "plain", tmp_path / "adapter", target_modules=ATTENTION)
    merge_by_peft(tmp_path / "plain", tmp_path / "adapter", tmp_path / "theirs", torch.float32)
    reshard(tmp_path / "fp8", tmp_path / "ours", adapter=tmp_path / "adapter", dtype="float32")
    ours, theirs = torch_tensors(tmp_path / "ours"), torch_tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-6, rtol=1e-6)
    assert "quantization_config" not in (tmp_path / "ours" / "config.json").read_text()


def test_an_adapter_of_megatron_bridge_is_merged_like_that_of_peft(tmp_path: Path) -> None:
    """Its fused modules have the matrices of q, k and v side by side."""
    tiny_model("llama", tmp_path / "base", tie_word_embeddings=False)
    save_adapter(tmp_path / "base", tmp_path / "peft", target_modules="all-linear")
    convert_adapter(tmp_path / "peft", tmp_path / "bridge", to="bridge", base=tmp_path / "base")
    for name in ("peft", "bridge"):
        reshard(tmp_path / "base", tmp_path / f"of {name}", adapter=tmp_path / name)
    ours, theirs = (torch_tensors(tmp_path / f"of {name}") for name in ("bridge", "peft"))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-7, rtol=1e-6)


def test_an_adapter_is_merged_into_decoded_gguf(tmp_path: Path) -> None:
    base = gguf_models.save(tmp_path / "base", "llama")
    export(base, tmp_path / "base.gguf", to="gguf", outtype="q8_0", fsync=False)
    reshard(tmp_path / "base.gguf", tmp_path / "plain", to="hf", dtype="float32")
    save_adapter(tmp_path / "plain", tmp_path / "adapter", target_modules=ATTENTION)
    merge_by_peft(tmp_path / "plain", tmp_path / "adapter", tmp_path / "theirs", torch.float32)
    reshard(
        tmp_path / "base.gguf",
        tmp_path / "ours",
        to="hf",
        adapter=tmp_path / "adapter",
        dtype="float32",
        verify=True,
    )
    ours, theirs = torch_tensors(tmp_path / "ours"), torch_tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], atol=1e-6, rtol=1e-6)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", folder / "base")
    save_adapter(folder / "base", folder / "adapter", target_modules=ATTENTION)
    return folder


def test_the_command_says_what_it_will_merge(base: Path, capsys: Any, tmp_path: Path) -> None:
    call = ["reshard", str(base / "base"), str(tmp_path / "out"), "--to", "torch_dist"]
    call += ["--adapter", str(base / "adapter"), "--dry-run"]
    assert main(call) == 0
    text = capsys.readouterr().out
    for words in ("8 weights with", "rank 4, scale 1.5", "merged with an adapter"):
        assert words in text
    assert main([*call, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (merged,) = data["merges"]
    assert merged["adapter"] == str(base / "adapter")
    assert (merged["ranks"], merged["scales"]) == ([4], [1.5])
    assert len(merged["weights"]) == 8
    assert data["plan"]["num_bytes"]["merge"] > 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"layers": "0"},
        {"select": ["*q_proj*"]},
        {"exclude": ["lm_head*"]},
        {"average": ["base"]},
        {"optimizer_only": True},
        {"pruning_scores": "scores.json", "hidden_size": 8},
    ],
    ids=lambda options: next(iter(options)),
)
def test_an_adapter_is_of_a_whole_model(
    options: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    with raises(UsageError, "--adapter", id="option-without-effect"):
        reshard(base / "base", tmp_path / "out", adapter=base / "adapter", **options)


def test_state_of_weights_as_they_were_is_not_written(
    base: Path, tmp_path: Path, materialize: Any
) -> None:
    adapter = base / "adapter"
    with raises(UsageError, "--amax rebuild"):
        reshard(base / "base", tmp_path / "a", to="torch_dist", adapter=adapter, amax="rebuild")
    sizes = {"num_layers": 2, "hidden_size": 32, "head_dim": 8}
    write(tmp_path / "run", config(**sizes), ParallelConfig(), materialize)
    with raises(UsageError, "optimizer state"):
        reshard(
            tmp_path / "run",
            tmp_path / "b",
            to="torch_dist",
            adapter=adapter,
            family="llama",
            optimizer_format="fully_reshardable",
        )
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def truncate(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def edit_tensors(adapter: Path, edit: Any) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in tensors:
        if "lora_B" in name:
            edit(tensors[name])
            break
    save_file(tensors, adapter / "adapter_model.safetensors")


HOSTILE: dict[str, tuple[type[Exception], str, Any]] = {
    "truncated": (FormatError, "format", truncate),
    "NaN": (FormatError, "nan-weights", lambda a: edit_tensors(a, lambda t: t.fill_(torch.nan))),
    "Inf": (FormatError, "nan-weights", lambda a: edit_tensors(a, lambda t: t[1].fill_(torch.inf))),
    "absent": (FormatError, "not-an-adapter", lambda a: (a / "adapter_config.json").unlink()),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_damaged_adapters_are_one_error(case: str, base: Path, tmp_path: Path) -> None:
    kind, error_id, damage = HOSTILE[case]
    save_adapter(base / "base", tmp_path / "adapter", target_modules=ATTENTION)
    damage(tmp_path / "adapter")
    with raises(kind, id=error_id) as e:
        reshard(base / "base", tmp_path / "out", adapter=tmp_path / "adapter")
    assert str(tmp_path / "adapter") in str(e.value.file)
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


def test_adapters_of_other_models_are_one_error(base: Path, tmp_path: Path) -> None:
    for number, keys in enumerate(({"num_hidden_layers": 3}, {"hidden_size": 48})):
        other = tmp_path / f"other{number}"
        tiny_model("llama", other, **keys)
        save_adapter(other, tmp_path / f"adapter{number}", target_modules=ATTENTION)
        with raises(MappingError, id="foreign-adapter"):
            reshard(base / "base", tmp_path / "out", adapter=tmp_path / f"adapter{number}")
    assert not (tmp_path / "out").exists()


def test_the_adapter_is_not_replaced(base: Path, tmp_path: Path) -> None:
    save_adapter(base / "base", tmp_path / "adapter", target_modules=ATTENTION)
    before = contents(tmp_path / "adapter")
    with raises(DestinationError, id="destination-in-source"):
        reshard(
            base / "base",
            tmp_path / "adapter",
            adapter=tmp_path / "adapter",
            overwrite=True,
        )
    assert contents(tmp_path / "adapter") == before
