"""`megtool.Engine`: texts are those of transformers one by one, whatever else runs."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import megtool
from megtool.errors import CheckpointError, MegtoolError, UsageError
from megtool.inference.generation.text_engine import Engine, TextRequest
from tests.support.errors import raises
from tests.support.models import tiny_text
from tests.support.models.every_family import MODELS
from tests.support.worlds.gloo_world import run_world

transformers = pytest.importorskip("transformers")

SYSTEM = "You are a careful assistant. Answer in one short sentence. "
TEXTS = (SYSTEM + "Hello", "a", SYSTEM + "The quick brown fox", "zzz zz", SYSTEM + "1 2 3 4 5")
NEW = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_text.save(tmp_path_factory.mktemp("text") / "hf", positions=256)


class Peer:
    """What transformers makes of prompts, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=torch.float32).eval()

    def generate(self, text: str) -> list[int]:
        ids = self.tokenizer(text, return_tensors="pt")
        out = self.model.generate(**ids, max_new_tokens=NEW, do_sample=False)
        new: list[int] = out[0][ids["input_ids"].shape[1] :].tolist()
        return new

    def log_probs(self, ids: Sequence[int]) -> torch.Tensor:
        """Of every token, given those before it: [S, V]."""
        with torch.no_grad():
            return self.model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)


@pytest.fixture(scope="module")
def peer(folder: Path) -> Peer:
    return Peer(folder)


@pytest.fixture(scope="module")
def expected(peer: Peer) -> list[list[int]]:
    return [peer.generate(text) for text in TEXTS]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefill_tokens": 7},
        {"prefill_tokens": 16, "max_sequences": 2},
        {"prefill_tokens": 32, "cache_tokens": 144},
        {"share_prefixes": False, "max_sequences": 3, "cache_tokens": 112},
    ],
    ids=str,
)
def test_texts_are_those_of_transformers_one_by_one(
    folder: Path, expected: list[list[int]], settings: dict[str, Any]
) -> None:
    """Requests arrive while others run, share prefixes, and are thrown out where memory ends."""
    with Engine(folder, **settings) as engine:
        requests: list[TextRequest] = []
        for text in TEXTS:
            requests.append(engine.submit(text, max_new_tokens=NEW))
            engine.step()
        assert [list(r.result().ids) for r in requests] == expected
        again = [engine.submit(text, max_new_tokens=NEW) for text in TEXTS]
        engine.run()
        assert [list(r.result().ids) for r in again] == expected
        assert (engine.meter.num_preempted > 0) == ("cache_tokens" in settings)
        assert (engine.meter.num_shared > 0) == settings.get("share_prefixes", True)
        assert not engine.is_busy


def test_prompts_that_begin_alike_are_read_once(folder: Path) -> None:
    """Also those that come together: the others wait for the first."""
    with Engine(folder, prefill_tokens=16) as engine:
        for n in range(5):
            engine.submit(SYSTEM + str(n), max_new_tokens=2)
        engine.run()
        blocks = len(SYSTEM) // 16
        assert engine.meter.num_shared == 4 * blocks * 16


def test_a_seed_gives_the_same_text_whatever_else_runs(folder: Path) -> None:
    how = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": NEW}
    with Engine(folder) as engine:
        alone = engine.submit(TEXTS[0], seed=5, **how).result().ids
    with Engine(folder, prefill_tokens=8, cache_tokens=144, max_sequences=3) as engine:
        others = [engine.submit(text, max_new_tokens=NEW) for text in TEXTS]
        drawn = [engine.submit(TEXTS[0], **how) for _ in range(2)]
        crowded = engine.submit(TEXTS[0], seed=5, **how).result().ids
        assert crowded == alone
        first, second = (r.result().ids for r in drawn)
        assert first != second, "without a seed, requests draw apart"
        assert all(r.result().finish for r in others)


