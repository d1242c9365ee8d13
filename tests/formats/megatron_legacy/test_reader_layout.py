"""Per-rank files laid out ahead of their data: torch loads what was meant."""

from __future__ import annotations

import argparse
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.dtypes import DTYPES, dtype
from megtool.errors import UsageError
from megtool.formats import open_checkpoint
from megtool.formats.megatron_legacy.reader import plan_megatron_legacy_layout
from megtool.pickles.reader import inert_global
from megtool.pickles.torch_file import plan_torch_file
from megtool.pickles.writer import make_namespace
from megtool.plan import execute
from megtool.plan.copies import PlanSource
from megtool.plan.planner import build_plan
from megtool.staging.open_stage import open_stage
from megtool.storage.files import Files
from megtool.tensors.catalogue import Catalogue, Destination
from megtool.tensors.placement import Placement
from megtool.tensors.sharded import GlobalTensor
from tests.support.checkpoints import rank_folders as saved
from tests.support.errors import raises

Materialize = Callable[[Destination, Path, dict[str, np.ndarray]], None]


def leaf(name: str, shape: tuple[int, ...], kind: str = "float32") -> GlobalTensor:
    return GlobalTensor(name=name, shape=shape, dtype=dtype(kind))


def copied(source: Catalogue, target: Destination, out: Path) -> None:
    """Carry every tensor of a source to the tensor of that name in a target, by the engine."""
    same = {
        t.name: Placement(
            canonical=t.name,
            stored=t.name,
            shape=t.shape,
            dims=tuple(range(len(t.shape))),
            mults=(1,) * len(t.shape),
            base=(0,) * len(t.shape),
        )
        for t in source.tensors
    }
    plan = build_plan([PlanSource(catalogue=source, placements=same)], target, same)
    with open_stage(out, files=Files(), fingerprint=plan.fingerprint) as stage:
        execute.execute(plan, stage, files=Files(), threads=2)
        stage.commit(fsync=False)


