"""Semantics S1-S6 as properties: any model through any layouts stays equal, and verify proves it.

What is tried is drawn at random: shapes, biases, padding, layouts, options and their order.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megtool import reshard, verify
from megtool.errors import LayoutError
from megtool.formats import open_checkpoint
from tests.support.errors import raises
from tests.support.folders import contents, file_states, stored_tensors
from tests.support.models import tiny_llama

models = st.fixed_dictionaries(
    {
        "num_hidden_layers": st.integers(1, 6),
        "heads": st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3), (6, 6), (8, 2)]),
        "head_dim": st.sampled_from([2, 4, 6]),
        "hidden_size": st.sampled_from([8, 12, 20]),
        "intermediate_size": st.sampled_from([4, 12, 30]),
        "vocab_size": st.integers(1, 300),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "dtype": st.sampled_from(["bfloat16", "float16", "float32"]),
        "parts": st.integers(1, 3),
        "seed": st.integers(0, 99),
    }
)
layouts = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 3, 4, 6]),
        "pp": st.sampled_from([1, 2, 3, 4]),
        "vpp": st.sampled_from([1, 1, 2]),
        "dp": st.integers(1, 3),
        "digest": st.sampled_from(["all", "buffered", "none"]),
        "threads": st.integers(1, 3),
        "to": st.sampled_from(["torch_dist", "torch_dist", "dcp", "hf"]),
    }
)


def fits(model: dict[str, Any], layout: dict[str, Any]) -> bool:
    """Whether a layout divides a model: the rules, written down once more."""
    heads, kv = model["num_attention_heads"], model["num_key_value_heads"]
    tp, stages = layout["tp"], layout["pp"] * layout["vpp"]
    return (
        heads % tp == 0
        and (kv % tp == 0 or tp % kv == 0)
        and model["intermediate_size"] % tp == 0
        and model["num_hidden_layers"] % stages == 0
        and (layout["vpp"] == 1 or layout["pp"] > 1)
    )


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A new folder for every example; the one before is removed."""
    made: list[Path] = []

    def make() -> Path:
        while made:
            shutil.rmtree(made.pop())
        made.append(tmp_path_factory.mktemp("job"))
        return made[-1]

    return make


@settings(max_examples=35, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=models, way=st.lists(layouts, min_size=1, max_size=3))
def test_any_way_there_and_back_changes_nothing(
    workshop: Any, drawn: dict[str, Any], way: list[dict[str, Any]]
) -> None:  # S1, S3, S6
    root = workshop()
    model = dict(drawn)
    model["num_attention_heads"], model["num_key_value_heads"] = model.pop("heads")
    original = tiny_llama.save(root / "hf", **model)
    before, at, megatron = file_states(original), original, False
    for number, layout in enumerate(way):
        out = root / str(number)
        options = dict(layout)
        if options["to"] == "hf":
            options = {k: v for k, v in options.items() if k in ("to", "digest", "threads")}
        by_ranks = options["to"] == "torch_dist" or (options["to"] == "dcp" and megatron)
        if options["to"] == "dcp" and not by_ranks:
            options = {k: v for k, v in options.items() if k not in ("tp", "pp", "vpp")}
        if by_ranks and not fits(model, layout):
            with raises(LayoutError, hint=True):
                reshard(at, out, **options)
            assert not out.exists()
            continue
        megatron = by_ranks
        report = reshard(at, out, fsync=False, **options)
        assert not [d for d in report.dropped if d.is_lost]
        assert report.plan.num_bytes.total == report.num_bytes
        compared = verify(at, out)
        assert compared.verdict == "equal", [*compared.lines()]
        at = out
    assert verify(at, original).verdict == "equal"
    reshard(at, root / "back", to="hf", fsync=False)
    assert stored_tensors(root / "back") == stored_tensors(original)
    assert file_states(original) == before


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=models, layout=layouts)
def test_the_plan_covers_every_byte_once(
    workshop: Any, drawn: dict[str, Any], layout: dict[str, Any]
) -> None:  # S3
    """Written over a tree full of ones, no byte of any file stays a one by chance of the plan."""
    root = workshop()
    model = dict(drawn)
    model["num_attention_heads"], model["num_key_value_heads"] = model.pop("heads")
    if not fits(model, layout):
        layout = layout | {"tp": 1, "pp": 1, "vpp": 1}
    original = tiny_llama.save(root / "hf", **model)
    options = {k: layout[k] for k in ("tp", "pp", "vpp", "dp")}
    reshard(original, root / "m", to="torch_dist", **options)
    catalogue = open_checkpoint(root / "m")
    at = catalogue.locate(np.arange(len(catalogue.shards))).offset
    item = np.array([t.dtype.itemsize for t in catalogue.tensors])[catalogue.shards.tensor]
    held: dict[int, list[tuple[int, int]]] = {}
    for file, start, size in zip(
        catalogue.extents.file.tolist(),
        at.tolist(),
        (catalogue.shards.boxes.volume() * item).tolist(),
        strict=True,
    ):
        held.setdefault(file, []).append((start, start + size))
    for spans in held.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    sizes = {t.name: 0 for t in catalogue.tensors}
    volumes = catalogue.shards.boxes.volume().tolist()
    for tensor, volume in zip(catalogue.shards.tensor.tolist(), volumes, strict=True):
        sizes[catalogue.tensors[tensor].name] += volume
    assert sizes == {t.name: t.numel for t in catalogue.tensors}


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=models, layout=layouts, threads=st.integers(1, 4))
def test_two_runs_write_the_same_bytes(
    workshop: Any, drawn: dict[str, Any], layout: dict[str, Any], threads: int
) -> None:  # S5
    root = workshop()
    model = dict(drawn)
    model["num_attention_heads"], model["num_key_value_heads"] = model.pop("heads")
    if not fits(model, layout):
        layout = layout | {"tp": 1, "pp": 1, "vpp": 1}
    original = tiny_llama.save(root / "hf", **model)
    options = {k: layout[k] for k in ("tp", "pp", "vpp", "dp", "digest")}
    for name, count in (("a", layout["threads"]), ("b", threads)):
        reshard(original, root / name, to="torch_dist", threads=count, **options)
    assert contents(root / "a") == contents(root / "b")
