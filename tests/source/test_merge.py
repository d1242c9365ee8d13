"""Merging low-rank updates into weights while they are written, in any format and layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megtool import quantize, reshard, verify
from megtool.dtypes import dtype
from megtool.errors import (
    CoverageError,
    DestinationError,
    FormatError,
    MappingError,
    MegtoolError,
    UsageError,
)
from megtool.options.execution import DigestMode, ExecutionOptions
from megtool.options.layout import ParallelConfig
from megtool.plan import work_units
from tests.support.checkpoints.faulty_files import FaultyFiles, Killed
from tests.support.checkpoints.trained import config, write
from tests.support.checkpoints.updates import (
    EXECUTION,
    add_update,
    merge,
    random_update,
    random_updates,
)
from tests.support.errors import raises
from tests.support.folders import contents, torch_tensors
from tests.support.models import tiny_llama
from tests.support.runs.worker_runs import UNIT_BYTES

ALL = ("*.attn.[qkvo].weight", "*.mlp.*.weight")
HF_NAMES = {
    **{f"attn.{k}.weight": f"self_attn.{k}_proj.weight" for k in "qkvo"},
    **{f"mlp.{k}.weight": f"mlp.{k}_proj.weight" for k in ("gate", "up", "down")},
}


def hf_name(canonical: str) -> str:
    layer, _, rest = canonical.removeprefix("layers.").partition(".")
    return f"model.layers.{layer}.{HF_NAMES[rest]}"


def expected(folder: Path, updates: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a Llama's folder with the updates added."""
    out = torch_tensors(folder)
    for name, update in updates.items():
        out[hf_name(name)] = add_update(out[hf_name(name)], update)
    return out


def same(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    found = torch_tensors(folder)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("model") / "hf", parts=2)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many units in few bytes."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", UNIT_BYTES)


