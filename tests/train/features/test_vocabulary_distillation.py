"""Losses between vocabularies against the papers' formulas in float64, and TRL's own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.data.token_alignment import TokenAligner, TokenBytes
from megtool.data.tokenizer import Tokenizer
from megtool.errors import LayoutError, UsageError
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.pipeline import PipelineSchedule
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.features import vocabulary_distillation
from megtool.train.features.distillation import (
    DistillationFeature,
    check_between_vocabularies,
)
from megtool.train.features.vocabulary_distillation import VocabularyPair, align_batch
from tests.support.errors import raises
from tests.support.models.taught_decoders import STUDENT, TEACHER, build
from tests.support.models.tiny_vocabularies import CORPUS, save_tokenizer
from tests.support.peers.release import install_release

T = 1.7


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenBytes, TokenBytes]:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("vocabularies")
    folders = save_tokenizer(root / "own", "bytes", 300), save_tokenizer(root / "b", "bytes", 420)
    own, taught = (TokenBytes(Tokenizer.from_folder(folder)) for folder in folders)
    return own, taught


def rows(own: TokenBytes) -> tuple[Batch, Tensor]:
    """Two rows, the second of two documents and padding; labels of most tokens."""
    eos = own.tokenizer.eos_id
    assert eos is not None
    texts = [own.tokenizer.encode(text, add_special=False) for text in CORPUS[:3]]
    first, second = texts[2][:30], [*texts[0][:12], eos, *texts[1][:9], eos]
    width = max(len(first), len(second)) + 2
    tokens_BS = torch.zeros(2, width, dtype=torch.int64)
    documents_BS = torch.full_like(tokens_BS, -1)
    valid_BS = torch.zeros(2, width, dtype=torch.bool)
    for row, tokens in enumerate((first, second)):
        tokens_BS[row, : len(tokens)] = torch.tensor(tokens)
        valid_BS[row, : len(tokens)] = True
        documents_BS[row, : len(tokens)] = 0
    documents_BS[1, 13 : len(second)] = 1
    labels_BS = tokens_BS.roll(-1, 1)
    labels_BS[0, len(first) - 1 :], labels_BS[1, len(second) - 1 :] = -100, -100
    labels_BS[1, 12], labels_BS[0, :4] = -100, -100
    return Batch(tokens_BS=tokens_BS, documents_BS=documents_BS, valid_BS=valid_BS), labels_BS


def reference(
    own_logits: list[Tensor],
    taught_logits: list[Tensor],
    own_tokens: list[int],
    taught_tokens: list[int],
    pairs: list[tuple[int, int]] | None,
) -> Tensor:
    """The loss of one span by the papers' formulas: lists of rows that predict its tokens."""

    def merged(logits: list[Tensor], tokens: list[int]) -> Tensor:
        *before, last = [(x.double() / T).softmax(-1) for x in logits]
        for probs, token in zip(before, tokens, strict=False):
            last = last * probs[token]
        return last

    p, q = merged(own_logits, own_tokens), merged(taught_logits, taught_tokens)

    def wasserstein(p: Tensor, q: Tensor) -> Tensor:
        n = max(len(p), len(q))
        a = torch.cat((p.sort(descending=True).values, p.new_zeros(n - len(p))))
        b = torch.cat((q.sort(descending=True).values, q.new_zeros(n - len(q))))
        return (a - b).abs().sum()

    if pairs is None:
        return wasserstein(p, q)
    kl = sum(
        (max(q[j], 1e-8) * (math.log(max(q[j], 1e-8)) - p[i].clamp_min(1e-8).log()))
        for i, j in pairs
    )
    rest_p = torch.stack([x for i, x in enumerate(p) if i not in {a for a, _ in pairs}])
    rest_q = torch.stack([x for j, x in enumerate(q) if j not in {b for _, b in pairs}])
    share = len(pairs) / len(q)
    return torch.as_tensor(share * kl + (1 - share) * wasserstein(rest_p, rest_q))


def distill(
    student: Decoder, teacher: Decoder, pair: VocabularyPair, data: tuple[Batch, Tensor]
) -> float:
    """The loss of a step that distills alone, whose gradients the student then has."""
    feature = DistillationFeature(
        student, teacher, num_microbatches=1, temperature=T, weight=1.0, vocabularies=pair
    )
    schedule = PipelineSchedule(student, num_microbatches=1, objective=feature.objective)
    with feature.around_passes(0, data[0]):
        total, _ = schedule.step(*data)
    return float(total)


