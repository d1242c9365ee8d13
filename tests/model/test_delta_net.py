"""The gated delta net: transformers' module, its caches, padding, documents, and layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megtool.config import ParallelConfig
from megtool.errors import LayoutError
from megtool.kernels.causal_conv import runs_of
from megtool.model.batch import Batch
from megtool.model.cache import ContiguousCache, KeySpan, KVCache, PagedCache
from megtool.model.delta_net import GatedDeltaNet
from megtool.model.forward_context import ForwardContext
from megtool.model_config import ModelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.train.memory_estimate import meta_groups

SIZES: dict[str, Any] = dict(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=50,
    norm_eps=1e-6,
    zero_centered_norm=True,
    layer_kinds=("G-", "*-"),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
)
CONFIG = ModelConfig(**SIZES)
TOKENS = 70  # more than a chunk
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def theirs() -> Any:
    """transformers' module, with weights that differ from element to element."""
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        Qwen3NextConfig,
        Qwen3NextGatedDeltaNet,
    )

    config = Qwen3NextConfig(
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        rms_norm_eps=1e-6,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        vocab_size=50,
    )
    torch.manual_seed(0)
    module = Qwen3NextGatedDeltaNet(config, 0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return module


def ours(module: Any, **more: Any) -> GatedDeltaNet:
    """The same weights by Megatron's names and rows."""
    made = GatedDeltaNet(CONFIG, 0, ProcessGroups.alone(), device="cpu", **more)
    qkvz = module.in_proj_qkvz.weight.detach().view(2, -1, 32).split((8, 8, 12, 12), 1)
    ba = module.in_proj_ba.weight.detach().view(2, -1, 32).split((2, 2), 1)
    values = {
        "dt_bias": module.dt_bias,
        "A_log": module.A_log,
        "in_proj.layer_norm_weight": noise(32, seed=2) * 0.2,
        "in_proj.weight": torch.cat([x.reshape(-1, 32) for x in (*qkvz, *ba)]),
        "conv1d.weight": module.conv1d.weight,
        "out_norm.weight": module.norm.weight - 1,
        "out_proj.weight": module.out_proj.weight,
    }
    made.load_state_dict(values)
    return made


def frame_of(
    shape: tuple[int, int],
    cache: KVCache | None = None,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
) -> ForwardContext:
    batch = Batch(tokens_BS=torch.zeros(shape, dtype=torch.int64), valid_BS=valid)
    span = KeySpan.fresh(batch) if cache is None else cache.begin(batch)
    return ForwardContext(
        num_rows=shape[0],
        num_tokens=shape[1],
        positions_BS=span.positions_BS,
        rotary=None,  # type: ignore[arg-type]
        masks=(),
        cache=cache,
        real_BS=span.real_BS,
        runs_BS=None if documents is None else runs_of(documents),
    )


def run(made: GatedDeltaNet, x_BSH: Tensor, *args: Any, **more: Any) -> Tensor:
    shape = (x_BSH.shape[0], x_BSH.shape[1])
    out: Tensor = made(x_BSH.flatten(0, 1), frame_of(shape, *args, **more))
    return out.view(x_BSH.shape)


def normed(made: GatedDeltaNet, x: Tensor) -> Tensor:
    return made.in_proj.normalize(x)


def test_names_and_shapes_are_megatrons_in_its_order() -> None:
    made = GatedDeltaNet(CONFIG, 0, ProcessGroups.alone())
    assert [(n, tuple(p.shape)) for n, p in made.named_parameters()] == [
        ("dt_bias", (4,)),
        ("A_log", (4,)),
        ("in_proj.layer_norm_weight", (32,)),
        ("in_proj.weight", (2 * 16 + 2 * 24 + 2 * 4, 32)),
        ("conv1d.weight", (2 * 16 + 24, 1, 4)),
        ("out_norm.weight", (6,)),
        ("out_proj.weight", (32, 24)),
    ]
    assert made.in_proj.weight.row_parts == (16, 16, 24, 24, 4, 4)


def test_output_and_gradients_are_transformers() -> None:
    module = theirs()
    made = ours(module)
    x, pull = noise(2, TOKENS, 32), noise(2, TOKENS, 32, seed=1)
    want, got = module(normed(made, x)), run(made, x)
    torch.testing.assert_close(got, want, **CLOSE)
    (got * pull).sum().backward()
    (want * pull).sum().backward()
    grads = {n: p.grad for n, p in module.named_parameters()}
    qkvz = grads["in_proj_qkvz.weight"].view(2, -1, 32).split((8, 8, 12, 12), 1)
    ba = grads["in_proj_ba.weight"].view(2, -1, 32).split((2, 2), 1)
    found = {n: p.grad for n, p in made.named_parameters()}
    wanted = {
        "in_proj.weight": torch.cat([g.reshape(-1, 32) for g in (*qkvz, *ba)]),
        "out_norm.weight": grads["norm.weight"],
    }
    wanted |= {n: grads[n] for n in ("dt_bias", "A_log", "conv1d.weight", "out_proj.weight")}
    for name, grad in wanted.items():
        torch.testing.assert_close(
            found[name], grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max())
        )


