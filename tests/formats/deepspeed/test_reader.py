"""DeepSpeed checkpoints: every stage of ZeRO and the universal form give the same tensors."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import FormatError
from megtool.formats import detect_format, open_checkpoint
from megtool.tensors.catalogue import Catalogue
from tests.support.checkpoints import zero_folders as saved
from tests.support.checkpoints.reads import contents
from tests.support.errors import raises

SHAPES = {"emb.weight": (7, 3), "a.weight": (3, 5), "a.bias": (5,), "n.weight": (1,), "b.w": (2, 3)}


def model(shapes: dict[str, tuple[int, ...]] = SHAPES) -> saved.Weights:
    torch.manual_seed(1)
    return {n: torch.randn(s).to(torch.bfloat16) for n, s in shapes.items()}


def check(catalogue: Catalogue, weights: saved.Weights, states: dict[str, saved.Weights]) -> None:
    """The catalogue holds exactly these; weights that no file has are the master weights."""
    found = contents(catalogue)
    for name, weight in weights.items():
        kind = catalogue[name].dtype.name
        want = weight if kind == "bfloat16" else states["param"][name]
        have = torch.from_numpy(found.pop(name).copy())
        have = have.view(torch.bfloat16) if kind == "bfloat16" else have
        assert torch.equal(have.reshape(want.shape), want), name
    for state, tensors in states.items():
        for name, tensor in tensors.items():
            have = found.pop(f"optimizer.state.{state}.{name}")
            assert np.array_equal(have.reshape(tensor.shape), tensor.numpy()), (state, name)
    assert not found


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 3), (3, 2), (3, 5)])
def test_partitions_are_read_as_parameters(tmp_path: Path, stage: int, ranks: int) -> None:
    weights = model()
    states = saved.trained(weights)
    folder = saved.save_zero(tmp_path, weights, states, stage=stage, ranks=ranks, sub_groups=2)
    for path in (tmp_path, folder):
        c = open_checkpoint(path)
        assert (c.format, c.root, c.metadata["iteration"]) == ("deepspeed", folder, 7)
        check(c, weights, states)
    assert not c.warnings
    assert "optimizer.param_groups" in c.objects


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(
        st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), min_size=2, max_size=6
    ),
    stage=st.sampled_from((1, 2, 3)),
    ranks=st.integers(1, 5),
    sub_groups=st.integers(1, 3),
)
def test_any_shapes_and_ranks(
    shapes: list[tuple[int, ...]], stage: int, ranks: int, sub_groups: int
) -> None:
    shapes = [*shapes, (2, 2), (3,)]  # a group for each kind
    weights = model({f"p{i}": s for i, s in enumerate(shapes)})
    states = saved.trained(weights)
    root = Path(tempfile.mkdtemp())
    try:
        saved.save_zero(root, weights, states, stage=stage, ranks=ranks, sub_groups=sub_groups)
        check(open_checkpoint(root), weights, states)
    finally:
        shutil.rmtree(root)


def test_a_universal_checkpoint(tmp_path: Path) -> None:
    weights = model()
    states = saved.trained(weights)
    folder = saved.save_universal(tmp_path, weights, states)
    c = open_checkpoint(tmp_path)
    assert c.root == folder
    assert c["a.weight"].dtype.name == "bfloat16"
    check(c, weights, states)
    (folder / "mp_rank_00_model_states.pt").unlink()
    c = open_checkpoint(folder)
    assert c["a.weight"].dtype.name == "float32"
    check(c, weights, states)


def test_tied_and_transposed_weights(tmp_path: Path) -> None:
    weights = model()
    states = saved.trained(weights)
    module = {
        **weights,
        "head.weight": weights["emb.weight"],
        "a.weight": weights["a.weight"].T.contiguous().T,
    }
    saved.save_zero(tmp_path, weights, states, stage=1, ranks=2, extra={"module": module})
    c = open_checkpoint(tmp_path)
    assert "head.weight" not in c
    check(c, weights, states)


def test_frozen_parameters_of_stage_3(tmp_path: Path) -> None:
    weights = model()
    states = saved.trained(weights)
    frozen = torch.arange(6.0).reshape(3, 2)
    folder = saved.save_zero(tmp_path, weights, states, stage=3, ranks=2)
    for rank in range(2):
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        tree = torch.load(path, weights_only=False)
        tree["frozen_param_shapes"] = {"frozen": frozen.shape}
        tree["frozen_param_fragments"] = {"frozen": frozen.reshape(-1)[3 * rank : 3 * rank + 3]}
        torch.save(tree, path)
    found = contents(open_checkpoint(tmp_path))
    assert np.array_equal(found.pop("frozen").reshape(3, 2), frozen.numpy())


def test_a_step_is_chosen(tmp_path: Path) -> None:
    weights = model()
    states = saved.trained(weights)
    old = saved.save_zero(tmp_path, weights, states, stage=1, ranks=1)
    shutil.copytree(old, tmp_path / "global_step10")
    assert open_checkpoint(tmp_path).root == old  # as `latest` says
    assert open_checkpoint(tmp_path, iteration=10).root.name == "global_step10"
    (tmp_path / "latest").unlink()
    assert open_checkpoint(tmp_path).root.name == "global_step10"
    with raises(FormatError, match="no checkpoint of step 3", hint="global_step7"):
        open_checkpoint(tmp_path, iteration=3)


def test_a_folder_with_weights_of_its_own_is_hugging_faces(tmp_path: Path) -> None:
    weights = model()
    saved.save_zero(tmp_path, weights, saved.trained(weights), stage=1, ranks=1)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert detect_format(tmp_path).names == ("deepspeed",)
    assert open_checkpoint(tmp_path).metadata["config"] == {"model_type": "llama"}
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "hf" in detect_format(tmp_path).names


@pytest.mark.parametrize("stage", [1, 3])
def test_a_missing_rank(tmp_path: Path, stage: int) -> None:
    weights = model()
    folder = saved.save_zero(tmp_path, weights, saved.trained(weights), stage=stage, ranks=3)
    names = sorted(p.name for p in folder.glob("*_optim_states.pt"))
    (folder / names[2]).unlink()
    with pytest.raises(FormatError, match="some of them are missing"):
        open_checkpoint(tmp_path)
    (folder / names[0]).unlink()
    with pytest.raises(FormatError, match="of data-parallel rank 0 are missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_optimizer_of_another_model(tmp_path: Path, stage: int) -> None:
    weights = model()
    states = saved.trained(weights)
    folder = saved.save_zero(tmp_path / "a", weights, states, stage=stage, ranks=2)
    larger = model({n: tuple(2 * x for x in s) for n, s in SHAPES.items()})
    other = saved.save_zero(tmp_path / "b", larger, saved.trained(larger), stage=stage, ranks=2)
    for path in other.glob("*_model_states.pt"):
        shutil.copy(path, folder)
    with pytest.raises(FormatError, match=r"holds \d+ elements|end before element"):
        open_checkpoint(folder)


def test_slices_that_the_file_tells_are_held_against_it(tmp_path: Path) -> None:
    weights = model()
    folder = saved.save_zero(tmp_path, weights, saved.trained(weights), stage=2, ranks=1)
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    tree = torch.load(path, weights_only=False)
    for start, fails in ((0, False), (3, True)):
        address = torch.nn.Identity()  # any object with attributes
        address.__dict__ = {"start": start, "numel": 21}
        tree["optimizer_state_dict"]["param_slice_mappings"] = [{"emb.weight": address}]
        torch.save(tree, path)
        if fails:
            with pytest.raises(FormatError, match="its place in the group"):
                open_checkpoint(folder)
        else:
            open_checkpoint(folder)


def test_tensor_parallel_ranks_have_to_be_universal(tmp_path: Path) -> None:
    weights = model()
    folder = saved.save_zero(tmp_path, weights, saved.trained(weights), stage=1, ranks=1)
    for path in list(folder.iterdir()):
        shutil.copy(path, folder / path.name.replace("mp_rank_00", "mp_rank_01"))
    with raises(FormatError, match="two model-parallel ranks", hint="ds_to_universal"):
        open_checkpoint(folder)


@pytest.mark.parametrize("what", [{"module": {}}, [1], {"param_shapes": [{"x": "y"}]}])
def test_files_of_something_else(tmp_path: Path, what: object) -> None:
    weights = model()
    folder = saved.save_zero(tmp_path, weights, saved.trained(weights), stage=1, ranks=1)
    torch.save(what, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(FormatError) as e:
        open_checkpoint(folder)
    assert "mp_rank_00_model_states.pt" in str(e.value.file)
