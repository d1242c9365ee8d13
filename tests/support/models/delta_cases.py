"""What a layer with a delta rule has to do, whichever rule: decode, pad, pack and generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megtool.inference.forward import Forward
from megtool.inference.generation.batching import GenerateRequest
from megtool.inference.generation.generate import Decoding, generate
from megtool.kernels.recurrence.causal_conv import runs_of
from megtool.model.batch import Batch
from megtool.model.cache.key_span import KeySpan
from megtool.model.cache.kv_cache import ContiguousCache, KVCache
from megtool.model.cache.paged import PagedCache
from megtool.model.forward_context import ForwardContext
from megtool.model.stacks.decoder import Decoder
from megtool.spec.model_config import ModelConfig
from tests.support.emulated.graph_rules import check_graphs

TOKENS = 70  # more than a chunk
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_text(rows: int, length: int, seed: int = 1) -> Tensor:
    """Tokens of the vocabulary of a tiny model."""
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(seed))


def frame_of(
    shape: tuple[int, int],
    cache: KVCache | None = None,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
) -> ForwardContext:
    """The context of a forward pass over rows of tokens."""
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


def run(layer: nn.Module, x_BSH: Tensor, *args: Any, **more: Any) -> Tensor:
    """The layer's output; what `frame_of` takes besides the shape comes after it."""
    shape = (x_BSH.shape[0], x_BSH.shape[1])
    out: Tensor = layer(x_BSH.flatten(0, 1), frame_of(shape, *args, **more))
    return out.view(x_BSH.shape)


@torch.no_grad()
def check_decoding(layer: nn.Module, config: ModelConfig, kind: str) -> None:
    """Portions and single tokens through a cache of this kind are the whole pass."""
    cache: KVCache
    if kind == "paged":
        cache = PagedCache(config, num_blocks=60, block_size=4)
    else:
        cache = ContiguousCache(config, num_rows=2, max_tokens=80, graphable=kind == "graphable")
    x, outs = noise(2, TOKENS, 32), []
    want = run(layer, x)
    for part in (x[:, :20], x[:, 20:23], *x[:, 23:].split(1, 1)):
        if isinstance(cache, PagedCache):
            cache.choose([(n, part.shape[1]) for n in range(2)])
        outs.append(run(layer, part, cache))
        cache.advance()
    torch.testing.assert_close(torch.cat(outs, 1), want, **CLOSE)


@torch.no_grad()
def check_padding(layer: nn.Module, config: ModelConfig, side: str) -> None:
    """Padding changes nothing in a pass without a cache, nor for the tokens after it."""
    x = noise(2, 30, 32)
    real = torch.arange(20) < torch.tensor([[13], [20]])
    real = real.flip(1) if side == "left" else real
    first, then = x[:, :20], x[:, 20:]
    cache = ContiguousCache(config, num_rows=2, max_tokens=40)
    without = run(layer, first, valid=real)
    outs = [run(layer, first, cache, real)]
    cache.advance()
    for part in (then[:, :9], then[:, 9:]):
        outs.append(run(layer, part, cache))
        cache.advance()
    for row in range(2):
        alone = run(layer, torch.cat((first[row][real[row]], then[row]))[None])[0]
        size = int(real[row].sum())
        torch.testing.assert_close(without[row][real[row]], alone[:size], **CLOSE)
        got = torch.cat((outs[0][row][real[row]], outs[1][row], outs[2][row]))
        torch.testing.assert_close(got, alone, **CLOSE)


@torch.no_grad()
def check_packed_documents(layer: nn.Module) -> None:
    """Documents in one row are as each alone."""
    x, sizes = noise(1, TOKENS, 32), [13, 53, 1, 3]
    documents = torch.repeat_interleave(torch.tensor([4, 2, 7, 1]), torch.tensor(sizes))[None]
    got = run(layer, x, documents=documents).split(sizes, 1)
    for part, out in zip(x.split(sizes, 1), got, strict=True):
        torch.testing.assert_close(out, run(layer, part), **CLOSE)


@torch.inference_mode()
def check_generation(model: Any, decoder: Decoder, ways: Sequence[Decoding]) -> None:
    """Tokens are those of transformers' `model`, whatever the options."""
    requests, wanted = [], []
    for number, length in enumerate((5, 2, 9, 70)):
        prompt = random_text(1, length, seed=length)
        whole = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)
        wanted.append(whole[0, length:].tolist())
        ids = tuple(prompt[0].tolist())
        requests.append(GenerateRequest(number=number, prompt=ids, max_new_tokens=8))
    for options in ways:
        with check_graphs():
            got = list(generate(Forward(decoder), requests, options, new_detokenizer=Silent))
        assert [[t.id for t in c.tokens] for c in got] == wanted, options


class Silent:
    """A detokenizer of nothing."""

    def push(self, token: int) -> str:
        """See `Detokenizer`."""
        return ""

    def finish(self) -> str:
        """See `Detokenizer`."""
        return ""
