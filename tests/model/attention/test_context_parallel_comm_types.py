"""Types of communication of context parallelism: the numbers of one process, bytes and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megtool.errors import LayoutError, UsageError
from megtool.kernels.attention import dot_product
from megtool.kernels.attention import tiles as attention_tiles
from megtool.model.attention.grouped_query import Attention
from megtool.model.batch import Batch
from megtool.model.layers.dropout import Dropout
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.recompute import recompute
from megtool.options.layout import ParallelConfig
from megtool.parallel import collectives
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig
from megtool.train.model.memory_estimate import meta_groups
from tests.support.errors import raises
from tests.support.worlds import context_layouts as ranks
from tests.support.worlds.gloo_world import run_world

CLOSE = 1e-5
HIERARCHY: dict[str, Any] = {"cp": 4, "cp_comm_type": ("a2a+p2p",), "hierarchical_cp": (2, 2)}
RING: dict[str, Any] = {"cp": 2, "cp_comm_type": ("p2p",)}
HEADS: dict[str, Any] = {"cp": 2, "cp_comm_type": ("a2a",)}
slow = pytest.mark.slow


def worst(size: int, jobs: list[ranks.Job]) -> dict[str, float]:
    """What is not close, on any rank."""
    found = run_world(ranks.verify_master_weights, size, jobs)
    assert all(len(one) == len(jobs) for one in found)
    return {k: v for one in found for k, v in one.items() if not v < CLOSE}


def test_two_ranks_have_the_numbers_of_one_process() -> None:
    jobs = [(n, "plain", RING, False) for n in ("grouped", "softcap", "latent", "sparse")]
    jobs += [(n, "documents", RING, False) for n in ("windows and sinks", "chunks")]
    jobs += [("slopes", "padded left", RING, False)]
    jobs += [(n, "documents", HEADS, False) for n in ("grouped", "windows and sinks", "latent")]
    jobs += [("slopes", "plain", HEADS, False)]
    assert worst(2, jobs) == {}


def test_four_ranks_have_them_at_two_levels_and_layer_by_layer() -> None:
    mixed = HIERARCHY | {"cp_comm_type": ("p2p", "a2a+p2p")}
    jobs = [("grouped", "documents", HIERARCHY, False), ("slopes", "plain", mixed, False)]
    assert worst(4, jobs) == {}


@slow
@pytest.mark.parametrize("layout", [RING, HEADS], ids=str)
def test_two_ranks_have_them_for_every_kind_of_batch(layout: dict[str, Any]) -> None:
    without = {"sparse"} if layout is HEADS else set()
    jobs = [
        (name, kind, layout, False)
        for name in ranks.MODELS
        for kind in ranks.BATCHES
        if name not in without
    ]
    assert worst(2, jobs) == {}


@slow
@pytest.mark.parametrize(
    ("layout", "sequence_parallel"),
    [
        (RING | {"cp": 4}, False),
        (HIERARCHY, False),
        (RING | {"tp": 2}, True),
        (RING | {"pp": 2}, False),
        (RING | {"dp": 2}, False),
        (HIERARCHY | {"cp_comm_type": ("a2a+p2p", "all_gather")}, False),
    ],
    ids=str,
)
def test_four_ranks_have_them(layout: dict[str, Any], sequence_parallel: bool) -> None:
    without = {"sparse"} if layout["cp_comm_type"][0] != "p2p" or "pp" in layout else set()
    jobs = [
        (name, kind, layout, sequence_parallel)
        for name, config in ranks.MODELS.items()
        for kind in ("plain", "documents")
        if name not in without and ("tp" not in layout or config.get("mamba_num_groups") != 1)
    ]
    assert worst(4, jobs) == {}


# ---- Dropout, and layers that are computed again


def dropped(rank: int, size: int, layout: dict[str, Any]) -> list[float]:
    """Losses of a pass with dropout: twice, by tiles of another size, and with another seed."""
    groups = ProcessGroups.start(ParallelConfig(**layout))
    batch, labels = ranks.batch_of("documents")
    out = []
    for seed, again in ((5, ""), (5, "selective"), (5, "full"), (6, "")):
        one = ranks.whole("grouped")
        decoder = Decoder(one.config, groups, device="cpu", vocab_multiple=64)
        decoder.load_state_dict(one.state_dict())
        decoder.dropout = Dropout(attention=0.3)
        if again:
            recompute(decoder, again)  # type: ignore[arg-type]
        torch.manual_seed(seed + rank)
        loss, _ = decoder.loss(batch, labels)
        loss.backward()
        grads = [p.grad.double().square().sum() for p in decoder.parameters() if p.grad is not None]
        out += [float(loss), float(torch.stack(grads).sum())]
    groups.stop()
    return out


def test_a_seed_decides_and_recompute_draws_the_same() -> None:
    for found in run_world(dropped, 2, RING):
        assert found[0:2] == found[2:4] == found[4:6]
        assert found[0] != found[6]


# ---- Bytes and memory

TOKENS = 1024


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes that this rank sends to others in the block, by what sends them."""
    sent = {"gather": 0, "scatter": 0, "shift": 0, "exchange": 0}
    real = (
        collectives._gather,
        collectives._reduce_scatter,
        dist.batch_isend_irecv,
        dist.all_to_all_single,
    )

    def gather(out: Tensor, x: Tensor, **more: Any) -> Any:
        sent["gather"] += x.nbytes * (out.shape[0] // x.shape[0] - 1)
        return real[0](out, x, **more)

    def scatter(out: Tensor, x: Tensor, **more: Any) -> Any:
        sent["scatter"] += x.nbytes - out.nbytes
        return real[1](out, x, **more)

    def shift(ops: list[Any]) -> Any:
        sent["shift"] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return real[2](ops)

    def exchange(out: Tensor, x: Tensor, receive: Any, send: Any, group: Any) -> Any:
        sent["exchange"] += x.nbytes * (len(send) - 1) // len(send)
        return real[3](out, x, receive, send, group=group)

    collectives._gather, collectives._reduce_scatter = gather, scatter
    dist.batch_isend_irecv, dist.all_to_all_single = shift, exchange
    try:
        yield sent
    finally:
        collectives._gather, collectives._reduce_scatter = real[:2]
        dist.batch_isend_irecv, dist.all_to_all_single = real[2:]


def peak_bytes(events: Any) -> int:
    """The largest sum of what was allocated and not freed, of a profile."""
    total = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    return most


def measured(rank: int, size: int, layouts: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The peak of memory of attention, forward and backward, and bytes sent, at each layout."""
    dot_product.NUM_PAIRS, attention_tiles.NUM_SCORES = 0, 1 << 14
    out = []
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    for layout in layouts:
        cp = layout["cp"]
        groups = ProcessGroups.start(ParallelConfig(**layout | {"dp": size // cp}))
        config = ModelConfig.from_fields(
            num_layers=1,
            hidden_size=32,
            ffn_hidden_size=32,
            num_heads=4,
            num_kv_heads=4,
            head_dim=32,
            vocab_size=64,
            max_positions=TOKENS,
            position_embedding="none",
        )
        decoder = Decoder(config, groups, device="cpu", vocab_multiple=64)
        attention = decoder.decoder.layers["0"].self_attention
        assert isinstance(attention, Attention)
        for p in decoder.parameters():
            torch.nn.init.normal_(p, std=0.1)
        batch = Batch(tokens_BS=torch.zeros(1, TOKENS, dtype=torch.int64))
        x_TH = torch.randn(TOKENS // cp, 32, requires_grad=True)

        def run(frame: Any, x: Tensor = x_TH, a: Attention = attention) -> None:
            a(x, frame).sum().backward()

        run(decoder.frame(batch))
        with (
            counted() as sent,
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof,
        ):
            run(decoder.frame(batch))
        out.append((peak_bytes(prof.profiler.kineto_results.events()), sum(sent.values())))
        groups.stop()
    return out


def test_bytes_and_memory_of_each_type() -> None:
    """A ring's memory falls with the number of ranks, also that of keys and values."""
    layouts = [
        {"cp": 1},
        {"cp": 4},
        RING,
        RING | {"cp": 4},
        HEADS | {"cp": 4},
        HIERARCHY,
    ]
    found = run_world(measured, 4, layouts)
    for rank in found:
        one, gather_4, ring_2, ring_4, heads_4, both_4 = rank
        kv = 2 * TOKENS * 4 * 32 * 4  # bytes of the row's keys and values
        assert one[1] == 0
        # All ranks' parts, and as much of gradients on the way back.
        assert gather_4[1] == 2 * 3 * kv // 4
        # Round once, and in the backward pass twice as much: gradients go home, too.
        assert ring_4[1] == (3 + 3 + 4) * kv // 4
        # Queries, keys, values and outputs, there and back: three quarters go to others.
        assert heads_4[1] == 2 * (kv * 2) // 4 * 3 // 4
        assert both_4[1] < heads_4[1] + ring_4[1]
        # With some room, since gloo lets go of what it has sent a moment later.
        assert ring_4[0] < 0.7 * ring_2[0] < 0.7 * one[0]
        assert heads_4[0] < 0.6 * one[0]
        assert both_4[0] < 0.6 * one[0]
        assert ring_4[0] < gather_4[0] < one[0]


# ---- Refusals


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        (ranks.MODELS["grouped"], HEADS | {"cp": 8}, ("a2a", "heads", "8")),
        (ranks.MODELS["grouped"], HEADS | {"tp": 2}, ("a2a", "key and value", "2")),
        (ranks.MODELS["sparse"], HEADS, ("a2a", "indexer")),
        (ranks.MODELS["grouped"], RING | {"cp_comm_type": ("p2p",) * 3}, ("3 types", "2 layers")),
    ],
    ids=["heads", "heads over tp", "indexer", "layers"],
)
def test_what_cannot_be_is_refused(
    model: dict[str, Any], layout: dict[str, Any], words: tuple[str, ...]
) -> None:
    with raises((LayoutError, UsageError), *words):
        Decoder(ModelConfig.from_fields(**model), meta_groups(ParallelConfig(**layout), 0))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"cp": 2, "cp_comm_type": ("ring",)}, ("'ring'",)),
        ({"cp": 4, "cp_comm_type": ("a2a+p2p",)}, ("a2a+p2p", "[]", "4")),
        (HIERARCHY | {"hierarchical_cp": (4, 2)}, ("[4, 2]", "cp is 4")),
        (RING | {"hierarchical_cp": (2, 1)}, ("[2, 1]", "no layer")),
    ],
    ids=str,
)
def test_levels_that_do_not_fit_are_refused(layout: dict[str, Any], words: tuple[str, ...]) -> None:
    with raises(LayoutError, *words):
        ParallelConfig(**layout)
