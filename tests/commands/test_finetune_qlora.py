"""LoRA over weights that stay packed: the same numbers as over decoded ones, in less memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import quantize, reshard, verify
from megtool.errors import MappingError, UsageError
from megtool.model.batch import Batch
from megtool.model.stacks.lora import LoraSettings, adapters_of, add_adapters
from megtool.model.stacks.recompute import recompute
from megtool.model.stacks.unpacked_forward import made_weights
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.open import open_decoder
from megtool.train.model.build import load_for_training
from megtool.train.model.packed_base import KeepPacked, PackedBase
from tests.support.checkpoints.compressed_folder import compress, deepseek
from tests.support.errors import raises
from tests.support.models import moe_models, tiny_text
from tests.support.models.tiny_model import tiny_model
from tests.support.quant.quantize_sizes import SMALL, save_llama
from tests.support.runs.finetune_runs import TEXT, curve, save_lines, tune
from tests.support.worlds.gloo_world import run_world

RECIPES = ("w4a16_nvfp4", "mxfp4", "int4_weight_only", "fp8_block128", "int8_weight_only", "mxfp8")
TOKENS = torch.arange(48).view(2, 24) * 37 % 256
LORA = {"lora_rank": 4, "lr": 1e-2, "save_interval": 3}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_llama(tmp_path_factory.mktemp("llama") / "hf")


@pytest.fixture(scope="module")
def packed(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "nvfp4"
    quantize(llama, out, recipe="w4a16_nvfp4", threads=1)
    return out


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_lines(tmp_path_factory.mktemp("data"))


def gradients(
    source: Path, *, packed: bool, dtype: str = "bfloat16", again: str | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a model with adapters, and their gradients."""
    groups = ProcessGroups.alone()
    (stage,) = load_for_training(
        open_decoder(source),
        KeepPacked(groups=groups) if packed else groups,
        dtype=dtype,
        threads=1,
    )
    assert bool(made_weights(stage)) == packed
    if again:
        recompute([stage], again)  # type: ignore[arg-type]
    add_adapters([stage], LoraSettings(rank=4, alpha=8.0))
    generator = torch.Generator().manual_seed(0)
    for *_, adapter in adapters_of(stage):
        adapter.lora_B.detach().normal_(generator=generator).mul_(0.05)
    loss, _ = stage.loss(Batch(tokens_BS=TOKENS), TOKENS.roll(-1, 1))
    loss.backward()
    found = {n: p.grad.clone() for n, p in stage.named_parameters() if p.grad is not None}
    return float(loss.detach()), found


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_and_gradients_are_those_of_decoded_weights(
    llama: Path, tmp_path: Path, recipe: str
) -> None:
    """Bit for bit."""
    quantize(llama, tmp_path / "q", recipe=recipe, threads=1)
    for dtype in ("bfloat16", "float32"):
        loss, found = gradients(tmp_path / "q", packed=True, dtype=dtype)
        expected, theirs = gradients(tmp_path / "q", packed=False, dtype=dtype)
        assert loss == expected
        assert found.keys() == theirs.keys()
        assert all(torch.equal(found[n], theirs[n]) for n in theirs)


