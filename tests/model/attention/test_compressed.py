"""DeepSeek-V4's passes over ranks, of packed rows and with caches, and what is refused.

Logits against transformers' are in test_decoder_moe_families.py, too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from megtool import reshard
from megtool.convert.megatron.sharding import check_layout
from megtool.errors import LayoutError, UsageError
from megtool.inference.load import load
from megtool.model.attention.context_parallel import check_exchange
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache, num_cache_bytes
from megtool.model.cache.paged import PagedCache
from megtool.model.stacks.decoder import Decoder
from megtool.options.layout import CommType, ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.open import open_decoder
from megtool.train.model.build import load_for_training
from tests.support.errors import raises
from tests.support.models import moe_models, mtp_models
from tests.support.models.moe_models import Carry
from tests.support.runs.loading import source_of
from tests.support.worlds import family_layouts
from tests.support.worlds.family_layouts import Job
from tests.support.worlds.gloo_world import run_world

NAME = "deepseek_v4"
EAGER: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
EVEN = 12  # tokens, of which context parallelism gives each rank two equal stretches
LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {}),
    ({"tp": 2}, {"sequence_parallel": True}),
    ({"pp": 2, "first_stage_layers": 2}, {}),
    ({"ep": 2, "dp": 2}, {}),
    ({"tp": 2, "ep": 2, "etp": 1}, {"sequence_parallel": True}),
]


def decoder_of(carry: Carry, **changes: Any) -> Decoder:
    return moe_models.ours(NAME, moe_models.transformers_model(NAME, **changes), carry)


@pytest.mark.parametrize("kind", ["p2p", "a2a"])
def test_compressed_keys_are_gathered(kind: CommType, carry: Carry) -> None:
    parallel = ParallelConfig(cp=2, cp_comm_type=(kind,))
    with raises(LayoutError, kind, "compressed", hint="all_gather"):
        check_exchange(decoder_of(carry).config, parallel)


@pytest.mark.slow
def test_every_layout_has_transformers_logits_and_gradients(tmp_path: Path) -> None:
    """And the logits of cached decoding with padding. Gradients of scalars cancel out, and have
    more rounding than others."""
    model = moe_models.transformers_model(NAME)
    model.save_pretrained(tmp_path / "hf")
    tokens, labels = family_layouts.tokens_and_labels()
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    loss.backward()
    one = load(source_of(tmp_path / "hf"), dtype="float32")
    ours = family_layouts.answer_of(one, ProcessGroups.alone())
    assert float((ours.logits - logits).detach().abs().max()) < 1e-4
    assert ours.loss == pytest.approx(loss.item(), rel=1e-5)
    real = family_layouts.valid()
    for row, kept in enumerate(real):
        alone = model(tokens[row : row + 1, kept]).logits[0].detach()
        assert ours.decoded is not None
        assert float((ours.decoded[row, kept] - alone).detach().abs().max()) < 1e-4
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
    model.save_pretrained(tmp_path / "gradients")
    theirs = load(source_of(tmp_path / "gradients"), dtype="float32").state_dict()
    gradients = {n: theirs[n] for n in ours.gradients}
    torch.save(replace(ours, gradients=gradients), tmp_path / "want")
    one.zero_grad()
    torch.save(family_layouts.answer_of(one, ProcessGroups.alone(), EVEN), tmp_path / "even")
    jobs = [
        Job(
            name=NAME,
            checkpoint=tmp_path / "hf",
            answer=tmp_path / "even",
            layout={"cp": 2},
            length=EVEN,
        )
    ]
    for number, (layout, how) in enumerate(LAYOUTS):
        there = tmp_path / f"{number}"
        reshard(tmp_path / "hf", there, to="torch_dist", fsync=False, **layout)  # type: ignore[arg-type]
        jobs.append(
            Job(name=NAME, checkpoint=there, answer=tmp_path / "want", layout=layout, how=how)
        )
    ranks = run_world(family_layouts.compare, 2, jobs, timeout_s=300)
    wrong = [
        (job, name, value)
        for found in ranks
        for job, values in found.items()
        for name, value in values.items()
        if not value < 2e-4
    ]
    assert not wrong


def test_padding_behind_tokens_changes_nothing(carry: Carry) -> None:
    decoder, tokens = decoder_of(carry), moe_models.tokens(2, 24)
    valid = torch.ones(2, 24, dtype=torch.bool)
    valid[0, 17:] = False
    with torch.no_grad():
        got = decoder(Batch(tokens_BS=tokens, valid_BS=valid))
        alone = decoder(Batch(tokens_BS=tokens[:1, :17]))
    assert float((got[0, :17] - alone[0]).abs().max()) < 1e-5


def test_packed_documents_are_as_each_alone(carry: Carry) -> None:
    """Windows of tokens begin anew in each, at whatever place; one is shorter than a window."""
    decoder, lengths = decoder_of(carry), (9, 2, 13)
    tokens = moe_models.tokens(2, sum(lengths))
    documents = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    places = torch.cat([torch.arange(n) for n in lengths])
    documents_BS = torch.stack((documents, documents.flip(0)))
    places_BS = torch.stack((places, torch.cat([torch.arange(n) for n in reversed(lengths)])))
    with torch.no_grad():
        packed = Batch(tokens_BS=tokens, documents_BS=documents_BS, positions_BS=places_BS)
        got = decoder(packed)
        for row, sizes in enumerate((lengths, lengths[::-1])):
            parts = zip(tokens[row].split(sizes), got[row].split(sizes), strict=True)
            for part, found in parts:
                alone = decoder(Batch(tokens_BS=part[None]))[0]
                assert float((found - alone).abs().max()) < 1e-5


def test_rows_of_a_paged_cache_are_as_each_alone(carry: Carry) -> None:
    """Prompts of unequal length, padded on the right, that grow by unequal numbers of tokens, and
    go back."""
    decoder, tokens = decoder_of(carry), moe_models.tokens(3, 40)
    cache = PagedCache(decoder.config, num_blocks=20, block_size=6, num_sequences=4)
    lengths = [0, 0, 0]
    steps = [((0, 7), (1, 17)), ((1, 1), (0, 3)), ((2, 2), (0, 9), (1, 1)), ((0, 1), (2, 5))]
    steps += [((2, 1), (1, 13)), ((1, 2), (0, 1), (2, 7)), ((0, 4), (1, 1), (2, 1))]
    with torch.no_grad():
        want = decoder(Batch(tokens_BS=tokens))
        for number, step in enumerate(steps):
            width = max(count for _, count in step)
            padded = torch.zeros(len(step), width, dtype=torch.int64)
            valid = torch.arange(width) < torch.tensor([count for _, count in step])[:, None]
            for place, (row, count) in enumerate(step):
                padded[place, :count] = tokens[row, lengths[row] : lengths[row] + count]
            batch = Batch(tokens_BS=padded, valid_BS=None if valid.all() else valid)
            for attempt in range(2):  # the second one after all of it is forgotten
                cache.choose(step, revertible=number == 5)
                got = decoder(batch, cache)
                for place, (row, count) in enumerate(step):
                    there = want[row, lengths[row] : lengths[row] + count]
                    assert float((got[place, :count] - there).abs().max()) < 1e-4
                if number != 5 or attempt:
                    break
                cache.truncate({row: lengths[row] for row, _ in step})
            for row, count in step:
                lengths[row] += count


def test_a_dry_run_counts_what_a_cache_keeps(carry: Carry) -> None:
    """A key of each token, one of each window, and what the last tokens give to the next."""
    config = decoder_of(carry).config
    keys = 3 * 20 * 16 + (20 // 4) * (16 + 8) + (20 // 8) * 16
    scratch = 16 + 8 + 16
    state = 7 * (2 * 2 * 16 + 2 * 2 * 8) + 7 * 2 * 16
    assert num_cache_bytes(config, 20, dtype=torch.bfloat16) == 2 * (keys + scratch + state)


def test_fewer_tokens_than_are_compressed_to_one_key(carry: Carry) -> None:
    model = moe_models.transformers_model(NAME)
    decoder, tokens = moe_models.ours(NAME, model, carry), moe_models.tokens(2, 3)
    with torch.no_grad():
        assert float((decoder(Batch(tokens_BS=tokens)) - model(tokens).logits).abs().max()) < 1e-4


def test_a_table_chooses_the_experts_of_the_first_layers(carry: Carry) -> None:
    decoder, tokens = decoder_of(carry), moe_models.tokens(1, 8)
    router = decoder.get_submodule("decoder.layers.0.mlp.router")
    with torch.no_grad():
        before = decoder(Batch(tokens_BS=tokens))
        router.tid2eid.copy_(router.tid2eid.roll(1, 0))
        after = decoder(Batch(tokens_BS=tokens))
    assert not torch.allclose(before, after)
    assert getattr(decoder.get_submodule("decoder.layers.1.mlp.router"), "tid2eid", None) is None


def test_what_is_not_run_is_refused(carry: Carry) -> None:
    decoder, tokens = decoder_of(carry), moe_models.tokens(2, 8)
    cache = ContiguousCache(decoder.config, num_rows=2, max_tokens=32)
    places = torch.arange(8)[None] + 3
    with raises(UsageError, "by counting tokens", hint="valid_BS"):
        decoder(Batch(tokens_BS=tokens, positions_BS=places), cache)


def layer_of_mtp(folder: Path, held: dict[str, torch.Tensor]) -> Any:
    """A model of transformers whose only layer, and what comes behind it, are those of the layer of
    multi-token prediction."""
    import transformers

    kinds = {"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
    one = {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}
    config = transformers.AutoConfig.from_pretrained(folder / "hf", **kinds | one)
    config.save_pretrained(folder / "inner")
    own = {n.replace("mtp.0.", "layers.0.", 1): t for n, t in held.items() if n[:6] == "mtp.0."}
    own = {n.replace("layers.0.hc_head", "hc_head"): t for n, t in own.items()}
    own["norm.weight"] = own.pop("layers.0.norm.weight")
    own |= {n: held[n] for n in ("embed.weight", "head.weight")}
    unused = ("enorm", "hnorm", "e_proj", "h_proj", "emb.tok_emb", "head")
    own = {n: t for n, t in own.items() if n not in {f"layers.0.{x}.weight" for x in unused}}
    save_file(own, folder / "inner" / "model.safetensors", metadata={"format": "pt"})
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "inner", output_loading_info=True, **EAGER
    )
    assert not any(said[k] for k in ("missing_keys", "unexpected_keys"))
    return model


def test_the_loss_of_multi_token_prediction_is_that_of_its_equations(tmp_path: Path) -> None:
    """And all gradients. The layer inside is transformers' own; what is around it are the lines of
    DeepSeek's `inference/model.py`."""
    import transformers

    mtp_models.save_deepseek_v4(tmp_path / "hf")
    (stage,) = load_for_training(open_decoder(tmp_path / "hf"), dtype="float32")
    tokens = moe_models.tokens(2, 14) % 101
    batch, labels = Batch(tokens_BS=tokens[:, :-1]), tokens[:, 1:]
    frame = stage.frame(batch)
    stage.mtp.loss_factor = 1.0
    x_TH = stage.finish(stage.run(stage.embed(batch, frame), frame))
    found = stage.mtp_loss(x_TH, batch, labels, frame)
    found.backward()

    held = {n: t.float() for n, t in load_file(tmp_path / "hf" / "model.safetensors").items()}
    main = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", **EAGER)
    inner, config = layer_of_mtp(tmp_path, held), main.config
    streams = []
    main.model.hc_head.register_forward_pre_hook(lambda module, args: streams.append(args[0]))
    main(batch.tokens_BS)

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ held[f"mtp.0.{name}_proj.weight"].T

    def normalize(name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        return x * scale * held[f"mtp.0.{name}norm.weight"]

    following = torch.zeros_like(labels)
    following[:, :-1] = labels[:, :-1]
    embedded = main.model.embed_tokens(following)
    mixed = project("e", normalize("e", embedded))[:, :, None]
    mixed = mixed + project("h", normalize("h", streams[0]))
    inner.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: ((mixed, *args[1:]), kwargs), with_kwargs=True
    )
    logits = inner(following).logits[:, :-1]
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    assert found.item() == pytest.approx(want.item() * labels.numel(), rel=1e-5)
    want.backward()
    gradient = inner.model.hc_head.hc_fn.grad * labels.numel()
    ours = stage.mtp.layer(0).hc_head_fn.grad
    assert float((ours - gradient).abs().max()) < 1e-4 * float(gradient.abs().max())
    gradient = main.model.layers[0].attn_hc.fn.grad * labels.numel()
    hyper = stage.decoder.layers["0"].self_attention_hyper_connection
    ours = hyper.mapping_proj.weight.grad
    assert float((ours - gradient).abs().max()) < 1e-4 * float(gradient.abs().max())


def test_groups_of_heads_go_evenly_over_ranks(carry: Carry) -> None:
    with raises(LayoutError, "tp=4 does not divide out_groups=2"):
        check_layout(decoder_of(carry).config, ParallelConfig(tp=4))
