"""Layers that are computed again: by the same kernels, and only where something learns."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.kernels.dispatch import requested_implementation, use
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.recompute import Granularity, recompute
from tests.support.models.dropout_inputs import BATCH, LABELS, PLAIN


def decoder() -> Decoder:
    torch.manual_seed(0)
    made = Decoder(PLAIN, device="cpu")
    for p in made.parameters():
        torch.nn.init.normal_(p, 0.0, 0.1)
    return made.train()


def watch(stage: Decoder) -> list[tuple[int, str]]:
    """The layers that run from now on, in their order, and the kernels they are asked to take."""
    seen: list[tuple[int, str]] = []
    for number, layer in stage.decoder.layers.items():
        run = layer.forward

        def noted(x_TH: Tensor, frame: Any, run: Any = run, number: str = number) -> Tensor:
            seen.append((int(number), requested_implementation()))
            out: Tensor = run(x_TH, frame)
            return out

        layer.forward = noted
    return seen


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_another_thread_computes_again_by_the_same_kernels(granularity: Granularity) -> None:
    """On a GPU a backward pass runs in a thread that has not asked for any."""
    stage, plain = decoder(), decoder()
    seen = watch(stage)
    recompute(stage, granularity)
    with use("torch"):
        loss, _ = stage.loss(BATCH, LABELS)
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        plain.loss(BATCH, LABELS)[0].backward()
    assert seen == [(n, "torch") for n in (0, 1, 2, 3, 3, 2, 1, 0)]
    for p, q in zip(stage.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, q.grad)


def test_layers_before_the_first_that_learns_keep_nothing_for_a_second_time() -> None:
    stage = decoder()
    for name, p in stage.named_parameters():
        p.requires_grad_("layers.2" in name)
    seen = watch(stage)
    recompute(stage, "full")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        x_TH = stage.embed(Batch(tokens_BS=BATCH.tokens_BS), frame := stage.frame(BATCH))
        for n in ("0", "1"):
            x_TH = stage.decoder.layers[n](x_TH, frame)
    assert not kept
    assert not x_TH.requires_grad
    seen.clear()
    stage.loss(BATCH, LABELS)[0].backward()
    assert [n for n, _ in seen] == [0, 1, 2, 3, 3, 2]
