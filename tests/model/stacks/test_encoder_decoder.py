"""An encoder and a decoder against transformers' T5: logits, gradients, caches, ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megtool import reshard
from megtool.convert.families.detection import family
from megtool.errors import LayoutError, MappingError, UsageError
from megtool.inference.load import load
from megtool.model.attention.relative_bias import RelativeBias
from megtool.model.batch import Batch
from megtool.model.cache.kv_cache import ContiguousCache
from megtool.model.cache.source import SourceCache
from megtool.model.layers.dropout import Dropout
from megtool.model.layers.param_attributes import finish_gradients
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.encoder_decoder import EncoderDecoder, decoder_config, encoder_config
from megtool.model.stacks.pipeline import PipelineSchedule, build_stages, forward_stages
from megtool.model.stacks.recompute import recompute
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import Group, ProcessGroups
from tests.support.errors import raises
from tests.support.models import tiny_t5
from tests.support.runs.loading import source_of
from tests.support.worlds.gloo_world import run_world

transformers = pytest.importorskip("transformers")

CASES: dict[str, dict[str, Any]] = {
    "t5": {},
    "flan": tiny_t5.FLAN,
    "more layers in the encoder": {"num_layers": 3, "num_decoder_layers": 1},
    "mt5": {"family": "mt5"},
    "umt5": {"family": "umt5", "num_decoder_layers": 3},
}
SOURCE, TARGET = 28, 14


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Each case as a folder, with transformers' model."""
    root = tmp_path_factory.mktemp("t5")
    return {name: (root / name, tiny_t5.save(root / name, **keys)) for name, keys in CASES.items()}


def inputs() -> tuple[Batch, Tensor]:
    """Four rows, with padding behind sources, and labels that do not all count."""
    generator = torch.Generator().manual_seed(0)

    def draw(width: int) -> Tensor:
        return torch.randint(1, 256, (4, width), generator=generator)

    source, tokens, labels = draw(SOURCE), draw(TARGET), draw(TARGET)
    labels[1, 9:] = -100
    valid = torch.arange(SOURCE) < torch.tensor([SOURCE, 20, 7, 1])[:, None]
    return Batch(tokens_BS=tokens, source_BE=source, source_valid_BE=valid), labels


def loaded(folder: Path, *, dtype: str = "float32", **how: Any) -> EncoderDecoder:
    found = load(source_of(folder), dtype=dtype, threads=1, **how)
    assert isinstance(found, EncoderDecoder)
    return found


def logits_of_theirs(model: Any, batch: Batch, labels: Tensor | None = None) -> Any:
    assert batch.source_valid_BE is not None
    return model(
        input_ids=batch.source_BE,
        attention_mask=batch.source_valid_BE.long(),
        decoder_input_ids=batch.tokens_BS,
        labels=labels,
    )


@pytest.mark.parametrize("name", CASES)
def test_logits_and_loss_are_those_of_transformers(
    name: str, folders: dict[str, tuple[Path, Any]]
) -> None:
    folder, theirs = folders[name]
    batch, labels = inputs()
    ours = loaded(folder)
    with torch.no_grad():
        want, got = logits_of_theirs(theirs, batch, labels), ours(batch)
    assert got.std() > 0.1
    assert (got - want.logits).abs().max() < 1e-4
    loss, count = ours.loss(batch, labels)
    assert float(loss / count) == pytest.approx(float(want.loss), abs=1e-5)
    without = Batch(tokens_BS=batch.tokens_BS, source_BE=batch.source_BE)
    assert (ours(without) - got).abs().max() > 1e-2  # padding is attended to


