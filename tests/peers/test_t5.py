"""A T5 that megatron-core saved is carried to another layout, which megatron-core loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import reshard, verify
from megtool.checkpoint.formats import open_checkpoint
from megtool.errors import LayoutError
from tests.support.paths import PEERS

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.slow]

SCRIPT = PEERS / "t5_world.py"


def run_world(action: str, folder: Path, **options: Any) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), action, str(folder), json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]


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


def test_megatrons_t5_has_the_logits_of_transformers(tmp_path: Path) -> None:
    """Relative positions, gated MLPs and norms, with more layers in the decoder."""
    transformers = pytest.importorskip("transformers")
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
    model.save_pretrained(tmp_path / "hf")
    tokens = torch.randint(2, 101, (2, 12))
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :7], decoder_input_ids=tokens[:, 7:]).logits
    sizes = {"encoder": 2, "decoder": 3, "hidden": 32, "heads": 4, "head": 16, "ffn": 48}
    said = {"sizes": sizes | {"buckets": 8, "distance": 20}, "logits": logits}
    torch.save(said | {"encoder": tokens[:, :7], "decoder": tokens[:, 7:]}, tmp_path / "inputs")
    reshard(tmp_path / "hf", tmp_path / "two", to="torch_dist", tp=2, fsync=False)
    reshard(tmp_path / "two", tmp_path / "meg", to="megatron", tp=1, fsync=False)
    (file,) = (tmp_path / "meg").glob("**/model_optim_rng.pt")
    done = subprocess.run(
        [sys.executable, str(PEERS / "t5_logits.py"), str(file), str(tmp_path / "inputs")],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["unexpected"] == []
    assert set(answer["missing"]) == {"lm_head.output_layer.bias", "output_layer.bias"}
    assert logits.std() > 0.1
    assert answer["apart"] < 1e-4
