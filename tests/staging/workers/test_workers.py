"""Several workers write what one would have written, to the byte."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import megtool
from megtool import export, quantize, reshard
from megtool.errors import UsageError
from tests.support.checkpoints.fp8_trained import rank_files
from tests.support.errors import raises
from tests.support.folders import contents, file_states
from tests.support.models import gguf_models, tiny_llama
from tests.support.runs.worker_runs import run_workers

TARGETS: dict[str, dict[str, Any]] = {
    "hf": {"to": "hf", "max_shard_size": "40KB"},
    "safetensors": {"to": "safetensors"},
    "torch_dist": {"to": "torch_dist", "tp": 2, "pp": 2},
    "by the kernel": {"to": "torch_dist", "pp": 2, "digest": "buffered"},
    "all by the kernel": {"to": "dcp", "digest": "buffered"},
    "no digests": {"to": "hf", "digest": "none", "dtype": "float32"},
    "megatron": {"to": "megatron", "tp": 4},
    "dcp": {"to": "dcp"},
    "zarr": {"to": "zarr"},
    "zarr, compressed": {"to": "zarr", "compress": "zstd"},
    "tensorstore": {"to": "tensorstore"},
    "tensorstore, compressed": {"to": "tensorstore", "compress": "zstd"},
    "read back": {"to": "torch_dist", "tp": 4, "verify": True},
}


pytestmark = pytest.mark.usefixtures("small_units")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("model") / "hf", parts=2)


def name_of(options: dict[str, Any]) -> str:
    return "out.safetensors" if options["to"] == "safetensors" else "out"


@pytest.mark.parametrize("target", TARGETS)
def test_any_number_of_workers_writes_the_same_bytes(tmp_path: Path, hf: Path, target: str) -> None:
    options = TARGETS[target] | {"threads": 1}
    name = name_of(options)
    before = file_states(hf)
    (tmp_path / "one").mkdir()
    reshard(hf, tmp_path / "one" / name, **options)
    expected = contents(tmp_path / "one" / name)
    for count in (2, 3, 8):
        root = tmp_path / str(count)
        order = random.Random(count).sample(range(count), count)
        reports = run_workers("reshard", hf, root / name, count, order, **options)
        assert contents(root / name) == expected, count
        states = [r.worker.state for r in reports]
        assert states == ["waiting"] * (count - 1) + ["published"], count
        assert [set(r.worker.missing) for r in reports[:-1]] == [
            set(order[k:]) for k in range(1, count)
        ]
        total = sum(r.worker.num_bytes for r in reports)
        late = reports[-1].num_bytes - total  # units between those of several workers
        assert late == 0 or (target == "by the kernel" and late < total // 5), count
    assert file_states(hf) == before


QUANTIZABLE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "head_dim": 64,
}
EXPORTS: dict[str, dict[str, Any]] = {
    "hf": {"to": "hf", "max_shard_size": "40KB"},
    "gguf": {"to": "gguf", "outtype": "q8_0"},
    "trtllm-legacy": {"to": "trtllm-legacy", "tp": 2},
}


@pytest.mark.parametrize("target", EXPORTS)
def test_workers_export_what_one_would_have(tmp_path: Path, hf: Path, target: str) -> None:
    options, name = EXPORTS[target], "out.gguf" if target == "gguf" else "out"
    if target == "gguf":
        hf = gguf_models.save(tmp_path / "hf", "llama")
    (tmp_path / "one").mkdir()
    export(hf, tmp_path / "one" / name, **options)
    reports = run_workers("export", hf, tmp_path / "many" / name, 3, (2, 0, 1), **options)
    assert [label for label, _ in reports[0].rows()] == ["form", "worker", "share"]
    assert contents(tmp_path / "many" / name) == contents(tmp_path / "one" / name)
    assert [r.worker.state for r in reports] == ["waiting", "waiting", "published"]
    assert all("\n".join(r.lines()) and r.to_json() for r in reports)


@pytest.mark.parametrize("recipe", ["fp8_block128", "mxfp8", "int4_weight_only"])
def test_workers_quantize_what_one_would_have(tmp_path: Path, recipe: str) -> None:
    source = tiny_llama.save(tmp_path / "hf", **QUANTIZABLE)
    options = {"recipe": recipe, "max_shard_size": "100KB", "threads": 1}
    quantize(source, tmp_path / "one", **options)
    reports = run_workers("quantize", source, tmp_path / "many", 3, (1, 2, 0), **options)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert [r.worker.state for r in reports] == ["waiting", "waiting", "published"]
    assert [r.proof is None for r in reports] == [True, True, False]
    assert all("\n".join(r.lines()) and r.to_json() for r in reports)
    late = quantize(source, tmp_path / "many", worker="2/3", **options)
    assert late.worker.state == "complete"


def test_a_recipe_that_needs_data_is_no_work_for_workers(tmp_path: Path, hf: Path) -> None:
    with raises(UsageError, id="option-without-effect"):
        quantize(hf, tmp_path / "out", recipe="fp8", worker="0/2")


@pytest.mark.parametrize("verb", ["fix_amax", "strip_amax"])
def test_verbs_of_amax_take_workers(tmp_path: Path, verb: str) -> None:
    ranks = rank_files(tmp_path)
    getattr(megtool, verb)(ranks, tmp_path / "one")
    reports = run_workers(verb, ranks, tmp_path / "many", 3)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert [r.worker.state for r in reports] == ["waiting", "waiting", "published"]