def equal(a: Any, b: Any) -> bool:
    """Whether two trees are of the same types and values, tensors bit by bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and saved.raw(a) == saved.raw(b)
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and np.array_equal(a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, argparse.Namespace):
        return equal(vars(a), vars(b))
    return bool(a == b)


def test_what_was_opened_is_written_again_and_loaded_by_torch(tmp_path: Path) -> None:
    folder = saved.save_all(tmp_path / "from", tp=2, pp=2)
    large = saved.rank_state(9, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    large["model"]["turned"] = torch.randn(300, 200).t()
    large["model"]["tied"] = large["model"]["decoder.layers.0.mlp.linear_fc1.weight"]
    saved.save(folder / "mp_rank_00_000", model_optim_rng=large)
    source = open_checkpoint(tmp_path / "from")
    target = plan_megatron_legacy_layout(
        source.metadata["trees"], iteration=7, small_files={"hf/config.json": b"{}"}
    )
    assert target.catalogue.format == "megatron"
    target.catalogue.check()
    copied(source, target, tmp_path / "to")
    assert (tmp_path / "to/latest_checkpointed_iteration.txt").read_text() == "7"
    assert (tmp_path / "to/iter_0000007/hf/config.json").read_text() == "{}"
    for file in sorted(folder.rglob("*.pt")):
        other = tmp_path / "to/iter_0000007" / file.relative_to(folder)
        want, found = (torch.load(f, weights_only=False) for f in (file, other))
        assert equal(want, found), file
        if file.name == "model_optim_rng.pt":
            assert found["model"]._metadata == want["model"]._metadata
        with zipfile.ZipFile(other) as z:
            assert not any(i.compress_type for i in z.infolist())
    model = torch.load(
        tmp_path / "to/iter_0000007/mp_rank_00_000/model_optim_rng.pt", weights_only=False
    )["model"]
    assert model["tied"].data_ptr() == model["decoder.layers.0.mlp.linear_fc1.weight"].data_ptr()
    again = open_checkpoint(tmp_path / "to")
    names = {t.name: t for t in source.tensors}
    assert {t.name: t for t in again.tensors} == names
    assert saved.stored(again) == saved.stored(source)
    assert again.metadata["aliases"] == source.metadata["aliases"]
    assert list(again.auxiliary_files) == ["hf/config.json"]
    laid = target.catalogue
    assert {f.path: f.size for f in laid.files} == {
        f"iter_0000007/{f.path}": f.size for f in again.files
    }
    row = laid.index["mp_rank_00_000/model_optim_rng/model/turned"]
    assert laid.extents.offset[row] % 4096 == 0
    assert not (laid.extents.offset % 64).any()


def test_a_release_of_new_trees(tmp_path: Path, materialize: Materialize) -> None:
    size = inert_global("torch", "Size")
    tree = {
        "args": make_namespace(
            {"num_layers": 2, "params_dtype": inert_global("torch", "bfloat16")}
        ),
        "iteration": 0,
        "model": {"w": leaf("w", (3, 5), "bfloat16"), "shape": size((3, 5)), "none": None},
        "path": inert_global("pathlib", "PosixPath")("a", "b"),
    }
    target = plan_megatron_legacy_layout({"mp_rank_00/model_optim_rng.pt": tree}, iteration=None)
    materialize(target, tmp_path, {"w": np.arange(15, dtype="<u2").reshape(3, 5)})
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    file = tmp_path / "release/mp_rank_00/model_optim_rng.pt"
    found = torch.load(file, weights_only=False)
    assert found["args"] == argparse.Namespace(num_layers=2, params_dtype=torch.bfloat16)
    assert found["model"]["shape"] == torch.Size([3, 5])
    assert found["path"] == Path("a/b")
    assert found["model"]["w"].dtype is torch.bfloat16
    assert found["model"]["w"].view(torch.uint8).numpy().tobytes() == bytes(
        np.arange(15, dtype="<u2").tobytes()
    )
    c = open_checkpoint(tmp_path)
    assert "iteration" not in c.metadata
    assert [t.shape for t in c.tensors] == [(3, 5)]


class Case:
    """A tree for us, the same for torch, and the elements of its tensors."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.want: dict[str, torch.Tensor] = {}

    def tensor(self, kind: str, shape: tuple[int, ...], seed: int) -> tuple[Any, Any]:
        name = f"t{len(self.arrays)}"
        made = leaf(name, shape, kind)
        data = np.random.default_rng(seed).integers(0, 2, made.num_bytes, np.uint8)
        self.arrays[name] = data.view(made.dtype.view).reshape(shape)
        whole = torch.empty(shape, dtype=getattr(torch, made.dtype.name))
        if len(data):
            whole.view(-1).view(torch.uint8)[:] = torch.from_numpy(data)
        return made, whole


KEYS = st.text(max_size=5) | st.integers(-(1 << 70), 1 << 70)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.tuples(
        st.sampled_from([d.name for d in DTYPES]),
        st.lists(st.integers(0, 40), max_size=3).map(tuple),
        st.integers(0, 99),
    ).map(lambda t: ("tensor", *t)),
)
TREES = st.recursive(
    VALUES,
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=5)
        | st.lists(inner, max_size=5)
        | st.lists(inner, max_size=4).map(lambda x: ("tuple", *x))
        | st.dictionaries(KEYS, inner, max_size=4).map(lambda x: ("ordered", x))
    ),
    max_leaves=25,
)


def make(tree: Any, case: Case) -> tuple[Any, Any]:
    """The tree with `GlobalTensor` leaves, and the one torch should load."""
    if isinstance(tree, tuple):
        kind, *rest = tree
        if kind == "tensor":
            return case.tensor(*rest)
        if kind == "ordered":
            pairs = [(k, *make(v, case)) for k, v in rest[0].items()]
            node = inert_global("collections", "OrderedDict")()
            node.pairs = [(k, a) for k, a, _ in pairs]
            return node, OrderedDict((k, b) for k, _, b in pairs)
        made = [make(x, case) for x in rest]
        return tuple(a for a, _ in made), tuple(b for _, b in made)
    if isinstance(tree, list):
        made = [make(x, case) for x in tree]
        return [a for a, _ in made], [b for _, b in made]
    if isinstance(tree, dict):
        pairs = [(k, *make(v, case)) for k, v in tree.items()]
        return {k: a for k, a, _ in pairs}, {k: b for k, _, b in pairs}
    return tree, tree


