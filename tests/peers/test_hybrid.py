"""Real megatron-core 0.19 saves HybridModels that megtool reads, and loads those it writes.

What the release cannot do here, by its source: state in `fully_sharded_model_space` is not saved
(`dist_checkpointing/mapping.py` refuses flattened ranges); tied embeddings with multi-token
prediction do not go over pipeline stages, not even in its own save
(`models/common/language_module/language_module.py` asserts that its copy of the embedding is not
there); `fsdp_dtensor` is saved by Megatron-FSDP, which wants CUDA.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool import reshard, verify
from megtool.source.open import open_source
from tests.support.peers.forked_worlds import run_forked
from tests.support.peers.release import install_release
from tests.support.peers.run_trained import read_with_torch, run_world

pytestmark = [pytest.mark.peers, pytest.mark.slow]


@pytest.fixture(scope="session")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a release that has HybridModel, apart from the one that is installed."""
    folder = tmp_path_factory.mktemp("core")
    return install_release("megatron-core==0.19.2", folder, "--ignore-requires-python")


def run(core: Path, action: str, folder: Path, **options: Any) -> str:
    return run_forked("hybrid_world.py", action, str(folder), json.dumps(options), core=core)


def test_megatron_loads_what_became_of_its_own_save(core: Path, tmp_path: Path) -> None:
    """Mixers cut over ranks, a pattern with chunks, and rank files on the way."""
    run(core, "save", tmp_path / "0", tp=2, pp=2, pattern="M-G-|*-M-")
    found = open_source(tmp_path / "0")
    assert found.view.is_hybrid
    assert found.view.config is not None
    assert found.view.config.layer_kinds == tuple("M-G-*-M-")
    assert found.view.dropped == []
    steps: list[dict[str, Any]] = [
        {"to": "megatron", "tp": 1, "pp": 2},
        {"to": "torch_dist", "tp": 1, "pp": 4},
        {"to": "torch_dist", "tp": 2, "pp": 1},
    ]
    for number, step in enumerate(steps):
        there = tmp_path / f"{number + 1}"
        report = reshard(tmp_path / f"{number}", there, fsync=False, verify=True, **step)
        assert not [d for d in report.dropped if d.is_lost], step
    assert "loaded" in run(core, "load", tmp_path / "2", tp=1, pp=4, pattern="M-|G-|*-|M-")
    assert "loaded" in run(core, "load", tmp_path / "3", tp=2, pp=1, pattern="M-G-*-M-")
    mine = {t.name: t.shape for t in open_source(tmp_path / "3").catalogue.tensors}
    assert mine == {t.name: t.shape for t in found.catalogue.tensors}


def test_a_gpt_becomes_a_hybrid_that_megatron_loads(core: Path, tmp_path: Path) -> None:
    """And back: the same tensors under both classes' names."""
    run(core, "save", tmp_path / "0", tp=1, pp=1, pattern="*-*-")
    reshard(tmp_path / "0", tmp_path / "1", to="torch_dist", model_class="gpt", fsync=False)
    names = {t.name for t in open_source(tmp_path / "1").catalogue.tensors}
    assert "decoder.layers.self_attention.linear_qkv.weight" in names
    reshard(
        tmp_path / "1", tmp_path / "2", to="torch_dist", model_class="hybrid", tp=2, fsync=False
    )
    assert "loaded" in run(core, "load", tmp_path / "2", tp=2, pp=1, pattern="*-*-")


@pytest.mark.parametrize("pattern", ["D-DE", "+-+E"])
def test_latent_and_sparse_attention(core: Path, tmp_path: Path, pattern: str) -> None:
    """Indexers are whole on every tensor-parallel rank; test_moe_families.py has their logits."""
    run(core, "save", tmp_path / "0", tp=2, pp=1, pattern=pattern)
    reshard(tmp_path / "0", tmp_path / "1", to="megatron", tp=2, fsync=False)
    reshard(tmp_path / "1", tmp_path / "2", to="torch_dist", tp=1, fsync=False)
    names = {t.name for t in open_source(tmp_path / "2").catalogue.tensors}
    assert any(".core_attention.indexer.k_norm.bias" in n for n in names) == ("D" in pattern)
    assert "loaded" in run(core, "load", tmp_path / "2", tp=1, pp=1, pattern=pattern)


