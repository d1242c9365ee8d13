"""Gathering: nothing is read before it came, in models of every kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.optim.buffers import ParamAndGradBucket
from megtool.optim.distributed import DistributedOptimizer
from megtool.optim.flat_shards import Pending
from megtool.optim.param_gather import ParamGather
from megtool.parallel.process_groups import ProcessGroups
from megtool.spec.model_config import ModelConfig
from tests.support.worlds.moe_layouts import DENSE, MODELS, SIZES
from tests.support.worlds.overlap_settings import OVERLAPPED

KINDS: dict[str, dict[str, Any]] = {
    "dense": DENSE | dict(qkv_bias=True, mlp_bias=True, norm="layernorm", qk_norm=True),
    "tied, norms after": DENSE | dict(tied_embeddings=True, post_norms=True),
    "one norm for both": DENSE | dict(parallel_residual=True, attn_sinks=True),
    "latent": SIZES | MODELS["latent"],
    "experts": SIZES | MODELS["shared and gated"],
}


def comes_late(bucket: ParamAndGradBucket, tag: int) -> Pending:
    """A bucket whose parameters are no numbers until somebody waits for them."""
    values = bucket.params.clone()
    bucket.params.fill_(torch.nan)
    return Pending(works=[], then=lambda: bucket.params.copy_(values))


@pytest.mark.parametrize("kind", KINDS)
def test_no_parameter_is_read_before_it_came(kind) -> None:
    decoder = Decoder(ModelConfig.from_fields(**KINDS[kind]), device="cpu", vocab_multiple=64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if "norm" in name else noise * 0.3)
    settings = replace(OVERLAPPED, overlap_param_gather=False, ddp_bucket_size=1)
    optimizer = DistributedOptimizer(decoder.named_parameters(), settings, ProcessGroups.alone())
    buckets = [bucket for buffer in optimizer.buffers for bucket in buffer.buckets]
    assert len(buckets) == len(optimizer.param_infos)  # each parameter comes by itself
    gathering = ParamGather(buckets[::-1], [decoder], overlap=True, begin=comes_late)
    tokens_BS = torch.randint(0, 61, (2, 8), generator=generator)

    def loss() -> torch.Tensor:
        return decoder.loss(Batch(tokens_BS=tokens_BS), tokens_BS)[0].detach()

    want = loss()
    gathering.learn()
    gathering.start()
    assert len(gathering.under_way) > 5
    torch.testing.assert_close(loss(), want, rtol=0, atol=0)
    gathering.close()
    optimizer.close()
