"""State that needs no decoding is held against the weights too, and is whole or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megtool import reshard
from megtool.errors import FormatError, MappingError, UsageError
from megtool.options.layout import ParallelConfig
from megtool.source.open import open_source
from tests.support.checkpoints.optimizer_saves import FORMATS, edit, save
from tests.support.checkpoints.trained import config, write
from tests.support.errors import raises
from tests.support.models import tiny_llama

Tensors = dict[str, torch.Tensor]
STATES = ("param", "exp_avg", "exp_avg_sq")
NORM = "model.norm.weight"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return tiny_llama.save(tmp_path / "hf")


def train(folder: Path, change: Callable[[Tensors], None], states: tuple[str, ...] = STATES) -> str:
    """State in the folder's shards, of every weight; `change` alters it."""
    from safetensors.torch import load_file

    found: Tensors = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    state = {
        f"optimizer.state.{s}.{n}": t.float() if s == "param" else torch.ones(t.shape)
        for n, t in found.items()
        for s in states
    }
    change(state)
    save_file(state, folder / "optimizer.safetensors")
    index = {n: "optimizer.safetensors" for n in state}
    whole = {n: f.name for f in folder.glob("model*.safetensors") for n in load_file(f)}
    text = json.dumps({"metadata": {}, "weight_map": whole | index})
    (folder / "model.safetensors.index.json").write_text(text)
    return "llama"


# ---- masters


@pytest.mark.parametrize(("at", "probed"), [((0, 0), True), ((-1, -1), True), ((5, 3), False)])
def test_masters_of_a_hugging_face_folder(
    at: tuple[int, int], probed: bool, tmp_path: Path, hf: Path
) -> None:
    name = "model.layers.1.mlp.down_proj.weight"

    def one(state: Tensors) -> None:
        state[f"optimizer.state.param.{name}"][at] += 1

    train(hf, one)
    with raises(FormatError, match="master weight is", hint="--optimizer-format none") as e:
        open_source(hf, verify_master_weights=True)
    assert e.value.tensor is not None
    assert e.value.tensor.startswith("layers.1.")
    reshard(hf, tmp_path / "fully", to="torch_dist", fsync=False)
    for optimizer, to in FORMATS.items():
        if probed:
            with pytest.raises(FormatError, match="master weight is"):
                reshard(hf, tmp_path / optimizer, to=to, optimizer_format=optimizer)
            assert not (tmp_path / optimizer).exists()


@pytest.mark.parametrize("model", [{}, {"num_experts": 4, "num_experts_per_token": 2}], ids=str)
def test_masters_of_fully_reshardable_state(
    model: dict[str, Any], tmp_path: Path, materialize: Any
) -> None:
    if model:
        model = {**model, "moe_ffn_hidden_size": 8}

    def changed(out: Any, folder: Path, arrays: dict[str, Any]) -> None:
        arrays["optimizer.state.param.decoder.final_layernorm.weight"][...] += 1
        materialize(out, folder, arrays)

    write(tmp_path / "sound", config(**model), ParallelConfig(tp=2), materialize)
    write(tmp_path / "other", config(**model), ParallelConfig(tp=2), changed)
    open_source(tmp_path / "sound", verify_master_weights=True)
    open_source(tmp_path / "other")
    with raises(FormatError, match="master weight is", tensor="norm.weight"):
        open_source(tmp_path / "other", verify_master_weights=True)
    with pytest.raises(FormatError, match="master weight is"):
        reshard(tmp_path / "other", tmp_path / "out", optimizer_format="dp_reshardable")


@pytest.mark.parametrize("whole", [False, True])
def test_masters_by_number(whole: bool, tmp_path: Path, materialize: Any) -> None:
    """Of an optimizer that is not distributed, in rank files."""
    folder = save(tmp_path, materialize, "legacy", model={"num_layers": 2})
    next(folder.rglob("distrib_optim.pt")).unlink()

    def number(tree: Any, more: float) -> None:
        held = [(n, w) for n, w in tree["model"].items() if isinstance(w, torch.Tensor)]
        flat = [(n, w) for n, w in held if not n.endswith("_extra_state")]
        groups = [[w for _, w in flat if (w.ndim > 1) is decays] for decays in (True, False)]
        masters = [[w.float() for w in group] for group in groups]
        masters[0][0][5, 3] += more
        size = len(groups[0])
        numbers = [[*range(size)], [*range(size, len(flat))]]
        tree["optimizer"] = {
            "optimizer": {
                "state": {
                    n: {"exp_avg": torch.ones(w.shape)}
                    for n, w in zip(chain(*numbers), chain(*groups), strict=True)
                },
                "param_groups": [
                    {"params": n, "wd_mult": float(k == 0)} for k, n in enumerate(numbers)
                ],
            },
            "fp32_from_fp16_params": masters,
        }

    file = next(folder.rglob("model_optim_rng.pt"))
    edit(file, lambda tree: number(tree, 0.0))
    assert open_source(folder, verify_master_weights=whole).view.states.keys() == {
        "main",
        "exp_avg",
    }
    edit(file, lambda tree: number(tree, 1.0))
    if whole:
        with pytest.raises(FormatError, match="master weight is"):
            open_source(folder, verify_master_weights=True)
    else:
        open_source(folder)