LAYOUTS: dict[str, dict[str, Any]] = {
    "torch_dist": {"to": "torch_dist", "tp": 2, "pp": 2},
    "torch_dist, pp 4": {"to": "torch_dist", "pp": 4},
    "megatron": {"to": "megatron", "tp": 4, "pp": 2},
    "dcp": {"to": "dcp"},
    "zarr": {"to": "zarr"},
    "safetensors": {"to": "safetensors"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merged_weights_have_the_same_bits_in_every_format(
    layout: str, hf: Path, tmp_path: Path
) -> None:
    updates = random_updates(hf, ALL)
    assert len(updates) == 28
    wanted = expected(hf, updates)
    execution = replace(EXECUTION, verify=True)
    ending = ".safetensors" if layout == "safetensors" else ""
    report = merge(
        hf, tmp_path / f"merged{ending}", updates, execution=execution, **LAYOUTS[layout]
    )
    assert report.verified is not None
    assert report.unverified == 0
    assert report.plan.num_bytes.merge == sum(2 * u.shape[0] * u.shape[1] for u in updates.values())
    assert report.peak_buffer_bytes <= report.plan.peak_buffer_bytes
    assert verify(tmp_path / f"merged{ending}").exit_status == 0
    if ending:
        same(tmp_path, wanted)
        return
    reshard(tmp_path / f"merged{ending}", tmp_path / "back", to="hf")
    same(tmp_path / "back", wanted)
    # the same updates, of the plain checkpoint in that format
    reshard(hf, tmp_path / "plain", **LAYOUTS[layout])
    merge(tmp_path / "plain", tmp_path / "again", updates, to="hf")
    same(tmp_path / "again", wanted)


def test_the_report_says_what_was_merged(hf: Path, tmp_path: Path) -> None:
    updates = random_updates(hf, ["*.attn.q.weight"]) | random_updates(
        hf, ["*.mlp.down.weight"], rank=8, scale=0.5
    )
    report = merge(hf, tmp_path / "out", updates, execution=replace(EXECUTION, dry_run=True))
    assert not (tmp_path / "out").exists()
    (data,) = report.to_json()["merges"]
    assert data == {
        "adapter": None,
        "weights": sorted(updates),
        "ranks": [4, 8],
        "scales": [0.5, 2.0],
    }
    assert dict(report.rows())["merged"] == "8 weights: rank 4 to 8, scale 0.5 to 2"
    assert any("merged with an adapter" in line for line in report.lines())
    assert {hf_name(n) for n in updates} == set(report.derived["tensors"])


@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("mode", [DigestMode.BUFFERED, DigestMode.NONE])
def test_sums_are_rounded_once_to_the_dtype_that_is_written(
    kind: str, mode: DigestMode, hf: Path, tmp_path: Path
) -> None:
    updates = random_updates(hf, ALL)
    merge(
        hf,
        tmp_path / "out",
        updates,
        dtype=dtype(kind),
        execution=replace(EXECUTION, digest=mode, verify=True),
    )
    wanted = {
        name: tensor.float().to(getattr(torch, kind)) for name, tensor in torch_tensors(hf).items()
    }
    for name, update in updates.items():
        weight = torch_tensors(hf)[hf_name(name)].float()
        wanted[hf_name(name)] = add_update(weight, update).to(getattr(torch, kind))
    same(tmp_path / "out", wanted)


def test_quantized_weights_are_decoded_and_then_updated(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    tiny_llama.save(tmp_path / "hf", **sizes, head_dim=32)
    quantize(tmp_path / "hf", tmp_path / "fp8", recipe="fp8_block128", fsync=False)
    updates = random_updates(tmp_path / "fp8", ["*.attn.q.weight", "*.mlp.down.weight"])
    merge(
        tmp_path / "fp8",
        tmp_path / "merged",
        updates,
        dtype=dtype("float32"),
        execution=replace(EXECUTION, verify=True),
    )
    reshard(tmp_path / "fp8", tmp_path / "plain", dtype="float32")
    same(tmp_path / "merged", expected(tmp_path / "plain", updates))


def test_optimizer_state_stays_behind(tmp_path: Path, materialize: Any) -> None:
    write(tmp_path / "run", config(), ParallelConfig(), materialize)
    updates = random_updates(tmp_path / "run", ["*.attn.q.weight"])
    report = merge(tmp_path / "run", tmp_path / "out", updates)
    lost = [d for d in report.dropped if d.is_lost]
    assert [d.name for d in lost] == [f"optimizer state of {tmp_path / 'run'}"]
    assert lost[0].num_bytes > report.num_bytes
    with raises(CoverageError, "merged adapter"):
        merge(tmp_path / "run", tmp_path / "b", updates, execution=replace(EXECUTION, strict=True))
    with raises(UsageError, "--optimizer-format"):
        merge(
            tmp_path / "run",
            tmp_path / "b",
            updates,
            to="torch_dist",
            optimizer="fully_reshardable",
        )
    assert not (tmp_path / "b").exists()


def test_a_run_is_known_by_its_updates(hf: Path, tmp_path: Path) -> None:
    def fingerprint(some: dict[str, Any]) -> str:
        report = merge(hf, tmp_path / "x", some, execution=replace(EXECUTION, dry_run=True))
        return report.plan.fingerprint

    updates = random_updates(hf, ALL)
    first = fingerprint(updates)
    assert fingerprint(random_updates(hf, ALL)) == first
    name = next(iter(updates))
    changed = [
        updates | {name: replace(updates[name], scale=1.0)},
        updates | {name: random_update(updates[name].shape, seed=99)},
        {n: u for n, u in updates.items() if n != name},
    ]
    assert len({first, *map(fingerprint, changed)}) == 4


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("same_adapter", [True, False])
def test_a_run_is_resumed_with_the_same_updates_alone(
    same_adapter: bool, hf: Path, tmp_path: Path
) -> None:
    updates, layout = random_updates(hf, ALL), LAYOUTS["torch_dist"]
    calm = FaultyFiles()
    merge(hf, tmp_path / "wanted", updates, files=calm, **layout)
    before = updates if same_adapter else random_updates(hf, ALL, scale=1.0)
    with pytest.raises(Killed):
        merge(
            hf, tmp_path / "out", before, files=FaultyFiles(len(calm.calls) - 30, "kill"), **layout
        )
    report = merge(hf, tmp_path / "out", updates, **layout)
    assert (report.resumed_units > 8) == same_adapter
    assert report.repaired_units == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "wanted")


@pytest.mark.usefixtures("small_units")
def test_workers_merge_what_one_would_have(hf: Path, tmp_path: Path) -> None:
    updates, layout = random_updates(hf, ALL), LAYOUTS["megatron"]
    merge(hf, tmp_path / "one", updates, **layout)
    states = []
    for n in (2, 0, 1):
        execution = replace(EXECUTION, worker=f"{n}/3")
        if n == 0:
            with raises(DestinationError, id="foreign-workers"):
                other = random_updates(hf, ALL, scale=1.0)
                merge(hf, tmp_path / "many", other, execution=execution, **layout)
        report = merge(hf, tmp_path / "many", updates, execution=execution, **layout)
        states.append(report.worker.state)
    assert states == ["waiting", "waiting", "published"]
    assert contents(tmp_path / "many") == contents(tmp_path / "one")


CASES: list[tuple[type[MegtoolError], str, dict[str, Any]]] = [
    (MappingError, "foreign-adapter", {"layers.9.attn.q.weight": (32, 32)}),
    (MappingError, "foreign-adapter", {"layers.0.attn.q.weight": (32, 16)}),
    (MappingError, "foreign-adapter", {"layers.0.attn.q.weight": (16, 64)}),
    (MappingError, "foreign-adapter", {"layers.0.attn_norm.weight": (32, 1)}),
    (MappingError, "foreign-adapter", {}),
]


@pytest.mark.parametrize(("kind", "name", "shapes"), CASES)
def test_updates_that_do_not_fit_are_refused(
    kind: type[MegtoolError], name: str, shapes: dict[str, Any], hf: Path, tmp_path: Path
) -> None:
    updates = {n: random_update(shape) for n, shape in shapes.items()}
    with raises(kind, id=name, tensor=next(iter(shapes), None)):
        merge(hf, tmp_path / "out", updates)
    assert list(tmp_path.iterdir()) == []


def test_updates_of_tied_weights_are_refused(tmp_path: Path) -> None:
    tiny_llama.save(tmp_path / "hf", tie_word_embeddings=True)
    for name in ("embed.weight", "head.weight"):
        with raises(MappingError, id="unsupported-adapter", tensor=name):
            merge(tmp_path / "hf", tmp_path / "out", {name: random_update((101, 32))})


def test_an_embedding_of_its_own_is_updated_with_its_padding_left_alone(
    hf: Path, tmp_path: Path
) -> None:
    updates = {n: random_update((101, 32), seed=3) for n in ("embed.weight", "head.weight")}
    merge(
        hf, tmp_path / "a", updates, to="megatron", tp=4, execution=replace(EXECUTION, verify=True)
    )
    reshard(tmp_path / "a", tmp_path / "b", to="hf")
    wanted = torch_tensors(hf)
    for ours, theirs in (("embed", "model.embed_tokens"), ("head", "lm_head")):
        key = f"{theirs}.weight"
        wanted[key] = add_update(wanted[key], updates[f"{ours}.weight"])
    same(tmp_path / "b", wanted)


def test_nothing_is_written_of_an_adapter_with_nan(hf: Path, tmp_path: Path) -> None:
    updates = random_updates(hf, ["*.attn.q.weight"])
    updates["layers.2.attn.q.weight"].up[3, 1] = float("nan")
    with raises(MegtoolError, id="nan-weights"):
        merge(hf, tmp_path / "out", updates)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_of_an_adapter_whose_sums_overflow(hf: Path, tmp_path: Path) -> None:
    updates = random_updates(hf, ["layers.1.attn.q.weight"])
    (update,) = updates.values()
    update.up[3, :] = 1e30
    update.down[:, :] = 1e30
    with raises(FormatError, update.shape[1], "float32", id="nan-weights"):
        merge(hf, tmp_path / "out", updates)
    assert list(tmp_path.iterdir()) == []


def test_nan_of_the_model_stays_nan(tmp_path: Path) -> None:
    """It is nothing that the update made of it."""
    hf = tiny_llama.save(tmp_path / "hf")
    name, path = "model.layers.0.self_attn.q_proj.weight", hf / "model.safetensors"
    tensors = load_file(path)
    tensors[name][2, 3] = float("nan")
    tensors[name][0, 1] = float("-inf")
    save_file(tensors, path, metadata={"format": "pt"})
    updates = random_updates(hf, ["layers.0.attn.q.weight"])
    merge(hf, tmp_path / "out", updates)
    same(tmp_path / "out", expected(hf, updates))


def test_memory_is_that_of_the_budget(tmp_path: Path) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": 1}
    tiny_llama.save(tmp_path / "hf", **wide)
    updates = random_updates(tmp_path / "hf", ALL, rank=64)
    small = ExecutionOptions(fsync=False, threads=1, memory="4MiB")
    report = merge(tmp_path / "hf", tmp_path / "a", updates, execution=small)
    assert report.peak_buffer_bytes <= report.plan.peak_buffer_bytes <= 8 << 20
    merge(tmp_path / "hf", tmp_path / "b", updates, execution=replace(EXECUTION, threads=2))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
