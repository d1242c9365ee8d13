"""Text models inside larger ones, through the whole engine and back, with towers byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megtool import inspect, reshard, verify
from megtool.convert.families.detection import detect_family, families, family
from megtool.convert.megatron.sharding import is_known, rule_of
from megtool.convert.whole_towers import check_towers
from megtool.errors import MappingError
from megtool.inference.load import load
from megtool.model.batch import Batch
from megtool.source.open import open_source
from tests.support.errors import raises
from tests.support.folders import read_config
from tests.support.folders import stored_tensors as stored
from tests.support.models.moe_cases import MISTRAL4
from tests.support.models.nested_cases import CASES, NestedCase, edit_config, rename
from tests.support.runs.loading import source_of

transformers = pytest.importorskip("transformers")

cases = pytest.mark.parametrize("case", CASES, ids=str)
first_is_fast = pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(c, marks=pytest.mark.slow) for c in CASES[1:])], ids=str
)
GEMMA, MISTRAL, QWEN = (
    next(case for case in CASES if case.family == family)
    for family in ("gemma3_multimodal", "mistral3", "qwen2_5_vl")
)
TOKENS = torch.arange(28).reshape(2, 14)


@cases
def test_weights_come_back_to_the_same_bytes(case: NestedCase, tmp_path: Path) -> None:
    case.build(tmp_path / "hf")
    before = stored(tmp_path / "hf")
    steps: tuple[tuple[str, dict[str, Any]], ...] = (
        ("torch_dist", {"tp": 2, "pp": 2}),
        ("dcp", {"dp": 2}),
        ("megatron", {"tp": 2, "pp": 2}),
        ("zarr", {}),
        ("torch_dist", {"tp": 1}),
        ("megatron", {"tp": 4}),
        ("hf", {}),
    )
    last = tmp_path / "hf"
    for number, (to, layout) in enumerate(steps):
        out = tmp_path / f"{number}_{to}"
        report = reshard(last, out, to=to, fsync=False, **layout)
        assert [d for d in report.dropped if d.is_lost] == []
        assert report.family == case.family
        last = out
    assert stored(last) == before
    assert read_config(last) == read_config(tmp_path / "hf")
    assert verify(tmp_path / "hf", tmp_path / "2_megatron").verdict == "equal"


@first_is_fast
def test_names_beside_the_towers_are_megatron_bridges(case: NestedCase, tmp_path: Path) -> None:
    case.build(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, pp=2, fsync=False)
    opened = open_source(tmp_path / "meg")
    names = {t.name for t in opened.catalogue.tensors}
    if opened.view.family is not None and opened.view.family.towers[0].megatron is not None:
        assert not [n for n in names if n.startswith("visual.")]
        return
    towers = opened.view.towers()
    assert towers
    assert set(towers) < names  # they keep their names
    text = names - set(towers)
    assert all(n.startswith("language_model.") for n in text)
    assert "language_model.embedding.word_embeddings.weight" in text
    for name in towers:
        assert is_known(name)
        assert (rule_of(name, False).tp_dim, rule_of(name, False).place) == (0, "first")
    owners = opened.catalogue.shards.owner
    for name in towers:  # one whole copy, on the first stage
        rows = opened.catalogue.shards.of(opened.catalogue.index[name])
        assert rows.stop - rows.start == 1
        assert owners[rows.start] < 2


def bridge_tower(held: dict[str, torch.Tensor], heads: int) -> dict[str, torch.Tensor]:
    """A tower as Megatron-Bridge saves it, by the rules of its own conversion: what it renames, how
    it weaves queries, keys and values, and which modules it stacks."""
    exact = {
        "norm1.": "self_attention.linear_qkv.layer_norm_",
        "norm2.": "mlp.linear_fc1.layer_norm_",
        "attn.qkv.": "self_attention.linear_qkv.",
        "attn.proj.": "self_attention.linear_proj.",
    }
    out: dict[str, list[torch.Tensor]] = {}
    for name in sorted(held, key=lambda n: [int(x) if x.isdigit() else 0 for x in n.split(".")]):
        rest, tensor = name.removeprefix("model.visual."), held[name]
        if rest.startswith("blocks."):
            _, _, rest = rest.split(".", 2)
            if rest.startswith("attn.qkv."):
                parts = [p.unflatten(0, (heads, -1)) for p in tensor.chunk(3)]
                tensor = torch.cat(parts, 1).flatten(0, 1)
            for old, new in exact.items():
                rest = rest.replace(old, new)
            out.setdefault(f"decoder.layers.{rest}", []).append(tensor)
        elif rest.startswith("deepstack_merger_list."):
            _, _, rest = rest.split(".", 2)
            rest = rest.replace("norm.", "patch_norm.")
            out.setdefault(f"decoder.deepstack_merger_list.{rest}", []).append(tensor)
        else:
            out[rest.replace("merger.norm.", "merger.patch_norm.")] = [tensor]
    return {
        f"vision_model.{n}": torch.stack(t) if n.startswith("decoder.") else t[0]
        for n, t in out.items()
    }


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_vl",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3_vl_moe", "qwen3_5")),
        pytest.param("qwen3_5_moe", marks=pytest.mark.slow),
    ],
)
def test_towers_have_the_names_of_megatron_bridge(name: str, tmp_path: Path) -> None:
    """Layers are stacked, and heads woven, whatever the layout; each way is to the same bytes."""
    case = next(case for case in CASES if case.family == name)
    case.build(tmp_path / "hf")
    held = {
        n: t
        for n, t in load_file(tmp_path / "hf" / "model.safetensors").items()
        if n.startswith("model.visual.")
    }
    want = bridge_tower(held, case.vision["num_heads"])
    assert any("deepstack" in n for n in want) == name.startswith("qwen3_vl")
    source = tmp_path / "hf"
    for to, layout in (("torch_dist", {"tp": 2, "pp": 2}), ("dcp", {})):
        reshard(source, tmp_path / to, to=to, fsync=False, **layout)
        source = tmp_path / to
        found = {n: t for n, t in read_tensors(tmp_path / to).items() if "vision_model." in n}
        assert found.keys() == want.keys()
        assert all(torch.equal(found[n], t) for n, t in want.items())
    opened = open_source(tmp_path / "torch_dist")
    qkv = "vision_model.decoder.layers.self_attention.linear_qkv.weight"
    index = next(i for i, t in enumerate(opened.catalogue.tensors) if t.name == qkv)
    assert (opened.catalogue.shards.tensor == index).sum() == 2  # a shard for each tp rank
    states = [o for o in opened.catalogue.objects if o.startswith("vision_model.")]
    assert any(
        o.endswith("layers.self_attention.linear_qkv._extra_state/shard_1_2") for o in states
    )
    assert verify(tmp_path / "hf", tmp_path / "torch_dist").verdict == "equal"

    numbered = tmp_path / "numbered"  # where layers differ, Megatron numbers them
    write_numbered(tmp_path / "torch_dist", numbered)
    reshard(numbered, tmp_path / "back", to="hf", like=tmp_path / "hf", fsync=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "hf")


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint with global shapes, as torch reads them."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(next(folder.rglob(".metadata")).parent)
    held: dict[str, Any] = {
        n: torch.empty(m.size, dtype=m.properties.dtype)
        for n, m in reader.read_metadata().state_dict_metadata.items()
        if isinstance(m, TensorStorageMetadata)
    }
    dcp.load(held, storage_reader=reader, no_dist=True)
    return held


def write_numbered(source: Path, out: Path) -> None:
    """The same checkpoint with a tensor for each layer of the tower, saved by torch."""
    import torch.distributed.checkpoint as dcp

    held: dict[str, Any] = {}
    for name, tensor in read_tensors(source).items():
        if name.startswith("vision_model.decoder."):
            begin, kind, rest = name.partition("layers." if ".layers." in name else "_list.")
            held |= {f"{begin}{kind}{n}.{rest}": t.clone() for n, t in enumerate(tensor)}
        else:
            held[name] = tensor
    dcp.save(held, storage_writer=dcp.FileSystemWriter(out), no_dist=True)


def test_heads_of_a_tower_have_to_be_known(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.family == "qwen3_vl")
    case.build(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)
    for heads, problem in ((None, "nothing says of how many"), (5, "of 5 heads")):
        edit_config(tmp_path / "hf", lambda c, h=heads: c["vision_config"].update(num_heads=h))
        with raises(MappingError, problem):
            reshard(tmp_path / "meg", tmp_path / "no", to="hf", like=tmp_path / "hf", fsync=False)


def test_rank_files_have_the_prefix_too(tmp_path: Path) -> None:
    GEMMA.build(tmp_path / "hf")
    reshard(tmp_path / "hf", tmp_path / "meg", to="megatron", tp=2, fsync=False)
    (file,) = (tmp_path / "meg").glob("**/mp_rank_01/model_optim_rng.pt")
    model = torch.load(file, weights_only=False)["model"]
    tensors = {n: t for n, t in model.items() if isinstance(t, torch.Tensor) and t.ndim}
    assert "language_model.decoder.layers.1.mlp.linear_fc2.weight" in tensors
    tower = "vision_tower.encoder.layers.1.mlp.fc1.weight"
    assert tensors[tower].equal(load_file(tmp_path / "hf" / "model.safetensors")[tower])
    begin = ("language_model.", "vision_tower.", "multi_modal_projector.")
    assert all(n.startswith(begin) for n in model)


@first_is_fast
def test_what_other_releases_save_is_read(case: NestedCase, tmp_path: Path) -> None:
    if not case.older:
        pytest.skip("all releases save the same names")
    case.build(tmp_path / "hf")
    before = stored(tmp_path / "hf")
    rename(tmp_path / "hf", case.older)
    assert stored(tmp_path / "hf") != before
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)
    reshard(tmp_path / "meg", tmp_path / "back", to="hf", fsync=False)
    assert stored(tmp_path / "back") == before


@cases
def test_the_text_model_computes_what_transformers_does(case: NestedCase, tmp_path: Path) -> None:
    model = case.build(tmp_path / "hf", dtype="float32")
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, pp=2, fsync=False)
    with torch.no_grad():
        want = model(input_ids=TOKENS).logits
        for folder in ("hf", "meg"):
            found = load(source_of(tmp_path / folder))(Batch(tokens_BS=TOKENS))
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_the_text_model_of_ministral_3(tmp_path: Path) -> None:
    """Queries are scaled by their position, here beyond the fourth."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.3}
    rope |= {"original_max_position_embeddings": 4, "mscale": 1.0, "mscale_all_dim": 1.0}
    model = MISTRAL.build(
        tmp_path / "hf", dtype="float32", model_type="ministral3", rope_parameters=rope
    )
    with torch.no_grad():
        want = model(input_ids=TOKENS).logits
    found = load(source_of(tmp_path / "hf"))(Batch(tokens_BS=TOKENS))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_the_text_model_of_mistral_4(tmp_path: Path) -> None:
    """Latent attention and experts, beside the tower of Mistral 3."""
    sizes = MISTRAL4 | {"model_type": "mistral4", "head_dim": "absent"}
    model = MISTRAL.build(tmp_path / "hf", dtype="float32", **sizes)
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, pp=2, fsync=False)
    reshard(tmp_path / "meg", tmp_path / "back", to="hf", fsync=False)
    assert stored(tmp_path / "back") == stored(tmp_path / "hf")
    with torch.no_grad():
        want = model(input_ids=TOKENS).logits
    found = load(source_of(tmp_path / "meg"))(Batch(tokens_BS=TOKENS))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@first_is_fast
