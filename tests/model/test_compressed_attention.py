"""DeepSeek-V4's passes over ranks, of packed rows and with caches, and what is refused.

Logits against transformers' are in test_decoder_moe_families.py, too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from megtool import quantize, reshard
from megtool.config import ParallelConfig
from megtool.convert.sharding import check_layout
from megtool.errors import LayoutError, MappingError, UsageError
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.model.cache import ContiguousCache, PagedCache
from megtool.model.decoder import Decoder
from megtool.parallel.process_groups import ProcessGroups
from tests.support.errors import raises
from tests.support.models import moe_models
from tests.support.models.moe_models import Carry
from tests.support.runs.loading import source_of
from tests.support.worlds import family_layouts
from tests.support.worlds.family_layouts import Job
from tests.support.worlds.gloo_world import run_world

NAME = "deepseek_v4"
LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {}),
    ({"tp": 2}, {"sequence_parallel": True}),
    ({"pp": 2, "first_stage_layers": 2}, {}),
    ({"ep": 2, "dp": 2}, {}),
    ({"tp": 2, "ep": 2, "etp": 1}, {"sequence_parallel": True}),
]


def decoder_of(carry: Carry, **changes: Any) -> Decoder:
    return moe_models.ours(NAME, moe_models.transformers_model(NAME, **changes), carry)


@pytest.mark.slow
def test_every_layout_has_transformers_logits_and_gradients(tmp_path: Path) -> None:
    """And the logits of cached decoding with padding. Gradients of scalars cancel out, and have
    more rounding than others."""
    model = moe_models.transformers_model(NAME)
    model.save_pretrained(tmp_path / "hf")
    tokens, labels = family_layouts.tokens_and_labels()
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    loss.backward()
    one = load(source_of(tmp_path / "hf"), dtype="float32")
    ours = family_layouts.answer_of(one, ProcessGroups.alone())
    assert float((ours.logits - logits).detach().abs().max()) < 1e-4
    assert ours.loss == pytest.approx(loss.item(), rel=1e-5)
    real = family_layouts.valid()
    for row, kept in enumerate(real):
        alone = model(tokens[row : row + 1, kept]).logits[0].detach()
        assert ours.decoded is not None
        assert float((ours.decoded[row, kept] - alone).detach().abs().max()) < 1e-4
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    model.save_pretrained(tmp_path / "gradients")
    theirs = load(source_of(tmp_path / "gradients"), dtype="float32").state_dict()
    gradients = {n: theirs[n] for n in ours.gradients}
    torch.save(replace(ours, gradients=gradients), tmp_path / "want")
    jobs = []
    for number, (layout, how) in enumerate(LAYOUTS):
        there = tmp_path / f"{number}"
        reshard(tmp_path / "hf", there, to="torch_dist", fsync=False, **layout)  # type: ignore[arg-type]
        jobs.append(
            Job(name=NAME, checkpoint=there, answer=tmp_path / "want", layout=layout, how=how)
        )
    ranks = run_world(family_layouts.compare, 2, jobs, timeout_s=300)
    wrong = [
        (job, name, value)
        for found in ranks
        for job, values in found.items()
        for name, value in values.items()
        if not value < 2e-4
    ]
    assert not wrong


def test_padding_behind_tokens_changes_nothing(carry: Carry) -> None:
    decoder, tokens = decoder_of(carry), moe_models.tokens(2, 24)
    valid = torch.ones(2, 24, dtype=torch.bool)
    valid[0, 17:] = False
    with torch.no_grad():
        got = decoder(Batch(tokens_BS=tokens, valid_BS=valid))
        alone = decoder(Batch(tokens_BS=tokens[:1, :17]))
    assert float((got[0, :17] - alone[0]).abs().max()) < 1e-5


def test_packed_documents_are_as_each_alone(carry: Carry) -> None:
    """Windows of tokens begin anew in each, at whatever place; one is shorter than a window."""
    decoder, lengths = decoder_of(carry), (9, 2, 13)
    tokens = moe_models.tokens(2, sum(lengths))
    documents = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    places = torch.cat([torch.arange(n) for n in lengths])
    documents_BS = torch.stack((documents, documents.flip(0)))
    places_BS = torch.stack((places, torch.cat([torch.arange(n) for n in reversed(lengths)])))
    with torch.no_grad():
        packed = Batch(tokens_BS=tokens, documents_BS=documents_BS, positions_BS=places_BS)
        got = decoder(packed)
        for row, sizes in enumerate((lengths, lengths[::-1])):
            parts = zip(tokens[row].split(sizes), got[row].split(sizes), strict=True)
            for part, found in parts:
                alone = decoder(Batch(tokens_BS=part[None]))[0]
                assert float((found - alone).abs().max()) < 1e-5


def test_rows_of_a_paged_cache_are_as_each_alone(carry: Carry) -> None:
    """Prompts of unequal length, padded on the right, that grow by unequal numbers of tokens, and
    go back."""
    decoder, tokens = decoder_of(carry), moe_models.tokens(3, 40)
    cache = PagedCache(decoder.config, num_blocks=20, block_size=6, num_sequences=4)
    lengths = [0, 0, 0]
    steps = [((0, 7), (1, 17)), ((1, 1), (0, 3)), ((2, 2), (0, 9), (1, 1)), ((0, 1), (2, 5))]
    steps += [((2, 1), (1, 13)), ((1, 2), (0, 1), (2, 7)), ((0, 4), (1, 1), (2, 1))]
    with torch.no_grad():
        want = decoder(Batch(tokens_BS=tokens))
        for number, step in enumerate(steps):
            width = max(count for _, count in step)
            padded = torch.zeros(len(step), width, dtype=torch.int64)
            valid = torch.arange(width) < torch.tensor([count for _, count in step])[:, None]
            for place, (row, count) in enumerate(step):
                padded[place, :count] = tokens[row, lengths[row] : lengths[row] + count]
            batch = Batch(tokens_BS=padded, valid_BS=None if valid.all() else valid)
            for attempt in range(2):  # the second one after all of it is forgotten
                cache.choose(step, revertible=number == 5)
                got = decoder(batch, cache)
                for place, (row, count) in enumerate(step):
                    there = want[row, lengths[row] : lengths[row] + count]
                    assert float((got[place, :count] - there).abs().max()) < 1e-4
                if number != 5 or attempt:
                    break
                cache.truncate({row: lengths[row] for row, _ in step})
            for row, count in step:
                lengths[row] += count


def test_fewer_tokens_than_are_compressed_to_one_key(carry: Carry) -> None:
    model = moe_models.transformers_model(NAME)
    decoder, tokens = moe_models.ours(NAME, model, carry), moe_models.tokens(2, 3)
    with torch.no_grad():
        assert float((decoder(Batch(tokens_BS=tokens)) - model(tokens).logits).abs().max()) < 1e-4


def test_a_table_chooses_the_experts_of_the_first_layers(carry: Carry) -> None:
    decoder, tokens = decoder_of(carry), moe_models.tokens(1, 8)
    router = decoder.get_submodule("decoder.layers.0.mlp.router")
    with torch.no_grad():
        before = decoder(Batch(tokens_BS=tokens))
        router.tid2eid.copy_(router.tid2eid.roll(1, 0))
        after = decoder(Batch(tokens_BS=tokens))
    assert not torch.allclose(before, after)
    assert getattr(decoder.get_submodule("decoder.layers.1.mlp.router"), "tid2eid", None) is None


def test_what_is_not_run_is_refused(carry: Carry) -> None:
    decoder, tokens = decoder_of(carry), moe_models.tokens(2, 8)
    cache = ContiguousCache(decoder.config, num_rows=2, max_tokens=32)
    places = torch.arange(8)[None] + 3
    with raises(UsageError, "by counting tokens", hint="valid_BS"):
        decoder(Batch(tokens_BS=tokens, positions_BS=places), cache)
    with raises(MappingError, "layers of multi-token prediction have residuals side by side"):
        Decoder(replace(decoder.config, num_mtp_layers=1))


def test_such_a_model_is_not_quantized(tmp_path: Path) -> None:
    moe_models.transformers_model(NAME).save_pretrained(tmp_path / "hf")
    with raises(MappingError, "is not quantized", id="unsupported-model"):
        quantize(tmp_path / "hf", tmp_path / "out", recipe="fp8")


def test_groups_of_heads_go_evenly_over_ranks(carry: Carry) -> None:
    with raises(LayoutError, "tp=4 does not divide out_groups=2"):
        check_layout(decoder_of(carry).config, ParallelConfig(tp=4))