@pytest.mark.parametrize("case", ["flan", "umt5"])
def test_gradients_are_those_of_transformers(
    case: str, folders: dict[str, tuple[Path, Any]]
) -> None:
    folder, theirs = folders[case]
    batch, labels = inputs()
    ours = loaded(folder).requires_grad_(True)
    loss, count = ours.loss(batch, labels)
    (loss / count).backward()
    theirs.zero_grad()
    logits_of_theirs(theirs, batch, labels).loss.backward()
    own = {n: p.grad for n, p in ours.named_parameters()}
    assert all(g is not None and g.any() for g in own.values())
    block = "{}.block.{}.layer.{}.{}.weight"
    bias = "relative_attention_bias"
    biases = {
        f"encoder_relative_pos_emb.{bias}": ("encoder", 0, 0, f"SelfAttention.{bias}"),
        f"decoder_relative_pos_emb.{bias}": ("decoder", 0, 0, f"SelfAttention.{bias}"),
    }
    if case == "umt5":
        layer = "{}.layers.{}.self_attention.relative_pos_emb." + bias
        biases = {
            layer.format(stack, number): (stack, number, 0, f"SelfAttention.{bias}")
            for stack, number in (("encoder", 1), ("decoder", 0), ("decoder", 2))
        }
    pairs = {
        **biases,
        "encoder.layers.1.mlp.linear_fc2": ("encoder", 1, 1, "DenseReluDense.wo"),
        "decoder.layers.2.pre_cross_attn_layernorm": ("decoder", 2, 1, "layer_norm"),
        "decoder.layers.0.cross_attention.linear_q": ("decoder", 0, 1, "EncDecAttention.q"),
        "decoder.layers.1.cross_attention.linear_proj": ("decoder", 1, 1, "EncDecAttention.o"),
    }
    names = {n: p.grad for n, p in theirs.named_parameters()}
    for name, place in pairs.items():
        want, got = names[block.format(*place)], own[f"{name}.weight"]
        assert (got - want).abs().max() < 2e-4 * want.abs().max(), name


