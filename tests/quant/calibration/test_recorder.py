"""Recording: statistics against plain arithmetic on the same inputs, and against other layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megtool.errors import CalibrationError, MappingError, UsageError
from megtool.model.batch import Batch
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.quant.calibration.recorder import ActivationRecorder
from megtool.quant.statistics.site_statistics import BINS
from tests.support.emulated.graph_rules import graphed
from tests.support.quant.recording import assert_equal, batches, on_rank, points_of, raw, record
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.moe_layouts import whole_model

LAYOUTS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("shared and gated", {"tp": 2}, {"gram": True, "normalize_tokens": True}),
    ("shared and gated", {"tp": 2}, {"gram": True, "sequence_parallel": True}),
    ("shared and gated", {"dp": 2, "ep": 2}, {"gram": True}),
    ("shared and gated", {"dp": 2}, {"gram": True}),
    ("wide keys", {"tp": 2}, {}),
    ("latent", {"tp": 2, "ep": 2, "etp": 1}, {"calibrate_all_experts": True}),
    ("latent", {"tp": 2}, {"sequence_parallel": True}),
    (
        "scaled input",
        {"tp": 2, "ep": 2, "etp": 1},
        {"sequence_parallel": True, "calibrate_all_experts": True},
    ),
]


@pytest.mark.parametrize(
    ("module", "point"),
    [
        ("decoder.layers.0.self_attention.linear_qkv", "layers.0.attn.qkv"),
        ("decoder.layers.1.self_attention.linear_proj", "layers.1.attn.o"),
        ("decoder.layers.0.mlp.linear_fc2", "layers.0.mlp.down"),
        ("decoder.layers.1.mlp.shared_experts.linear_fc1", "layers.1.mlp.shared.fc1"),
        ("decoder.layers.1.mlp.router", "layers.1.mlp.router"),
    ],
)
def test_statistics_of_an_input(module: str, point: str) -> None:
    decoder = whole_model("shared and gated")
    found = record(decoder, gram=True)[point]
    x = raw(decoder, module)
    assert found.num_tokens == len(x) == 74
    assert torch.equal(torch.from_numpy(found.amax), x.abs().amax(0))
    np.testing.assert_allclose(found.abs_sum, x.double().abs().sum(0), rtol=1e-6)
    np.testing.assert_allclose(found.square_sum, x.double().square().sum(0), rtol=1e-6)
    np.testing.assert_allclose(found.gram, x.T @ x, rtol=1e-4, atol=1e-4)
    normalized = record(decoder, gram=True, normalize_tokens=True)[point].gram
    np.testing.assert_allclose(
        normalized, x.T @ (x / x.norm(dim=1, keepdim=True)), rtol=1e-4, atol=1e-4
    )
    assert found.sample is not None
    assert torch.equal(torch.from_numpy(found.sample), x)
    edges = np.concatenate([[0.0], np.geomspace(2.0**-40, 2.0**24, 65)])
    by_octave = np.histogram(np.abs(x.numpy()), edges)[0]
    folded = np.concatenate([found.histogram[:1], found.histogram[1:].reshape(64, 32).sum(1)])
    assert (folded == by_octave).all()
    assert len(found.histogram) == BINS


def test_an_expert_sees_its_tokens_alone() -> None:
    """Counted by the router's own choice, padding aside."""
    decoder = whole_model("shared and gated")
    found = record(decoder)
    x = raw(decoder, "decoder.layers.1.mlp.router")
    with torch.no_grad():
        chosen, _ = decoder.get_submodule("decoder.layers.1.mlp.router")(x)
    for e in range(8):
        rows = x[(chosen == e).any(1)]
        seen = found[f"layers.1.mlp.experts.{e}.fc1"]
        assert seen.num_tokens == len(rows) == found[f"layers.1.mlp.experts.{e}.down"].num_tokens
        if len(rows):
            assert torch.equal(torch.from_numpy(seen.amax), rows.abs().amax(0))


def test_all_experts_see_all_tokens_and_nothing_comes_of_it() -> None:
    decoder = whole_model("shared and gated")
    batch = batches()[0][0]
    with torch.no_grad():
        want = decoder(batch)
    found = record(decoder, calibrate_all_experts=True)
    assert {s.num_tokens for s in found.values()} == {74}
    one = found["layers.1.mlp.experts.0.fc1"]
    np.testing.assert_array_equal(one.amax, found["layers.1.mlp.router"].amax)
    recorder = ActivationRecorder(decoder, points_of(decoder.config), calibrate_all_experts=True)
    recorder.start(1)
    recorder.set_batch(batch)
    with torch.no_grad():
        assert torch.equal(decoder(batch), want)