def test_what_is_written_loads_in_transformers(case: NestedCase, tmp_path: Path) -> None:
    kind = type(case.build(tmp_path / "hf"))
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)
    reshard(tmp_path / "meg", tmp_path / "back", to="hf", fsync=False)
    _, info = kind.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_a_text_model_that_transformers_took_out_of_a_larger_one(tmp_path: Path) -> None:
    """Its configuration is that of a text model alone, and its names are those of the larger."""
    next(c for c in CASES if c.family == "qwen3_5").build(tmp_path / "hf")
    model = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path / "hf")
    model.save_pretrained(tmp_path / "text")
    before = stored(tmp_path / "text")
    assert all(n.startswith(("model.language_model.", "lm_head.")) for n in before)
    report = reshard(tmp_path / "text", tmp_path / "meg", to="torch_dist", tp=2, fsync=False)
    assert report.family == "qwen3_5_text"
    reshard(tmp_path / "meg", tmp_path / "back", to="hf", fsync=False)
    after = stored(tmp_path / "back")
    assert after == {n.replace("language_model.", ""): t for n, t in before.items()}
    _, info = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@cases
def test_a_configuration_is_written_as_transformers_reads_it(
    case: NestedCase, tmp_path: Path
) -> None:
    case.build(tmp_path / "hf")
    original = read_config(tmp_path / "hf")
    found = detect_family(original)
    assert found.name == case.family
    config = found.read_config(original)
    written = found.write_config(config)
    assert found.read_config(written) == config
    kind = getattr(transformers, f"{case.model}Config")
    want, got = (kind(**c).to_dict() for c in (original, written))
    for section in (want, got):
        section |= section.pop("text_config")
        section.pop("interleave_moe_layer_step", None)  # written as the list `moe_layers`
    assert {k: got[k] for k in want} == want


