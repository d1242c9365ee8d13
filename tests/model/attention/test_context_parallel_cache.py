"""A cache of which each rank of context parallelism keeps a part: the logits of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megtool.errors import LayoutError, UsageError
from megtool.model.attention.context_parallel import check_cache
from megtool.model.batch import Batch
from megtool.model.cache.paged import PagedCache
from megtool.model.stacks.decoder import Decoder
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import Group, ProcessGroups
from tests.support.errors import raises
from tests.support.worlds import context_layouts as ranks
from tests.support.worlds.gloo_world import run_world
from tests.support.worlds.moe_layouts import rank_part

NAMES = ("grouped", "windows and sinks", "softcap", "chunks", "slopes", "latent", "mamba")
LENGTHS = (11, 6, 1)
STEPS = 3


def logits_of(decoder: Decoder) -> tuple[torch.Tensor, int]:
    """Logits of prompts of unequal lengths, read in two chunks, and of some steps; and the bytes
    of keys that this rank keeps."""
    cache = PagedCache(
        decoder.config,
        num_blocks=20,
        block_size=4,
        num_sequences=3,
        groups=decoder.groups,
    )
    tokens = torch.randint(0, 61, (3, 16), generator=torch.Generator().manual_seed(4))
    read, found = [0, 0, 0], []
    counts = [[min(n, 5) for n in LENGTHS], [n - min(n, 5) for n in LENGTHS]]
    counts += [[1, 1, 1]] * STEPS
    for some in counts:
        rows = [(n, count) for n, count in enumerate(some) if count]
        cache.choose(rows)
        width = max(count for _, count in rows)
        given = torch.stack([tokens[n, read[n] : read[n] + width] for n, _ in rows])
        valid = torch.arange(width) < torch.tensor([[count] for _, count in rows])
        batch = Batch(tokens_BS=given, valid_BS=None if bool(valid.all()) else valid)
        logits = decoder(batch, cache)
        found += [logits[place, :count].flatten() for place, (_, count) in enumerate(rows)]
        for n, count in rows:
            read[n] += count
    kept = sum(t.nbytes for t in (*cache.keys.values(), *cache.values.values()))
    return torch.cat(found), kept


def compare(rank: int, size: int, layout: dict[str, int]) -> dict[str, tuple[float, float]]:
    """The largest difference of logits on this rank, and its share of the bytes, by model."""
    dist.init_process_group("gloo")
    groups = ProcessGroups.start(ParallelConfig(**layout))
    out = {}
    for name in NAMES:
        one = ranks.whole(name)
        made = Decoder(one.config, groups, device="cpu", vocab_multiple=64 // groups.tp.size)
        full = dict(one.named_parameters())
        with torch.no_grad():
            for key, p in made.named_parameters():
                p.copy_(rank_part(key, full[key], one.config, groups))
            want, every = logits_of(one)
            got, own = logits_of(made)
        out[name] = float((got - want).abs().max()), own / every
    groups.stop()
    return out


def test_two_ranks_keep_half_of_the_keys_each() -> None:
    for found in run_world(compare, 2, {"cp": 2}):
        assert max(difference for difference, _ in found.values()) < 1e-5, found
        assert {share for _, share in found.values()} == {0.5}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"cp": 4}, {"cp": 2, "tp": 2}], ids=str)
def test_four_ranks_have_the_numbers_of_one_process(layout: dict[str, int]) -> None:
    for found in run_world(compare, 4, layout):
        assert max(difference for difference, _ in found.values()) < 1e-5, found


def test_what_is_not_split_is_refused() -> None:
    two = Group(ranks=(0, 1), rank=0)
    groups = ProcessGroups(parallel=ParallelConfig(cp=2), cp=two)
    with raises(UsageError, "blocks of 5", "cp=2"):
        PagedCache(ranks.whole("grouped").config, num_blocks=4, block_size=5, groups=groups)
    for name, kept_by, words in (
        ("grouped", Group(), ("cp is 2", "not shared")),
        ("sparse", two, ("cp is 2", "indexer")),
    ):
        with raises(LayoutError, *words):
            check_cache(ranks.whole(name).config, groups, kept_by)