def test_smoothed_weights_with_calibrated_inputs(llama: Path, tmp_path: Path) -> None:
    quantize(llama, tmp_path / "q", recipe="int4_awq", **SMALL)
    loss, found = gradients(tmp_path / "q", packed=True)
    expected, theirs = gradients(tmp_path / "q", packed=False)
    assert loss == expected
    assert all(torch.equal(found[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize("kind", ["fp8", "int4", "int4-zeros", "nvfp4", "deepseek"])
def test_folders_of_other_forms(llama: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "q"
    if kind == "deepseek":
        deepseek(llama, folder)
    else:
        compress(llama, folder, kind.partition("-")[0])
    if kind == "int4-zeros":
        add_zero_points(folder)
    loss, found = gradients(folder, packed=True)
    expected, theirs = gradients(folder, packed=False)
    assert loss == expected
    assert all(torch.equal(found[n], theirs[n]) for n in theirs)


def add_zero_points(folder: Path) -> None:
    """Zero points of all groups, in words along the rows, as compressed-tensors packs them."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(".weight_scale")]:
        zeros = torch.randint(0, 16, tensors[name].shape, generator=generator, dtype=torch.int64)
        words = zeros.view(-1, 8, zeros.shape[1]) << (4 * torch.arange(8)).view(1, 8, 1)
        words = words.sum(1).to(torch.uint32).view(torch.int32)
        tensors[name.replace("_scale", "_zero_point")] = words
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputed_layers_decode_again(packed: Path, granularity: str) -> None:
    loss, found = gradients(packed, packed=True, again=granularity)
    expected, theirs = gradients(packed, packed=False)
    assert loss == expected
    assert all(torch.equal(found[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts(tmp_path: Path, family: str) -> None:
    """Of gpt-oss they are stacked, with gates and ups in turn."""
    pytest.importorskip("transformers")
    name, _, keys = moe_models.CASES[family]
    width = "intermediate_size" if family == "gpt_oss" else "moe_intermediate_size"
    keys = keys | {"vocab_size": tiny_text.VOCABULARY, "hidden_size": 64, width: 64}
    tiny_model(name, tmp_path / "moe", sizes=moe_models.SIZES, **keys)
    recipe = "mxfp4_experts" if family == "gpt_oss" else "mxfp4"
    quantize(tmp_path / "moe", tmp_path / "q", recipe=recipe, threads=1)
    loss, found = gradients(tmp_path / "q", packed=True)
    expected, theirs = gradients(tmp_path / "q", packed=False)
    assert loss == expected
    assert all(torch.equal(found[n], theirs[n]) for n in theirs)


def test_memory_is_that_of_codes_and_scales(packed: Path) -> None:
    """4.5 bits an element, and 2 bytes of what is not packed."""
    source = open_decoder(packed)
    alone = KeepPacked(groups=ProcessGroups.alone())
    (stage,) = load_for_training(source, alone, dtype="bfloat16", threads=1)
    base = PackedBase(source, [stage])
    elements = sum(stage.get_parameter(n).numel() for n in base.parameters)
    assert len(base.parameters) == 8
    held = sum(
        p.untyped_storage().nbytes() for n, p in stage.named_parameters() if n in base.parameters
    )
    assert held == 2 * len(base.parameters)
    num_bytes = base.load()
    assert num_bytes <= elements * 4.5 / 8 * 1.01
    assert base.saved_bytes == 2 * elements - num_bytes


def test_a_run_is_that_over_decoded_weights(packed: Path, data: Path, tmp_path: Path) -> None:
    """Curve, adapter and merged weights are the same, and it resumes with the same bits."""
    tune(packed, tmp_path / "ref", data, **LORA)
    report = tune(packed, tmp_path / "out", data, **LORA, qlora=True, exit_duration_in_mins=1e-9)
    assert report.outcome.saved_iteration == 1
    tune(packed, tmp_path / "out", data, **LORA, qlora=True)
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")
    ours, theirs = (tmp_path / n / "iter_0000006" for n in ("out", "ref"))
    assert verify(ours, theirs).exit_status == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (ours / "adapter" / name).read_bytes() == (theirs / "adapter" / name).read_bytes()


def test_peft_loads_the_adapter_over_the_decoded_model(
    packed: Path, data: Path, tmp_path: Path
) -> None:
    """And computes what the merged model does."""
    peft = pytest.importorskip("peft", reason="the peft package is the oracle")
    transformers = pytest.importorskip("transformers")
    report = tune(packed, tmp_path / "out", data, **LORA, qlora=True, to="hf", fp32=True)
    reshard(packed, tmp_path / "plain", to="hf", dtype="float32", threads=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.float32
    )
    adapted = peft.PeftModel.from_pretrained(theirs, report.adapter).eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(report.hf, dtype=torch.float32)
    ids = torch.tensor([list(TEXT[:60].encode())])
    with torch.no_grad():
        ours = merged(ids).logits
        assert torch.allclose(adapted(ids).logits, ours, atol=1e-5, rtol=1e-5)
        assert (adapted.unload()(ids).logits - ours).abs().max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2, "sequence_parallel": True}, {"pp": 2}, {"dp": 2}])
def test_every_layout(packed: Path, data: Path, tmp_path: Path, layout: dict[str, Any]) -> None:
    tune(packed, tmp_path / "ref", data, **LORA)
    run_world(on_rank, 2, str(packed), str(tmp_path / "out"), str(data), layout)
    ours, theirs = curve(tmp_path / "out"), curve(tmp_path / "ref")
    assert [x[1] for x in ours] == pytest.approx([x[1] for x in theirs], rel=1e-4)


def on_rank(rank: int, size: int, model: str, folder: str, data: str, more: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    tune(model, folder, data, **LORA, qlora=True, **more)


def test_what_cannot_be_packed_is_refused(
    llama: Path, packed: Path, data: Path, tmp_path: Path
) -> None:
    for more, message in (
        ({}, "without --lora-rank"),
        ({"lora_rank": 4, "qat": "mxfp4"}, "--qat exclude"),
        ({"lora_rank": 4, "data_parallel_sharding_strategy": "optim_grads"}, "exclude each other"),
    ):
        with raises(UsageError, message):
            tune(packed, tmp_path / "x", data, qlora=True, **more)
    with raises(MappingError, "no weight of a layer is packed"):
        tune(llama, tmp_path / "x", data, qlora=True, lora_rank=4)
