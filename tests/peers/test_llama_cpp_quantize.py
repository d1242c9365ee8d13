"""Real llama.cpp: its quantizer makes no better K-quants, and it computes with ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import megtool
from megtool.number_formats.gguf import decode, encode, row_bytes
from megtool.number_formats.kquants import K_QUANTS, WEIGHED
from tests.support.models import gguf_models
from tests.support.paths import PEERS
from tests.support.peers.release import install_release
from tests.support.runs.exports import export_gguf

pytestmark = [pytest.mark.peers, pytest.mark.slow]

QUANTIZE = """
import ctypes, glob, json, sys
import numpy as np
from pathlib import Path
folder = Path(sys.argv[1])
lib = ctypes.CDLL(glob.glob(sys.argv[2] + "/xllamacpp/*.so")[0])
lib.ggml_quantize_chunk.restype = ctypes.c_size_t
at, long = ctypes.c_void_p, ctypes.c_int64
lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, at, at, long, long, long, at]
x, w = np.load(folder / "values.npy"), np.load(folder / "columns.npy")
for name, number, width in json.loads((folder / "job.json").read_text()):
    for i, weights in enumerate((None, w)):
        out = np.zeros((len(x), width), np.uint8)
        at = None if weights is None else weights.ctypes.data
        lib.ggml_quantize_chunk(number, x.ctypes.data, out.ctypes.data, 0, *x.shape, at)
        np.save(folder / f"{name}-{i}.npy", out)
"""


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of llama.cpp with its Python binding."""
    return install_release("xllamacpp", tmp_path_factory.mktemp("llama-cpp"), "--only-binary=:all:")


@pytest.mark.parametrize("tail", [3, 30])
def test_errors_are_not_above_those_of_its_quantizer(
    tail: int, package: Path, tmp_path: Path
) -> None:
    import gguf

    generator = np.random.default_rng(tail)
    values = (generator.standard_t(tail, (256, 2048)) * 0.03).astype(np.float32)
    columns = generator.gamma(1, 1, 2048).astype(np.float32)
    np.save(tmp_path / "values.npy", values)
    np.save(tmp_path / "columns.npy", columns)
    kinds = [*K_QUANTS, *WEIGHED]
    job = [
        (k, int(gguf.GGMLQuantizationType[k]), row_bytes(f"gguf:{k}", values.shape[1]))
        for k in kinds
    ]
    (tmp_path / "job.json").write_text(json.dumps(job))
    script = tmp_path / "quantize.py"
    script.write_text(QUANTIZE)
    subprocess.run([sys.executable, script, tmp_path, package], check=True, timeout=300)
    for kind in kinds:
        for i, weights in enumerate((None, columns)):
            theirs = np.load(tmp_path / f"{kind}-{i}.npy")
            ours = encode(values, kind, weights)
            scale = 1.0 if weights is None else weights
            ratio = np.divide(
                *(
                    (scale * (decode(r, f"gguf:{kind}", 2048) - values.astype(float)) ** 2).sum()
                    for r in (ours, theirs)
                )
            )
            assert ratio < 1.005, (kind, i)


@pytest.mark.parametrize("outtype", ["q2_k", "q3_k_m", "q4_k_m", "q5_k_s", "q6_k"])
def test_it_computes_with_our_files(outtype: str, package: Path, tmp_path: Path) -> None:
    """As with the numbers that our own reader gives; it rounds what it multiplies to eight bits."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4}
    source = gguf_models.save(tmp_path / "hf", "llama", **sizes)
    export_gguf(source, tmp_path / "model.gguf", outtype=outtype)
    export_gguf(tmp_path / "model.gguf", tmp_path / "plain" / "model.gguf", outtype="f32")
    assert divergence_of([tmp_path / "plain", tmp_path], package) < 1e-3


def divergence_of(folders: list[Path], package: Path) -> float:
    """The largest divergence of what it answers by the second of two files from the first."""
    size = int(gguf_models.SIZES["vocab_size"])
    tokens = torch.randint(2, size - 30, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    job = json.dumps({"prompts": [tokens[:n] for n in (1, 5, 24)], "vocab_size": size})
    answers = []
    for folder in folders:
        (folder / "job.json").write_text(job)
        subprocess.run(
            [sys.executable, str(PEERS / "llama_cpp_logits.py"), str(folder)],
            env=os.environ | {"PYTHONPATH": str(package)},
            timeout=300,
            check=True,
        )
        answers.append(torch.tensor(json.loads((folder / "answer.json").read_text())))
    plain, quantized = answers
    return float((plain.exp() * (plain - quantized)).sum(-1).max())


@pytest.mark.parametrize("model", ["llama", "qwen3-moe"])
def test_it_computes_with_nvfp4_of_folders(model: str, package: Path, tmp_path: Path) -> None:
    """As with the numbers of the folder; it rounds what it multiplies to eight bits."""
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    if "moe" in model:
        sizes["moe_intermediate_size"] = 64
    source = gguf_models.save(tmp_path / "hf", model, **sizes)
    megtool.quantize(source, tmp_path / "quantized", recipe="nvfp4")
    export_gguf(tmp_path / "quantized", tmp_path / "model.gguf", outtype="nvfp4")
    export_gguf(tmp_path / "quantized", tmp_path / "plain" / "model.gguf", outtype="f32")
    assert divergence_of([tmp_path / "plain", tmp_path], package) < 1e-3
