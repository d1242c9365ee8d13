"""Every family with experts or latent attention against transformers' own class, in fp32."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache
from tests.support.models import moe_models
from tests.support.models.moe_models import CASES, MORE, Carry

cases = pytest.mark.parametrize("name", CASES)
whole_cases = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in MORE else []) for n in CASES]
)
TOLERANCE = 1e-4


def differ(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).detach().abs().max())


@cases
def test_logits_are_transformers(name: str, carry: Carry) -> None:
    model = moe_models.transformers_model(name)
    decoder = moe_models.ours(name, model, carry)
    tokens = moe_models.tokens(2, 24)
    with torch.no_grad():
        want = model(tokens).logits
        got = decoder(Batch(tokens_BS=tokens))
    assert want.abs().max() > 0.5
    assert differ(got, want) < TOLERANCE


@whole_cases
def test_padding_on_the_left_changes_nothing(name: str, carry: Carry) -> None:
    """Rows of 17 and 24 tokens in one batch, as each alone and as transformers computes them."""
    model = moe_models.transformers_model(name)
    decoder = moe_models.ours(name, model, carry)
    tokens = moe_models.tokens(2, 24)
    valid = torch.ones(2, 24, dtype=torch.bool)
    valid[0, :7] = False
    places = (valid.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        want = model(tokens, attention_mask=valid.long(), position_ids=places).logits
        got = decoder(Batch(tokens_BS=tokens, valid_BS=valid))
        alone = decoder(Batch(tokens_BS=tokens[:1, 7:]))
    assert differ(got[0, 7:], alone[0]) < 1e-5
    # transformers counts padding as positions there, or makes keys of it.
    if decoder.config.attention.attn_temperature_scale or decoder.config.compression.is_compressed:
        valid[0] = False
    assert differ(got[valid], want[valid]) < TOLERANCE


@whole_cases
def test_decoding_with_a_cache_is_the_whole_pass(name: str, carry: Carry) -> None:
    model = moe_models.transformers_model(name)
    decoder = moe_models.ours(name, model, carry)
    tokens = moe_models.tokens(2, 24)
    cache = ContiguousCache(decoder.config, num_rows=2, max_tokens=32)
    with torch.no_grad():
        want = model(tokens).logits
        parts = [
            decoder(Batch(tokens_BS=part), cache)
            for part in (tokens[:, :10], tokens[:, 10:13], *tokens[:, 13:].split(1, 1))
        ]
    assert differ(torch.cat(parts, 1), want) < TOLERANCE


@whole_cases
def test_gradients_are_transformers(name: str, carry: Carry) -> None:
    """Of every parameter: routers, experts and norms among them."""
    model = moe_models.transformers_model(name)
    decoder = moe_models.ours(name, model, carry)
    tokens = moe_models.tokens(2, 17)
    labels = tokens[:, 1:]
    logits = model(tokens[:, :-1]).logits
    want_loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    want_loss.backward()
    loss, count = decoder.loss(Batch(tokens_BS=tokens[:, :-1]), labels)
    loss.backward()
    assert int(count) == labels.numel()
    assert differ(loss, want_loss) < 1e-3
    grads = {n: p.grad for n, p in model.named_parameters()}
    arrays = {
        n: (torch.zeros_like(t) if grads.get(n) is None else grads[n]).numpy()
        for n, t in model.state_dict().items()
    }
    unshifted = partial(carry, has_shifts=False)
    want, _ = moe_models.carried(name, moe_models.config_of(name, model), arrays, unshifted)
    largest = max(float(w.abs().max()) for w in want.values())
    worst = {
        n: differ(p.grad, want[n]) for n, p in decoder.named_parameters() if p.grad is not None
    }
    assert any("mlp.router.weight" in n for n in worst)
    assert max(worst.values()) < 1e-4 * max(1.0, largest), max(worst, key=worst.get)
    without = {n for n, p in decoder.named_parameters() if p.grad is None}
    fixed = ("expert_bias", "layer_scalar", "tid2eid")
    assert all(n.endswith(fixed) or ".indexer." in n for n in without)
    assert np.isfinite(largest)