@settings(max_examples=60)
@given(trees=st.lists(TREES, min_size=1, max_size=3))
def test_torch_loads_any_tree(
    trees: list[Any], materialize: Materialize, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("trees")
    case = Case()
    made = {f"mp_rank_{i:02d}/x.pt": make(tree, case) for i, tree in enumerate(trees)}
    target = plan_megatron_legacy_layout(
        {path: ours for path, (ours, _) in made.items()}, iteration=3
    )
    target.catalogue.check()
    materialize(target, root, case.arrays)
    for path, (_, want) in made.items():
        for safely in (False, True):
            found = torch.load(root / "iter_0000003" / path, weights_only=safely)
            assert equal(want, found)


def test_small_values_of_several_files_meet_in_one(
    tmp_path: Path, materialize: Materialize
) -> None:
    saved.save_all(tmp_path / "from", tp=2)
    trees = open_checkpoint(tmp_path / "from").metadata["rank_trees"]
    state = {"rng_state": [t["rng_state"][0] for t in trees.values()], "w": leaf("w", (2,))}
    target = plan_megatron_legacy_layout({"mp_rank_00/model_optim_rng.pt": state}, iteration=1)
    materialize(target, tmp_path / "to", {"w": np.ones(2, "<f4")})
    found = torch.load(
        tmp_path / "to/iter_0000001/mp_rank_00/model_optim_rng.pt", weights_only=False
    )
    assert equal(found["rng_state"], saved.random_state() * 2)
    assert found["w"].tolist() == [1, 1]


def test_files_beyond_four_gibibytes() -> None:
    tensors = [leaf(f"t{i}", (5 << 30,), "uint8") for i in range(2)] + [leaf("small", (3,))]
    laid = plan_torch_file({"all": tensors})
    assert [t.name for t in laid.tensors] == ["t0", "t1", "small"]
    assert laid.offsets[2] > 10 << 30
    assert laid.size > laid.offsets[2]
    assert sum(len(data) for _, data in laid.fragments) < 4000


@pytest.mark.slow
def test_a_file_beyond_four_gibibytes_is_loaded(tmp_path: Path) -> None:
    tensors = {"large": leaf("large", (5 << 30,), "uint8"), "after": leaf("after", (3,), "int64")}
    laid = plan_megatron_legacy_layout(
        {"mp_rank_00/model_optim_rng.pt": {"model": tensors}}, iteration=1
    )
    file = tmp_path / laid.catalogue.files[0].path
    file.parent.mkdir(parents=True)
    with file.open("wb") as f:
        f.truncate(laid.catalogue.files[0].size)
        for _, at, data in laid.fragments:
            f.seek(at)
            f.write(data)
        f.seek(int(laid.catalogue.extents.offset[1]))
        f.write(np.arange(3, dtype="<i8").tobytes())
    found = torch.load(file, weights_only=True, mmap=True)["model"]
    assert found["large"].shape == (5 << 30,)
    assert found["after"].tolist() == [0, 1, 2]
    assert len(open_checkpoint(tmp_path).tensors) == 2


def test_what_cannot_be_laid_out_says_so() -> None:
    path = "mp_rank_00/model_optim_rng.pt"
    with raises(UsageError, match="two tensors have this name", tensor="a"):
        plan_megatron_legacy_layout({path: [leaf("a", (2,)), leaf("a", (3,))]}, iteration=1)
    with pytest.raises(UsageError, match="two files hold a tensor of this name"):
        plan_megatron_legacy_layout(
            {path: [leaf("a", (2,))], "mp_rank_01/x.pt": leaf("a", (2,))}, iteration=1
        )
    packed = GlobalTensor(name="p", shape=(32,), dtype=dtype("float32"), packing="gguf:Q4_0")
    with pytest.raises(UsageError, match="gguf:Q4_0"):
        plan_megatron_legacy_layout({path: packed}, iteration=1)
    with pytest.raises(TypeError, match="cannot pickle a complex"):
        plan_megatron_legacy_layout({path: 1j}, iteration=1)