def test_keys_after_rotation_and_values() -> None:
    decoder = whole_model("shared and gated")
    found = record(decoder)["layers.0.attn.kv"]
    attention = decoder.get_submodule("decoder.layers.0.self_attention")
    rows = []

    def tap(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows.append(torch.cat((key.flatten(2), value.flatten(2)), -1).flatten(0, 1))
        return key, value

    attention.cache_tap = tap  # type: ignore[assignment]
    real = []
    for batch, _ in batches():
        with torch.no_grad():
            decoder(batch)
        assert batch.valid_BS is not None
        real.append(rows.pop()[batch.valid_BS.flatten()])
    x = torch.cat(real)
    assert torch.equal(torch.from_numpy(found.amax), x.abs().amax(0))
    assert x.shape[1] == 2 * 2 * 4


@pytest.mark.parametrize(("name", "layout", "how"), LAYOUTS, ids=lambda v: str(v))
def test_as_in_one_process(name: str, layout: dict[str, int], how: dict[str, Any]) -> None:
    want = record(whole_model(name), **{k: v for k, v in how.items() if k != "sequence_parallel"})
    size = layout.get("tp", 1) * layout.get("dp", 1)
    for got in run_world(on_rank, size, name, layout, how):
        assert_equal(got, want)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_activation_that_is_not_finite(value: float) -> None:
    decoder = whole_model("shared and gated")
    with torch.no_grad():
        decoder.embedding.word_embeddings.weight[7] = value  # type: ignore[union-attr]
    tokens = torch.full((3, 4), 5)
    tokens[2, 1] = 7
    recorder = ActivationRecorder(decoder, points_of(decoder.config))
    recorder.start(0)
    recorder.set_batch(Batch(tokens_BS=tokens), first_sample=40)
    with pytest.raises(CalibrationError, match=r"layers\.0\.attn\.qkv \(layer 0\).*sample 42"):
        decoder(Batch(tokens_BS=tokens))
    # As padding it does not count.
    recorder = ActivationRecorder(decoder, points_of(decoder.config)[:1])
    recorder.start(0)
    batch = Batch(tokens_BS=tokens, valid_BS=tokens != 7)
    recorder.set_batch(batch)
    decoder(batch)
    assert np.isfinite(recorder.collect()["layers.0.attn.qkv"].amax).all()


def test_all_ranks_tell_of_what_one_has_seen() -> None:
    said = run_world(poisoned, 2)
    assert said[0] == said[1]
    assert "layers.0.attn.qkv (layer 0)" in said[0]
    assert "sample 3" in said[0]


def poisoned(rank: int, size: int) -> str:
    groups = ProcessGroups.start(ParallelConfig(dp=2))
    decoder = whole_model("shared and gated")
    decoder.groups = groups
    recorder = ActivationRecorder(decoder, points_of(decoder.config), groups=groups)
    recorder.start(0)
    tokens = torch.full((2, 4), 5)
    if rank:
        with torch.no_grad():
            decoder.embedding.word_embeddings.weight[7] = torch.nan  # type: ignore[union-attr]
        tokens[1] = 7
    recorder.set_batch(Batch(tokens_BS=tokens), first_sample=2 * rank)
    decoder(Batch(tokens_BS=tokens))
    try:
        recorder.collect()
    except CalibrationError as error:
        return str(error)
    return "nothing"


def test_without_waiting_for_the_device() -> None:
    """What runs on a GPU gives the same, and keeps the rules of CUDA graphs."""
    decoder = whole_model("biases")
    points = [p for p in points_of(decoder.config) if p.expert is None and p.layer == 0]
    names = [p.name for p in points if p.kind == "input"]
    want = record(decoder, gram=True, points=tuple(points))
    recorder = ActivationRecorder(decoder, points, gram=names, normalize_tokens=names[:1])
    recorder.start(0)
    embed = decoder.decoder.layers["0"].self_attention
    frame = decoder.frame(Batch(tokens_BS=batches()[0][0].tokens_BS))

    def attend(x_TH: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = embed(x_TH, frame)
        return out

    step = graphed(attend, "cpu", state=recorder.state)
    for batch, first in batches():
        recorder.set_batch(batch, first_sample=first)
        with torch.no_grad():
            step(decoder.embed(batch, frame))
    got = recorder.collect()
    alone = ActivationRecorder(decoder, points, gram=names, normalize_tokens=names[:1])
    alone.start(0)
    for batch, first in batches():
        alone.set_batch(batch, first_sample=first)
        with torch.no_grad():
            attend(decoder.embed(batch, frame))
    assert_equal(got, alone.collect())
    assert got["layers.0.attn.qkv"].num_tokens == want["layers.0.attn.qkv"].num_tokens


def test_a_pass_nobody_announced() -> None:
    decoder = whole_model("shared and gated")
    recorder = ActivationRecorder(decoder, points_of(decoder.config))
    recorder.start(0)
    with pytest.raises(UsageError, match="nothing to see"):
        decoder(batches()[0][0])
    recorder.stop()
    decoder(batches()[0][0])


def test_a_point_of_another_model() -> None:
    with pytest.raises(MappingError, match=r"no 'attn\.down'"):
        ActivationRecorder(whole_model("biases"), points_of(whole_model("latent").config)).start(0)
