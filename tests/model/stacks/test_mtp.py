"""Layers of multi-token prediction: losses and gradients by the formula, documents, numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megtool.convert.language.canonical import CanonicalModel
from megtool.errors import LayoutError, MappingError
from megtool.model.batch import Batch
from megtool.model.stacks.decoder import Decoder
from megtool.model.stacks.mtp import shifted, with_mtp_layers
from megtool.model.stacks.pipeline import PipelineSchedule, build_stages
from megtool.options.layout import ParallelConfig
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.open import open_source
from megtool.spec.model_config import ModelConfig
from megtool.train.model.build import load_for_training
from tests.support.models import moe_cases, mtp_models
from tests.support.models.mtp_reference import MtpReference

SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 37,
    "num_mtp_layers": 2,
}


def seeded(config: ModelConfig) -> Decoder:
    decoder = Decoder(config, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return decoder.train()


@pytest.mark.parametrize(
    "family",
    [
        "mimo",
        pytest.param("glm4_moe", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", marks=pytest.mark.slow),
        pytest.param("exaone_moe", marks=pytest.mark.slow),
        pytest.param("mimo_v2_flash", marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_those_of_the_formula(family: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "hf"
    folder.mkdir()
    if family == "deepseek_v3":
        moe_cases.with_mtp(folder)
    else:
        mtp_models.save(family, folder)
    reference = MtpReference(folder, tmp_path / "ordinary", family)
    vocab = reference.model.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(0, vocab, (2, 13), generator=generator)
    tokens, labels = row[:, :-1], row[:, 1:].clone()
    labels[0, 3] = -100
    main, further = reference.loss(tokens, labels, 0.3)
    (main + further).backward()
    (decoder,) = load_for_training(open_source(folder), dtype="float32", threads=1)
    assert decoder.mtp is not None
    decoder.mtp.loss_factor = 0.3
    schedule = PipelineSchedule(decoder, num_microbatches=1)
    total, count = schedule.step(Batch(tokens_BS=tokens), labels)
    assert float(total / count) == pytest.approx(float(main.detach()), abs=1e-5)
    means = [float(loss / num) for loss, num in decoder.mtp.sums]
    assert 0.3 * sum(means) / len(means) == pytest.approx(float(further.detach()), abs=1e-5)

    def check(ours: torch.nn.Parameter, theirs: torch.Tensor | None) -> None:
        assert ours.grad is not None
        assert theirs is not None
        torch.testing.assert_close(ours.grad[: len(theirs)] / count, theirs, atol=2e-5, rtol=1e-4)

    inner = reference.model.model
    check(decoder.embedding.word_embeddings.weight, inner.embed_tokens.weight.grad)
    check(decoder.output_layer.weight, reference.model.lm_head.weight.grad)
    check(decoder.decoder.norm.weight, inner.norm.weight.grad)
    for m, around in enumerate(reference.around):
        layer = decoder.mtp.layer(m)
        check(layer.enorm.weight, around["e"].grad)
        check(layer.hnorm.weight, around["h"].grad)
        check(layer.final_layernorm.weight, around["n"].grad)
        proj = around["p"].grad
        if reference.hidden_first:
            proj = proj.roll(proj.shape[1] // 2, 1)
        check(layer.eh_proj.weight, proj)


def test_documents_of_a_row_are_as_rows_of_their_own() -> None:
    decoder = seeded(ModelConfig.from_fields(**SIZES))
    assert decoder.mtp is not None
    tokens = torch.arange(12)[None] * 3 % 37
    labels = tokens.roll(-1, 1)
    labels[:, [6, 11]] = -100
    documents = torch.tensor([[0] * 7 + [1] * 5])
    positions = torch.tensor([[*range(7), *range(5)]])
    schedule = PipelineSchedule(decoder, num_microbatches=1)
    schedule.step(Batch(tokens_BS=tokens, positions_BS=positions, documents_BS=documents), labels)
    together = [(float(a), int(b)) for a, b in decoder.mtp.sums]
    decoder.mtp.begin()
    for part in (slice(7), slice(7, 12)):
        schedule.step(Batch(tokens_BS=tokens[:, part]), labels[:, part])
    apart = [(float(a), int(b)) for a, b in decoder.mtp.sums]
    assert [n for _, n in together] == [n for _, n in apart] == [5 + 3, 4 + 2]
    assert [x for x, _ in together] == pytest.approx([x for x, _ in apart], abs=1e-4)


def test_shifted() -> None:
    values = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    documents = torch.tensor([[0, 0, 1, 1], [2, 2, 2, -1]])
    assert shifted(values, None, 0).tolist() == [[2, 3, 4, 0], [6, 7, 8, 0]]
    assert shifted(values, documents, -100).tolist() == [[2, -100, 4, -100], [6, 7, -100, -100]]


def test_a_model_that_is_not_trained_adds_nothing() -> None:
    decoder = seeded(ModelConfig.from_fields(**SIZES, tied_embeddings=True))
    assert decoder.mtp is not None
    batch = Batch(tokens_BS=torch.arange(8)[None])
    for change in ("factor", "frozen"):
        decoder.mtp.loss_factor = 0.0 if change == "factor" else 0.1
        decoder.mtp.requires_grad_(change == "factor")
        PipelineSchedule(decoder, num_microbatches=1).step(batch, batch.tokens_BS)
        assert decoder.mtp.sums == [(0.0, 0)] * 2
        assert all(p.grad is None for p in decoder.mtp.parameters())


def test_further_layers_are_numbered_on() -> None:
    plain = with_mtp_layers(
        ModelConfig.from_fields(**SIZES, window_size=4, window_skip_freq=(1, 0))
    )
    assert (plain.num_layers, plain.mtp.num_mtp_layers) == (4, 0)
    assert plain.layer_kinds == ("*-",) * 4
    assert plain.window.window_skip_freq == (1, 0, 0, 0)
    sizes = SIZES | {"num_experts": 2, "num_experts_per_token": 1, "moe_ffn_hidden_size": 8}
    moe = with_mtp_layers(
        ModelConfig.from_fields(**sizes, moe_layer_freq=(0, 1), no_rope_layers=(1, 1))
    )
    assert moe.layer_kinds == ("*-", "*E", "*E", "*E")
    assert moe.positions.no_rope_layers == (1, 1, 0, 0)
    hybrid = ModelConfig.from_fields(**sizes, layer_kinds=("*", "E"), mtp_kind="*E")
    assert with_mtp_layers(hybrid).layer_kinds == ("*", "E", "*", "E", "*", "E")
    names = set(Decoder(hybrid).state_dict())
    assert "mtp.layers.1.mtp_model_layer.layers.0.self_attention.linear_qkv.weight" in names
    assert "mtp.layers.1.mtp_model_layer.layers.1.mlp.router.weight" in names
    assert decoder_runs(hybrid)
    config = ModelConfig.from_fields(**SIZES)
    assert with_mtp_layers(with_mtp_layers(config)) is not None
    assert "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight" in Decoder(config).state_dict()


_MIXERS: dict[str, Any] = {
    "mamba_num_heads": 2,
    "mamba_head_dim": 8,
    "mamba_num_groups": 1,
    "mamba_state_dim": 8,
    "mamba_conv_kernel": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel": 4,
}


@pytest.mark.parametrize("pattern", ["M*-", "*-*-", "E*", "GG"])
def test_layers_inside_are_numbered_in_a_hybrid(pattern: str) -> None:
    """They compute what the same layers do in a decoder, and all of them are trained."""
    sizes = SIZES | {"num_experts": 2, "num_experts_per_token": 1, "moe_ffn_hidden_size": 8}
    sizes |= _MIXERS | {"layer_kinds": ("*", "-")}
    config = ModelConfig.from_fields(**sizes, mtp_kind=pattern)
    decoder = seeded(config)
    assert decoder.mtp is not None
    inner = [
        name.split(".")[5]
        for name in decoder.state_dict()
        if name.startswith("mtp.layers.1.mtp_model_layer.layers.")
    ]
    assert sorted(set(inner)) == [str(k) for k in range(len(pattern))]
    alone = sizes | {"num_layers": len(pattern), "layer_kinds": tuple(pattern), "num_mtp_layers": 0}
    like = seeded(ModelConfig.from_fields(**alone))
    for depth in range(2):
        layer = decoder.mtp.layer(depth)
        state = layer.mtp_model_layer.state_dict()
        like.decoder.load_state_dict(state, strict=False)
        batch = Batch(tokens_BS=torch.arange(8)[None])
        x_TH, embedded_TH = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(depth))
        both = torch.cat((layer.enorm(embedded_TH), layer.hnorm(x_TH)), -1)
        want = layer.final_layernorm(like.run(layer.eh_proj(both), like.frame(batch)))
        got = layer(x_TH, embedded_TH, decoder.frame(batch))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert decoder_runs(config)
    model = CanonicalModel(config)
    names = [n for pattern in model.vocabulary for n in model.names(pattern)]
    assert len([n for n in names if n.startswith("mtp.1.layers.0.")]) > 2
    assert not [n for n in names if n.startswith(("mtp.1.attn", "mtp.1.mlp", "mtp.1.mamba"))]


def decoder_runs(config: ModelConfig) -> bool:
    decoder = seeded(config)
    batch = Batch(tokens_BS=torch.arange(8)[None])
    PipelineSchedule(decoder, num_microbatches=1).step(batch, batch.tokens_BS)
    assert decoder.mtp is not None
    return all(torch.isfinite(loss) and num > 0 for loss, num in decoder.mtp.sums)


def test_what_cannot_be_together_is_refused() -> None:
    with pytest.raises(MappingError, match="learned positions and layers of multi-token"):
        Decoder(ModelConfig.from_fields(**SIZES, position_embedding="learned"))
    config = ModelConfig.from_fields(**SIZES)
    for layout, problem in (
        ("Ettmm|L", "on another stage than the loss"),
        ("Et|tmL", "has 1 layers of multi-token prediction"),
    ):
        groups = ProcessGroups.alone("meta")
        object.__setattr__(groups, "parallel", ParallelConfig(pp=2, pipeline_layout=layout))
        with pytest.raises(LayoutError, match=problem):
            build_stages(config, groups)
