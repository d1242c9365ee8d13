"""Drafts of EAGLE-3 heads: those of ModelOpt's own head, and texts that stay the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megtool
from megtool.errors import FormatError, LayoutError, MappingError, UsageError
from megtool.inference.forward import Forward
from megtool.inference.generation.batching import GenerateRequest
from megtool.inference.generation.draft_head_files import DraftHeadFiles
from megtool.inference.generation.drafting import DraftRow
from megtool.inference.generation.generate import Decoding, Meter, generate
from megtool.inference.generation.head_drafter import HeadDrafter
from megtool.inference.generation.speculative import choose_drafting
from megtool.inference.generation.text_engine import NoText
from megtool.inference.load import load
from megtool.options.layout import ParallelConfig
from megtool.options.sampling import Sampling
from megtool.parallel.process_groups import ProcessGroups
from megtool.source.open import open_source
from megtool.spec.model_config import ModelConfig
from megtool.train.features.eagle_head import make_eagle_config
from tests.support.emulated.graph_rules import check_graphs
from tests.support.errors import raises
from tests.support.models.eagle_heads import SIZES, modelopt_eagle, save_head
from tests.support.models.tiny_model import tiny_model
from tests.support.worlds.gloo_world import run_world

pytest.importorskip("modelopt.torch.speculative", reason="ModelOpt makes the heads")

LENGTHS, LIMITS = (5, 1, 9, 2), (20, 12, 2, 7)


def requests_of(vocabulary: int) -> list[GenerateRequest]:
    generator = torch.Generator().manual_seed(0)
    return [
        GenerateRequest(
            number=n,
            prompt=tuple(torch.randint(1, vocabulary, (length,), generator=generator).tolist()),
            max_new_tokens=limit,
        )
        for n, (length, limit) in enumerate(zip(LENGTHS, LIMITS, strict=True))
    ]


def run(
    forward: Forward, requests: Sequence[GenerateRequest], **options: Any
) -> tuple[list[tuple[int, ...]], Meter]:
    meter = Meter()
    with check_graphs(forward.device):
        texts = [
            *generate(forward, requests, Decoding(**options), new_detokenizer=NoText, meter=meter)
        ]
    return [text.ids for text in texts], meter


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head") / "llama"
    tiny_model("llama", folder, num_hidden_layers=8, tie_word_embeddings=False)
    return folder


@pytest.fixture(scope="module")
def forward(llama: Path) -> Forward:
    return Forward(load(open_source(llama), dtype="float32"))


def eagle(llama: Path, model: ModelConfig, sizes: dict[str, Any], **recipe: Any) -> Any:
    """ModelOpt's model with a head whose weights are large enough to matter."""
    recipe |= {"eagle_export_rope_scaling": {}, "eagle_architecture_config": SIZES | sizes}
    config = make_eagle_config(recipe, model, torch.float32, file="recipe")
    out = modelopt_eagle(llama, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in out.eagle_module.parameters():
            noise = torch.empty_like(parameter).normal_(0, 0.3, generator=generator)
            parameter.copy_(noise + (1 if parameter.dim() == 1 else 0))
        if sizes.get("draft_vocab_size"):
            out.eagle_module.d2t.copy_(torch.arange(sizes["draft_vocab_size"]))  # every second one
    return out.eval()


@pytest.fixture(scope="module")
def head(llama: Path, forward: Forward, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = eagle(llama, forward.config, {"draft_vocab_size": 32})
    return save_head(model, tmp_path_factory.mktemp("head") / "eagle")


@pytest.mark.parametrize(
    ("sizes", "num_slots"),
    [
        ({"draft_vocab_size": 32}, 4),
        ({"num_hidden_layers": 2, "draft_vocab_size": 32}, 2),
        ({"eagle_aux_hidden_state_layer_ids": [0, 4]}, 4),
    ],
)
def test_drafts_are_modelopts(
    sizes: Any,
    num_slots: int,
    llama: Path,
    forward: Forward,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At every step, with caches, what ModelOpt's head drafts from the whole text so far."""
    theirs, checked = eagle(llama, forward.config, sizes), 0
    files = DraftHeadFiles.open(save_head(theirs, tmp_path / "eagle"), forward.config)
    requests, draft = requests_of(forward.config.embedding.vocab_size), HeadDrafter.draft
    plain, _ = run(forward, requests)

    def compare(self: HeadDrafter, rows: Sequence[DraftRow]) -> None:
        nonlocal checked
        draft(self, rows)
        for row in (r for r in rows if r.drafts):
            known = torch.tensor([row.running.known])
            with torch.no_grad():
                token, drafts = theirs.pseudo_speculative_generate(known[:, :-1], steps=3)
            assert token.item() == known[0, -1]
            assert row.drafts == drafts[0].tolist()[: row.num_wanted]
            checked += len(row.drafts)

    monkeypatch.setattr(HeadDrafter, "draft", compare)
    drafted, meter = run(forward, requests, num_slots=num_slots, speculative=files)
    assert drafted == plain
    assert checked == meter.num_drafted > 60


def test_right_drafts_save_passes(
    head: Path, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All, some or none of the drafts are right; the text is that of plain decoding."""
    files = DraftHeadFiles.open(head, forward.config, 4)
    requests = requests_of(forward.config.embedding.vocab_size)
    plain, one = run(forward, requests)
    generator = torch.Generator().manual_seed(0)

    def often_right(self: HeadDrafter, rows: Sequence[DraftRow], x_BH: torch.Tensor) -> Any:
        at = [len(r.running.tokens) + len(r.drafts) for r in rows]
        right = [plain[r.number][n] for r, n in zip(rows, at, strict=True)]
        wrong = torch.rand(len(rows), generator=generator) < share
        return torch.tensor([t + bool(e) for t, e in zip(right, wrong, strict=True)])

    monkeypatch.setattr(HeadDrafter, "_propose", often_right)
    for share in (0.0, 0.4):
        drafted, meter = run(forward, requests, speculative=files)
        assert drafted == plain
        assert meter.num_steps * (2 if share else 4) <= one.num_steps
        assert len(meter.accepted) == 4
        assert list(meter.accepted) == sorted(meter.accepted, reverse=True)
        assert (meter.num_accepted == meter.num_drafted) == (not share)


def test_a_sampled_text_is_the_same_alone_and_in_a_batch(head: Path, forward: Forward) -> None:
    files = DraftHeadFiles.open(head, forward.config)
    requests = requests_of(forward.config.embedding.vocab_size)
    how = {"sampling": Sampling(temperature=1.5, seed=5), "speculative": files}
    many, meter = run(forward, requests, **how)
    assert many == run(forward, requests, num_slots=1, **how)[0]
    assert 0 < meter.num_accepted < meter.num_drafted


def test_megatrons_names_and_the_layers_that_engines_count(
    head: Path, forward: Forward, tmp_path: Path
) -> None:
    shutil.copytree(head, tmp_path / "middle")
    tensors = load_file(head / "model.safetensors")
    renamed = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    save_file(renamed, tmp_path / "middle/model.safetensors")
    config = json.loads((head / "config.json").read_bytes())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]
    (tmp_path / "middle/config.json").write_text(json.dumps(config))
    one, two = (DraftHeadFiles.open(f, forward.config) for f in (head, tmp_path / "middle"))
    requests = requests_of(forward.config.embedding.vocab_size)
    meters = [run(forward, requests, speculative=f)[1] for f in (one, two)]
    assert one.layers == two.layers == (1, 3, 4)
    assert meters[0].accepted == meters[1].accepted


def test_layers_are_read_ascending_in_whatever_order_they_are_listed(
    head: Path, forward: Forward, tmp_path: Path
) -> None:
    shutil.copytree(head, tmp_path / "eagle")
    config = json.loads((head / "config.json").read_bytes())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [4, 1, 3]
    (tmp_path / "eagle/config.json").write_text(json.dumps(config))
    assert DraftHeadFiles.open(tmp_path / "eagle", forward.config).layers == (1, 3, 4)


def test_other_folders_and_damaged_heads_are_refused(
    llama: Path, head: Path, forward: Forward, tmp_path: Path
) -> None:
    config = forward.config
    tensors = load_file(head / "model.safetensors")
    stored = json.loads((head / "config.json").read_bytes())

    def open_changed(name: str, values: Any, **settings: Any) -> DraftHeadFiles:
        folder = tmp_path / name
        folder.mkdir()
        changed = {n: t for n, t in (tensors | values).items() if t is not None}
        save_file(changed, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(stored | settings))
        return DraftHeadFiles.open(folder, config)

    with raises(FormatError, "no draft head", str(llama)):
        DraftHeadFiles.open(llama, config)
    with raises(FormatError, "another kind"):
        open_changed("medusa", {}, architectures=["DFlashDraftModel"])
    with raises(MappingError, "lacks 1 tensors", tensor="fc.weight"):
        open_changed("missing", {"fc.weight": None})
    with raises(FormatError, "shape", tensor="norm.weight"):
        open_changed("shape", {"norm.weight": torch.ones(3)})
    with raises(MappingError, "vocab_size"):
        open_changed("vocabulary", {"t2d": None}, vocab_size=config.embedding.vocab_size + 1)
    with raises(MappingError, "no output layer", tensor="lm_head.weight"):
        open_changed("output", {"lm_head.weight": None})
    section = stored["eagle_config"]
    for n, (setting, value, words) in enumerate(
        (
            ("num_hidden_layers", 10**9, "more than there are tensors"),
            ("vocab_size", "101", "vocab_size is '101'"),
            ("head_dim", 0, "head_dim is 0"),
            ("num_key_value_heads", 3, "does not divide"),
            ("draft_vocab_size", 200, "draft_vocab_size is 200"),
            ("eagle_config", [1], "eagle_config is [1]"),
            ("eagle_config", {"eagle_aux_hidden_state_layer_ids": 5}, "layer_ids is 5"),
            ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 1, 1]}, "layer_ids is"),
            ("eagle_config", section | {"use_aux_hidden_state": False}, "no states of layers"),
            ("norm_before_residual", "yes", "norm_before_residual is 'yes'"),
            ("quantization_config", {"quant_method": "modelopt"}, "quantized"),
            ("rope_scaling", "yarn", "config.json cannot be used"),
            ("rope_scaling", {"rope_type": "yarn"}, "lacks 'factor'"),
        )
    ):
        with raises((FormatError, MappingError), words, str(tmp_path / f"setting{n}")):
            open_changed(f"setting{n}", {}, **{setting: value})
    for n, (name, tensor) in enumerate(
        (
            ("d2t", tensors["d2t"].float()),
            ("fc.weight", tensors["fc.weight"].to(torch.int8)),
            ("fc.weight", tensors["fc.weight"].to(torch.float8_e4m3fn)),
        )
    ):
        with raises(FormatError, "dtype", tensor=name):
            open_changed(f"dtype{n}", {name: tensor})
    with raises(FormatError, "stored twice"):
        open_changed("twice", {"midlayer.hidden_norm.weight": tensors["norm.weight"].clone()})
    nothing = torch.full_like(tensors["norm.weight"], torch.nan)
    beyond = torch.full_like(tensors["d2t"], 1 << 40)
    for name, value, words in (
        ("norm.weight", nothing, "a NaN"),
        ("d2t", beyond, "no token"),
        ("d2t", -torch.arange(32), "twice"),
    ):
        files = open_changed(f"{name}-{words}", {name: value})
        with raises(FormatError, words, tensor=name):
            files.load(dtype=torch.float32, device=torch.device("cpu"))
    for number in (0, 33):
        with raises(UsageError, f"--num-drafts is {number}"):
            DraftHeadFiles.open(head, config, number)
    with raises(UsageError, "--num-drafts 2"):
        choose_drafting("mtp", 2, config)
    with raises(UsageError, "--stream-layers"):
        choose_drafting(str(head), None, config, stream_layers=True)


def test_an_engine_drafts_with_a_head(llama: Path, head: Path) -> None:
    with (
        megtool.Engine(llama, device="cpu", speculative=head, num_drafts=2) as engine,
        megtool.Engine(llama, device="cpu") as plain,
    ):
        prompt = [3, 1, 4, 1, 5]
        request = engine.submit(prompt, max_new_tokens=9)
        assert request.result().ids == plain.submit(prompt, max_new_tokens=9).result().ids
        assert engine.meter.num_verified * 2 >= engine.meter.num_drafted > 0


def on_rank(rank: int, size: int, model: str, head: str, layout: dict[str, int]) -> Any:
    groups = ProcessGroups.start(ParallelConfig(**layout))
    torch.set_num_threads(1)
    forward = Forward(load(open_source(Path(model)), groups=groups, dtype="float32"))
    files = DraftHeadFiles.open(Path(head), forward.config)
    try:
        texts, meter = run(
            forward, requests_of(forward.config.embedding.vocab_size), speculative=files
        )
    except LayoutError as e:
        return e.message
    return texts, meter.accepted


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_write_the_texts_of_one(
    llama: Path, head: Path, forward: Forward, layout: dict[str, int]
) -> None:
    files = DraftHeadFiles.open(head, forward.config)
    texts, meter = run(forward, requests_of(forward.config.embedding.vocab_size), speculative=files)
    for out in run_world(on_rank, 2, str(llama), str(head), layout):
        if "pp" in layout:
            assert "pp=2" in out
        else:
            assert out == (texts, meter.accepted)
