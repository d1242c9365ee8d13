"""Dense families: logits, cached decoding and gradients are those of transformers' own classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megtool.convert.dialects import read_side, write_side
from megtool.convert.families.detection import family
from megtool.dtypes import dtype
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.stacks.decoder import Decoder
from megtool.options.layout import ParallelConfig
from megtool.spec import layer_sets
from megtool.tensors.sharded import GlobalTensor
from tests.support.models.dense_decoders import CASES, MORE, largest, transformers_model
from tests.support.models.tiny_model import SIZES, Case

transformers = pytest.importorskip("transformers")


Carry = Callable[..., dict[str, np.ndarray]]
TOLERANCE = 1e-4


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in MORE]
cases = pytest.mark.parametrize("case", [*CASES, *SLOW], ids=str)
LENGTH = 14


def ours(case: Case, model: Any, carry: Carry) -> Decoder:
    """The same model, its weights carried over through the family's tables."""
    arrays = {n: t.detach().numpy() for n, t in model.state_dict().items()}
    if case.family == "gpt_neox":  # the name it is saved under
        arrays["embed_out.weight"] = arrays.pop("lm_head.weight")
    if model.config.tie_word_embeddings:
        tied = {"lm_head.weight", "embed_out.weight"}
        arrays = {n: a for n, a in arrays.items() if n not in tied}
    found = family(case.family)
    config = found.read_config(model.config.to_dict())
    held = [GlobalTensor(name=n, shape=a.shape, dtype=dtype("float32")) for n, a in arrays.items()]
    side = read_side(held, family=found, config=config)
    there = write_side(side, dialect="megatron", parallel=ParallelConfig(tp=1), per_layer=True)
    weights = carry(side, arrays, there)
    decoder = Decoder(side.config, device="cpu")
    own = dict(decoder.named_parameters())
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            assert parameter.shape == weights[name].shape, name
            parameter.copy_(torch.from_numpy(weights[name]))
    return decoder


@pytest.fixture(scope="module")
def pair(carry: Carry) -> Callable[[Case], tuple[Any, Decoder]]:
    made: dict[str, tuple[Any, Decoder]] = {}

    def both(case: Case) -> tuple[Any, Decoder]:
        if str(case) not in made:
            model = transformers_model(case)
            made[str(case)] = (model, ours(case, model, carry))
        return made[str(case)]

    return both


def forget(model: Any, case: Case) -> None:
    """Dynamic scaling remembers the longest sequence it has seen until it sees a short one."""
    if case.name == "dynamic":
        with torch.no_grad():
            model(prompt(1, 4))


def decoded(model: Any, case: Case, tokens: Any, valid: Any, sizes: Any) -> list[Any]:
    """transformers' logits, portion by portion with its cache.

    Where frequencies depend on the longest row of its batch, every row has a batch of its own.
    """
    alone = case.name in ("dynamic", "longrope")
    rows = tokens.shape[0]
    places = (valid.cumsum(1) - 1).clamp_min(0)
    found: list[list[Any]] = [[] for _ in sizes]
    for part in [slice(r, r + 1) for r in range(rows)] if alone else [slice(None)]:
        kept, at = None, 0
        forget(model, case)
        for portion, size in enumerate(sizes):
            with torch.no_grad():
                out = model(
                    tokens[part, at : at + size],
                    attention_mask=valid[part, : at + size],
                    position_ids=places[part, at : at + size],
                    past_key_values=kept,
                    use_cache=True,
                )
            kept, at = out.past_key_values, at + size
            found[portion].append(out.logits)
    return [torch.cat(portion) for portion in found]


def prompt(rows: int = 2, length: int = LENGTH) -> Any:
    return torch.randint(1, 101, (rows, length), generator=torch.Generator().manual_seed(1))


def test_the_first_gemmas_mean_the_approximation_by_gelu() -> None:
    """As transformers reads them; what is written back is what was there."""
    stored = transformers.GemmaConfig(**SIZES).to_dict() | {"hidden_act": "gelu"}
    config = family("gemma").read_config(stored)
    assert config.mlp.activation == "gelu_pytorch_tanh"
    assert transformers.GemmaConfig(**stored).hidden_act == config.mlp.activation
    assert family("gemma").write_config(config)["hidden_act"] == "gelu"


@pytest.mark.parametrize("case", [*CASES, *MORE], ids=str)
def test_logits(case: Case, pair: Callable[..., Any], record_property: Any) -> None:
    model, decoder = pair(case)
    forget(model, case)
    tokens = prompt()
    with torch.no_grad():
        want, got = model(tokens).logits, decoder(Batch(tokens_BS=tokens))
        last = decoder(Batch(tokens_BS=tokens), last_only=True)
    record_property("largest", largest(want, got))
    assert want.std() > 0.1
    assert got.shape == want.shape
    assert largest(want, got) < TOLERANCE
    assert largest(want[:, -1:], last) < TOLERANCE


