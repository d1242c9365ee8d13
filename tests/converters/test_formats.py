"""Every family through every format that is written, in several layouts, to the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megtool import reshard, verify
from megtool.convert.families.detection import family_names
from megtool.source.open import open_source
from tests.support.folders import read_config
from tests.support.folders import stored_tensors as stored
from tests.support.models.every_family import MODELS, WITH_EXPERTS

pytest.importorskip("transformers")


UNUSED = {
    "bert": "cls.predictions.bias",
    "bert_post_norm": "cls.predictions.bias",
    "roberta": "lm_head.bias",
}
"""Tensors that repeat others, which are left out."""


def test_every_family_is_here() -> None:
    assert set(MODELS) == set(family_names())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MODELS))
def test_weights_come_back_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    source = tmp_path / "hf"
    MODELS[name](source)
    before = stored(source)
    ep = {"ep": 2} if name in WITH_EXPERTS else {}
    pp: dict[str, int] = {"pp": 2}
    if name in ("t5", "mt5", "umt5"):
        pp |= {"encoder_pp": 1}
    steps: tuple[tuple[str, dict[str, Any]], ...] = (
        ("torch_dist", {"tp": 2, **pp}),
        ("dcp", {"dp": 2}),
        ("megatron", {"tp": 2, **ep}),
        ("zarr", {}),
        ("torch_dist", {**pp, **ep}),
        ("megatron", {"tp": 2, **pp}),
        ("torch_checkpointing", {}),
        ("megatron", {"tp": 1}),
        ("ocdbt", {}),
        ("hf", {}),
    )
    at = source
    for number, (to, layout) in enumerate(steps):
        out = tmp_path / f"{number}_{to}"
        report = reshard(at, out, to=to, fsync=False, **layout)
        assert report.family == name
        assert not [d for d in report.dropped if d.is_lost]
        at = out
    after = stored(at)
    for unused, _ in open_source(source).view.dropped:
        assert unused == UNUSED.get(name)
        before.pop(unused)
    assert after == before
    assert read_config(at) == read_config(source)
    assert verify(source, tmp_path / "5_megatron").verdict == "equal"
