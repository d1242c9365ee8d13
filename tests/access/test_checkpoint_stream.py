"""`megtool.stream`: the ranks' tensors make the whole again, in every naming and layout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megtool
from megtool.access import checkpoint
from megtool.errors import LayoutError, StorageError
from tests.support.errors import raises
from tests.support.folders import torch_tensors
from tests.support.models import dense_cases, moe_cases
from tests.support.models.tiny_model import Case

TP2 = {"tp": 2}
GRID = {"tp": 2, "pp": 2}
EXPERTS = {"tp": 2, "ep": 2}


def parts_of(source: Path, world: int, **layout: Any) -> list[dict[str, torch.Tensor]]:
    return [dict(megtool.stream(source, rank=rank, **layout)) for rank in range(world)]


def test_every_tensor_comes_once_in_order(llama: Path, tensors: dict[str, torch.Tensor]) -> None:
    names = []
    for name, tensor in megtool.stream(llama):
        assert tensor.equal(tensors[name])
        names.append(name)
    assert sorted(names) == sorted(tensors)
    assert names == list(megtool.open(llama).as_("hf"))


def joined(parts: list[torch.Tensor], whole: torch.Tensor) -> torch.Tensor:
    """The tensor that ranks' parts make along the one dimension in which they are shorter."""
    if parts[0].shape == whole.shape:
        assert all(p.equal(parts[0]) for p in parts)
        return parts[0]
    (dim,) = [d for d in range(whole.ndim) if parts[0].shape[d] != whole.shape[d]]
    return torch.cat(parts, dim)


def test_tensor_ranks_make_the_whole(
    anywhere: dict[str, Path], tensors: dict[str, torch.Tensor]
) -> None:
    for name in ("hf", "megatron", "torch_dist"):
        parts = parts_of(anywhere[name], 2, **TP2)
        for key, whole in tensors.items():
            assert joined([p[key] for p in parts], whole).equal(whole), (name, key)
        assert parts[0]["model.layers.0.mlp.down_proj.weight"].shape == (32, 24)
        assert parts[1]["model.embed_tokens.weight"].shape == (50, 32)  # 101 = 51 + 50


def test_stages_share_the_layers_out(llama: Path, tensors: dict[str, torch.Tensor]) -> None:
    parts = parts_of(llama, 4, **GRID)
    assert {n for p in parts[:2] for n in p} | {n for p in parts[2:] for n in p} == set(tensors)
    assert not {n for n in parts[0] if n.startswith("model.layers.2.")}
    assert "lm_head.weight" not in parts[1]
    assert "model.embed_tokens.weight" not in parts[2]


def test_ranks_have_what_reshard_writes_for_them(llama: Path, tmp_path: Path) -> None:
    megtool.reshard(llama, tmp_path / "ranks", to="megatron", tp=2, pp=2)
    for rank, parts in enumerate(parts_of(llama, 4, to="megatron", **GRID)):
        (file,) = (tmp_path / "ranks").rglob(f"mp_rank_0{rank % 2}_00{rank // 2}/*.pt")
        saved = torch.load(file, weights_only=False)["model"]
        saved = {n: t for n, t in saved.items() if isinstance(t, torch.Tensor)}
        first = 2 * (rank // 2)  # ranks count their own layers
        parts = {
            n.replace(f"layers.{i + first}.", f"layers.{i}."): t
            for n, t in parts.items()
            for i in [int(n.split(".")[2]) - first if ".layers." in n else 0]
        }
        assert parts.keys() == saved.keys(), rank
        assert all(t.equal(saved[n]) for n, t in parts.items())


def pick(cases: list[Any], model_type: str) -> Case:
    return next(c for c in cases if c.model_type == model_type)


def test_fused_rows_are_cut_part_by_part(tmp_path: Path) -> None:
    """Phi-3's `qkv_proj` and `gate_up_proj`: a rank has rows of every part."""
    dense_cases.save(pick(dense_cases.CASES, "phi3"), tmp_path / "phi3")
    whole = torch_tensors(tmp_path / "phi3")
    name = "model.layers.0.mlp.gate_up_proj.weight"
    parts = parts_of(tmp_path / "phi3", 2, **TP2)
    gate, up = whole[name].chunk(2)
    for rank in range(2):
        assert parts[rank][name].equal(torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    assert parts[0][qkv].shape[0] * 2 == whole[qkv].shape[0]
    rows = torch.cat([p[qkv] for p in parts])
    assert sorted(rows.float().sum(1).tolist()) == sorted(whole[qkv].float().sum(1).tolist())


def test_experts_go_to_their_ranks(tmp_path: Path) -> None:
    moe_cases.save(moe_cases.CASES[0], tmp_path / "moe")
    whole = torch_tensors(tmp_path / "moe")
    parts = parts_of(tmp_path / "moe", 2, ep=2)
    experts = [{n for n in p if ".experts." in n} for p in parts]
    assert experts[0].isdisjoint(experts[1])
    assert experts[0] | experts[1] == {n for n in whole if ".experts." in n}
    for part in parts:
        assert all(t.equal(whole[n]) for n, t in part.items())


EVERY = [
    *(pytest.param(dense_cases.save, c, id=str(c)) for c in dense_cases.CASES + dense_cases.MORE),
    *(pytest.param(moe_cases.save, c, id=f"{c[0]}-{n}") for n, c in enumerate(moe_cases.CASES)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("save", "case"), EVERY)
def test_ranks_of_every_family_have_every_element_once(
    save: Callable[[Any, Path], None], case: Any, tmp_path: Path
) -> None:
    """Stages and expert ranks share tensors out, and tensor ranks the elements of each."""
    save(case, tmp_path / "hf")
    whole = torch_tensors(tmp_path / "hf")
    for axis in ("tp", "pp", "ep"):
        try:
            parts = parts_of(tmp_path / "hf", 2, **{axis: 2})
        except LayoutError as e:
            assert e.hint
            continue
        assert {n for p in parts for n in p} == set(whole) - dropped(tmp_path / "hf")
        for name, tensor in whole.items():
            held = [p[name] for p in parts if name in p]
            if all(t.shape == tensor.shape for t in held):
                assert all(t.equal(tensor) for t in held)
                continue
            values = torch.cat([t.float().flatten() for t in held]).sort().values
            assert values.equal(tensor.float().flatten().sort().values), (axis, name)


def dropped(folder: Path) -> set[str]:
    """Stored tensors that are no tensors of the model, such as copies of tied embeddings."""
    return {name for name, _ in megtool.open(folder).source.view.dropped}


def test_batches_are_bounded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor comes alone; the next batch is read while one is used, and no further."""
    monkeypatch.setattr(checkpoint, "BATCH_BYTES", 5000)
    view = megtool.open(llama).as_("hf")
    sizes = [
        sum(view[n].num_bytes for n in names)
        for names in checkpoint.in_batches(view, lambda n: view[n].num_bytes)
    ]
    assert max(sizes) == view["model.embed_tokens.weight"].num_bytes
    assert sum(sizes) == view.num_bytes
    assert len(sizes) > 5
    stream = megtool.stream(llama)
    next(stream)
    stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("megtool-stream")]


def test_a_read_that_fails_is_raised_where_tensors_are_used(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StorageError("the disk failed", file=llama)

    monkeypatch.setattr(checkpoint.BoxReader, "read", refuse)
    with raises(StorageError, "disk"):
        list(megtool.stream(llama))


def test_what_a_layout_does_not_divide_is_refused_before_reading(llama: Path) -> None:
    with raises(LayoutError, "3"):
        megtool.stream(llama, tp=3, rank=0)
