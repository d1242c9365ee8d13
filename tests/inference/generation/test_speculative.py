"""Speculative decoding: the same texts, the same distribution, and the drafts of the formula."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool.errors import UsageError
from megtool.inference.forward import Forward
from megtool.inference.generation.batching import ChosenToken, GenerateRequest
from megtool.inference.generation.drafting import DraftRow
from megtool.inference.generation.generate import Decoding, Meter, generate
from megtool.inference.generation.mtp_drafter import MtpDrafter
from megtool.inference.generation.sampling import draw, probabilities
from megtool.inference.generation.speculative import SpeculativeSlots, choose_drafting
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.options.layout import ParallelConfig
from megtool.options.sampling import Sampling
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.open import open_source
from megtool.spec.model_config import ModelConfig
from tests.support.emulated.graph_rules import check_graphs
from tests.support.models import mtp_models
from tests.support.models.mtp_reference import MtpReference
from tests.support.worlds.gloo_world import run_world

pytest.importorskip("transformers")

Tokens = list[tuple[int, ...]]
SIZES: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 8,
    "ffn_hidden_size": 8,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 8,
    "vocab_size": 5,
    "num_mtp_layers": 2,
}
_MAMBA = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 4,
    "mamba_num_groups": 2,
    "mamba_state_dim": 4,
    "mamba_conv_kernel": 4,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel": 4,
}
_COMPRESSED = {
    "num_layers": 4,
    "num_heads": 2,
    "compress_ratios": (0, 4, 8, 4),
    "q_lora_rank": 4,
    "out_groups": 2,
    "out_lora_rank": 4,
    "window_size": 3,
    "index_num_heads": 2,
    "index_head_dim": 4,
    "index_topk": 2,
    "rotary_percent": 0.5,
    "qk_norm": True,
    "attn_sinks": True,
    "hyper_streams": 2,
    "norm_eps": 1e-3,
}
RECURRENT: dict[str, dict[str, Any]] = {
    "compressed keys": _COMPRESSED,
    "delta nets": _DELTA | {"num_layers": 2, "layer_kinds": ("G-", "*-"), "mtp_kind": "*-"},
    "short convolutions": {
        "num_layers": 2,
        "layer_kinds": ("c-", "*-"),
        "mtp_kind": "c-",
        "short_conv_taps": 5,
    },
    "mamba": _MAMBA | {"num_layers": 3, "layer_kinds": ("M", "*", "-"), "mtp_kind": "*-"},
    "mamba, predicted by several layers": _MAMBA
    | {"num_layers": 2, "layer_kinds": ("M", "-"), "mtp_kind": "M*-M"},
    "mamba, predicted by mamba": _MAMBA
    | {"num_layers": 2, "layer_kinds": ("M", "-"), "mtp_kind": "M-"},
}


class Numbers:
    """Tokens as text: their numbers."""

    def push(self, token: int) -> str:
        return f"{token} "

    def finish(self) -> str:
        return ""


def run(
    forward: Forward, requests: Sequence[GenerateRequest], **options: Any
) -> tuple[Tokens, Meter]:
    meter = Meter()
    with check_graphs(forward.device):
        texts = [
            *generate(forward, requests, Decoding(**options), new_detokenizer=Numbers, meter=meter)
        ]
    return [text.ids for text in texts], meter


def prompts(lengths: Sequence[int], limits: Sequence[int], vocab: int) -> list[GenerateRequest]:
    generator = torch.Generator().manual_seed(0)
    return [
        GenerateRequest(
            number=n,
            prompt=tuple(torch.randint(0, vocab, (length,), generator=generator).tolist()),
            max_new_tokens=limit,
        )
        for n, (length, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


MIXED = prompts([5, 1, 9, 2, 4, 12], [20, 12, 1, 2, 3, 9], 101)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp")
    mtp_models.save("mimo", folder)
    return folder


@pytest.fixture(scope="module")
def forward(folder: Path) -> Forward:
    return Forward(load(open_source(folder), dtype="float32", keeps_mtp=True))


def recurrent(name: str) -> Forward:
    """A model with recurrent mixers, whose next token the whole past decides."""
    decoder = Decoder(ModelConfig.from_fields(**SIZES | RECURRENT[name]), device="cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0, 0.7, generator=generator)
    return Forward(decoder.requires_grad_(False).eval())


def agreeable() -> Forward:
    """A model whose drafts are often right: little but the last token decides."""
    decoder = Decoder(ModelConfig.from_fields(**SIZES), device="cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.normal_(0, 0.15, generator=generator)
            if "norm" in name:
                parameter.fill_(1.0)
        assert decoder.mtp is not None
        for m in range(2):
            eye = torch.eye(8)
            decoder.mtp.layer(m).eh_proj.weight.copy_(torch.cat((eye, 0 * eye), 1))
        decoder.embedding.word_embeddings.weight.mul_(10)  # type: ignore[union-attr]
        decoder.output_layer.weight.mul_(4)  # type: ignore[union-attr]
    return Forward(decoder.requires_grad_(False).eval())


@pytest.mark.parametrize("num_slots", [16, 2])
def test_greedy_texts_are_those_of_plain_decoding(num_slots: int, forward: Forward) -> None:
    plain, _ = run(forward, MIXED, num_slots=num_slots)
    drafted, meter = run(forward, MIXED, num_slots=num_slots, speculative=True)
    assert drafted == plain
    assert meter.num_drafted > 0
    assert meter.new_tokens == sum(map(len, plain))
    assert meter.step_tokens == meter.new_tokens - len(MIXED)


def test_right_drafts_save_steps() -> None:
    forward = agreeable()
    requests = prompts([4, 7], [40, 30], 5)
    plain, one = run(forward, requests)
    drafted, several = run(forward, requests, speculative=True)
    assert drafted == plain
    assert several.num_accepted > several.num_drafted // 2
    assert several.num_steps < one.num_steps * 2 // 3
    ends = frozenset({plain[0][9]})  # a text may end at a draft that is right
    assert (
        run(forward, requests, eos_ids=ends, speculative=True)[0]
        == (run(forward, requests, eos_ids=ends)[0])
    )


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_mixers_go_back_to_before_a_rejected_draft(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy texts are those of plain decoding whether no draft, some or all are right."""
    forward = recurrent(name)
    requests = prompts([1, 7, 2, 20, 3], [40, 30, 20, 10, 2], 5)
    plain, _ = run(forward, requests)
    assert len(set(plain[0])) > 1
    generator = torch.Generator().manual_seed(0)

    def often_right(self: MtpDrafter, rows: Sequence[DraftRow], x_BH: torch.Tensor) -> torch.Tensor:
        errors = (torch.rand(len(rows), generator=generator) < 0.35).tolist()
        at = [len(r.running.tokens) + len(r.drafts) for r in rows]
        right = [plain[r.number][n] for r, n in zip(rows, at, strict=True)]
        return torch.tensor([(t + e) % 5 for t, e in zip(right, errors, strict=True)])

    monkeypatch.setattr(MtpDrafter, "_propose", often_right)
    for num_slots in (16, 2):
        drafted, meter = run(forward, requests, num_slots=num_slots, speculative=True)
        assert drafted == plain
        assert 0.3 < meter.num_accepted / meter.num_drafted < 0.8