@cases
def test_logits_with_padding_on_the_left(case: Case, pair: Callable[..., Any]) -> None:
    model, decoder = pair(case)
    tokens = prompt(3)
    valid = torch.ones_like(tokens)
    valid[0, :6], valid[2, :1] = 0, 0
    (want,) = decoded(model, case, tokens, valid, [LENGTH])
    with torch.no_grad():
        got = decoder(Batch(tokens_BS=tokens, valid_BS=valid.bool()))
    real = valid.bool()
    assert largest(want[real], got[real]) < TOLERANCE


@cases
def test_decoding_with_a_cache(case: Case, pair: Callable[..., Any]) -> None:
    """Prompt, then token by token, with and without padding, as transformers' own cache does."""
    model, decoder = pair(case)
    tokens, sizes = prompt(3, LENGTH + 6), (LENGTH, 1, 1, 1, 3)
    for padded in (False, True):
        valid = torch.ones_like(tokens)
        if padded:
            valid[0, :3], valid[1, :1] = 0, 0
        cache, at = ContiguousCache(decoder.config, num_rows=3, max_tokens=LENGTH + 8), 0
        wants = decoded(model, case, tokens, valid, sizes)
        for size, want in zip(sizes, wants, strict=True):
            span = slice(at, at + size)
            with torch.no_grad():
                fresh = valid[:, span].bool() if padded and not at else None
                got = decoder(Batch(tokens_BS=tokens[:, span], valid_BS=fresh), cache)
            real = valid[:, span].bool()
            assert largest(want[real], got[real]) < TOLERANCE
            at += size
        assert cache.length == at


@pytest.mark.parametrize("case", [c for c in CASES if "sliding_window" in c.keys], ids=str)
def test_padding_on_the_right_takes_no_place_in_a_window(
    case: Case, pair: Callable[..., Any]
) -> None:
    """Rows of unequal length, then more tokens for all, against each row alone, unpadded."""
    model, decoder = pair(case)
    lengths, more = (3, 9, 7), (3, 1, 4)
    tokens, answers = prompt(3, max(lengths)), prompt(3, sum(more)).flip(1)
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    cache = ContiguousCache(decoder.config, num_rows=3, max_tokens=20)
    with torch.no_grad():
        got = [decoder(Batch(tokens_BS=tokens, valid_BS=valid), cache)]
        got += [decoder(Batch(tokens_BS=part), cache) for part in answers.split(more, 1)]
        for row, length in enumerate(lengths):
            want = model(torch.cat((tokens[row, :length], answers[row]))[None]).logits[0]
            out = torch.cat([g[row] for g in got])
            assert largest(want, torch.cat((out[:length], out[max(lengths) :]))) < TOLERANCE


@cases
def test_loss_and_gradients(case: Case, pair: Callable[..., Any]) -> None:
    model, decoder = pair(case)
    tokens = prompt()
    labels = tokens[:, 1:].clone()
    labels[0, :4] = -100
    forget(model, case)
    model.zero_grad()
    decoder.zero_grad()
    logits = model(tokens[:, :-1]).logits
    want = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    want.backward()
    total, count = decoder.loss(Batch(tokens_BS=tokens[:, :-1]), labels)
    total.backward()
    assert count == (labels != -100).sum()
    assert largest(want, total) < 1e-4 * want.item()
    embedding = model.get_input_embeddings().weight.grad
    own = decoder.embedding.word_embeddings.weight.grad[: embedding.shape[0]]
    assert largest(embedding, own) < 1e-4 * max(1.0, float(embedding.abs().max()))
    down = next(
        p.grad
        for n, p in model.named_parameters()
        if n.endswith(
            (
                "0.mlp.down_proj.weight",
                "0.mlp.c_proj.weight",
                "0.mlp.dense_4h_to_h.weight",
                "0.feed_forward.down_proj.weight",
                "0.feed_forward.w2.weight",
                "0.ffn.proj_2.weight",
                "0.mlp.fc2.weight",
                "layers.0.fc2.weight",
                "0.ffn.down_proj.weight",
                "0.mlp.fc_out.weight",
            )
        )
    )
    first = decoder.decoder.layers[str(min(layer_sets.dense_layers(decoder.config)))]
    own = first.mlp.linear_fc2.weight.grad
    down = down.T if case.family == "gpt2" else down
    assert largest(down, own) < 1e-4 * max(1.0, float(down.abs().max()))