# ---- state that is not whole


@pytest.mark.parametrize("optimizer", FORMATS)
def test_state_without_masters(optimizer: str, tmp_path: Path, hf: Path) -> None:
    train(hf, lambda state: None, STATES[1:])
    with raises(UsageError, match="needs master weights", hint="--optimizer-format none"):
        reshard(hf, tmp_path / "out", to=FORMATS[optimizer], optimizer_format=optimizer)
    reshard(hf, tmp_path / "out", to="torch_dist", fsync=False)
    reshard(hf, tmp_path / "bare", to=FORMATS[optimizer], optimizer_format="none", fsync=False)


@pytest.mark.parametrize("lost", [STATES, STATES[:1], STATES[1:2]], ids=str)
@pytest.mark.parametrize("optimizer", FORMATS)
def test_a_parameter_without_its_state(
    optimizer: str, lost: tuple[str, ...], tmp_path: Path, hf: Path
) -> None:
    def lose(state: Tensors) -> None:
        for s in lost:
            del state[f"optimizer.state.{s}.{NORM}"]

    train(hf, lose)
    with pytest.raises(MappingError, match=f"incomplete.* has no '({'|'.join(lost)})'") as e:
        reshard(hf, tmp_path / "out", to=FORMATS[optimizer], optimizer_format=optimizer)
    assert str(e.value.tensor).endswith(".decoder.final_layernorm.weight")
    assert not (tmp_path / "out").exists()


# ---- copies


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_every_copy_of_a_tied_embedding(tp: int, tmp_path: Path, materialize: Any) -> None:
    model = {"tied_embeddings": True, "num_heads": 8, "num_kv_heads": 8, "vocab_size": 512}
    folder = save(tmp_path, materialize, "legacy", model=model, tp=tp, pp=2)
    for rank in range(tp):
        for at in (0, -1):
            file = next(folder.rglob(f"mp_rank_{rank:02}_001/model_optim_rng.pt"))
            sound = file.read_bytes()
            edit(file, lambda tree: tree["model"]["output_layer.weight"][at].add_(1))  # noqa: B023
            with pytest.raises(FormatError, match="copies of it differ"):
                reshard(folder, tmp_path / "dst", tp=1, pp=1)
            file.write_bytes(sound)


# ---- vocabulary


@pytest.mark.parametrize("to", ["hf", "torch_dist"])
@pytest.mark.parametrize("true", [256, None])
def test_a_smaller_vocabulary_is_refused(
    true: int | None, to: str, tmp_path: Path, hf: Path
) -> None:
    smaller = tiny_llama.save(tmp_path / "smaller", vocab_size=90)
    reshard(hf, tmp_path / "in", to="torch_dist", fsync=False)
    for file in (tmp_path / "in").rglob("common.pt"):
        edit(file, lambda tree: setattr(tree["args"], "vocab_size", true))
    options: dict[str, Any] = {"to": to, "like": smaller, "strict": True, "fsync": False}
    if true is None:  # a padded size says nothing of the true one
        reshard(tmp_path / "in", tmp_path / "out", **options)
        return
    with raises(MappingError, match=r"vocabulary of 90, .* of 256", hint="vocab_size"):
        reshard(tmp_path / "in", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_weights_cast_up_are_still_their_masters_rounded(tmp_path: Path, materialize: Any) -> None:
    write(tmp_path / "a", config(), ParallelConfig(), materialize)
    for number, kind in enumerate(("dp_reshardable", "legacy")):
        out = tmp_path / f"b{number}"
        to = "megatron" if kind == "legacy" else "torch_dist"
        reshard(tmp_path / "a", out, to=to, optimizer_format=kind, dtype="float32")
        reshard(out, tmp_path / f"c{number}", to="torch_dist", verify_master_weights=True)
