"""Folders that AMD Quark itself writes are decoded into the numbers of its own quantizers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from megtool import reshard
from tests.support.models import tiny_llama
from tests.support.peers.release import install_release

pytestmark = [pytest.mark.peers, pytest.mark.slow]

QUANTIZE = """
import sys
from pathlib import Path
import quark.torch.quantization.config.config as config
from quark.torch import ModelQuantizer, export_safetensors
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

folder, words = Path(sys.argv[1]), {"is_dynamic": False}
whole = words | {"observer_method": "min_max"}
integers = {"symmetric": False, "scale_type": "float", "round_method": "half_even"}
specs = {
    "fp8": config.FP8E4M3PerTensorSpec(**whole),
    "fp8_channel": config.FP8E4M3PerChannelSpec(ch_axis=0, **words),
    "e5m2": config.FP8E5M2PerTensorSpec(**whole),
    "int8": config.Int8PerTensorSpec(**whole, **integers),
    "int8_channel": config.Int8PerChannelSpec(ch_axis=0, **words, **integers),
    "mxfp4": config.OCP_MXFP4Spec(ch_axis=-1, **words),
}
for name, spec in specs.items():
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype="float32")
    layer = config.QLayerConfig(weight=spec.to_quantization_spec())
    quantizer = ModelQuantizer(config.QConfig(global_quant_config=layer, exclude=["lm_head"]))
    model = quantizer.freeze(quantizer.quantize_model(model))
    want = {}
    for module, held in model.named_modules():
        rounds = getattr(held, "_weight_quantizer", None)
        if rounds is not None:
            want[f"{module}.weight"] = rounds(held.weight.detach().clone()).detach().contiguous()
    export_safetensors(model, str(folder / name))
    save_file(want, folder / f"{name}.safetensors")
print("written:", *specs)
"""


def test_weights_are_those_of_its_quantizers(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    for name in ("amd-quark", "onnx", "onnxslim", "ml-dtypes"):
        install_release(name, packages, "--only-binary=:all:")
    tiny_llama.save(tmp_path / "hf", hidden_size=64, intermediate_size=96)
    done = subprocess.run(
        [sys.executable, "-c", QUANTIZE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(packages)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = done.stdout.rpartition("written:")[2].split()
    assert len(names) == 6
    for name in names:
        reshard(tmp_path / name, tmp_path / "plain" / name, to="hf", dtype="float32")
        found = load_file(tmp_path / "plain" / name / "model.safetensors")
        want = load_file(tmp_path / f"{name}.safetensors")
        assert want
        for tensor, values in want.items():
            np.testing.assert_array_equal(found[tensor], values, err_msg=f"{name} {tensor}")
