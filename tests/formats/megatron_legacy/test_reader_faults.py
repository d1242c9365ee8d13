"""Per-rank folders that are broken, mixed or hostile: one error each, with the way out."""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megtool.errors import FormatError
from megtool.formats import open_checkpoint
from megtool.formats.megatron_legacy.rank_file import read_rank_file
from megtool.formats.megatron_legacy.reader import plan_megatron_legacy_layout
from megtool.pickles.torch_file import StorageBudget
from megtool.pickles.zip_writer import write_archive
from megtool.reshard.foreign_objects import find_foreign_objects
from megtool.storage.files import Files
from megtool.transport.reading.reader import CheckpointReader
from tests.support.checkpoints import rank_folders as saved
from tests.support.errors import raises

FILE = "mp_rank_00/model_optim_rng.pt"


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


def refused(path: Path, match: str) -> FormatError:
    """The error of opening; it names a file and says what to do."""
    with raises(FormatError, match=match, hint=True) as e:
        open_checkpoint(path)
    assert e.value.file
    return e.value


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    folder = saved.save_all(tmp_path, tp=2, pp=2)
    shutil.rmtree(folder / "mp_rank_01_001")
    error = refused(tmp_path, "1 of 4 ranks are missing: mp_rank_01_001")
    assert error.file == str(folder)
    shutil.rmtree(folder / "mp_rank_00_001")
    refused(tmp_path, "2 of 4 ranks are missing: mp_rank_00_001, mp_rank_01_001")
    (folder / "mp_rank_01_000/model_optim_rng.pt").unlink()
    refused(tmp_path, r"model_optim_rng\.pt is missing, which every rank has")


@pytest.mark.parametrize("sizes", [{"tp": 3}, {"tp": 3, "pp": 2}, {"tp": 3, "ep": 2}])
def test_missing_ranks_are_named_without_args(tmp_path: Path, sizes: dict[str, int]) -> None:
    folder = saved.save_all(tmp_path, **sizes)
    for file in folder.glob("*/model_optim_rng.pt"):
        edit(file, lambda s: s.pop("args"))
    for gone in folder.glob("mp_rank_01*"):
        shutil.rmtree(gone)
    refused(tmp_path, "ranks are missing: mp_rank_01")


def test_too_many_ranks(tmp_path: Path) -> None:
    folder = saved.save_all(tmp_path, tp=2)
    shutil.copytree(folder / "mp_rank_01", folder / "mp_rank_02")
    refused(tmp_path, "mp_rank_02 is not a rank of tp=2 pp=1 ep=1, the sizes in args")
    shutil.rmtree(folder / "mp_rank_02")
    shutil.copytree(folder / "mp_rank_01", folder / "mp_rank_01_001")
    refused(tmp_path, "named like a rank of another layout")


def test_a_rank_nobody_can_place(tmp_path: Path) -> None:
    folder = saved.save_all(tmp_path, pp=2)
    edit(folder / "mp_rank_00_000/model_optim_rng.pt", lambda s: s.pop("args"))
    shutil.rmtree(folder / "mp_rank_00_001")
    refused(tmp_path, "cannot decide whether mp_rank_00_000 is a pipeline or an expert rank")
    (folder / "mp_rank_00_000").rename(folder / "mp_rank_999999")
    refused(tmp_path, "999999 of 1000000 ranks are missing: mp_rank_00, mp_rank_01")


def test_ranks_that_do_not_belong_together(tmp_path: Path) -> None:
    folder = saved.save_all(tmp_path, tp=2)
    file = folder / "mp_rank_01/model_optim_rng.pt"
    edit(file, lambda s: s.update(iteration=8))
    error = refused(tmp_path, "is of iteration 8, and mp_rank_00 of iteration 7")
    assert error.file == str(folder / "mp_rank_01")
    edit(file, lambda s: setattr(s["args"], "num_layers", 3))
    refused(tmp_path, "args have num_layers 3 here and 2 in mp_rank_00")


@pytest.mark.parametrize("value", [0, -1, "2", 1 << 40, 2.0, True])
def test_sizes_that_are_none(tmp_path: Path, value: Any) -> None:
    saved.save_all(tmp_path, tensor_model_parallel_size=1, pipeline_model_parallel_size=value)
    refused(tmp_path, "args have pipeline_model_parallel_size")