def test_buckets_are_those_of_transformers() -> None:
    theirs = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    for keys in (
        {},
        {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    ):
        config = family("t5").read_config(tiny_t5.SIZES | keys)
        distance = torch.arange(-300, 301)
        for both_ways, stack in ((True, encoder_config), (False, decoder_config)):
            ours = RelativeBias(stack(config), ProcessGroups.alone(), device="cpu")
            want = theirs(
                distance,
                bidirectional=both_ways,
                num_buckets=config.positions.relative_num_buckets,
                max_distance=config.positions.relative_max_distance,
            )
            assert torch.equal(ours.bucket(distance), want)


@pytest.mark.parametrize("case", ["flan", "umt5"])
def test_a_decoder_that_goes_on_reads_its_sources_once(
    case: str, folders: dict[str, tuple[Path, Any]]
) -> None:
    """Token by token, with the rows' slots in another order."""
    ours, (batch, _) = loaded(folders[case][0]), inputs()
    whole = ours(batch)
    cache = ContiguousCache(ours.config, num_rows=4, max_tokens=TARGET)
    cache.sources = SourceCache(
        ours.config, num_slots=6, max_tokens=SOURCE + 3, layers=ours.stage.layers
    )
    cache.sources.choose([5, 0, 3, 2])
    parts = []
    for span in (slice(0, 5), *(slice(n, n + 1) for n in range(5, TARGET))):
        first = span.start == 0
        part = Batch(
            tokens_BS=batch.tokens_BS[:, span],
            source_BE=batch.source_BE if first else None,
            source_valid_BE=batch.source_valid_BE if first else None,
        )
        parts.append(ours(part, cache))
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-4
    with raises(UsageError, "the batch has no source"):
        ours(Batch(tokens_BS=batch.tokens_BS))
    with raises(UsageError, "6 slots of"):
        cache.sources.choose(range(6))
        cache.sources.begin((5, 3), None)


def test_recomputed_layers_have_the_same_gradients(folders: dict[str, tuple[Path, Any]]) -> None:
    (batch, labels), gradients = inputs(), []
    for again in (False, True):
        ours = loaded(folders["t5"][0]).requires_grad_(True).train()
        ours.dropout = Dropout(hidden=0.2, attention=0.1)
        if again:
            assert recompute(ours, "full") == 4
        torch.manual_seed(3)
        PipelineSchedule(ours, num_microbatches=2).step(batch, labels)
        gradients.append({n: p.grad for n, p in ours.named_parameters()})
    assert all(torch.equal(g, gradients[1][n]) for n, g in gradients[0].items() if g is not None)


def test_what_two_stacks_cannot_be_is_refused(folders: dict[str, tuple[Path, Any]]) -> None:
    config = source_of(folders["t5"][0]).config
    with raises(MappingError, "position_embedding is 'relative'"):
        Decoder(config)
    with raises(MappingError, "num_decoder_layers is 0"):
        EncoderDecoder(encoder_config(config))
    for field, value in (("relative_num_buckets", 2), ("relative_max_distance", 1)):
        with raises(MappingError, "relative positions have", hint="at least 4 buckets"):
            EncoderDecoder(config.with_fields(**{field: value}))
    alone, pair = ProcessGroups.alone(), Group(ranks=(0, 1), rank=0)
    with raises(LayoutError, "cp is 2", hint="--tp and --pp split it"):
        build_stages(config, replace(alone, cp=pair))
    for layout, text, hint in (
        ({"pp": 2}, "encoder_pp does not say", "--encoder-pp 1"),
        ({"pp": 4}, "encoder_pp does not say", "--encoder-pp 2"),
        ({"pp": 6}, "encoder_pp does not say", "another --pp"),
        ({"pp": 4, "encoder_pp": 1}, "3 of pp=4 stages do not divide num_decoder_layers=2", "1, 2"),
    ):
        with raises(LayoutError, text, hint=hint):
            build_stages(config, replace(alone, parallel=ParallelConfig(**layout)))
    tokens = torch.ones(2, 3, dtype=torch.int64)
    with raises(UsageError, "source_BE has shape None"):
        Batch(tokens_BS=tokens, source_valid_BE=tokens.bool())
    with raises(UsageError, "source_BE has shape [1, 3]"):
        Batch(tokens_BS=tokens, source_BE=tokens[:1])
    with raises(UsageError, "source_valid_BE is of torch.int64"):
        Batch(tokens_BS=tokens, source_BE=tokens, source_valid_BE=tokens)


def on_rank(rank: int, size: int, folder: str, answer: str, layout: dict[str, Any]) -> None:
    sequence_parallel = layout.pop("sequence_parallel", False)
    groups = ProcessGroups.start(ParallelConfig(**layout))
    how: dict[str, Any] = {"groups": groups, "sequence_parallel": sequence_parallel}
    batch, labels = inputs()
    logits = forward_stages(loaded(Path(folder), **how), batch, everywhere=True)
    assert logits is not None
    ours = loaded(Path(folder), dtype="float64", **how).requires_grad_(True)
    loss, _ = PipelineSchedule(ours, num_microbatches=4).step(batch, labels)
    finish_gradients(ours, groups)
    want_logits, want_loss, want_grads = torch.load(answer, weights_only=True)
    assert (logits - want_logits).abs().max() < 1e-4
    assert float(loss) == pytest.approx(want_loss, rel=1e-10)
    for name, parameter in ours.named_parameters():
        whole, own = want_grads[name], parameter.grad
        assert own is not None
        if name == "embedding.word_embeddings.weight" and groups.tp.size == 1:
            whole = torch.nn.functional.pad(whole, (0, 0, 0, len(own) - len(whole)))
        if whole.shape == own.shape:
            assert (own - whole).abs().max() < 1e-9 * whole.abs().max(), name
    groups.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("t5", {"tp": 2}),
        ("t5", {"tp": 2, "sequence_parallel": True}),
        ("flan", {"tp": 2}),
        ("flan", {"tp": 2, "sequence_parallel": True}),
        ("t5", {"pp": 2, "encoder_pp": 1}),
        ("t5", {"pp": 3, "encoder_pp": 1}),
        ("t5", {"pp": 3, "encoder_pp": 2}),
        ("flan", {"pp": 4, "encoder_pp": 1}),
        ("flan", {"tp": 2, "pp": 2, "encoder_pp": 1, "sequence_parallel": True}),
        ("more layers in the encoder", {"pp": 4, "encoder_pp": 3}),
        ("mt5", {"tp": 2}),
        ("mt5", {"pp": 2, "encoder_pp": 1}),
        ("umt5", {"tp": 2, "sequence_parallel": True}),
        ("umt5", {"pp": 4, "encoder_pp": 1}),
    ],
    ids=str,
)
def test_ranks_have_the_logits_of_transformers(
    name: str, layout: dict[str, Any], folders: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    """Loaded from one tensor rank's folder, and parameters that all have whole."""
    folder, theirs = folders[name]
    reshard(folder, tmp_path / "meg", to="torch_dist", tp=1, fsync=False)
    batch, labels = inputs()
    with torch.no_grad():
        logits = logits_of_theirs(theirs, batch).logits
    ours = loaded(folder, dtype="float64").requires_grad_(True)
    loss, _ = PipelineSchedule(ours, num_microbatches=2).step(batch, labels)
    grads = {n: p.grad for n, p in ours.named_parameters()}
    torch.save((logits, float(loss), grads), tmp_path / "answer")
    size = layout.get("tp", 1) * layout.get("pp", 1)
    run_world(on_rank, size, str(tmp_path / "meg"), str(tmp_path / "answer"), layout)
