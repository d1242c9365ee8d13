"""Inspecting real checkpoints; statistics against torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import inspect, reshard
from megtool.cli.app import main
from megtool.errors import FormatError, MappingError
from tests.support import folders
from tests.support.models import tiny_llama

SHAPES = tiny_llama.shapes(tiny_llama.config())
PARAMETERS = sum(int(np.prod(s)) for s in SHAPES.values())


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("inspect") / "hf")


@pytest.fixture(scope="module")
def megatron(hf: Path) -> Path:
    folder = hf.parent / "megatron"
    reshard(hf, folder, to="torch_dist", tp=2, pp=2, digest="all")
    return folder


def test_a_hugging_face_folder(hf: Path) -> None:
    report = inspect(hf)
    assert (report.format, report.family, report.reason) == ("hf", "llama", None)
    assert (report.num_tensors, report.parameters) == (len(SHAPES), PARAMETERS)
    assert report.num_bytes == 2 * PARAMETERS
    assert report.dtypes == {"bfloat16": 2 * PARAMETERS}
    assert (report.num_files, report.digests, report.tensors) == (1, None, ())
    assert report.attachments == ("config.json", "tokenizer.json")
    text = "\n".join(report.lines())
    assert "layers.{0-3}" in text
    assert "q_proj.weight" in text
    assert "none: a flipped bit would go unnoticed" in text


def test_a_megatron_folder_counts_neither_padding_nor_shards(megatron: Path) -> None:
    report = inspect(megatron)
    assert (report.format, report.family) == ("torch_dist", "llama")
    assert {k: report.layout[k] for k in ("tp", "pp")} == {"tp": 2, "pp": 2}
    assert report.parameters == PARAMETERS
    assert report.padding["embedding.word_embeddings.weight"] == 256 - 101
    assert report.num_files == 4
    assert report.digests == len(SHAPES)
    assert report.attachments == ("hf/config.json", "hf/tokenizer.json")
    text = "\n".join(report.lines())
    assert "tp=2 pp=2, 4 files" in text
    assert "155 rows of embedding.word_embeddings.weight" in text


def test_a_tied_copy_is_not_counted(tmp_path: Path) -> None:
    folder = tiny_llama.save(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    report = inspect(folder)  # a trained output layer is none
    assert report.parameters == PARAMETERS
    assert report.left_out == ()
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    report = inspect(folder)
    assert report.parameters == PARAMETERS - 101 * 32
    assert report.left_out == (("lm_head.weight", "a copy of the tied embedding"),)


def test_every_tensor_on_a_line(megatron: Path) -> None:
    report = inspect(megatron, tensors=True)
    held = {t.name: t for t in report.tensors}
    assert held["decoder.layers.mlp.linear_fc1.weight"].shape == (4, 96, 32)
    assert held["decoder.layers.mlp.linear_fc1.weight"].num_shards > 4
    lines = list(report.lines())
    assert len([n for n in held if any(line.startswith(f"{n} ") for line in lines)]) == len(held)
    assert report.to_json()["tensors"][0]["shape"]


def test_tensors_that_fit_no_family_are_no_error(tmp_path: Path) -> None:
    save_file({"x.0.w": torch.zeros(3), "x.1.w": torch.zeros(3)}, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    report = inspect(tmp_path)
    assert report.family is None
    assert "perceptron" in (report.reason or "")
    assert report.parameters == 6
    with pytest.raises(MappingError):
        inspect(tmp_path, family="llama")

    (tmp_path / "config.json").write_text(json.dumps(tiny_llama.config()))
    report = inspect(tmp_path)
    assert report.family is None
    assert "x.0.w" in (report.reason or "")
    with pytest.raises(FormatError):
        inspect(tmp_path / "nowhere")


def special(kind: torch.dtype) -> torch.Tensor:
    values = torch.randn(700, 301).mul(3).to(kind).reshape(-1)
    values[5:90] = 0
    if kind is not torch.float8_e4m3fn:
        values[100] = float("inf")
        values[101:103] = float("-inf")
    values[200:207] = float("nan")
    return values.reshape(700, 301)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    floats = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    out = {name: special(getattr(torch, name)) for name in floats}
    integers = ("int64", "int32", "int16", "int8", "uint8")
    out |= {n: torch.randint(0, 99, (31, 77)).to(getattr(torch, n)) for n in integers}
    out["large"] = torch.tensor([2**63 - 1, -(2**63)])
    out["bool"] = torch.rand(40) > 0.3
    out["empty"] = torch.empty(0, 4)
    out["scalar"] = torch.tensor(2.5)
    out["only nan"] = torch.full((3,), float("nan"))
    out["offset"] = torch.randn(200_000, dtype=torch.float32) * 1e-3 + 1000
    return out


@pytest.mark.parametrize("threads", [1, 3])
def test_statistics_are_those_of_torch(tmp_path: Path, threads: int) -> None:
    held = tensors()
    save_file(held, tmp_path / "a.safetensors")
    report = inspect(tmp_path / "a.safetensors", stats=True, threads=threads)
    found = {t.name: t.statistics for t in report.tensors}
    assert set(found) == set(held)
    for name, tensor in held.items():
        s = found[name]
        assert s is not None
        wide = tensor.to(torch.float64).reshape(-1)
        finite = wide[wide.isfinite()]
        assert s.count == wide.numel()
        assert s.zeros == int((wide == 0).sum()), name
        assert s.nan == int(wide.isnan().sum()), name
        assert s.inf == int(wide.isinf().sum()), name
        if not finite.numel():
            assert (s.min, s.max, s.mean, s.std) == (None, None, None, None)
            continue
        assert s.min == (tensor.min().item() if not s.nan and not s.inf else finite.min().item())
        assert s.max == (tensor.max().item() if not s.nan and not s.inf else finite.max().item())
        assert s.mean == pytest.approx(finite.mean().item(), rel=1e-12, abs=1e-12)
        assert s.std == pytest.approx(finite.std(correction=0).item(), rel=1e-9, abs=1e-12)
    text = "\n".join(report.lines())
    assert "NaN" in text
    assert all(name in text for name in held)


def test_statistics_of_shards_are_those_of_the_whole(hf: Path, megatron: Path) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    whole = {t.name: t.statistics for t in inspect(hf, stats=True).tensors}[name]
    shards = {t.name: t.statistics for t in inspect(megatron, stats=True).tensors}
    stacked = shards["decoder.layers.mlp.linear_fc2.weight"]
    assert whole is not None
    assert stacked is not None
    assert stacked.count == 4 * whole.count
    assert stacked.min <= whole.min  # type: ignore[operator]


def test_statistics_tell_progress_and_change_nothing(hf: Path) -> None:
    before = folders.file_states(hf)
    seen: list[tuple[int, int]] = []
    inspect(hf, stats=True, progress=lambda stage, n, total: seen.append((n, total)))
    assert sum(n for n, _ in seen) == 2 * PARAMETERS
    assert {total for _, total in seen} == {2 * PARAMETERS}
    assert folders.file_states(hf) == before


def test_the_command_line(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(megatron), "--stats", "--json", "--threads", "1"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert value["family"] == "llama"
    assert {"min", "max", "mean", "std", "zeros", "nan", "inf"} <= set(value["tensors"][0])
    assert sum(f["count"] for f in value["tree"]) == value["num_tensors"]
    assert main(["inspect", str(megatron / "nothing")]) == 3


def test_torch_is_not_imported(megatron: Path) -> None:
    code = (
        "import sys\nfrom megtool.cli.app import main\n"
        "status = main(['inspect', sys.argv[1], '--stats', '-q'])\n"
        "status |= main(['verify', sys.argv[1], sys.argv[1], '-q'])\n"
        "sys.exit(9 if 'torch' in sys.modules else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(megatron)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_histograms_count_every_element(tmp_path: Path) -> None:
    values = torch.tensor([0.0, 1.0, 1.5, -1.0, 4.0, -0.25, 1e-20, float("nan"), float("inf")])
    save_file({"x": values}, tmp_path / "model.safetensors")
    line = inspect(tmp_path, stats=True).tensors[0]
    assert line.statistics is not None
    low, negative, zeros, positive = line.statistics.histogram
    counts = {-(2.0 ** (low + i)): n for i, n in enumerate(negative) if n}
    counts |= {2.0 ** (low + i): n for i, n in enumerate(positive) if n}
    assert counts == {-1.0: 1, -0.25: 1, 2.0**-40: 1, 1.0: 2, 4.0: 1}
    assert zeros == 1


def test_ranks_and_modules_share_out_all_bytes(hf: Path, megatron: Path) -> None:
    report = inspect(megatron)
    assert [(r.pp, r.tp, r.layers) for r in report.ranks] == [
        (0, 0, "0-1"),
        (0, 1, "0-1"),
        (1, 0, "2-3"),
        (1, 1, "2-3"),
    ]
    assert sum(r.num_bytes for r in report.ranks) == report.num_bytes
    for rank in report.ranks:
        sizes = [n for _, n in rank.largest]
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) == 4
        assert sum(sizes) < rank.num_bytes
    assert sum(report.modules.values()) == 2 * PARAMETERS == sum(inspect(hf).modules.values())
    assert inspect(hf).ranks == ()


def test_outliers_are_named_by_role_and_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(8, 8) for i in range(8)}
    tensors |= {f"model.layers.{i}.mlp.down_proj.weight": torch.randn(8, 8) for i in range(8)}
    tensors["model.layers.5.mlp.up_proj.weight"] *= 1000
    tensors["model.layers.6.mlp.down_proj.weight"] *= 0
    save_file(tensors, tmp_path / "model.safetensors")
    report = inspect(tmp_path, stats=True)
    named = {o.name: o.text for o in report.outliers}
    assert set(named) == {
        "model.mlp.up_proj.weight, layer 5",
        "model.mlp.down_proj.weight, layer 6",
    }
    assert "times the median" in named["model.mlp.up_proj.weight, layer 5"]
    assert "outlier" in "\n".join(report.lines())


def test_a_page_is_written_beside_the_text(hf: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "report.html"
    report = inspect(hf, report=page, stats=True)
    assert report.page == str(page)
    assert f"page        {page}" in "\n".join(report.lines())
    assert "Bytes by module" in page.read_text()
    assert main(["inspect", str(hf), "--report", str(tmp_path / "report.txt")]) == 2