def test_log_probabilities_are_those_of_transformers(folder: Path, peer: Peer) -> None:
    with Engine(folder, prefill_tokens=16) as engine:
        other = engine.submit("beside", temperature=2.0, logprobs=0, max_new_tokens=4)
        request = engine.submit(TEXTS[2], max_new_tokens=6, logprobs=3, prompt_logprobs=True)
        plain = engine.submit("a", max_new_tokens=3)
        tokens = list(request)
        completion = request.result()
        assert [t.log_prob for t in plain] == [None] * 3
        assert all(t.log_prob is not None and not t.top for t in other)
    prompt = peer.tokenizer(TEXTS[2])["input_ids"]
    ids = [*prompt, *(t.id for t in tokens)]
    scores = peer.log_probs(ids)
    found = [*completion.prompt_log_probs, *completion.tokens]
    assert len(found) == len(ids) - 1
    for place, token in enumerate(found):
        own = scores[place][ids[place + 1]]
        assert math.isclose(float(own), token.log_prob or 0.0, abs_tol=1e-4)
        values = torch.tensor([p for _, p in token.top])
        torch.testing.assert_close(values, scores[place].topk(3).values, atol=1e-4, rtol=0)
        assert [t for t, _ in token.top] == scores[place].topk(3).indices.tolist()


def test_a_cancelled_request_frees_what_it_has(folder: Path, expected: list[list[int]]) -> None:
    with Engine(folder, max_sequences=1, share_prefixes=False, cache_tokens=160) as engine:
        first = engine.submit(TEXTS[0], max_new_tokens=NEW)
        waiting = engine.submit(TEXTS[1], max_new_tokens=NEW)
        second = engine.submit(TEXTS[2], max_new_tokens=NEW)
        next(first)
        waiting.cancel()
        first.cancel()
        first.cancel()
        assert [len(list(r)) for r in (first, waiting)] == [0, 0]
        assert (first.finish, waiting.finish, len(first.result().ids)) == ("cancelled",) * 2 + (1,)
        assert list(second.result().ids) == expected[2]
        assert engine._loop._slots._cache.pool.num_free == 10  # type: ignore[union-attr]


def test_pieces_of_text_are_the_text_and_stop_strings_cut_it(folder: Path) -> None:
    with Engine(folder) as engine:
        whole = engine.submit(TEXTS[2], max_new_tokens=NEW).result().text
        stop = whole[5:8]
        request = engine.submit(TEXTS[2], max_new_tokens=NEW, stop=stop)
        pieces = [token.text for token in request]
        assert "".join(pieces) == request.result().text == whole[: whole.index(stop)]
        assert request.finish == "stop"


def test_messages_and_tokens_are_prompts(folder: Path, peer: Peer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    ids = peer.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    with Engine(folder) as engine:
        chat = engine.submit(messages, max_new_tokens=4).result()
        assert chat.ids == engine.submit(ids, max_new_tokens=4).result().ids
        assert chat.num_prompt_tokens == len(ids)


def test_threads_and_coroutines_take_turns(folder: Path, expected: list[list[int]]) -> None:
    with Engine(folder, prefill_tokens=16, max_sequences=3) as engine:
        texts: dict[int, list[int]] = {}

        def work(n: int) -> None:
            texts[n] = [t.id for t in engine.submit(TEXTS[n], max_new_tokens=NEW)]

        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(TEXTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [texts[n] for n in range(len(TEXTS))] == expected

        async def read(text: str) -> list[int]:
            return [t.id async for t in engine.submit(text, max_new_tokens=NEW)]

        async def read_all() -> list[list[int]]:
            return await asyncio.gather(*map(read, TEXTS))

        assert asyncio.run(read_all()) == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 300}, "the model has 256 positions"),
        ({"max_new_tokens": 100}, "the cache has 4"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"prompt_logprobs": True}, "none of new tokens"),
        ({"stop": ""}, "a stop string is empty"),
        ({"top_k": 3}, "top_k with temperature 0"),
        ({"prompt": ""}, "is empty"),
        ({"prompt": [1, 262]}, "token 262"),
        ({"prompt": [1, "a"]}, "a list of int, str"),
        ({"prompt": None}, "the prompt is None"),
        ({"prompt": b"ab"}, "the prompt is b'ab'"),
        ({"max_new_tokens": "5"}, "max_new_tokens is '5'"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"temperature": None}, "temperature is None"),
        ({"priority": True}, "priority is True"),
        ({"stop": [5]}, "stop is [5]"),
    ],
)
def test_bad_requests_are_refused_and_others_go_on(
    folder: Path, settings: dict[str, Any], words: str
) -> None:
    with Engine(folder, cache_tokens=64) as engine:
        good = engine.submit("abc", max_new_tokens=3)
        with raises(UsageError, words):
            engine.submit(**{"prompt": "ab", **settings})
        assert len(good.result().ids) == 3