@pytest.mark.parametrize("name", RECURRENT)
def test_drafts_do_not_depend_on_how_a_text_was_read(name: str) -> None:
    """Layers draft in the middle of a text what they do if all of it is a prompt."""
    forward = recurrent(name)
    drafts: dict[tuple[int, ...], list[int]] = {}
    draft = MtpDrafter.draft

    def note(self: MtpDrafter, rows: Sequence[DraftRow]) -> None:
        draft(self, rows)
        for row in rows:
            drafts[tuple(row.running.known)] = row.drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MtpDrafter, "draft", note)
        run(forward, prompts([4, 9, 1], [12, 9, 12], 5), num_slots=2, speculative=True)
        texts, drafts = drafts, {}
        requests = [
            GenerateRequest(number=n, prompt=text[:-1], max_new_tokens=2 + len(expected))
            for n, (text, expected) in enumerate(texts.items())
        ]
        run(forward, requests, num_slots=1, speculative=True)
    assert sum(map(len, texts.values())) > 30
    assert {text: drafts[text] for text in texts} == texts


def test_drafts_are_those_of_the_formula(
    folder: Path, forward: Forward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step, with caches, what the layers would draft from the whole text so far."""
    reference = MtpReference(folder, tmp_path / "ordinary", "mimo")
    checked = []
    draft = MtpDrafter.draft

    def compare(self: MtpDrafter, rows: Sequence[DraftRow]) -> None:
        draft(self, rows)
        for row in rows:
            text, drafts = row.running.known, row.drafts
            last = len(text) - 2
            for depth, token in enumerate(drafts):
                tokens = torch.tensor([[*text, *drafts[:depth], 0]])
                with torch.no_grad():
                    state = reference.states(tokens)[depth + 1][0, last]
                    logits = reference.model.lm_head(state)
                assert float(logits.max() - logits[token]) < 1e-4
                checked.append(depth)

    monkeypatch.setattr(MtpDrafter, "draft", compare)
    run(forward, MIXED, num_slots=4, speculative=True)
    assert Counter(checked)[1] > 10


def test_drafts_of_residuals_side_by_side_are_those_of_a_pass_over_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V4, whose loss by its equations is compared where its attention is tested."""
    mtp_models.save_deepseek_v4(tmp_path)
    forward = Forward(load(open_source(tmp_path), dtype="float32", keeps_mtp=True))
    plain, _ = run(forward, MIXED, num_slots=4)
    decoder, checked = forward.decoder, 0
    draft = MtpDrafter.draft

    def compare(self: MtpDrafter, rows: Sequence[DraftRow]) -> None:
        nonlocal checked
        draft(self, rows)
        for row in rows:
            text = torch.tensor([row.running.known])
            before = decoder.mtp_input(decoder.hidden(Batch(tokens_BS=text)))
            for token in row.drafts:
                following = Batch(tokens_BS=torch.cat((text[:, 1:], text[:, :1]), 1))
                frame = decoder.frame(following)
                layer = decoder.mtp.layer(0)  # type: ignore[union-attr]
                embedded = decoder.embed_tokens(following.tokens_BS, frame)
                state = layer(before, embedded, frame)[-2]  # the last reads no further token
                logits = decoder.logits(state[None])[0]
                assert float(logits.max() - logits[token]) < 1e-4
                checked += 1

    monkeypatch.setattr(MtpDrafter, "draft", compare)
    drafted, meter = run(forward, MIXED, num_slots=4, speculative=True)
    assert drafted == plain
    assert checked == meter.num_drafted > 20


def test_drafts_of_a_model_that_agrees_are_accepted_at_any_depth() -> None:
    """The caches of both layers go on from what was accepted, whether none, one or two were."""
    forward = agreeable()
    lengths: set[int] = set()
    step = SpeculativeSlots.step

    def note(self: SpeculativeSlots, *args: Any) -> list[list[ChosenToken]]:
        out = step(self, *args)
        lengths.update(map(len, out))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpeculativeSlots, "step", note)
        run(
            forward,
            prompts([3] * 8, [30] * 8, 5),
            speculative=True,
            sampling=Sampling(temperature=1.0),
        )
    assert lengths == {1, 2, 3}


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("", {"temperature": 0.8}),
        ("", {"temperature": 1.3, "top_k": 3}),
        ("mamba, predicted by mamba", {"temperature": 1.0}),
    ],
)
def test_sampled_texts_have_the_model_s_distribution(name: str, sampling: dict[str, Any]) -> None:
    """Chi-squared of the first three tokens of many texts against exact probabilities."""
    forward, number = recurrent(name) if name else agreeable(), 3000
    how = Sampling(**sampling, seed=1)
    prompt = (1, 3)
    requests = [GenerateRequest(number=n, prompt=prompt, max_new_tokens=3) for n in range(number)]
    texts, meter = run(forward, requests, num_slots=1000, sampling=how, speculative=True)
    assert 0.1 < meter.num_accepted / meter.num_drafted < 0.95
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, chance in expected.items():
            tokens = torch.tensor([[*prompt, *text]])
            with torch.no_grad():
                logits = forward.decoder(Batch(tokens_BS=tokens))[0, -1:]
            for token, p in enumerate(probabilities(logits, how)[0].tolist()):
                longer[(*text, token)] = chance * p
        expected = longer
    seen = Counter(texts)
    assert all(expected[text] > 0 for text in seen)
    cells = [(seen[t], p * number) for t, p in expected.items() if p * number >= 5]
    chi_squared = sum((a - b) ** 2 / b for a, b in cells)
    assert chi_squared < len(cells) + 4 * math.sqrt(2 * len(cells))


