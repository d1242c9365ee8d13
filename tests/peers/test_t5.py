"""A T5 that megatron-core saved is carried to another layout, which megatron-core loads."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import reshard, verify
from megtool.convert.megatron.names import split_state
from megtool.errors import LayoutError, MappingError
from megtool.formats import open_checkpoint
from megtool.source.open import open_source
from megtool.storage.files import Files
from megtool.transport.reading.reader import CheckpointReader
from tests.support.errors import raises
from tests.support.paths import PEERS
from tests.support.peers.forked_worlds import run_forked
from tests.support.peers.old_core_world import LAYERS, state_of
from tests.support.peers.release import install_release

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.slow]


def run_world(action: str, folder: Path, **options: Any) -> None:
    run_forked("t5_world.py", action, str(folder), json.dumps(options))


def test_t5_is_carried(tmp_path: Path) -> None:
    run_world("save", tmp_path / "a", layouts=[{"tp": 1}], world=1)
    names = {t.name for t in open_checkpoint(tmp_path / "a").tensors}
    assert "encoder.layers.self_attention.linear_qkv.weight" in names
    assert "decoder.layers.cross_attention.linear_kv.weight" in names
    reshard(tmp_path / "a", tmp_path / "b", tp=2)
    reshard(tmp_path / "b", tmp_path / "c", tp=1)
    assert verify(tmp_path / "a", tmp_path / "c").verdict == "equal"
    run_world("load", tmp_path / "c", layouts=[{"tp": 1}], world=1)
    held = open_checkpoint(tmp_path / "b")
    cut = {t.name: held.shards.boxes.shape[held.shards.of(i)] for i, t in enumerate(held.tensors)}
    assert cut["decoder.layers.cross_attention.linear_q.weight"][0].tolist() == [1, 16, 32]


def test_t5_goes_through_rank_files(tmp_path: Path) -> None:
    run_world("save", tmp_path / "a", layouts=[{"tp": 1}], world=1)
    reshard(tmp_path / "a", tmp_path / "b", to="megatron", tp=2)
    assert verify(tmp_path / "a", tmp_path / "b").verdict == "equal"
    names = {t.name for t in open_checkpoint(tmp_path / "b").tensors}
    own = "mp_rank_01/model_optim_rng/model/decoder.layers.3.cross_attention.linear_kv.weight"
    assert own in names
    reshard(tmp_path / "b", tmp_path / "c", to="torch_dist", tp=1)
    assert verify(tmp_path / "a", tmp_path / "c").verdict == "equal"
    run_world("load", tmp_path / "c", layouts=[{"tp": 1}], world=1)
    with pytest.raises(LayoutError, match="encoder"):
        reshard(tmp_path / "a", tmp_path / "d", to="megatron", pp=2)
    reshard(tmp_path / "a", tmp_path / "d", to="torch_dist", pp=3, encoder_pp=1)
    assert verify(tmp_path / "a", tmp_path / "d").verdict == "equal"
    run_world("load", tmp_path / "d", layouts=[{"tp": 1}], world=1)


def _as_fused(name: str) -> str:
    """The name that Transformer Engine's layers give the norm of one of Megatron's own."""
    if "pre_mlp_layernorm" in name:
        return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    return name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")


@pytest.mark.parametrize("tied", [True, False])
def test_stages_are_those_of_releases_that_had_them(
    tied: bool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Encoder's stages and decoder's: megatron-core 0.14 and later have no pipelines of T5."""
    core = install_release(
        "megatron-core==0.12.1", tmp_path_factory.mktemp("core"), "--ignore-requires-python"
    )
    sizes = {"hidden": 32, "heads": 4, "head": 16, "ffn": 48, "vocab": 128, "buckets": 8}
    model = {"encoder": [2, 2], "decoder": [6, 3], "tied": tied, "sizes": sizes}
    done = subprocess.run(
        [sys.executable, str(PEERS / "t5_stages.py"), str(tmp_path / "a"), json.dumps(model)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(core)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reshard(tmp_path / "a", tmp_path / "whole", to="torch_dist", pp=1)
    reshard(tmp_path / "whole", tmp_path / "b", to="megatron", pp=5, encoder_pp=2)
    assert verify(tmp_path / "a", tmp_path / "b").verdict == "equal"
    reshard(tmp_path / "whole", tmp_path / "one", to="megatron", pp=1)
    (file,) = (tmp_path / "one").glob("**/model_optim_rng.pt")
    whole = torch.load(file, weights_only=False)["model"]
    for name in (
        "encoder.layers.1.mlp.linear_fc2.weight",
        "decoder.layers.4.mlp.linear_fc2.weight",
    ):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        assert torch.equal(whole[name], torch.randn(32, 48, generator=generator))
    for stage, theirs in enumerate(json.loads(done.stdout)):
        (file,) = (tmp_path / "b").glob(f"**/mp_rank_00_{stage:03d}/model_optim_rng.pt")
        saved = torch.load(file, weights_only=False)
        assert saved["args"].encoder_pipeline_model_parallel_size == 2
        assert saved["args"].pipeline_model_parallel_size == 3
        ours = {n: list(t.shape) for n, t in saved["model"].items() if "_extra_state" not in n}
        # There is a twin of the output layer behind the encoder, which nothing uses.
        theirs = {
            _as_fused(n): shape
            for n, shape in theirs.items()
            if stage != 1 or not n.startswith(("lm_head.", "output_layer."))
        }
        assert ours == theirs


@pytest.fixture(scope="module")
def flan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model as Flan-T5 is, and what `t5_logits.py` compares it with."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("flan")
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        vocab_size=101,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,  # what Flan-T5 says to have its states not scaled
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained(folder / "hf")
    tokens = torch.randint(2, 101, (2, 12))
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :7], decoder_input_ids=tokens[:, 7:]).logits
    assert logits.std() > 0.1
    sizes = {"encoder": 2, "decoder": 3, "hidden": 32, "heads": 4, "head": 16, "ffn": 48}
    said = {"sizes": sizes | {"buckets": 8, "distance": 20}, "logits": logits}
    torch.save(said | {"encoder": tokens[:, :7], "decoder": tokens[:, 7:]}, folder / "inputs")
    return folder


