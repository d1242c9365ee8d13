"""Generate: what transformers generates, alone, in batches that refill, and by graphs' rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megtool.console import silent
from megtool.data.tokenizer import Tokenizer
from megtool.errors import CheckpointError, UsageError
from megtool.inference.forward import Forward
from megtool.inference.generation.batching import GenerateRequest
from megtool.inference.generation.generate import Decoding, Meter, check_requests, generate
from megtool.inference.runtime import load_forward, on_ranks
from megtool.options.groups import RuntimeOptions
from megtool.options.sampling import Sampling
from megtool.source.open import open_decoder
from tests.support.emulated.graph_rules import check_graphs
from tests.support.errors import raises
from tests.support.models import tiny_text

TEXTS = ("Hello", "a", "The quick brown fox", "zzz zz", "1 2 3 4 5 6 7")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return tiny_text.save(tmp_path_factory.mktemp("text") / "hf")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[tuple[Forward, Tokenizer]]:
    manner = RuntimeOptions(device="cpu")
    runnable = open_decoder(folder)
    with on_ranks(manner) as groups:
        yield load_forward(runnable, manner, groups, silent), runnable.tokenizer()


@pytest.fixture(scope="module")
def theirs(folder: Path) -> list[list[int]]:
    """What transformers generates, prompt by prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    out = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")
        new = peer.generate(**ids, max_new_tokens=20, do_sample=False)
        out.append(new[0][ids["input_ids"].shape[1] :].tolist())
    return out


def requests(tokenizer: Tokenizer, new: int = 20) -> list[GenerateRequest]:
    return [
        GenerateRequest(number=n, prompt=tuple(tokenizer.encode(t)), max_new_tokens=new)
        for n, t in enumerate(TEXTS)
    ]


def run(model: tuple[Forward, Tokenizer], new: int = 20, **options: Any) -> list[Any]:
    forward, tokenizer = model
    callbacks = {name: options.pop(name) for name in ("on_text", "meter") if name in options}
    fields = {"graphed": False, "eos_ids": frozenset(tokenizer.eos_ids)} | options
    with check_graphs(forward.device):
        return list(
            generate(
                forward,
                requests(tokenizer, new),
                Decoding(**fields),
                new_detokenizer=tokenizer.stream,
                **callbacks,
            )
        )


@pytest.mark.parametrize("num_slots", [1, 2, 3, 16])
def test_greedy_text_is_that_of_transformers(
    model: Any, theirs: list[list[int]], num_slots: int
) -> None:
    found = run(model, num_slots=num_slots)
    assert [list(c.ids) for c in found] == theirs
    for one in found:
        expected = model[1].decode([t for t in one.ids if t != tiny_text.END])
        assert (one.text, one.finish) == (
            expected,
            "eos" if one.ids[-1] == tiny_text.END else "length",
        )


def test_steps_keep_the_rules_of_cuda_graphs(model: Any, theirs: list[list[int]]) -> None:
    meter = Meter()
    found = run(model, graphed=True, meter=meter)
    assert [list(c.ids) for c in found] == theirs
    assert meter.num_graphed == meter.num_steps > 0


@pytest.mark.parametrize("num_slots", [1, 3])
def test_steps_over_blocks_keep_the_rules_of_cuda_graphs(
    model: Any, theirs: list[list[int]], num_slots: int
) -> None:
    meter = Meter()
    found = run(model, graphed=True, num_slots=num_slots, meter=meter)
    assert [list(c.ids) for c in found] == theirs
    assert meter.num_graphed == meter.num_steps > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_replayed_step_is_a_step(folder: Path, theirs: list[list[int]]) -> None:
    manner = RuntimeOptions(device="cuda")
    runnable = open_decoder(folder)
    with on_ranks(manner) as groups:
        model = load_forward(runnable, manner, groups, silent), runnable.tokenizer()
        for num_slots in (16, 3):  # all rows at once; over blocks, as rows come and go
            meter = Meter()
            plain = run(model, num_slots=num_slots)
            graphed = run(model, graphed=True, num_slots=num_slots, meter=meter)
            assert [c.ids for c in plain] == [c.ids for c in graphed]
            assert meter.num_graphed == meter.num_steps > 0


def test_a_seed_gives_the_same_text_whatever_the_batch(model: Any) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=5)
    texts = [
        [c.ids for c in run(model, sampling=sampling, num_slots=slots)] for slots in (1, 2, 16)
    ]
    assert texts[0] == texts[1] == texts[2]
    other = Sampling(temperature=1.0, top_p=0.95, seed=6)
    assert [c.ids for c in run(model, sampling=other)] != texts[0]


def test_stop_strings_cut_the_text_where_they_begin(model: Any) -> None:
    whole = run(model)[2].text
    stop = whole[5:8]
    at = whole.index(stop)
    shown: list[str] = []
    cut = run(model, stop=[stop], on_text=lambda n, text: shown.append(text) if n == 2 else None)[2]
    assert (cut.text, cut.finish) == (whole[:at], "stop")
    assert "".join(shown) == cut.text


def test_a_prompt_beyond_the_positions_is_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="the model has 128 positions") as caught:
        run(model, new=124)
    assert caught.value.hint == "--max-new-tokens 123 fits"


def test_a_prompt_of_another_tokenizer_is_refused(model: Any) -> None:
    size = model[0].config.embedding.vocab_size
    prompt = GenerateRequest(number=3, prompt=(1, size), max_new_tokens=2)
    with raises(
        UsageError, match=f"prompt 3 holds token {size}, and the model has", hint="another model's"
    ):
        check_requests([prompt], model[0].config)


def test_a_nan_names_the_weight_it_comes_from(folder: Path) -> None:
    manner = RuntimeOptions(device="cpu")
    runnable = open_decoder(folder)
    with on_ranks(manner) as groups:
        forward = load_forward(runnable, manner, groups, silent)
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    forward.decoder.state_dict()[name][0, 0] = torch.nan
    with raises(CheckpointError, match="of prompt 0 contain a NaN", tensor=name):
        run((forward, runnable.tokenizer()))