KINDS = ("fully_reshardable", "dp_reshardable", "legacy")
TRAINED: dict[str, dict[str, Any]] = {
    "replicas": {"pattern": "M-GE*E/*E", "layout": {}},
    "tensor parallel": {"pattern": "*-ME/M-/M-", "layout": {"tp": 2}},
    "experts": {"pattern": "M-*E/*E", "layout": {"ep": 2}},
    "tied": {"pattern": "*EG-/*-", "layout": {}, "tied": True},
    "several layers inside": {"pattern": "M-*E/G*-ME*/G*-ME*", "layout": {"tp": 2}},
}
Run = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module", params=TRAINED)
def trained(
    request: pytest.FixtureRequest, core: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """Two steps of training of a HybridModel on two ranks, saved in every format."""
    folder, options = tmp_path_factory.mktemp("trained"), TRAINED[request.param]
    run_world("train", core=core, saves=[[k, str(folder / k)] for k in KINDS], **options)
    return folder, options


def assert_loaded(core: Path, folder: Path, truth: Path, kind: str, **options: Any) -> None:
    """Megatron loads a folder; what it dumps then is the truth to the last bit."""
    dump = folder.with_name(f"{folder.name}-dump")
    said = run_world("load", core=core, kind=kind, folder=str(folder), dump=str(dump), **options)
    assert "loaded [2.0" in said
    found, want = read_with_torch(dump), read_with_torch(truth / "fully_reshardable")
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), name


def test_every_format_has_the_same_state(trained: Run) -> None:
    folder, _ = trained
    for kind in KINDS[1:]:
        report = verify(folder / KINDS[0], folder / kind)
        assert report.verdict == "equal", list(report.lines())


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("legacy", "dp_reshardable"),
        ("dp_reshardable", "legacy"),
        ("dp_reshardable", "fully_reshardable"),
    ],
)
def test_its_optimizer_goes_to_another_layout(
    core: Path, trained: Run, tmp_path: Path, source: str, target: str
) -> None:
    """Weights, master weights and moments, of one or two tensor-parallel ranks."""
    folder, options = trained
    layout = {"tp": 2, "ep": 1} if options["layout"].get("tp", 1) == 1 else {"tp": 1}
    reshard(
        folder / source,
        tmp_path / "out",
        to="megatron" if target == "legacy" else "torch_dist",
        optimizer_format=target,
        verify_master_weights=True,
        fsync=False,
        **layout,  # type: ignore[arg-type]
    )
    assert_loaded(core, tmp_path / "out", folder, target, **options | {"layout": layout})


def test_rank_files_come_back_with_the_keys_that_they_had(trained: Run, tmp_path: Path) -> None:
    """Extra states too: Megatron's own linear layers have one, its norms and attention none."""
    folder, options = trained
    reshard(folder / "legacy", tmp_path / "there", to="torch_dist", fsync=False)
    reshard(tmp_path / "there", tmp_path / "back", to="megatron", fsync=False, **options["layout"])
    keys = {
        root: {
            path.parent.name: set(torch.load(path, weights_only=False)["model"])
            for path in root.rglob("model_optim_rng.pt")
        }
        for root in (folder / "legacy", tmp_path / "back")
    }
    assert keys[folder / "legacy"] == keys[tmp_path / "back"]
    assert all(
        any(n.endswith("_extra_state") for n in names) for names in keys[folder / "legacy"].values()
    )


@pytest.mark.parametrize(("source", "via"), [("legacy", "load"), ("dp_reshardable", "install")])
def test_it_is_loaded_at_another_layout_without_a_copy(
    core: Path, trained: Run, tmp_path: Path, source: str, via: str
) -> None:
    """By `megtool.megatron`, weights, master weights and moments."""
    folder, options = trained
    layout = {"tp": 2, "ep": 1} if options["layout"].get("tp", 1) == 1 else {"tp": 1}
    place = shutil.copytree(folder / source, tmp_path / source)
    assert_loaded(core, place, folder, source, **options | {"layout": layout}, via=via)