@pytest.mark.parametrize("loss", ["uld", "gold"])
def test_a_step_has_the_loss_of_the_formulas(
    loss: str, both: tuple[TokenBytes, TokenBytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, taught = both
    torch.set_num_threads(1)
    monkeypatch.setitem(vocabulary_distillation.CHUNK, "cpu", 3000)  # a few spans at a time
    student = build(STUDENT.with_fields(vocab_size=310), ProcessGroups.alone(), 1).train()
    teacher = build(TEACHER.with_fields(vocab_size=430, max_positions=64), ProcessGroups.alone(), 2)
    batch, labels_BS = rows(own)
    pair = VocabularyPair(own=own, taught=taught, loss=loss)
    total = distill(student, teacher, pair, (batch, labels_BS))
    found = {n: p.grad.double() for n, p in student.named_parameters() if p.grad is not None}

    spans = align_batch(TokenAligner(*both), batch, labels_BS)
    assert spans.num_spans > 15
    assert len(spans.own.rows_N) > spans.num_spans < len(spans.taught.rows_N) + 15
    student.zero_grad()
    logits_TV = student.logits(student.hidden(batch))[:, :310]
    with torch.no_grad():
        taught_TV = teacher.logits(teacher.hidden(spans.teacher))[:, :430]
    pairs = own.shared(taught) if loss == "gold" else None
    wanted, begin, begin_taught = torch.zeros((), dtype=torch.float64), 0, 0
    for end, end_taught in zip(
        spans.own.ends_G.tolist(), spans.taught.ends_G.tolist(), strict=True
    ):
        of, of_taught = slice(begin, end), slice(begin_taught, end_taught)
        wanted = wanted + reference(
            list(logits_TV[spans.own.rows_N[of]]),
            list(taught_TV[spans.taught.rows_N[of_taught]]),
            spans.own.tokens_N[of].tolist(),
            spans.taught.tokens_N[of_taught].tolist(),
            pairs,
        )
        begin, begin_taught = end, end_taught
    assert total == pytest.approx(float(wanted.detach()), rel=1e-5)
    wanted.backward()
    for name, p in student.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(found[name], grad.double(), rtol=2e-3, atol=2e-5)


def test_spans_lie_within_documents_and_labels(both: tuple[TokenBytes, TokenBytes]) -> None:
    """Rows that predict are before the tokens, in the same document, and have their labels."""
    own, taught = both
    batch, labels_BS = rows(own)
    spans = align_batch(TokenAligner(own, taught), batch, labels_BS)
    tokens_T, labels_T = batch.tokens_BS.flatten(), labels_BS.flatten()
    rows_N = spans.own.rows_N
    assert torch.equal(labels_T[rows_N], spans.own.tokens_N)
    assert torch.equal(tokens_T[rows_N + 1], spans.own.tokens_N)
    assert len(set(rows_N.tolist())) == len(rows_N)
    taught_batch = spans.teacher
    assert taught_batch.documents_BS is not None
    assert taught_batch.positions_BS is not None
    taught_T, numbers_T = taught_batch.tokens_BS.flatten(), taught_batch.documents_BS.flatten()
    rows_M = spans.taught.rows_N
    assert torch.equal(taught_T[rows_M + 1], spans.taught.tokens_N)
    assert torch.equal(numbers_T[rows_M], numbers_T[rows_M + 1])
    starts = (taught_batch.positions_BS == 0) & (taught_batch.documents_BS >= 0)
    assert starts.sum(1).tolist() == [1, 2]
    eos = taught.tokenizer.eos_id
    assert (spans.taught.tokens_N == eos).sum() == 2  # both documents of the second row


_TRL = """
import json, sys
from types import SimpleNamespace
import torch
from trl.experimental.gold.gold_trainer import ULDLoss

facts = json.load(open(sys.argv[1]))

class Vocabulary:
    def __init__(self, table): self.table = table
    def get_vocab(self): return self.table

for loss in ("uld", "gold"):
    config = SimpleNamespace(
        uld_crossentropy_weight=0.0, uld_distillation_weight=1.0,
        uld_student_temperature=facts["t"], uld_teacher_temperature=facts["t"],
        uld_skip_student_eos=False, uld_skip_teacher_eos=False, use_extended_uld=True,
        uld_token_merge_strategy="bayesian", uld_use_hybrid_loss=loss == "gold",
        uld_hybrid_matched_weight=None, uld_hybrid_unmatched_weight=None, beta=0.0,
    )
    own, taught = (Vocabulary(facts[k]["vocabulary"]) for k in ("own", "taught"))
    arrays = {
        k: {n: torch.tensor(facts[k][n])[None] for n in ("logits", "tokens", "labels", "offsets")}
        for k in ("own", "taught")
    }
    a, b = arrays["own"], arrays["taught"]
    value = ULDLoss(config, own, taught, "cpu")(
        a["logits"], b["logits"], a["labels"], b["labels"], a["tokens"], b["tokens"],
        student_byte_offsets=a["offsets"], teacher_byte_offsets=b["offsets"],
    )
    print(loss, float(value))
"""


@pytest.mark.slow
def test_the_losses_are_those_of_trl(both: tuple[TokenBytes, TokenBytes], tmp_path: Path) -> None:
    """ULD, and GOLD's hybrid loss, over the same spans of a prompt's completion."""
    pytest.importorskip("datasets")
    pytest.importorskip("accelerate")
    folder = install_release("trl==1.16.0", tmp_path / "trl")
    own, taught = both
    student = build(STUDENT.with_fields(vocab_size=310, max_positions=64), ProcessGroups.alone(), 1)
    teacher = build(TEACHER.with_fields(vocab_size=430, max_positions=64), ProcessGroups.alone(), 2)
    prompt, completion = "It was a dark", " and stormy night; der Deich überrascht 日本 den Boxer."
    facts: dict[str, Any] = {"t": T}
    tokens = own.tokenizer.encode(prompt, add_special=False)
    start = len(tokens)
    tokens += own.tokenizer.encode(completion, add_special=False)
    batch = Batch(tokens_BS=torch.tensor([tokens]))
    labels_BS = batch.tokens_BS.roll(-1, 1)
    labels_BS[:, : start - 1], labels_BS[:, -1] = -100, -100
    spans = align_batch(TokenAligner(own, taught), batch, labels_BS)
    taught_tokens = spans.teacher.tokens_BS[0].tolist()
    first = int(spans.taught.rows_N[0]) + 1
    with torch.no_grad():
        logits = {
            "own": student.logits(student.hidden(batch))[:, :310],
            "taught": teacher.logits(teacher.hidden(spans.teacher))[:, :430],
        }
    for key, side, ids, at in (
        ("own", own, tokens, start),
        ("taught", taught, taught_tokens, first),
    ):
        offsets, place = [[0, 0]] * at, 0
        for token in ids[at:]:
            size = len(side.of(token) or b"")
            offsets.append([place, place + size])
            place += size
        facts[key] = {
            "vocabulary": side.tokenizer.vocabulary(),
            "logits": logits[key].tolist(),
            "tokens": ids,
            "labels": [-100] * at + ids[at:],
            "offsets": offsets,
        }
    assert len(spans.own.rows_N) == len(tokens) - start
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    (tmp_path / "losses.py").write_text(_TRL)
    done = subprocess.run(
        [sys.executable, tmp_path / "losses.py", tmp_path / "facts.json"],
        env=os.environ | {"PYTHONPATH": str(folder), "TRL_EXPERIMENTAL_SILENCE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = dict(line.split() for line in done.stdout.splitlines() if line[:4] in ("uld ", "gold"))
    for loss in ("uld", "gold"):
        pair = VocabularyPair(own=own, taught=taught, loss=loss)
        total = distill(student, teacher, pair, (batch, labels_BS))
        assert total / spans.num_spans == pytest.approx(float(theirs[loss]), rel=1e-5)


def test_ranks_and_hidden_states_are_refused() -> None:
    for axis in ("tp", "pp", "cp"):
        with raises(LayoutError, f"{axis}=2"):
            check_between_vocabularies(ParallelConfig(**{axis: 2}), 0.0)
    with raises(UsageError, "--distill-hidden-weight"):
        check_between_vocabularies(ParallelConfig(dp=2), 1.0)