def logits_apart(source: Path, inputs: Path, tp: int = 1) -> float:
    """How far the logits of Megatron's T5 are from transformers', of which it lacks nothing but the
    bias of tied embeddings."""
    said = run_forked("t5_logits.py", str(source), str(inputs), str(tp))
    answer = json.loads(said.splitlines()[-1])
    assert answer["unexpected"] == []
    assert set(answer["missing"]) == {"lm_head.output_layer.bias", "output_layer.bias"}
    return float(answer["apart"])


def test_megatrons_t5_has_the_logits_of_transformers(flan: Path, tmp_path: Path) -> None:
    """Relative positions, gated MLPs and norms, with more layers in the decoder."""
    reshard(flan / "hf", tmp_path / "two", to="torch_dist", tp=2, fsync=False)
    reshard(tmp_path / "two", tmp_path / "meg", to="megatron", tp=1, fsync=False)
    (file,) = (tmp_path / "meg").glob("**/model_optim_rng.pt")
    assert logits_apart(file, flan / "inputs") < 1e-4


@pytest.mark.parametrize("tp", [1, 2])
def test_megatrons_t5_loads_shards_of_any_layout(flan: Path, tmp_path: Path, tp: int) -> None:
    """By dist_checkpointing, from a folder of the other number of ranks."""
    reshard(flan / "hf", tmp_path / "meg", to="torch_dist", tp=3 - tp, fsync=False)
    assert logits_apart(tmp_path / "meg" / "release", flan / "inputs", tp) < 1e-4


def run_optimizer_world(folder: Path, **options: Any) -> str:
    return run_forked("old_core_world.py", str(folder), json.dumps(options))


def assert_states(folder: Path) -> int:
    """Every optimizer state is what the world filled in: their number."""
    opened, count = open_source(folder, verify_master_weights=True), 0
    opened.catalogue.check()
    with CheckpointReader(opened.catalogue, Files()) as reader:
        for t in opened.catalogue.tensors:
            state, _, key = split_state(t.name)
            if not state:
                continue
            state = "param" if state == "main" else state
            match = re.fullmatch(r"(\w+\.layers\.)(\d+)\.(.+)", key)
            if match:
                num_layers = 2 if key.startswith("encoder.") else LAYERS
                whole = state_of(state, match[1] + match[3], (num_layers, *t.shape))[int(match[2])]
            else:
                whole = state_of(state, key, t.shape)
            found = reader.open_stored(t.name).read().view(np.float32)
            assert np.array_equal(found, whole.numpy().reshape(found.shape)), t.name
            count += 1
    return count


def test_optimizer_state_of_a_t5_there_and_back(tmp_path: Path) -> None:
    """Buckets are in the order in which T5Model registers its parameters, each of them once; what
    is written for two tensor ranks megatron-core loads, and what those save is read."""
    run_optimizer_world(tmp_path / "0", t5=True, sharding="dp_reshardable", world=2)
    assert assert_states(tmp_path / "0") == 321
    with raises(MappingError, "needs the model's family", hint="fully_reshardable"):
        reshard(tmp_path / "0", tmp_path / "1", tp=2, optimizer_format="dp_reshardable")
    kind = "fully_reshardable"
    reshard(tmp_path / "0", tmp_path / "1", tp=2, fsync=False)
    said = run_optimizer_world(tmp_path / "1", t5=True, sharding=kind, tp=2, world=2, load=True)
    assert said.count("loaded") == 2
    run_optimizer_world(tmp_path / "2", t5=True, sharding="dp_reshardable", tp=2, world=2)
    assert assert_states(tmp_path / "2") == 321
    assert verify(tmp_path / "0", tmp_path / "2").verdict == "equal"