def test_absurd_sizes(tmp_path: Path) -> None:
    sizes = {k: 1 << 19 for k in ("pipeline_model_parallel_size", "expert_model_parallel_size")}
    saved.save(tmp_path / "mp_rank_00", model_optim_rng=saved.rank_state(**sizes))
    refused(tmp_path, "args have too many ranks: RankSizes")


@pytest.mark.parametrize("name", ["iteration", "args"])
def test_facts_that_are_none(tmp_path: Path, name: str) -> None:
    saved.save_all(tmp_path)
    edit(tmp_path / "iter_0000007" / FILE, lambda s: s.update({name: "seven"}))
    refused(tmp_path, r"'seven'")


def test_optimizer_files_of_some_ranks(tmp_path: Path) -> None:
    folder = saved.save_all(tmp_path, tp=2, ep=2)
    (folder / "mp_rank_01_001/distrib_optim.pt").unlink()
    refused(tmp_path, r"1 of 4 ranks have no distrib_optim\.pt: mp_rank_01_001")
    for file in folder.glob("*/distrib_optim.pt"):
        file.unlink()
    assert "the optimizer's moments are missing" in open_checkpoint(tmp_path).warnings[0]


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    folder = saved.save_all(tmp_path)
    file = folder / FILE
    whole = file.read_bytes()
    for size in [0, 1, 3, 4, 21, 22, 100, *range(500, len(whole), 997), len(whole) - 1]:
        file.write_bytes(whole[:size])
        refused(tmp_path, "empty|torch.save")


def test_files_from_before_torch_1_6(tmp_path: Path) -> None:
    folder = tmp_path / "mp_rank_00"
    folder.mkdir()
    file = tmp_path / FILE
    torch.save(saved.rank_state(), file, _use_new_zipfile_serialization=False)
    opened = open_checkpoint(tmp_path)
    with CheckpointReader(opened, Files()) as reader:
        names = [t.name for t in opened.tensors]
        old = {n: reader.open_stored(n).read().tobytes() for n in names}
    torch.save(saved.rank_state(), file)
    opened = open_checkpoint(tmp_path)
    with CheckpointReader(opened, Files()) as reader:
        assert old == {n: reader.open_stored(n).read().tobytes() for n in names}
    (tmp_path / "x").write_bytes(file.read_bytes())
    with tarfile.open(file, "w") as tar:
        tar.add(tmp_path / "x", "storages")
    assert "torch.save(torch.load" in refused(tmp_path, "before version 0.2").hint
    file.write_bytes(b"hello")
    refused(tmp_path, "begins with b'hell', which torch.save never writes")


def test_a_hostile_pickle_is_refused(tmp_path: Path, audit: Any) -> None:
    folder = saved.save_all(tmp_path)
    executes = b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00false\x85R."
    (folder / FILE).write_bytes(write_archive({"data.pkl": executes}))
    audit.seen.clear()
    audit.watching = True
    try:
        refused(tmp_path, "hostile")
    finally:
        audit.watching = False
    assert not {e for e, _ in audit.seen} & {"os.system", "exec", "subprocess.Popen"}


def test_classes_that_no_checkpoint_needs_are_named_and_never_written(tmp_path: Path) -> None:
    folder = saved.save_all(tmp_path)
    edit(folder / FILE, lambda s: setattr(s["args"], "share", Fraction(1, 3)))
    c = open_checkpoint(tmp_path)
    assert c.warnings == []
    assert c.metadata["common"]["args"].state["share"].name == "fractions.Fraction"
    (foreign,) = find_foreign_objects(c)
    assert foreign.name == "common state: args.share"
    assert foreign.globals == ("fractions.Fraction",)
    with pytest.raises(FormatError, match=r"fractions\.Fraction"):
        plan_megatron_legacy_layout(c.metadata["trees"], iteration=1)


def test_trees_that_are_no_ranks(tmp_path: Path) -> None:
    for value in ([1], torch.ones(2), "text"):
        saved.save(tmp_path / "mp_rank_00", model_optim_rng=value)
        refused(tmp_path, "not the dict of a Megatron rank")


def deep() -> Any:
    out: Any = torch.ones(1)
    for _ in range(100):
        out = [out]
    return out


def bomb() -> Any:
    out: Any = [torch.ones(1)]
    for _ in range(60):
        out = [out, out]
    return out


