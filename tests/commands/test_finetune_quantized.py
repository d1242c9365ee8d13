"""`finetune --qat source` goes on from a checkpoint with ModelOpt's quantizers, and saves one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megtool import convert_adapter, export, quantize, verify
from megtool.errors import FormatError, UsageError
from megtool.formats import open_checkpoint
from megtool.quant.fake_quant.fake_quantize import fake_weight
from megtool.quantize.layout.megatron_source import read_quantized_megatron
from megtool.storage.files import Files
from megtool.transport.cast import numeric_values
from megtool.transport.reading.reader import CheckpointReader
from tests.support.errors import raises
from tests.support.models import moe_models, tiny_text
from tests.support.models.tiny_model import tiny_model
from tests.support.quant.quantize_sizes import SMALL, save_llama
from tests.support.quant.stored_values import canonical
from tests.support.runs.finetune_runs import curve, save_lines, tune
from tests.support.worlds.gloo_world import run_world

BY_WEIGHTS = ("int8_weight_only", "mxfp4", "fp8_block128")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_llama(tmp_path_factory.mktemp("llama") / "hf")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_lines(tmp_path_factory.mktemp("data"))


def quantized(model: Path, folder: Path, recipe: str, **layout: Any) -> Path:
    how = {"threads": 1, **layout} if recipe in BY_WEIGHTS else SMALL | layout
    quantize(model, folder, recipe=recipe, to="torch_dist", **how)
    return folder


def buffers(folder: Path) -> dict[str, np.ndarray]:
    """The buffers of all quantizers as float32."""
    catalogue, out = open_checkpoint(folder), {}
    with CheckpointReader(catalogue, Files()) as reader:
        for t in catalogue.tensors:
            if "_quantizer." in t.name and not t.name.startswith("optimizer."):
                view = reader.open_stored(t.name)
                out[t.name] = numeric_values(view.read(), view.dtype).astype(np.float32)
    return out


@pytest.mark.parametrize(
    "recipe",
    [
        *("fp8_kv_fp8", "int8_sq", "nvfp4_awq", "int8_weight_only", "mxfp4"),
        *(pytest.param(r, marks=pytest.mark.slow) for r in ("int4_awq", "nvfp4")),
    ],
)
def test_training_goes_on_and_resumes_with_the_same_bits(
    llama: Path, data: Path, tmp_path: Path, recipe: str
) -> None:
    """Amaxes and scales stay, weights change, and the folder has the rounded weights."""
    source = quantized(llama, tmp_path / "source", recipe)
    more = {"qat": "source", "save_interval": 3, "lr": 1e-2, "eval_split": 0.1}
    report = tune(source, tmp_path / "ref", data, **more, to="hf")
    assert report.evaluations[-1][1] < report.evaluations[0][1]
    tune(source, tmp_path / "out", data, **more, exit_duration_in_mins=1e-9)
    tune(source, tmp_path / "out", data, **more)
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")
    ours, theirs = (tmp_path / n / "iter_0000006" for n in ("out", "ref"))
    assert verify(ours, theirs).exit_status == 0
    have, want = buffers(ours), buffers(source)
    assert set(have) == set(want)
    for n, values in want.items():  # a scale in bfloat16 is that of inputs in float32 here
        near = 1e-6 if n.endswith("_pre_quant_scale") else 0
        assert np.allclose(have[n], values, rtol=near, atol=0), n
    assert (ours / "modelopt_state/common.pt").is_file()
    name = "layers.0.mlp.down"
    q = read_quantized_megatron(ours).qparams.weights[name]
    rounded = fake_weight(canonical(ours, name), q)
    assert not torch.equal(rounded, fake_weight(canonical(source, name), q))
    decoded = canonical(Path(str(report.hf)), name)
    if q.smoothing_scale is not None:  # the reader divides by what inputs are multiplied by
        decoded = decoded * torch.from_numpy(q.smoothing_scale)
    assert torch.allclose(decoded, rounded, rtol=2**-7, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layout", "more"),
    [
        ("fp8", {"tp": 2}, {}),
        ("int8_weight_only", {"tp": 2}, {}),
        ("int8_sq", {"pp": 2}, {}),
        ("int8_sq", {"tp": 2}, {"lora_rank": 4}),
    ],
)
def test_every_layout_goes_on_from_every_other(
    llama: Path,
    data: Path,
    tmp_path: Path,
    recipe: str,
    layout: dict[str, int],
    more: dict[str, int],
) -> None:
    source = quantized(llama, tmp_path / "source", recipe)
    assert_same_at(source, tmp_path, data, layout, more)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"lora_rank": 4}])
def test_recipes_by_weights_alone_are_trained_on_every_rank(
    llama: Path, data: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    options = {"qat": "mxfp4"} | more
    tune(llama, tmp_path / "ref", data, **options)
    ranks = options | {"tp": 2, "sequence_parallel": True}
    run_world(on_rank, 2, str(llama), str(tmp_path / "out"), str(data), ranks)
    ours, theirs = curve(tmp_path / "out"), curve(tmp_path / "ref")
    assert [x[1] for x in ours] == pytest.approx([x[1] for x in theirs], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "more"), [("int8_weight_only", {}), ("int8_sq", {"lora_rank": 4})]
)
def test_experts(data: Path, tmp_path: Path, recipe: str, more: dict[str, int]) -> None:
    pytest.importorskip("transformers")
    family, _, keys = moe_models.CASES["qwen3_moe"]
    keys = keys | {"vocab_size": tiny_text.VOCABULARY, "eos_token_id": tiny_text.END}
    tiny_model(family, tmp_path / "moe", sizes=moe_models.SIZES, **keys)
    tiny_text.save_tokenizer(tmp_path / "moe")
    source = quantized(tmp_path / "moe", tmp_path / "source", recipe)
    assert_same_at(source, tmp_path, data, {"ep": 2, "dp": 2}, more)


def assert_same_at(
    source: Path, root: Path, data: Path, layout: dict[str, int], options: dict[str, int]
) -> None:
    """A run at a layout, resumed by one process, is that of one process, and has its quantizers."""
    steady = {"qat": "source", "lr_decay_style": "constant"} | options
    tune(source, root / "ref", data, **steady)
    more = steady | layout | {"train_iters": 3}
    run_world(on_rank, 2, str(source), str(root / "two"), str(data), more)
    resumed = tune(source, root / "two", data, **steady)
    assert resumed.start_iteration == 3
    ours, theirs = curve(root / "two"), curve(root / "ref")
    assert [x[1] for x in ours] == pytest.approx([x[1] for x in theirs], rel=1e-3)
    at_layout = {n: b.reshape(-1) for n, b in buffers(root / "two/iter_0000003").items()}
    for n, b in buffers(source).items():
        near = 1e-6 if n.endswith("_pre_quant_scale") else 0
        assert np.allclose(np.sort(at_layout[n]), np.sort(b.reshape(-1)), rtol=near, atol=0), n
    for name, folder in (("a", root / "two/iter_0000003"), ("b", root / "two/iter_0000006")):
        assert export(folder, root / name, to="unified", threads=1).exact > 0
    have, want = (
        read_quantized_megatron(p).qparams.weights for p in (root / "two/iter_0000003", source)
    )
    for n, q in want.items():
        if q.amax is not None and q.amax.size > 1:
            assert np.array_equal(have[n].amax, q.amax), n


def on_rank(rank: int, size: int, model: str, folder: str, data: str, more: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    tune(model, folder, data, **more)


@pytest.mark.parametrize(
    "recipe", ["int8_sq", *(pytest.param(r, marks=pytest.mark.slow) for r in ("fp8", "nvfp4_awq"))]
)
def test_adapters_are_trained_with_the_quantizers(
    llama: Path, data: Path, tmp_path: Path, recipe: str
) -> None:
    """What is saved has the quantizers and merged weights; the adapter is that of the weights in
    the exported folder, which are divided by `pre_quant_scale`."""
    source = quantized(llama, tmp_path / "source", recipe)
    more = {"qat": "source", "lora_rank": 4, "lr": 1e-2, "eval_split": 0.1}
    report = tune(source, tmp_path / "ref", data, **more, to="hf")
    assert report.evaluations[-1][1] < report.evaluations[0][1]
    tune(source, tmp_path / "out", data, **more, exit_duration_in_mins=1e-9)
    tune(source, tmp_path / "out", data, **more)
    assert curve(tmp_path / "out") == curve(tmp_path / "ref")
    saved = tmp_path / "out/iter_0000006"
    assert verify(saved, tmp_path / "ref/iter_0000006").exit_status == 0
    have, want = buffers(saved), buffers(source)
    for n, values in want.items():
        near = 1e-6 if n.endswith("_pre_quant_scale") else 0
        assert np.allclose(have[n], values, rtol=near, atol=0), n
    export(source, tmp_path / "exported", to="unified", threads=1)
    bridge = convert_adapter(saved / "adapter", tmp_path / "bridge", to="bridge", base=source)
    assert bridge.num_weights == 2 * 7
    weights = load_file(saved / "adapter/adapter_model.safetensors")
    for name, peft in (("attn.q", "self_attn.q_proj"), ("mlp.down", "mlp.down_proj")):
        name = f"layers.0.{name}"
        at = f"base_model.model.model.layers.0.{peft}.lora_"
        delta = weights[f"{at}B.weight"] @ weights[f"{at}A.weight"] * 2
        q = read_quantized_megatron(saved).qparams.weights[name]
        factors = 1 if q.smoothing_scale is None else torch.from_numpy(q.smoothing_scale)
        merged = canonical(source, name) + delta * factors
        assert torch.allclose(canonical(saved, name), merged, atol=1e-6)
        off = canonical(tmp_path / "exported", name) + delta - merged / factors
        assert off.norm() < 0.12 * merged.norm(), "the exported weight is rounded, and no more"
        rounded = fake_weight(merged, q)
        decoded = canonical(Path(str(report.hf)), name) * factors
        assert (decoded - rounded).abs().max() <= rounded.abs().max() * 2**-4
        assert torch.isclose(decoded, rounded, rtol=2**-7, atol=0).float().mean() > 0.99


def test_what_cannot_be_trained_with_quantizers_is_refused(
    llama: Path, data: Path, tmp_path: Path
) -> None:
    with raises(FormatError, "no state of ModelOpt's quantizers"):
        tune(llama, tmp_path / "x", data, qat="source")
    with raises(UsageError, "whose quantizers are calibrated"):
        tune(llama, tmp_path / "x", data, qat="source", calibration=tmp_path / "file")
    plain = quantized(llama, tmp_path / "plain", "int8_weight_only")
    with raises(UsageError, "dp_reshardable", hint=True):
        tune(plain, tmp_path / "x", data, qat="source", dist_ckpt_optim_format="dp_reshardable")
    blocks = quantized(llama, tmp_path / "blocks", "fp8_block128")
    with raises(FormatError, "lie across several weights"):
        tune(blocks, tmp_path / "x", data, qat="source")
    assert not (tmp_path / "x").exists()


def test_the_state_of_modelopt_is_written_again(llama: Path, data: Path, tmp_path: Path) -> None:
    """From the states of modules, where its folder is lost; a damaged file is called damaged."""
    source = quantized(llama, tmp_path / "source", "fp8")
    state = source / "release/modelopt_state/common.pt"
    sound = state.read_bytes()
    more = {"qat": "source", "train_iters": 1}
    for damage in (sound[: len(sound) // 2], sound[:-1], b""):
        state.write_bytes(damage)
        with raises(
            FormatError, "damaged", id="truncated-file", file=state, hint="copy the file again"
        ):
            tune(source, tmp_path / "x", data, **more)
        assert not (tmp_path / "x").exists()
    tune(source, tmp_path / "dropped", data, **more, drop_objects=True)
    shutil.rmtree(state.parent)
    tune(source, tmp_path / "lost", data, **more)
    assert curve(tmp_path / "lost") == curve(tmp_path / "dropped")
    for name in ("dropped", "lost"):
        written = tmp_path / name / "iter_0000001"
        assert (written / "modelopt_state/common.pt").read_bytes() == sound
        have, want = (
            {d.module.name: d.format for d in read_quantized_megatron(p).decisions}
            for p in (written, source)
        )
        assert have == want


def test_a_note_says_that_the_folder_is_of_an_earlier_iteration(
    llama: Path, data: Path, tmp_path: Path
) -> None:
    source = quantized(llama, tmp_path / "source", "int8_weight_only")
    assert not tune(source, tmp_path / "x", data, qat="source", train_iters=1, to="hf").notes
    (note,) = tune(source, tmp_path / "x", data, qat="source", train_iters=2).notes
    assert "hf/ is of iteration 1" in note


def test_a_recipe_takes_the_place_of_quantizers(
    llama: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning; what is saved has none then."""
    source = quantized(llama, tmp_path / "source", "int8_weight_only")
    tune(source, tmp_path / "x", data, qat="mxfp4", train_iters=1)
    assert "ModelOpt's quantizers are left out" in caplog.text
    assert not buffers(tmp_path / "x")