def test_a_sequence_is_the_same_alone_and_in_a_batch(forward: Forward) -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    many, _ = run(forward, MIXED, num_slots=16, sampling=sampling, speculative=True)
    few, _ = run(forward, MIXED, num_slots=1, sampling=sampling, speculative=True)
    assert many == few


def test_draw_takes_nothing_without_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([0.0, 0.3, 0.0, 0.1, 0.0])
    seen = Counter(draw(weights, generator) for _ in range(400))
    assert set(seen) == {1, 3}
    assert seen[1] == pytest.approx(300, abs=40)


def on_rank(rank: int, size: int, folder: str, layout: dict[str, int], how: Any) -> Tokens:
    groups = ProcessGroups.start(ParallelConfig(**layout))
    torch.set_num_threads(1)
    decoder = load(open_source(Path(folder)), groups=groups, dtype="float32", keeps_mtp=True)
    return run(Forward(decoder), MIXED, speculative=True, num_slots=3, sampling=how)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mimo", "qwen3_next", "nemotron_h", "deepseek_v4"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9)], ids=["greedy", "t"])
def test_ranks_write_the_texts_of_one(name, layout, sampling, tmp_path: Path) -> None:
    if name == "deepseek_v4":
        mtp_models.save_deepseek_v4(tmp_path)
    else:
        mtp_models.save(name, tmp_path)
    forward = Forward(load(open_source(tmp_path), dtype="float32", keeps_mtp=True))
    expected, _ = run(forward, MIXED, speculative=True, num_slots=3, sampling=sampling)
    if sampling.is_greedy:
        assert expected == run(forward, MIXED, num_slots=3)[0]
    assert run_world(on_rank, 2, str(tmp_path), layout, sampling) == [expected] * 2


def test_models_that_cannot_draft_are_refused() -> None:
    for config, how, problem in (
        (
            ModelConfig.from_fields(**SIZES | {"num_mtp_layers": 0}),
            {},
            "has no layers of multi-token",
        ),
        (ModelConfig.from_fields(**SIZES), {"stream_layers": True}, "--stream-layers"),
    ):
        with pytest.raises(UsageError, match=problem) as caught:
            choose_drafting("mtp", None, config, **how)
        assert "--speculative none" in (caught.value.hint or "")
