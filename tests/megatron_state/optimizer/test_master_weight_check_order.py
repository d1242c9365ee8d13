"""Optimizer state is read in the one order it was written in, or refused with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megtool import verify
from megtool.errors import FormatError
from megtool.megatron_state.optimizer import master_weight_check
from megtool.source.open import open_source
from megtool.tensors.registration_order import ORDERS, Order
from tests.support.checkpoints.optimizer_saves import EXPERTS, FORMATS, Arrays, edit, save
from tests.support.checkpoints.trained import to_bfloat16
from tests.support.errors import raises

ALIGNED = {"hidden_size": 64, "head_dim": 16, "num_layers": 2}
"""Of a model without padding between its parameters."""
MISLEADING: list[dict[str, Any]] = [
    {"transformer_impl": "local", "moe_grouped_gemm": False},
    {"transformer_impl": "transformer_engine", "moe_grouped_gemm": True},
    {"transformer_impl": None},
    {"moe_grouped_gemm": "what"},
]
MAIN, FIRST, SECOND = (f"optimizer.state.{s}." for s in ("param", "exp_avg", "exp_avg_sq"))


def mislead(folder: Path, args: dict[str, Any]) -> None:
    """Write other args into a checkpoint; None removes one."""
    for file in [*folder.rglob("common.pt"), *folder.rglob("model_optim_rng.pt")]:
        tree = torch.load(file, weights_only=False)
        for key, value in args.items():
            if value is None:
                vars(tree["args"]).pop(key, None)
            else:
                setattr(tree["args"], key, value)
        torch.save(tree, file)


def refused(folder: Path, says: str, **options: Any) -> FormatError:
    """What is said of a checkpoint that cannot be read with its optimizer, but without."""
    with pytest.raises(FormatError, match=says) as e:
        open_source(folder, **options)
    assert e.value.file is not None
    assert e.value.hint is not None
    open_source(folder, optimizer=False)
    return e.value


# ---- orders


@pytest.mark.parametrize("optimizer", FORMATS)
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_order_is_found_whatever_the_args_say(
    order: Order, optimizer: str, tmp_path: Path, materialize: Any
) -> None:
    out = save(tmp_path, materialize, optimizer, model=EXPERTS, order=order, tp=2, ep=2)
    for args in MISLEADING:
        mislead(out, args)
        found = open_source(out).catalogue.metadata["registration_order"]
        assert replace(found, conv_first=order.conv_first) == order, args  # there is no mixer
    report = verify(tmp_path / "in", out)
    assert report.exit_status == 0, list(report.lines())


@pytest.mark.parametrize("optimizer", FORMATS)
def test_equal_values_do_not_hide_the_order(
    optimizer: str, tmp_path: Path, materialize: Any
) -> None:
    def level(arrays: Arrays) -> None:
        for name, array in arrays.items():
            is_alike = "norm" in name or "linear_proj" in name
            if is_alike and not name.startswith((FIRST, SECOND)):
                array[...] = to_bfloat16(np.float32(1.0)) if array.itemsize == 2 else 1.0

    order = Order(fused_norms=False, grouped_experts=True)
    with_all_equal = save(
        tmp_path, materialize, optimizer, change=level, order=order, model=ALIGNED
    )
    mislead(with_all_equal, {"transformer_impl": "transformer_engine"})
    if optimizer == "legacy":  # the file lists its own order
        assert verify(tmp_path / "in", with_all_equal).exit_status == 0
    else:
        e = refused(with_all_equal, "in two orders")
        assert "linear_proj" in str(e.tensor) or "norm" in str(e.tensor)


def test_one_different_element_tells_the_order(tmp_path: Path, materialize: Any) -> None:
    """Norms and the matrix beside them are ones, all but for an element that no probe looks at."""

    def almost_level(arrays: Arrays) -> None:
        for name, array in arrays.items():
            if name.startswith((FIRST, SECOND)) or not ("norm" in name or "linear_proj" in name):
                continue
            array[...] = to_bfloat16(np.float32(1.0)) if array.itemsize == 2 else 1.0
            if "linear_proj" in name:
                two = to_bfloat16(np.float32(2.0)) if array.itemsize == 2 else 2.0
                array[:, 3, 7] = two

    order = Order(fused_norms=False, grouped_experts=True)
    out = save(tmp_path, materialize, change=almost_level, order=order, model=ALIGNED)
    mislead(out, {"transformer_impl": "transformer_engine"})
    assert verify(tmp_path / "in", out).exit_status == 0


# ---- another model


def test_masters_of_another_model(tmp_path: Path, materialize: Any) -> None:
    rng = np.random.default_rng(9)

    def other(arrays: Arrays) -> None:
        for name, array in arrays.items():
            if name.startswith(MAIN):
                array[...] = rng.standard_normal(array.shape, np.float32)

    out = save(tmp_path, materialize, change=other, tp=2)
    e = refused(out, "master weight is .* where the model has")
    assert e.tensor
    assert "--optimizer-format none" in str(e.hint)


@pytest.mark.parametrize("optimizer", FORMATS)
def test_one_parameter_that_is_not_the_models(
    optimizer: str, tmp_path: Path, materialize: Any
) -> None:
    name = "decoder.layers.mlp.linear_fc2.weight"

    def one(arrays: Arrays) -> None:
        arrays[MAIN + name][2] *= 2

    out = save(tmp_path, materialize, optimizer, change=one, pp=2)
    e = refused(out, "master weight")
    assert e.tensor == name.replace("layers", "layers.2")


@pytest.mark.parametrize("at", [(0, 0), (-1, -1), (12, 0)])
def test_a_matrix_is_probed_at_both_ends_and_in_its_middle(
    at: tuple[int, int], tmp_path: Path, materialize: Any
) -> None:
    name = "decoder.layers.mlp.linear_fc2.weight"

    def one(arrays: Arrays) -> None:
        arrays[MAIN + name][(1, *(at if at != (12, 0) else (7, 0)))] += 5

    out = save(tmp_path, materialize, change=one, model={"num_layers": 2})
    assert refused(out, "master weight").tensor == name.replace("layers", "layers.1")


def test_all_elements_are_compared_on_request(tmp_path: Path, materialize: Any) -> None:
    name = "embedding.word_embeddings.weight"

    def one(arrays: Arrays) -> None:
        arrays[MAIN + name][5, 3] += 5

    out = save(tmp_path, materialize, change=one)
    open_source(out)
    e = refused(out, r"at \[5, 3\]", verify_master_weights=True)
    assert e.tensor == name


# ---- copies


def ranked(tmp_path: Path, materialize: Any, model: dict[str, Any] | None = None) -> Path:
    return save(tmp_path, materialize, "legacy", model=model, tp=2, pp=2)


def test_copies_of_a_norm_that_differ(tmp_path: Path, materialize: Any) -> None:
    folder = ranked(tmp_path, materialize)
    file = next(folder.rglob("mp_rank_01_001/model_optim_rng.pt"))
    edit(file, lambda tree: tree["model"]["decoder.final_layernorm.weight"].add_(1))
    with raises(
        FormatError,
        match="copies of it differ",
        tensor="decoder.final_layernorm.weight",
        file=file,
        hint="another iteration",
    ) as e:
        open_source(folder, optimizer=False)
    assert "mp_rank_00_001/model_optim_rng.pt" in e.value.message
    report = verify(folder)
    assert report.exit_status == 7
    assert any(d.kind == "replica" for d in report.differences)
    assert not (tmp_path / "dst").exists()


def test_copies_of_a_tied_embedding_that_differ(tmp_path: Path, materialize: Any) -> None:
    folder = ranked(tmp_path, materialize, {"tied_embeddings": True})
    file = next(folder.rglob("mp_rank_00_001/model_optim_rng.pt"))
    edit(file, lambda tree: tree["model"]["output_layer.weight"][0].zero_())
    with raises(
        FormatError, match="copies of it differ", tensor="embedding.word_embeddings.weight"
    ):
        open_source(folder, optimizer=False)


def test_copies_of_state_that_differ(tmp_path: Path, materialize: Any) -> None:
    folder = ranked(tmp_path, materialize)
    file = next(folder.rglob("mp_rank_01_001/distrib_optim.pt"))

    model = torch.load(file.with_name("model_optim_rng.pt"), weights_only=False)["model"]
    start = -(-model["output_layer.weight"].numel() // 64) * 64

    def change(tree: Any) -> None:
        (states,) = tree[0].values()
        states["exp_avg"][start : start + 16] += 1  # the final norm, behind the output matrix

    edit(file, change)
    e = refused(folder, "copies of it differ")
    assert e.tensor == f"{FIRST}decoder.final_layernorm.weight"
    assert "--optimizer-format none" in str(e.hint)


def test_one_element_of_a_copy_is_found_on_request(tmp_path: Path, materialize: Any) -> None:
    folder = ranked(tmp_path, materialize, {"hidden_size": 400, "head_dim": 100})
    file = next(folder.rglob("mp_rank_01_001/model_optim_rng.pt"))
    edit(file, lambda tree: tree["model"]["decoder.final_layernorm.weight"][100:101].add_(1))
    open_source(folder, optimizer=False)
    with pytest.raises(FormatError, match=r"at \[100\]"):
        open_source(folder, optimizer=False, verify_master_weights=True)


def test_few_reads_for_many_copies(
    tmp_path: Path, materialize: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, materialize, "legacy", tp=4, model={"num_kv_heads": 4})
    seen: list[int] = []
    kept = master_weight_check.pair_replicas

    def counted(catalogue: Any) -> Any:
        number = catalogue.shards.tensor[[r.shard for r in catalogue.replicas]]
        seen.append(int(np.bincount(number).max()))
        return kept(catalogue)

    monkeypatch.setattr(master_weight_check, "pair_replicas", counted)
    monkeypatch.setattr(master_weight_check, "MOST_COPIES", 2)
    open_source(folder)
    assert seen
    assert max(seen) <= 2


# ---- buckets


def test_sizes_that_do_not_add_up(tmp_path: Path, materialize: Any) -> None:
    folder = save(tmp_path, materialize, "legacy")
    file = next(folder.rglob("distrib_optim.pt"))
    whole = file.read_bytes()

    def shorten(tree: Any) -> None:
        (states,) = tree[0].values()
        for k in ("param", "exp_avg", "exp_avg_sq"):
            states[k] = states[k][:-64].clone()

    def shorten_one(tree: Any) -> None:
        (states,) = tree[0].values()
        states["exp_avg"] = states["exp_avg"][:-64].clone()

    def lose(key: str) -> Callable[[Any], None]:
        def change(tree: Any) -> None:
            (states,) = tree[0].values()
            del states[key]

        return change

    def remainders(tree: Any) -> None:
        (states,) = tree[0].values()
        states["param"] = states["param"].to(torch.int16)

    for change, says in (
        (shorten, "do not fit .* elements .* parameters"),
        (shorten_one, "differ in size"),
        (lose("param"), "no master weights"),
        (remainders, "int16 remainders"),
    ):
        edit(file, change)
        e = refused(folder, says)
        assert "--optimizer-format none" in str(e.hint)
        file.write_bytes(whole)
    edit(file, lose("exp_avg_sq"))  # as Lion's
    assert open_source(folder).view.states.keys() == {"main", "exp_avg"}


def test_ranks_whose_states_differ(tmp_path: Path, materialize: Any) -> None:
    folder = ranked(tmp_path, materialize)
    file = next(folder.rglob("mp_rank_01_001/distrib_optim.pt"))

    def lose(tree: Any) -> None:
        (states,) = tree[0].values()
        del states["exp_avg_sq"]

    edit(file, lose)
    e = refused(folder, "no 'exp_avg_sq'")
    assert "mp_rank_01_001" in str(e.tensor)


def test_moments_of_another_dtype(tmp_path: Path, materialize: Any) -> None:
    folder = save(tmp_path, materialize, "legacy", tp=2)

    def halve(tree: Any) -> None:
        (states,) = tree[0].values()
        for k in ("exp_avg", "exp_avg_sq"):
            states[k] = states[k].bfloat16()

    for file in folder.rglob("distrib_optim.pt"):
        edit(file, halve)
    kinds = {
        t.dtype.name for t in open_source(folder).catalogue.tensors if t.name.startswith(FIRST)
    }
    assert kinds == {"bfloat16"}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"tensor_model_parallel_size": 4}, "4 data-parallel groups|make 8"),
        ({"pipeline_model_parallel_size": 1}, "dp_group_idx_2"),
        ({"tensor_model_parallel_size": 1}, "contradict"),
        (
            {"num_layers_per_virtual_pipeline_stage": 1, "virtual_pipeline_model_parallel_size": 2},
            "buffers|add up",
        ),
    ],
    ids=str,
)
def test_args_of_another_layout(
    args: dict[str, Any], says: str, tmp_path: Path, materialize: Any
) -> None:
    out = save(tmp_path, materialize, tp=2, pp=2, model={"num_kv_heads": 4})
    mislead(out, args)
    refused(out, says)


def test_swapped_ranks(tmp_path: Path, materialize: Any) -> None:
    folder = ranked(tmp_path, materialize)
    a, b = (next(folder.rglob(f"mp_rank_0{k}_000/distrib_optim.pt")) for k in (0, 1))
    shutil.move(a, tmp_path / "aside")
    shutil.move(b, a)
    shutil.move(tmp_path / "aside", b)
    refused(folder, "master weight")


def test_expert_bias_has_no_state(tmp_path: Path, materialize: Any) -> None:
    model = {**EXPERTS, "router_expert_bias": True}
    for optimizer in FORMATS:
        out = save(tmp_path / optimizer, materialize, optimizer, model=model, ep=2)
        assert verify(tmp_path / optimizer / "in", out).exit_status == 0


# ---- files of ranks


def test_versions_that_are_not_known(tmp_path: Path, materialize: Any) -> None:
    folder = ranked(tmp_path, materialize)
    for version in (1.0, 0, 99.0, None, "3"):
        for file in folder.rglob("model_optim_rng.pt"):
            edit(file, lambda tree: tree.update(checkpoint_version=version))  # noqa: B023
        with raises(FormatError, match="checkpoint_version", hint="Megatron-LM") as e:
            open_source(folder, optimizer=False)
        assert str(e.value.file).endswith("mp_rank_00_000/model_optim_rng.pt")


def test_ranks_of_a_stage_that_hold_other_tensors(tmp_path: Path, materialize: Any) -> None:
    folder = ranked(tmp_path, materialize)
    name = "output_layer.weight"
    file = next(folder.rglob("mp_rank_01_001/model_optim_rng.pt"))
    sound = file.read_bytes()

    def shorten(tree: Any) -> None:
        tree["model"][name] = tree["model"][name][:-1].clone()

    def widen(tree: Any) -> None:
        tree["model"][name] = tree["model"][name].float()

    for change, says, at in (
        (lambda tree: tree["model"].pop(name), "is missing", "mp_rank_01_001"),
        (lambda tree: tree["model"].update(more=torch.zeros(2)), "is missing", "mp_rank_00_001"),
        (shorten, "of the same pipeline stage", "mp_rank_01_001"),
        (widen, "float32", "mp_rank_01_001"),
    ):
        edit(file, change)
        with raises(FormatError, match=says, hint=True) as e:
            open_source(folder, optimizer=False)
        assert e.value.tensor in (name, "more")
        assert at in str(e.value.file)
        file.write_bytes(sound)
    open_source(folder)