def test_a_closed_engine_and_bad_settings_are_refused(folder: Path) -> None:
    with Engine(folder) as engine:
        request = engine.submit("ab")
        with raises(UsageError, "no rank to follow"):
            engine.follow()
    assert (list(request), request.finish) == ([], "cancelled")
    engine.close()
    with raises(UsageError, "the engine is closed"):
        engine.submit("ab")
    for name in ("max_sequences", "cache_tokens", "prefill_tokens"):
        with raises(UsageError, f"{name} is 0"):
            megtool.Engine(folder, **{name: 0})
    with raises(UsageError, "no layers of multi-token prediction"):
        megtool.Engine(folder, speculative="mtp")


def test_a_nan_ends_the_request_that_has_it(folder: Path) -> None:
    with Engine(folder) as engine:
        name = "decoder.layers.1.mlp.linear_fc2.weight"
        engine._forward.decoder.state_dict()[name][0, 0] = torch.nan
        request = engine.submit("abc")
        with raises(CheckpointError, "contain a NaN", tensor=name):
            list(request)
        with pytest.raises(MegtoolError):
            request.result()
        assert not engine.is_busy


@pytest.mark.parametrize(
    "family", ["lfm2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("bamba", "qwen3_next"))]
)
def test_recurrent_mixers_read_in_chunks_and_share_nothing(family: str, tmp_path: Path) -> None:
    """A model without a tokenizer; requests thrown out have their states made anew."""
    MODELS[family](tmp_path)
    prompts = [[*range(2, 2 + n)] for n in (20, 9, 20, 17)]
    with Engine(tmp_path, dtype="float32", max_sequences=1) as engine:
        alone = [engine.submit(p, max_new_tokens=14).result().ids for p in prompts]
    with Engine(tmp_path, dtype="float32", prefill_tokens=8, cache_tokens=64) as engine:
        assert not engine.shares_prefixes
        requests = [engine.submit(p, max_new_tokens=14) for p in prompts]
        assert [r.result().ids for r in requests] == alone
        assert engine.meter.num_preempted > 0
        assert engine.meter.num_shared == 0
        with raises(UsageError, "there is no tokenizer"):
            engine.submit("text")


def test_where_tokens_turn_by_the_length_prompts_are_read_whole(tmp_path: Path) -> None:
    """The long factors are for the whole prompt, whatever a chunk of it would have."""
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=16,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 3.0, 9.0, 27.0],
        },
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    model = transformers.Phi3ForCausalLM(config).float().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(tmp_path)
    prompts = [[*range(5, 45)], [*range(5, 44), 9], [7, 8, 9]]
    with Engine(tmp_path, prefill_tokens=8) as engine:
        requests = [engine.submit(p, max_new_tokens=8) for p in prompts]
        engine.run()
        for prompt, request in zip(prompts, requests, strict=True):
            want = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
            assert list(request.result().ids) == want[0, len(prompt) :].tolist()
        assert not engine.shares_prefixes


def engine_on_rank(rank: int, size: int, folder: Path, axes: dict[str, int]) -> list[Any]:
    """Texts of requests that every rank makes, then of those that rank 0 alone does."""
    out: list[Any] = []
    how = {"prefill_tokens": 16, "cache_tokens": 144, **axes}
    with Engine(folder, **how) as engine:
        requests = [engine.submit(t, max_new_tokens=NEW, logprobs=2) for t in TEXTS]
        requests[1].cancel()
        out.append([r.result().ids for r in requests])
        out.append([t.top for t in requests[0].result().tokens])
    with Engine(folder, **how, followers=True) as engine:
        if rank:
            with raises(UsageError, "rank 0 takes requests"):
                engine.submit("a")
            engine.follow()
        else:
            kept, cancelled = (engine.submit(t, max_new_tokens=NEW) for t in TEXTS[2:4])
            next(cancelled)
            cancelled.cancel()
            out.append(kept.result().ids)
            with raises(UsageError, "is empty"):
                engine.submit("")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_share_a_model(folder: Path, expected: list[list[int]], axes: dict[str, int]) -> None:
    first, other = run_world(engine_on_rank, 2, folder, axes)
    assert first[:2] == other[:2]
    assert [list(ids) for ids in first[0]] == [expected[0], [], *expected[2:]]
    assert list(first[2]) == expected[2]
    assert len(first[1]) == NEW
