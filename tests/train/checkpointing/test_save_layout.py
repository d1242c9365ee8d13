"""Saving at a layout writes what `reshard` writes at it, and resuming at another reads it back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megtool import reshard, verify
from megtool.megatron_state.random_state import is_rng_object
from megtool.source.open import open_source
from megtool.tensors.catalogue import Catalogue
from tests.support.checkpoints.trained import config, write
from tests.support.models import tiny_llama
from tests.support.runs.train_runs import Trained
from tests.support.worlds.gloo_world import run_world

MOE = {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tied_embeddings": True},
    "moe": MOE | {"shared_ffn_hidden_size": 8, "moe_layer_freq": (0, 1, 0, 1)},
    "experts": MOE,
}
BY_RUN = {
    "iteration",
    "consumed_train_samples",
    "consumed_valid_samples",
    "no_save_rng",
    "no_save_optim",
}

Materialize = Callable[[Any, Path, dict[str, Any]], None]


def save_after_loading(
    rank: int, size: int, source: str, target: str, layout: dict[str, int], how: dict[str, Any]
) -> None:
    """Load at a layout, resume where there is state, and save at once."""
    save = how.pop("save", "fully_reshardable")
    run = Trained(Path(source), layout, **how)
    try:
        if save != "none":
            assert run.resume().has_optimizer
        with run.saver(Path(target), save) as saver:
            run.save(saver, 7)
    finally:
        run.groups.stop()


def boxes(catalogue: Catalogue, state: bool) -> dict[str, set[tuple[Any, ...]]]:
    """Shards of all tensors, of weights with their files."""
    out: dict[str, set[tuple[Any, ...]]] = {}
    cut = catalogue.shards
    for row, which in enumerate(cut.tensor.tolist()):
        t = catalogue.tensors[which]
        if t.name.startswith("optimizer.") == state:
            box = (*cut.boxes.lo[row].tolist(), *cut.boxes.hi[row].tolist())
            file = catalogue.files[int(catalogue.extents.file[row])].path
            out.setdefault(t.name, set()).add(box if state else (*box, file))
    return out


def check(got: Path, want: Path, *, state: bool, same_cuts: bool = True) -> None:
    """Two save folders hold the same, cut the same and described the same."""
    differences = verify(got, want).differences
    # Samples, the learning rate, and what a run alone has are those of the run that saves.
    assert {d.part for d in differences} <= {"training state"}
    both = [d for d in differences if d.kind != "missing"]
    assert all(d.tensor in BY_RUN or d.tensor.endswith(": lr") for d in both)
    assert all(d.text.startswith(str(got)) for d in differences if d.kind == "missing")
    a, b = open_source(got), open_source(want)
    assert [(t.name, t.shape, t.dtype) for t in a.catalogue.tensors] == [
        (t.name, t.shape, t.dtype) for t in b.catalogue.tensors
    ]
    if same_cuts:
        assert boxes(a.catalogue, state) == boxes(b.catalogue, state)
    assert {n for n in a.catalogue.objects if not is_rng_object(n)} == set(b.catalogue.objects)
    args = [o.catalogue.metadata["args"] for o in (a, b)]
    said = [{k: str(v) for k, v in known.items() if k not in BY_RUN} for known in args]
    assert said[0] == said[1]
    held = [o.catalogue.metadata["common"] for o in (a, b)]
    assert str(held[0].get("content_metadata")) == str(held[1].get("content_metadata"))


LAYOUTS = [
    pytest.param("dense", {"tp": 2, "dp": 2}, 4, marks=pytest.mark.slow),
    ("tied", {"pp": 2, "tp": 2}, 4),
    pytest.param("dense", {"pp": 2, "vpp": 2}, 2, marks=pytest.mark.slow),
    ("moe", {"ep": 2, "dp": 2}, 2),
    pytest.param("experts", {"tp": 2, "ep": 2, "etp": 1}, 2, marks=pytest.mark.slow),
    pytest.param("experts", {"tp": 2, "ep": 2, "dp": 2, "pp": 1}, 4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(
    ("layout", "size"),
    [({"dp": 2}, 2), pytest.param({"tp": 2, "pp": 2}, 4, marks=pytest.mark.slow)],
)
def test_weights_of_a_hugging_face_folder_are_saved_as_reshard_writes_them(
    layout: dict[str, int], size: int, tmp_path: Path
) -> None:
    tiny_llama.save(tmp_path / "hf", dtype="float32")
    reshard(tmp_path / "hf", tmp_path / "want", to="torch_dist", fsync=False, **layout)
    how = {"save": "none"}
    run_world(save_after_loading, size, str(tmp_path / "hf"), str(tmp_path / "got"), layout, how)
    check(tmp_path / "got", tmp_path / "want", state=False)
    assert (tmp_path / "got/iter_0000007/hf/config.json").is_file()


@pytest.mark.parametrize(("model", "layout", "size"), LAYOUTS, ids=str)
def test_state_is_saved_as_reshard_writes_it(
    model: str, layout: dict[str, int], size: int, materialize: Materialize, tmp_path: Path
) -> None:
    from megtool.options.layout import ParallelConfig

    write(tmp_path / "src", config(**MODELS[model]), ParallelConfig(), materialize)
    reshard(tmp_path / "src", tmp_path / "want", fsync=False, **layout)
    how = {"kind": "bfloat16"}
    run_world(save_after_loading, size, str(tmp_path / "src"), str(tmp_path / "got"), layout, how)
    # Replicas have parts of parameters, and each writes its own.
    whole = layout.get("dp", 1) == 1 and "ep" not in layout
    check(tmp_path / "got", tmp_path / "want", state=True, same_cuts=whole)
