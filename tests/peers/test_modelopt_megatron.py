"""Real ModelOpt restores our quantized checkpoints in Megatron-Core, and we read what it saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import export, quantize, reshard
from megtool.model.batch import Batch
from megtool.quant.statistics.activation_sites import list_activation_sites
from megtool.quantize.layout.megatron_source import QuantizedMegatronSource, read_quantized_megatron
from megtool.source.open import open_source
from megtool.storage.files import Files
from megtool.train.features.qat import QatFeature
from megtool.train.model.build import load_for_training
from megtool.transport.cast import numeric_values
from megtool.transport.reading.reader import CheckpointReader
from tests.support.models import tiny_text
from tests.support.paths import PEERS
from tests.support.quant.quantize_sizes import SMALL
from tests.support.runs.finetune_runs import save_lines, tune
from tests.support.worlds.gloo_world import run_world

pytest.importorskip("megatron.core")
pytest.importorskip("modelopt.torch.quantization")
pytestmark = pytest.mark.peers

LAYER = "decoder.layers.0."
PROJ, FC1, FC2 = (
    f"{LAYER}self_attention.linear_proj",
    f"{LAYER}mlp.linear_fc1",
    f"{LAYER}mlp.linear_fc2",
)

CLOSE = 2**-6
"""ModelOpt divides, rounds and multiplies in bfloat16."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sizes of modelopt_world.py; its vocabulary is padded to 384."""
    torch.set_num_threads(1)
    return tiny_text.save(
        tmp_path_factory.mktemp("source") / "hf",
        dtype="bfloat16",
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )


