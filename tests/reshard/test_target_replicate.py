"""Rank files of tensors that no Megatron module has: refused, unless --replicate names them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megtool import reshard, verify
from megtool.convert.language.mapping import Row
from megtool.convert.megatron import names as megatron_names
from megtool.convert.megatron.sharding import is_known
from megtool.errors import MappingError, UnknownTensorsError, UsageError
from megtool.source.open import open_source
from tests.support.errors import raises
from tests.support.models import tiny_llama

ADAPTER, HEAD = "decoder.layers.0.mlp.adapter.weight", "my_head.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank files of one rank, of a model whose family they do not tell, with two more tensors."""
    folder = tmp_path_factory.mktemp("replicate")
    reshard(tiny_llama.save(folder / "hf"), folder / "ranks", to="megatron", tp=1)
    file = folder / "ranks" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    tree["model"] |= {ADAPTER: torch.randn(32, 8), HEAD: torch.randn(4)}
    torch.save(tree, file)
    shutil.rmtree(folder / "ranks" / "release" / "hf")
    for sidecar in (folder / "ranks").rglob("megtool.json"):
        sidecar.unlink()
    return folder / "ranks"


def test_unknown_tensors_are_refused_by_name(source: Path, tmp_path: Path) -> None:
    with pytest.raises(MappingError) as caught:
        reshard(source, tmp_path / "out", to="megatron", tp=2)
    assert caught.value.tensor == ADAPTER
    assert HEAD in caught.value.message
    assert "--replicate" in (caught.value.hint or "")
    with pytest.raises(MappingError) as caught:
        reshard(source, tmp_path / "out", to="megatron", tp=2, replicate=["my_*"])
    assert caught.value.tensor == ADAPTER
    assert HEAD not in caught.value.message
    assert not (tmp_path / "out").exists()


def test_replicate_writes_them_whole_and_reports_them(source: Path, tmp_path: Path) -> None:
    report = reshard(source, tmp_path / "out", to="megatron", tp=2, replicate=["*adapter*", HEAD])
    assert report.replicated == (ADAPTER, HEAD)
    assert report.to_json()["replicated"] == (ADAPTER, HEAD)
    assert any(label == "replicated" and ADAPTER in text for label, text in report.rows())
    one = torch.load(source / "release/mp_rank_00/model_optim_rng.pt", weights_only=False)
    for rank in range(2):
        file = tmp_path / f"out/release/mp_rank_{rank:02d}/model_optim_rng.pt"
        tree = torch.load(file, weights_only=False)
        for name in (ADAPTER, HEAD):
            assert torch.equal(tree["model"][name], one["model"][name])


def test_one_rank_and_other_formats_need_no_word(source: Path, tmp_path: Path) -> None:
    assert reshard(source, tmp_path / "one", to="megatron", tp=1).replicated == ()
    assert reshard(source, tmp_path / "td", to="torch_dist", tp=2).replicated == ()
    with pytest.raises(UsageError, match="no effect with --to torch_dist"):
        reshard(source, tmp_path / "no", to="torch_dist", tp=2, replicate=["*"])
    with pytest.raises(UsageError, match="matches no tensor"):
        reshard(source, tmp_path / "no", to="megatron", tp=2, replicate=["*", "nothing.*"])


def test_formats_with_global_shapes_carry_them_though_a_family_does_not_know_them(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf, stored = source.parent / "hf", tmp_path / "td"
    reshard(source, stored, to="torch_dist", tp=2)
    for to, layout in (("torch_dist", {"tp": 4}), ("dcp", {}), ("zarr", {})):
        caplog.clear()
        reshard(stored, tmp_path / to, to=to, like=hf, **layout)
        assert "2 stored tensors are not known to 'llama'" in caplog.text
        report = verify(stored, tmp_path / to)
        assert report.verdict == "equal", list(report.lines())
        assert {ADAPTER, HEAD} <= set(open_source(tmp_path / to, lenient=True).catalogue.index)
    for to in ("megatron", "hf"):
        with raises(UnknownTensorsError, "2 stored tensors", hint="--exclude"):
            reshard(stored, tmp_path / "no", to=to, like=hf)
    bias = f"{ADAPTER}=decoder.layers.0.self_attention.linear_qkv.bias"  # which is another model's
    reshard(stored, tmp_path / "biased", to="torch_dist", rename=[bias])
    with raises(MappingError, "linear_qkv.bias", "the configuration says"):
        reshard(tmp_path / "biased", tmp_path / "no", to="torch_dist", like=hf)


def test_megatrons_own_names_are_known() -> None:
    for table in (megatron_names.PER_LAYER, megatron_names.STACKED):
        for row in table:
            for name in (row.stored, *row.also) if isinstance(row, Row) else ():
                key = name.replace("{l}", "0").replace("{e}", "1").replace("{m}", "0")
                assert is_known(key), key
    for name in (
        "pooler.dense.weight",
        "lm_head.layer_norm.bias",
        "encoder.final_layernorm.weight",
    ):
        assert is_known(name)
    for name in (ADAPTER, HEAD, "decoder.layers.3.mlp.linear_fc3.weight"):
        assert not is_known(name)