@pytest.mark.parametrize("target", ["dp_reshardable", "legacy"])
def test_its_optimizer_goes_over_stages_and_back(core: Path, tmp_path: Path, target: str) -> None:
    """Multi-token prediction is on the last stage, with a copy of the embedding."""
    folder, there = tmp_path / "trained", tmp_path / "there"
    saves = [[k, str(folder / k)] for k in KINDS[:2]]
    run_world("train", core=core, saves=saves, pattern="M-GE*E/*E", layout={})
    reshard(
        folder / "dp_reshardable",
        there,
        to="megatron" if target == "legacy" else "torch_dist",
        optimizer_format=target,
        fsync=False,
        tp=1,
        pp=2,
    )
    layout = {"tp": 1, "pp": 2}
    assert_loaded(core, there, folder, target, pattern="M-G|E*E/*E", layout=layout)
    reshard(there, tmp_path / "back", to="torch_dist", pp=1, fsync=False)
    assert verify(tmp_path / "back", folder / "fully_reshardable").verdict == "equal"


def test_optimizer_state_of_indexers(core: Path, tmp_path: Path) -> None:
    """Sparse attention, whose indexers every tensor-parallel rank has whole: weights, master
    weights and moments as trained on two ranks, then on one, from and to rank files."""
    options: dict[str, Any] = {"pattern": "D-DE"}
    saves = [[k, str(tmp_path / k)] for k in KINDS]
    run_world("train", core=core, saves=saves, layout={"tp": 2}, **options)
    for kind in KINDS[1:]:
        assert verify(tmp_path / KINDS[0], tmp_path / kind).verdict == "equal"
    names = set(read_with_torch(tmp_path / KINDS[0]))
    assert "optimizer.state.exp_avg.decoder.layers.2.self_attention.core_attention.indexer" in {
        n.rpartition(".linear_wk")[0] for n in names
    }
    one, two = tmp_path / "one", tmp_path / "two"
    reshard(tmp_path / "legacy", one, to="torch_dist", optimizer_format=KINDS[1], tp=1, fsync=False)
    assert_loaded(core, one, tmp_path, KINDS[1], layout={"tp": 1}, **options)
    reshard(tmp_path / KINDS[1], two, to="megatron", tp=1, fsync=False)
    assert_loaded(core, two, tmp_path, "legacy", layout={"tp": 1}, **options)


def test_an_older_format_and_one_that_is_gone(core: Path, tmp_path: Path) -> None:
    kinds = ("fully_reshardable", "dp_zero_gather_scatter")
    saves = [[k, str(tmp_path / k)] for k in kinds]
    run_world("train", core=core, saves=saves, pattern="M-*E", layout={})
    assert verify(tmp_path / kinds[0], tmp_path / kinds[1]).verdict == "equal"


@pytest.mark.parametrize("as_hybrid", [False, True])
def test_a_gpt_is_loaded_without_a_copy(core: Path, tmp_path: Path, as_hybrid: bool) -> None:
    """By `megtool.megatron`, also into a HybridModel, where a layer's key is another layer's."""
    folder, dump = tmp_path / "trained", tmp_path / "dump"
    saves = [[k, str(folder / k)] for k in ("fully_reshardable", "legacy")]
    run_world("train", core=core, saves=saves, layout={})
    hybrid = {"pattern": "*-" * 4, "plain": True} if as_hybrid else {}
    said = run_world(
        "load",
        core=core,
        kind="legacy",
        folder=str(folder / "legacy"),
        dump=str(dump),
        layout={"tp": 2},
        via="load",
        **hybrid,
    )
    assert "loaded [2.0" in said
    assert verify(dump, folder / "fully_reshardable").verdict == "equal"


@pytest.mark.parametrize("experts", [None, 4])
@pytest.mark.parametrize("target", ["dp_reshardable", "legacy"])
def test_a_gpts_optimizer_becomes_a_hybrids(
    core: Path, tmp_path: Path, experts: int | None, target: str
) -> None:
    """Which Megatron's own translation does not do; both are trained by the same release."""
    folder, options = tmp_path / "trained", {"experts": experts}
    saves = [[k, str(folder / k)] for k in KINDS]
    run_world("train", core=core, saves=saves, layout={}, **options)
    reshard(
        folder / ("dp_reshardable" if target == "legacy" else "legacy"),
        tmp_path / "hybrid",
        to="megatron" if target == "legacy" else "torch_dist",
        optimizer_format=target,
        model_class="hybrid",
        tp=2,
        fsync=False,
    )
    dump = tmp_path / "dump"
    said = run_world(
        "load",
        core=core,
        kind=target,
        folder=str(tmp_path / "hybrid"),
        dump=str(dump),
        pattern=("*E" if experts else "*-") * 4,
        layout={"tp": 2},
        plain=True,
    )
    assert "loaded [2.0" in said
    assert verify(dump, folder / "fully_reshardable").verdict == "equal"
