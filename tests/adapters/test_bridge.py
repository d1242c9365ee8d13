"""Megatron-Bridge's adapters: what its code saves adds to a model what its code computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import megtool
from megtool.adapters.read import read_adapter
from megtool.errors import FormatError, MappingError
from megtool.source.open import open_source
from tests.support.models.adapted_models import decoder_logits
from tests.support.peers import bridge_world
from tests.support.peers.release import install_release

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.peers, pytest.mark.slow]


@pytest.fixture(scope="session")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest release whose adapters are on layers of this megatron-core."""
    return install_release("megatron-bridge==0.3.1", tmp_path_factory.mktemp("bridge"))


def run(bridge: Path, action: str, folder: Path, **options: Any) -> str:
    done = subprocess.run(
        [sys.executable, bridge_world.__file__, action, str(folder), json.dumps(options)],
        env=os.environ | {"PYTHONPATH": str(bridge), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


KINDS = [("LoRA", 1), ("LoRA", 2), ("CanonicalLoRA", 1), ("CanonicalLoRA", 2)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda p: f"{p[0]}-tp{p[1]}")
def saved(
    request: pytest.FixtureRequest, bridge: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    kind, tp = request.param
    folder = tmp_path_factory.mktemp("saved")
    run(bridge, "save", folder, kind=kind, tp=tp, peft={"dim": 4, "alpha": 6})
    return folder


def test_updates_are_those_that_megatron_bridge_computes(saved: Path) -> None:
    adapter = read_adapter(saved / "adapter")
    source = open_source(saved / "base")
    updates = adapter.updates(source.config, None)
    assert len(updates) == 4 * 7
    wanted = torch.load(saved / "logits.pt")
    plain = decoder_logits(saved / "base", {}, bridge_world.TOKENS)
    ours = decoder_logits(saved / "base", updates, bridge_world.TOKENS)
    assert (plain - wanted).abs().max() > 1
    torch.testing.assert_close(ours, wanted, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize(("grouped", "loaded"), [(False, 80), (True, 32)])
def test_experts_have_an_adapter_each_or_share_one(
    grouped: bool, loaded: int, bridge: Path, tmp_path: Path
) -> None:
    options = {"kind": "LoRA", "experts": 4, "grouped": grouped, "peft": {"dim": 4, "alpha": 6}}
    run(bridge, "save", tmp_path, **options)
    source = open_source(tmp_path / "base")
    updates = read_adapter(tmp_path / "adapter").updates(source.config, None)
    assert len(updates) == 4 * (4 + 3 * 4)
    ours = decoder_logits(tmp_path / "base", updates, bridge_world.TOKENS)
    wanted = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(ours, wanted, atol=1e-2, rtol=1e-3)
    again = tmp_path / "again"  # what is written of it loads
    adapter = again / "adapter"
    megtool.convert_adapter(tmp_path / "adapter", adapter, to="bridge", base=tmp_path / "base")
    for name in ("base", "logits.pt"):
        (again / name).symlink_to(tmp_path / name)
    assert f"loaded {loaded} tensors" in run(bridge, "load", again, experts=4)


@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_bridge_loads_what_became_of_its_adapter(
    tp: int, bridge: Path, saved: Path, tmp_path: Path
) -> None:
    """At any tp: projections of CanonicalLoRA, which it cuts wrongly, are one matrix of LoRA."""
    adapter, base = saved / "adapter", saved / "base"
    report = megtool.convert_adapter(adapter, tmp_path / "adapter", to="bridge", base=base)
    rank = 12 if "Canonical" in read_adapter(adapter).settings["class"] else 4
    assert list(report.ranks["destination"]) == [rank]
    assert report.rounded == ()
    (tmp_path / "base").symlink_to(base)
    (tmp_path / "logits.pt").symlink_to(saved / "logits.pt")
    assert "loaded 32 tensors" in run(bridge, "load", tmp_path, tp=tp)


def edit_config(folder: Path, section: str, **values: Any) -> None:
    path = folder / "adapter/iter_0000007/run_config.yaml"
    content = json.loads(path.read_text())
    content[section] |= values
    path.write_text(json.dumps(content))


def test_a_configuration_of_another_run_is_refused(saved: Path) -> None:
    path = saved / "adapter/iter_0000007/run_config.yaml"
    text = path.read_text()
    edit_config(saved, "peft", dim=8)
    with pytest.raises(FormatError) as e:
        read_adapter(saved / "adapter")
    assert "adapter.linear_in" in str(e.value.tensor) or "adapter_" in str(e.value.tensor)
    path.write_text(text)
    edit_config(saved, "peft", _target_="megatron.bridge.peft.dora.DoRA")
    with pytest.raises(MappingError) as f:
        read_adapter(saved / "adapter")
    assert f.value.id == "unsupported-adapter"
    path.unlink()
    with pytest.raises(FormatError) as e:
        read_adapter(saved / "adapter")
    assert e.value.id == "missing-shard"
    path.write_text(text)
    if "Canonical" in text:
        edit_config(saved, "model", tensor_model_parallel_size=4)
        with pytest.raises(MappingError) as f:
            read_adapter(saved / "adapter").updates(open_source(saved / "base").config, None)
        assert f.value.id == "unsupported-adapter"
        path.write_text(text)