def looped() -> Any:
    out: dict[str, Any] = {}
    out["again"] = out
    return out


@pytest.mark.parametrize("make", [deep, bomb, looped])
def test_trees_of_absurd_size(tmp_path: Path, make: Callable[[], Any]) -> None:
    saved.save(tmp_path / "mp_rank_00", model_optim_rng={"model": make()})
    refused(tmp_path, "absurd")
    saved.save(tmp_path / "mp_rank_00", model_optim_rng={"model": {}, "rerun_state": make()})
    if make is deep:
        assert open_checkpoint(tmp_path).tensors == []
    else:
        refused(tmp_path, "a stored value")


def test_tensors_that_share_bytes_in_part(tmp_path: Path) -> None:
    base = torch.randn(10)
    for tensors in (
        {"a": base[:6], "b": base[4:]},
        {"b": torch.ones(1).expand(4)},
        {"a": base, "b": base.view(2, 5)},
    ):
        saved.save(tmp_path / "mp_rank_00", model_optim_rng={"model": tensors})
        error = refused(tmp_path, "shares bytes with")
        assert error.tensor == "mp_rank_00/model_optim_rng/model/b"


def test_kinds_of_tensors_that_are_not_supported(tmp_path: Path) -> None:
    for tensor in (torch.eye(3).to_sparse(), Holder(torch.ones(2))):
        saved.save(tmp_path / "mp_rank_00", model_optim_rng={"model": {"layers": [{"w": tensor}]}})
        error = refused(tmp_path, "not supported")
        assert error.tensor == "model/layers/0/w"
        assert "plain tensors" in error.hint


class Holder:
    """An object with a tensor inside, as quantized weights are pickled."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data


def test_a_view_past_its_storage(tmp_path: Path) -> None:
    saved.save(tmp_path / "mp_rank_00", model_optim_rng={"model": {"w": torch.zeros(0x41, 3)}})
    file = tmp_path / FILE
    data = file.read_bytes()
    assert data.count(b"K\x41K\x03\x86") == 1
    file.write_bytes(data.replace(b"K\x41K\x03\x86", b"K\x42K\x03\x86"))
    error = refused(tmp_path, "ends at byte 792 of a storage of 780")
    assert error.tensor == "mp_rank_00/model_optim_rng/model/w"


def test_what_lies_beside_tensors_is_bounded(tmp_path: Path) -> None:
    state = {"model": {}, "rng_state": [torch.zeros(100, dtype=torch.uint8)] * 3}
    saved.save(tmp_path / "mp_rank_00", model_optim_rng=state)
    read_rank_file(tmp_path, FILE, StorageBudget(100))
    with raises(FormatError, match="more than 99 bytes", hint=True):
        read_rank_file(tmp_path, FILE, StorageBudget(99))


def test_links_that_leave_the_folder(tmp_path: Path) -> None:
    folder = saved.save_all(tmp_path / "a", tp=2)
    other = saved.save_all(tmp_path / "b", tp=2)
    shutil.rmtree(folder / "mp_rank_01")
    (folder / "mp_rank_01").symlink_to(other / "mp_rank_01")
    refused(tmp_path / "a", "link that leaves the folder")


@settings(max_examples=150)
@given(data=st.data())
def test_damage_anywhere_is_refused_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "mp_rank_00"
    state = saved.rank_state()
    state["rng_state"] = [{"cuda_rng_state": torch.zeros(8, dtype=torch.uint8)}]
    saved.save(folder, model_optim_rng=state)
    file = folder / "model_optim_rng.pt"
    blob = bytearray(file.read_bytes())
    pickle_end = blob.index(b"PK\3\4", 100)
    for _ in range(data.draw(st.integers(1, 3))):
        place = st.integers(0, pickle_end) | st.integers(0, len(blob) - 1)
        blob[data.draw(place)] = data.draw(st.integers(0, 255))
    file.write_bytes(blob)
    try:
        c = open_checkpoint(folder.parent)
    except FormatError as e:
        assert e.hint
    else:
        assert all(len(v) == c[n].num_bytes for n, v in saved.stored(c).items())
        try:
            plan_megatron_legacy_layout(c.metadata["trees"], iteration=1)
        except FormatError as e:  # a name or a size is another one now
            assert e.hint