@pytest.mark.parametrize("where", ["root", "text", "nowhere"])
@pytest.mark.parametrize("tied", [False, True])
def test_tied_embeddings_are_found_wherever_a_release_says_so(
    tied: bool, where: str, tmp_path: Path
) -> None:
    """transformers 5 reads the outer key, older releases the inner one; some files have neither."""
    MISTRAL.build(tmp_path / "hf", tie_word_embeddings=tied)

    def change(config: dict[str, Any]) -> None:
        for section in (config, config["text_config"]):
            section.pop("tie_word_embeddings", None)
        if where != "nowhere":
            section = config if where == "root" else config["text_config"]
            section["tie_word_embeddings"] = tied

    edit_config(tmp_path / "hf", change)
    opened = open_source(tmp_path / "hf")
    assert opened.config.embedding.tied_embeddings is tied
    assert ("head.weight" in opened.view.canonical) is not tied
    reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", tp=2, fsync=False)
    assert open_source(tmp_path / "meg").config.embedding.tied_embeddings is tied


def test_published_configurations_leave_out_defaults() -> None:
    """The keys of gemma-3-4b-it's config.json."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"model_type": "gemma3_text", "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    keys = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    config = detect_family(keys).read_config({**keys, "text_config": text})
    assert (
        config.attention.num_heads,
        config.attention.num_kv_heads,
        config.embedding.vocab_size,
    ) == (8, 4, 262208)
    assert config.window.window_skip_freq == 6


def test_settings_of_the_text_model_beside_the_others(tmp_path: Path) -> None:
    """The files of Qwen2.5-VL that were published first."""
    QWEN.build(tmp_path / "hf")
    want = open_source(tmp_path / "hf").config

    def change(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        text.pop("rope_parameters")
        text |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 1e6}
        config |= text | {k: config[k] for k in ("model_type", "architectures")}

    keys = edit_config(tmp_path / "hf", change)
    config = open_source(tmp_path / "hf").config
    for name in ("num_layers", "num_heads", "num_kv_heads", "rope_base", "rope_scaling"):
        assert config.get(name) == want.get(name), name
    written = family("qwen2_5_vl").write_config(config)
    assert {k: written.get(k) for k in keys} == keys


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    GEMMA.build(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    projector = {n for n in tensors if n.startswith("multi_modal_projector.")}
    save_file({n: t for n, t in tensors.items() if n not in projector}, file, {"format": "pt"})
    with raises(MappingError, "'multi_modal_projector.*'") as caught:
        reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)
    assert caught.value.id == "missing-tensors"
    edit_config(tmp_path / "hf", lambda config: config.pop("text_config"))
    with raises(MappingError, "'text_config'") as caught:
        reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)
    assert caught.value.id == "unsupported-model"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5"])
def test_a_tower_without_its_projector_is_named(family: str, tmp_path: Path) -> None:
    next(c for c in CASES if c.family == family).build(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    held = {n: t for n, t in load_file(file).items() if ".merger." not in n}
    save_file(held, file, {"format": "pt"})
    with raises(MappingError, "visual.merger.*", "visual.*", id="missing-tensors", hint=True):
        reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.family)
def test_a_tower_that_lacks_any_tensor_is_named(case: NestedCase, tmp_path: Path) -> None:
    """Of layers, of what is before and behind them, and of projectors.

    A part that a model may lack is gone with its only tensor.
    """
    case.build(tmp_path / "hf")
    side = open_source(tmp_path / "hf").view
    assert side.family is not None
    assert side.config is not None
    check_towers(side.family, side.canonical, side.config.extra)
    alone = "embed_audio.embedding_projection.weight" if case.family == "gemma4_unified" else ""
    for name in set(side.towers()) - {alone}:
        rest = [n for n in side.canonical if n != name]
        with raises(MappingError, "there is no tensor", id="missing-tensors"):
            check_towers(side.family, rest, side.config.extra)


def test_a_text_model_of_an_unknown_type_is_named(tmp_path: Path) -> None:
    MISTRAL.build(tmp_path / "hf")
    edit_config(tmp_path / "hf", lambda config: config["text_config"].update(model_type="other"))
    with raises(MappingError, "'other'", "'mistral'"):
        reshard(tmp_path / "hf", tmp_path / "meg", to="torch_dist", fsync=False)


def test_a_cast_leaves_integers_alone(tmp_path: Path) -> None:
    GEMMA.build(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    ids = {"vision_tower.embeddings.position_ids": torch.arange(4).reshape(1, 4)}
    save_file(load_file(file) | ids, file, {"format": "pt"})
    reshard(tmp_path / "hf", tmp_path / "out", to="hf", dtype="float32", fsync=False)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    kinds = {n: t.dtype for n, t in tensors.items()}
    assert kinds.pop(*ids) == torch.int64
    assert set(kinds.values()) == {torch.float32}


def test_some_layers_of_the_text_model(tmp_path: Path) -> None:
    model = GEMMA.build(
        tmp_path / "hf",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    reshard(tmp_path / "hf", tmp_path / "some", to="hf", layers="2,1", fsync=False)
    text = read_config(tmp_path / "some")["text_config"]
    assert text["num_hidden_layers"] == 2
    assert text["layer_types"] == ["sliding_attention", "full_attention"]
    loaded, info = type(model).from_pretrained(tmp_path / "some", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    one, two = (m.model.language_model.layers for m in (model, loaded))
    assert one[2].mlp.up_proj.weight.equal(two[0].mlp.up_proj.weight)


def test_inspect_shows_the_whole(tmp_path: Path) -> None:
    GEMMA.build(tmp_path / "hf")
    report = inspect(tmp_path / "hf").to_json()
    assert report["family"] == "gemma3_multimodal"


def test_towers_of_all_families_are_known_to_be_whole() -> None:
    for one in families():
        for tower in one.towers:
            assert is_known(f"{tower.name}any.linear_fc1.weight"), one.name
