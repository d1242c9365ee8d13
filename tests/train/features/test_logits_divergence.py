"""The divergence of logits against torch's own, at any chunk."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megtool.train.features import logits_divergence
from megtool.train.features.logits_divergence import LogitsHead, kl_divergence


@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize(("softcap", "scale", "temperature"), [(0.0, 1.0, 1.0), (5.0, 0.5, 2.5)])
def test_the_divergence_and_its_gradients_are_torchs(chunk, softcap, scale, temperature) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 16, dtype=torch.float64).float().requires_grad_()
    w = torch.randn(50, 16).requires_grad_()
    tx, tw = torch.randn(7, 24), torch.randn(50, 24)

    def bent(raw: Tensor) -> Tensor:
        raw = raw * scale
        return softcap * torch.tanh(raw / softcap) if softcap else raw

    held = 47
    ours = kl_divergence(
        x,
        LogitsHead(weight_VH=w, softcap=softcap, scale=scale),
        tx,
        LogitsHead(weight_VH=tw, softcap=softcap, scale=scale),
        num_columns=held,
        temperature=temperature,
        chunk=chunk,
    )
    (3 * ours).backward()
    mine = x.grad, w.grad
    x.grad = w.grad = None
    log_s = F.log_softmax(bent(x @ w[:held].T) / temperature, 1)
    log_t = F.log_softmax(bent(tx @ tw[:held].T) / temperature, 1)
    theirs = F.kl_div(log_s, log_t, reduction="sum", log_target=True) * temperature**2
    (3 * theirs).backward()
    assert torch.allclose(ours, theirs, rtol=1e-5)
    for a, b in zip(mine, (x.grad, w.grad), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def test_chunks_of_a_large_vocabulary_have_enough_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    logits = LogitsHead.logits

    def count(head: LogitsHead, x_TH: Tensor, num_columns: int) -> Tensor:
        rows.append(len(x_TH))
        return logits(head, x_TH, num_columns)

    monkeypatch.setattr(LogitsHead, "logits", count)
    monkeypatch.setitem(logits_divergence.CHUNK, "cpu", 100)
    x, head = torch.randn(150, 4), LogitsHead(weight_VH=torch.randn(50, 4))
    found = kl_divergence(x, head, x + 1, head, num_columns=50)
    assert rows == [64, 64, 64, 64, 22, 22]  # of student and teacher
    assert torch.allclose(found, kl_divergence(x, head, x + 1, head, num_columns=50, chunk=150))
