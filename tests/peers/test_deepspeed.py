"""Real DeepSpeed's ZeRO checkpoints, against its own zero_to_fp32 and ds_to_universal."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megtool import reshard, verify
from megtool.formats import open_checkpoint
from megtool.storage.files import Files
from megtool.transport.reading.reader import CheckpointReader
from tests.support.paths import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.peers,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
    ),
]


def _python(*args: object) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("ranks", "stage", "dtype"), [(2, 1, "bfloat16"), (2, 2, "float32"), (3, 3, "bfloat16")]
)
def test_real_deepspeed(tmp_path: Path, ranks: int, stage: int, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file

    saved, fp32 = tmp_path / "saved", tmp_path / "fp32"
    _python("-m", "tests.support.peers.deepspeed_world", ranks, stage, dtype, saved)
    _python("-m", "deepspeed.utils.zero_to_fp32", "--safe_serialization", saved, fp32)
    step = saved / "global_step2"
    universal = saved / "global_step2_universal"
    more = ("--inject_missing_state", "--num_extract_workers", 1, "--num_merge_workers", 1)
    _python(
        *("-m", "deepspeed.checkpoint.ds_to_universal", *more),
        *("--input_folder", step, "--output_folder", universal),
    )
    truth = load_file(fp32 / "model.safetensors")
    with CheckpointReader(catalogue := open_checkpoint(saved), Files()) as reader:
        for name, master in truth.items():
            for state in ("param", "exp_avg", "exp_avg_sq"):
                stored = reader.open_stored(f"optimizer.state.{state}.{name}").read()
                have = torch.from_numpy(stored.copy()).reshape(master.shape)
                if state == "param":
                    assert torch.equal(have, master), name
                    continue
                tree = torch.load(universal / "zero" / name / f"{state}.pt", weights_only=False)
                want = tree["param"] if isinstance(tree, dict) else tree
                assert torch.equal(have, want.reshape(-1)[: master.numel()].view(master.shape))
    assert len(catalogue.tensors) == 4 * len(truth)
    assert verify(step, universal).verdict == "equal"
    reshard(saved, tmp_path / "hf", to="hf", dtype=dtype)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    kind = getattr(torch, dtype)
    assert all(torch.equal(weights[n], master.to(kind)) for n, master in truth.items())