@pytest.mark.parametrize("kind", ["contiguous", "graphable", "paged"])
def test_decoding_is_the_whole_pass(kind: str) -> None:
    made = ours(theirs())
    cache: KVCache
    if kind == "paged":
        cache = PagedCache(CONFIG, num_blocks=60, block_size=4)
    else:
        cache = ContiguousCache(CONFIG, num_rows=2, max_tokens=80, graphable=kind == "graphable")
    x = noise(2, TOKENS, 32)
    outs = []
    with torch.no_grad():
        want = run(made, x)
        for part in (x[:, :20], x[:, 20:23], *x[:, 23:].split(1, 1)):
            if isinstance(cache, PagedCache):
                cache.choose([(n, part.shape[1]) for n in range(2)])
            outs.append(run(made, part, cache))
            cache.advance()
    torch.testing.assert_close(torch.cat(outs, 1), want, **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_as_if_it_were_not_there(side: str) -> None:
    """Neither in a pass without a cache, nor for the tokens after it."""
    made = ours(theirs())
    x = noise(2, 30, 32)
    real = torch.arange(20) < torch.tensor([[13], [20]])
    real = real.flip(1) if side == "left" else real
    first, then = x[:, :20], x[:, 20:]
    cache = ContiguousCache(CONFIG, num_rows=2, max_tokens=40)
    with torch.no_grad():
        without = run(made, first, valid=real)
        outs = [run(made, first, cache, real)]
        cache.advance()
        for part in (then[:, :9], then[:, 9:]):
            outs.append(run(made, part, cache))
            cache.advance()
        for row in range(2):
            alone = run(made, torch.cat((first[row][real[row]], then[row]))[None])[0]
            size = int(real[row].sum())
            torch.testing.assert_close(without[row][real[row]], alone[:size], **CLOSE)
            got = torch.cat((outs[0][row][real[row]], outs[1][row], outs[2][row]))
            torch.testing.assert_close(got, alone, **CLOSE)


def test_packed_documents_are_as_each_alone() -> None:
    made = ours(theirs())
    x = noise(1, TOKENS, 32)
    sizes = [13, 53, 1, 3]
    documents = torch.repeat_interleave(torch.tensor([4, 2, 7, 1]), torch.tensor(sizes))[None]
    with torch.no_grad():
        got = run(made, x, documents=documents).split(sizes, 1)
        for part, out in zip(x.split(sizes, 1), got, strict=True):
            torch.testing.assert_close(out, run(made, part), **CLOSE)


@pytest.mark.parametrize("layout", [{"tp": 4}, {"tp": 2, "cp": 2}, {"cp": 3}], ids=str)
def test_heads_that_do_not_go_evenly_are_refused_with_sizes_that_do(layout: Any) -> None:
    with pytest.raises(LayoutError, match="2 key heads and 4 value heads") as e:
        GatedDeltaNet(CONFIG, 0, meta_groups(ParallelConfig(**layout), 0))
    assert "divides both: 1, 2" in str(e.value)