def run_modelopt(**options: Any) -> None:
    """A world of modelopt_world.py."""
    done = subprocess.run(
        [sys.executable, str(PEERS / "modelopt_world.py"), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]


def restored(folder: Path, dump: Path, **options: Any) -> dict[str, torch.Tensor]:
    """What rank 0 has after ModelOpt has restored the checkpoint, and Megatron has loaded it."""
    saved = folder / "release" if (folder / "release").is_dir() else folder
    run_modelopt(restore=str(saved), dump=str(dump), **options)
    loaded: dict[str, torch.Tensor] = torch.load(dump)
    return loaded


def decoded(folder: Path, name: str) -> torch.Tensor:
    """A canonical weight of a folder, decoded."""
    opened = open_source(folder)
    with CheckpointReader(opened.catalogue, Files()) as reader:
        view = reader.open_canonical(opened.view.placements[name])
        values = numeric_values(view.read().reshape(-1), view.dtype)
        return torch.from_numpy(values.copy()).float().reshape(opened.view.canonical[name].shape)


def assert_equal_in_bf16(have: torch.Tensor, want: Any) -> None:
    """ModelOpt keeps what it loads in the model's dtype."""
    want = torch.as_tensor(want, dtype=torch.float32).bfloat16().float()
    assert torch.equal(have.float().bfloat16().float().reshape(want.shape), want)


@pytest.mark.parametrize("recipe", ["fp8", "int8_sq", "int4_awq"])
def test_modelopt_restores_amaxes_and_rounds_as_the_folder_has_it(
    source: Path, tmp_path: Path, recipe: str
) -> None:
    """Amaxes are those of calibration, and fake-quantized weights are the folder's decoded ones."""
    megatron = tmp_path / "megatron"
    quantize(source, megatron, recipe=recipe, to="torch_dist", **SMALL)
    state = restored(megatron, tmp_path / "state.pt")
    qparams = read_quantized_megatron(megatron).qparams.weights
    for module, name in ((FC1, "layers.0.mlp.up"), (FC2, "layers.0.mlp.down")):
        if amax := qparams[name].input_amax:
            assert_equal_in_bf16(state[f"{module}.input_quantizer._amax"], amax)
    export(megatron, tmp_path / "folder", to="unified", threads=1)
    scales = qparams["layers.0.mlp.down"].smoothing_scale
    want = decoded(tmp_path / "folder", "layers.0.mlp.down.weight")
    if scales is not None:  # the folder's reader divides by what inputs are multiplied by
        want = want * torch.from_numpy(scales)
    assert (state[f"{FC2}.fake"] - want).abs().max() <= want.abs().max() * CLOSE
    assert torch.isfinite(state["logits"]).all()
    assert state["logits"].std() > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_two_ranks_restore_their_share(
    source: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """Amaxes by row are cut with the rows of the weight: of a rank's gate, and of its up."""
    megatron = tmp_path / "megatron"
    written = {f"dst_{axis}": n for axis, n in layout.items()}
    quantize(source, megatron, recipe="int8_weight_only", to="torch_dist", threads=1, **written)
    state = restored(megatron, tmp_path / "state.pt", world=2, layout=layout)
    for module in (PROJ, FC1, FC2, f"{LAYER}self_attention.linear_qkv"):
        amax = state[f"{module}.weight_quantizer._amax"]
        weight = state[f"{module}.weight"]
        if layout.get("tp") and module in (PROJ, FC2):  # a rank has some columns of every row
            assert (amax.reshape(-1) >= weight.abs().amax(1)).all()
            continue
        assert torch.equal(amax.reshape(-1), weight.abs().amax(1))


@pytest.mark.parametrize("config", ["FP8_DEFAULT_CFG", "INT8_WEIGHT_ONLY_CFG"])
def test_what_modelopt_saves_is_exported(source: Path, tmp_path: Path, config: str) -> None:
    """Weights of the folder are those that ModelOpt fake-quantizes; so are scales of inputs."""
    plain, saved = tmp_path / "plain", tmp_path / "saved"
    reshard(source, plain, to="torch_dist", threads=1)
    dump = tmp_path / "state.pt"
    run_modelopt(load=str(plain / "release"), quantize=config, save=str(saved), dump=str(dump))
    report = export(saved, tmp_path / "folder", to="unified", like=source, threads=1)
    assert report.exact == 14
    state = torch.load(dump)
    want = decoded(tmp_path / "folder", "layers.0.mlp.down.weight")
    assert (state[f"{FC2}.fake"] - want).abs().max() <= want.abs().max() * CLOSE
    if config == "FP8_DEFAULT_CFG":
        qparams = read_quantized_megatron(tmp_path / "saved", like_of(source)).qparams.weights
        amax = float(state[f"{FC2}.input_quantizer._amax"])
        assert qparams["layers.0.mlp.down"].input_amax == amax


@pytest.mark.parametrize("recipe", ["fp8", "int8_sq"])
def test_modelopt_restores_what_training_saves(source: Path, tmp_path: Path, recipe: str) -> None:
    """Amaxes are those that training went on from, and so are rounded weights and logits."""
    megatron, data = tmp_path / "megatron", save_lines(tmp_path)
    quantize(source, megatron, recipe=recipe, to="torch_dist", **SMALL)
    tune(megatron, tmp_path / "tuned", data, qat="source", bf16=True, train_iters=3)
    saved = tmp_path / "tuned/iter_0000003"
    state = restored(saved, tmp_path / "state.pt")
    before = read_quantized_megatron(megatron, fixed=True).qparams.weights
    after = read_quantized_megatron(saved)
    for module, name in ((FC1, "layers.0.mlp.up"), (FC2, "layers.0.mlp.down")):
        assert_equal_in_bf16(state[f"{module}.input_quantizer._amax"], before[name].input_amax)
        assert_equal_in_bf16(
            state[f"{module}.weight_quantizer._amax"].max(), before[name].amax.max()
        )
    export(saved, tmp_path / "folder", to="unified", threads=1)
    want = decoded(tmp_path / "folder", "layers.0.mlp.down.weight")
    scales = before["layers.0.mlp.down"].smoothing_scale
    want = want if scales is None else want * torch.from_numpy(scales)
    assert (state[f"{FC2}.fake"] - want).abs().max() <= want.abs().max() * CLOSE
    ours, theirs = fake_quantized_logits(after), state["logits"][..., : tiny_text.VOCABULARY]
    original = fake_quantized_logits(read_quantized_megatron(megatron, fixed=True))
    assert (ours - theirs).norm() <= 0.05 * theirs.norm()
    assert (original - theirs).norm() > 2 * (ours - theirs).norm()


def test_training_goes_on_from_what_modelopt_saves(source: Path, tmp_path: Path) -> None:
    """Its amaxes are saved again, and it restores them."""
    plain, saved, data = tmp_path / "plain", tmp_path / "saved", save_lines(tmp_path)
    reshard(source, plain, to="torch_dist", threads=1)
    dump = tmp_path / "state.pt"
    config = "FP8_DEFAULT_CFG"
    run_modelopt(load=str(plain / "release"), quantize=config, save=str(saved), dump=str(dump))
    options = {"qat": "source", "like": source, "bf16": True, "train_iters": 2, "lr": 1e-2}
    tune(saved, tmp_path / "tuned", data, **options)
    before = torch.load(dump)
    after = restored(tmp_path / "tuned/iter_0000002", tmp_path / "after.pt")
    amaxes = [n for n in before if n.endswith("_quantizer._amax") and "output_layer" not in n]
    assert len(amaxes) > 8
    assert all(torch.equal(before[n].reshape(-1), after[n].reshape(-1)) for n in amaxes)
    assert not torch.equal(before[f"{FC2}.weight"], after[f"{FC2}.weight"])


def fake_quantized_logits(read: QuantizedMegatronSource) -> torch.Tensor:
    """What training computes of the tokens of modelopt_world.py, with its rounding."""
    (decoder,) = load_for_training(read.source, dtype="bfloat16", threads=1)
    modules = [d.module for d in read.decisions]
    sites = list_activation_sites(modules, decoder.config)
    feature = QatFeature([decoder], sites, read.qparams, read.decisions)
    tokens = torch.arange(16).view(2, 8) * 7 % 256
    with torch.no_grad(), feature.around_passes(0, None):
        return decoder(Batch(tokens_BS=tokens))[..., : tiny_text.VOCABULARY].float()


@pytest.mark.slow
def test_two_ranks_restore_what_two_ranks_have_trained(source: Path, tmp_path: Path) -> None:
    megatron, data = tmp_path / "megatron", save_lines(tmp_path)
    quantize(source, megatron, recipe="int8_weight_only", to="torch_dist", threads=1)
    run_world(train_rank, 2, str(megatron), str(tmp_path / "tuned"), str(data))
    saved = tmp_path / "tuned/iter_0000002"
    state = restored(saved, tmp_path / "state.pt", world=2, layout={"tp": 2})
    amaxes = read_quantized_megatron(megatron, fixed=True).qparams.weights
    have = state[f"{FC1}.weight_quantizer._amax"].reshape(-1)
    parts = [amaxes[f"layers.0.mlp.{x}"].amax for x in ("gate", "up")]
    assert_equal_in_bf16(have, np.concatenate([p[: len(p) // 2] for p in parts]))


def train_rank(rank: int, size: int, model: str, folder: str, data: str) -> None:
    torch.set_num_threads(1)
    tune(model, folder, data, qat="source", bf16=True, train_iters=2, tp=2)


def like_of(folder: Path) -> Any:
    from megtool.options.groups import SourceOptions

    return SourceOptions(like=folder)
