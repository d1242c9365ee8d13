"""Width pruning: rows and columns that stay, in any format, with their state, record and proof."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megtool import quantize, reshard, verify
from megtool.convert.pruning_scores import PruningScores, encode_scores, model_sizes
from megtool.errors import FormatError, MappingError, UsageError
from megtool.formats import open_checkpoint
from megtool.options.layout import ParallelConfig
from megtool.source.computed import gathered as gathered_tensors
from megtool.source.open import open_source
from megtool.spec import layer_sets
from megtool.spec.model_config import ModelConfig
from megtool.storage.files import Files
from megtool.transport.reading.reader import CheckpointReader
from tests.support.checkpoints.trained import config, write
from tests.support.checkpoints.trained_models import MODELS
from tests.support.errors import raises
from tests.support.folders import stored_tensors
from tests.support.models import tiny_llama, tiny_models

HOPS = (
    {"to": "torch_dist", "optimizer_format": "fully_reshardable", "tp": 2, "pp": 2},
    {"to": "torch_dist", "optimizer_format": "dp_reshardable", "pp": 2, "dp": 2},
    {"to": "megatron", "optimizer_format": "legacy", "tp": 2},
)


def save_scores(path: Path, model: ModelConfig, seed: int = 0) -> dict[str, Any]:
    """Random scores of all parts."""
    rng = np.random.default_rng(seed)

    def draw(size: int) -> tuple[float, ...]:
        return tuple(rng.random(size).tolist())

    scores = PruningScores(
        sizes=model_sizes(model),
        layers=draw(model.num_layers),
        hidden=draw(model.hidden_size),
        ffn={n: draw(model.mlp.ffn_hidden_size) for n in layer_sets.dense_layers(model)},
        heads={n: draw(model.attention.num_heads) for n in layer_sets.attn_layers(model)},
        experts={n: draw(model.moe.num_experts) for n in layer_sets.moe_layers(model)},
    )
    path.write_bytes(encode_scores(scores))
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def canonical_arrays(folder: Path) -> dict[str, Any]:
    """All tensors of a checkpoint, optimizer state among them, by canonical name."""
    source = open_source(folder)
    with CheckpointReader(source.catalogue, Files()) as reader:
        return {
            name: np.asarray(reader.open_canonical(p).read()).reshape(
                source.view.canonical[name].shape
            )
            for name, p in source.view.placements.items()
        }


def best(scores: list[float], count: int) -> list[int]:
    return sorted(np.argsort(-np.array(scores), kind="stable")[:count].tolist())


def runs(numbers: list[int], size: int) -> list[int]:
    return [n * size + k for n in numbers for k in range(size)]


def heads_of(scores: list[float], groups: int, keep: int, each: int) -> tuple[list[int], list[int]]:
    """Heads and groups that stay, worked out as they are said to be."""
    rows = np.array(scores).reshape(groups, -1)
    stay = best(np.linalg.norm(rows, axis=1).tolist(), keep)
    size = rows.shape[1]
    return [g * size + h for g in stay for h in best(rows[g].tolist(), each)], stay


def expected(
    before: dict[str, Any], model: ModelConfig, scores: dict[str, Any], **sizes: int
) -> dict[str, Any]:
    """What is to become of tensors, by rules for each kind of name."""
    hidden = best(scores["hidden"], sizes.get("hidden_size", model.hidden_size))
    d, out = model.attention.head_dim, {}
    for name, array in before.items():
        weight = name.rpartition(":")[2]
        found = re.match(r"layers\.(\d+)\.(.+)", weight)
        layer, last = (found[1], found[2]) if found else ("", weight)
        rows: list[int] | None = None
        columns: list[int] | None = None
        ffn = heads = groups = None
        if layer in scores["ffn"]:
            ffn = best(
                scores["ffn"][layer], sizes.get("ffn_hidden_size", model.mlp.ffn_hidden_size)
            )
        if layer in scores["heads"]:
            keep = sizes.get("num_query_groups", model.attention.num_kv_heads)
            each = sizes.get("num_attention_heads", model.attention.num_heads) // keep
            heads, groups = heads_of(
                scores["heads"][layer], model.attention.num_kv_heads, keep, each
            )
        if last in ("embed.weight", "head.weight"):
            columns = hidden
        elif "norm" in last and "attn." not in last:
            rows = hidden
        elif re.match(r"attn\.q\.", last):
            rows, columns = runs(heads or [], d), hidden
        elif re.match(r"attn\.[kv]\.", last):
            rows, columns = runs(groups or [], d), hidden
        elif re.match(r"attn\.o\.", last):
            rows, columns = hidden, runs(heads or [], d)
        elif re.match(r"mlp\.(gate|up)\.", last):
            rows, columns = ffn, hidden
        elif re.match(r"mlp\.down\.", last):
            rows, columns = hidden, ffn
        elif last == "mlp.router.weight":
            rows, columns = best(scores["experts"][layer], sizes["num_experts"]), hidden
        elif match := re.match(r"mlp\.experts\.(\d+)\.(\w+)\.", last):
            stay = best(scores["experts"][layer], sizes["num_experts"])
            if int(match[1]) not in stay:
                continue
            name = name.replace(f"experts.{match[1]}.", f"experts.{stay.index(int(match[1]))}.")
            rows, columns = (hidden, None) if match[2] == "down" else (None, hidden)
        elif re.match(r"mlp\.shared\.", last):
            rows, columns = (hidden, None) if "down" in last else (None, hidden)
        else:
            assert re.match(r"attn\.[qk]_norm\.", last), name
        array = array if rows is None else array[rows]
        out[name] = array if columns is None or array.ndim == 1 else array[:, columns]
    return out


@pytest.mark.parametrize("hop", HOPS, ids=lambda h: str(h["optimizer_format"]))
@pytest.mark.parametrize("name", ["dense", "tied", "biased", "qk norm", "experts", "some experts"])
def test_a_training_state_is_cut_as_its_weights_are(
    name: str, hop: dict[str, Any], tmp_path: Path, materialize: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(gathered_tensors, "BLOCK_BYTES", 400)  # several blocks of a tensor
    model = config(**MODELS[name])
    write(tmp_path / "source", model, ParallelConfig(), materialize)
    scores = save_scores(tmp_path / "scores", model)
    sizes = {"hidden_size": 10, "num_attention_heads": 2}
    if layer_sets.dense_layers(model):
        sizes["ffn_hidden_size"] = 12
    if layer_sets.moe_layers(model):
        sizes["num_experts"] = 2
    report = reshard(
        tmp_path / "source",
        tmp_path / "small",
        pruning_scores=tmp_path / "scores",
        verify=True,
        **sizes,
        **hop,
    )
    assert report.pruned[0] == "10 of 16 channels of hidden states"
    found = canonical_arrays(tmp_path / "small")
    wanted = expected(canonical_arrays(tmp_path / "source"), model, scores, **sizes)
    assert found.keys() == wanted.keys()
    assert any(":" in n for n in found)
    for key, array in wanted.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
    args = open_checkpoint(tmp_path / "small").metadata["args"]
    assert (args["hidden_size"], args["num_attention_heads"], args["kv_channels"]) == (10, 2, 4)
    for pair in (("source", "small"), ("small", "source")):
        assert verify(*(tmp_path / folder for folder in pair)).verdict == "equal"


@pytest.mark.parametrize(
    "options",
    [
        {"to": "hf"},
        {"to": "torch_dist", "pp": 3},
        {"to": "megatron", "tp": 1},
        {"to": "dcp", "dp": 2},
        {"to": "torch_checkpointing"},
        {"to": "zarr", "compress": "zstd"},
        {"to": "ocdbt"},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_every_format_holds_the_same_parts_and_the_record(
    options: dict[str, Any], tmp_path: Path
) -> None:
    hf = tiny_llama.save(tmp_path / "hf", parts=2)
    reshard(hf, tmp_path / "zarr", to="zarr", compress="zstd")
    model = open_source(hf).config
    scores = save_scores(tmp_path / "scores", model)
    sizes = {"hidden_size": 20, "ffn_hidden_size": 16, "num_query_groups": 1}
    for source in ("hf", "zarr"):
        out = tmp_path / f"of {source}"
        reshard(
            tmp_path / source,
            out,
            pruning_scores=tmp_path / "scores",
            num_layers=3,
            verify=True,
            **sizes,
            **options,
        )
        compared = verify(hf, out)
        assert (compared.verdict, len(compared.compared)) == ("equal", 30)
        assert any("3 of 4 layers, 20 of 32 channels" in note for note in compared.notes)
        record = open_source(out).pruning
        assert record is not None
        assert record["layers"] == best(scores["layers"], 3)
        assert record["hidden"] == best(scores["hidden"], 20)
        heads = {n: heads_of(row, 2, 1, 2) for n, row in scores["heads"].items()}
        assert record["heads"] == {n: both[0] for n, both in heads.items()}
        assert record["groups"] == {n: both[1] for n, both in heads.items()}
        assert record["ffn"] == {n: best(row, 16) for n, row in scores["ffn"].items()}
        assert record["scores"]["ffn"] == scores["ffn"]
        # The record goes along with what equals the parts, and not further.
        reshard(out, tmp_path / "back", to="hf", overwrite=True)
        assert verify(hf, tmp_path / "back").verdict == "equal"
        reshard(out, tmp_path / "mean", to="hf", average=[out], overwrite=True)
        assert open_source(tmp_path / "mean").pruning is None


def test_layers_are_recorded_too(tmp_path: Path) -> None:
    hf = tiny_llama.save(tmp_path / "hf")
    reshard(hf, tmp_path / "some", layers="3,0-1", to="torch_dist")
    found = verify(hf, tmp_path / "some")
    assert (found.verdict, len(found.compared)) == ("equal", 30)
    assert verify(tmp_path / "some").verdict == "ok"
    deeper = reshard(hf, tmp_path / "deeper", layers="0-3,3")
    assert deeper.pruned == ("4 of 4 layers, some several times: 5 in all",)


def test_sizes_that_a_model_already_has_leave_nothing_out(tmp_path: Path) -> None:
    hf = tiny_llama.save(tmp_path / "hf")
    save_scores(tmp_path / "scores", open_source(hf).config)
    reshard(hf, tmp_path / "out", pruning_scores=tmp_path / "scores", num_attention_heads=4)
    assert stored_tensors(tmp_path / "out") == stored_tensors(hf)
    assert verify(hf, tmp_path / "out").verdict == "equal"


def test_reports_say_whose_scores_chose_and_what_a_record_is_not_of(tmp_path: Path) -> None:
    hf = tiny_llama.save(tmp_path / "hf")
    scores = save_scores(tmp_path / "scores", open_source(hf).config)
    about = {"source": "runs/large", "data": "text.txt", "tokens": 99}
    (tmp_path / "scores").write_text(json.dumps(scores | about))
    report = reshard(hf, tmp_path / "out", pruning_scores=tmp_path / "scores", num_layers=2)
    by = "by scores of runs/large on text.txt, 99 tokens"
    assert report.pruned == ("2 of 4 layers", by)
    assert verify(hf, tmp_path / "out").notes[-1].endswith(by)
    other = tiny_llama.save(tmp_path / "other", num_hidden_layers=3)
    for pair in ((other, tmp_path / "out"), (tmp_path / "out", other)):
        compared = verify(*pair)
        assert compared.verdict == "different"
        assert any("another model than" in n and "num_layers 4, not 3" in n for n in compared.notes)


def test_what_is_not_as_recorded_differs(tmp_path: Path) -> None:
    """A byte that changed, and a record that lists another neuron."""
    from safetensors.torch import load_file, save_file

    hf = tiny_llama.save(tmp_path / "hf", num_hidden_layers=1)
    save_scores(tmp_path / "scores", open_source(hf).config)
    reshard(hf, tmp_path / "out", pruning_scores=tmp_path / "scores", ffn_hidden_size=16)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    kept = file.read_bytes()
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][3, 5] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    found = verify(hf, tmp_path / "out")
    assert [d.tensor for d in found.differences if d.kind == "values"] == [
        "layers.0.mlp.down.weight"
    ]
    file.write_bytes(kept)
    assert verify(hf, tmp_path / "out").verdict == "equal"
    from megtool.digests.crc32c import encode_sidecar, read_sidecar

    sidecar = read_sidecar(tmp_path / "out/megtool.json")
    assert sidecar is not None
    assert sidecar.pruning is not None
    neurons = sidecar.pruning["ffn"]["0"]
    gone = next(n for n in range(48) if n not in neurons)
    sidecar.pruning["ffn"]["0"] = sorted([*neurons[1:], gone])
    (tmp_path / "out/megtool.json").write_bytes(encode_sidecar(sidecar))
    found = verify(hf, tmp_path / "out")
    assert {d.tensor for d in found.differences} == {
        f"layers.0.mlp.{name}.weight" for name in ("gate", "up", "down")
    }
    for bad in ([0, 0, *range(2, 16)], [*range(15), 48], [], "0-15", [*range(15), True]):
        sidecar.pruning["ffn"]["0"] = bad
        (tmp_path / "out/megtool.json").write_bytes(encode_sidecar(sidecar))
        with raises(FormatError, id="damaged-digests"):
            verify(hf, tmp_path / "out")


def test_neurons_that_stay_give_the_logits_of_a_model_without_the_others(tmp_path: Path) -> None:
    """Zeroed in the whole model, in transformers: neurons and heads; taken out by hand: channels
    of hidden states."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    hf = tiny_llama.save(tmp_path / "hf", dtype="float32")
    scores = save_scores(tmp_path / "scores", open_source(hf).config)
    ids = torch.arange(40).view(2, 20)

    def logits(model: Any) -> Any:
        with torch.no_grad():
            return model(ids).logits

    def load(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    options: dict[str, Any] = {"pruning_scores": tmp_path / "scores"}
    reshard(hf, tmp_path / "a", ffn_hidden_size=20, num_attention_heads=2, **options)
    reshard(hf, tmp_path / "b", num_query_groups=1, **options)
    reshard(hf, tmp_path / "c", hidden_size=24, **options)
    whole = load(hf)
    for n, layer in enumerate(whole.model.layers):
        gone = sorted(set(range(48)) - {*best(scores["ffn"][f"{n}"], 20)})
        layer.mlp.down_proj.weight.data[:, gone] = 0
        heads = heads_of(scores["heads"][f"{n}"], 2, 2, 1)[0]
        off = runs(sorted(set(range(4)) - {*heads}), 8)
        layer.self_attn.o_proj.weight.data[:, off] = 0
    torch.testing.assert_close(logits(load(tmp_path / "a")), logits(whole), rtol=1e-5, atol=1e-5)
    whole = load(hf)
    assert (logits(load(tmp_path / "a")) - logits(whole)).abs().max() > 1e-2
    for n, layer in enumerate(whole.model.layers):
        heads = heads_of(scores["heads"][f"{n}"], 2, 1, 2)[0]
        off = runs(sorted(set(range(4)) - {*heads}), 8)
        layer.self_attn.o_proj.weight.data[:, off] = 0
    torch.testing.assert_close(logits(load(tmp_path / "b")), logits(whole), rtol=1e-5, atol=1e-5)
    whole, channels = load(hf), best(scores["hidden"], 24)
    config_c = whole.config.to_diff_dict() | {"hidden_size": 24}
    by_hand = LlamaForCausalLM(type(whole.config)(**config_c)).eval()
    state = whole.state_dict()
    by_hand.load_state_dict(
        {
            name: state[name][channels]
            if new.ndim == 1 or name.endswith(("o_proj.weight", "down_proj.weight"))
            else state[name][:, channels]
            for name, new in by_hand.state_dict().items()
        }
    )
    torch.testing.assert_close(logits(load(tmp_path / "c")), logits(by_hand))


def test_experts_that_stay_are_those_a_router_without_the_others_chooses(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    whole = tiny_models.sparse(tmp_path / "hf")
    scores = save_scores(tmp_path / "scores", open_source(tmp_path / "hf").config)
    reshard(tmp_path / "hf", tmp_path / "out", pruning_scores=tmp_path / "scores", num_experts=3)
    assert verify(tmp_path / "hf", tmp_path / "out").verdict == "equal"
    # Megatron loads one of Transformer Engine's states for each expert, from either source.
    options: dict[str, Any] = {"pruning_scores": tmp_path / "scores", "num_experts": 3}
    reshard(tmp_path / "hf", tmp_path / "whole", to="torch_dist", ep=2)
    reshard(tmp_path / "hf", tmp_path / "direct", to="torch_dist", **options)
    twice = reshard(tmp_path / "whole", tmp_path / "twice", ep=1, **options)
    states = [open_checkpoint(tmp_path / n).objects.keys() for n in ("direct", "twice")]
    assert any("experts.linear_fc1._extra_state" in name for name in states[0])
    assert {n for n in states[0] if "_extra_state" in n} <= states[1]
    assert not twice.dropped
    gone = sorted(set(range(6)) - {*best(scores["experts"]["1"], 3)})
    router = whole.model.layers[1].mlp.gate

    def never(_: Any, inputs: Any, __: Any) -> Any:
        scores_TE = torch.nn.functional.linear(inputs[0].reshape(-1, 16), router.weight)
        scores_TE[:, gone] = -torch.inf
        shares_TK, chosen_TK = scores_TE.softmax(-1).topk(2, dim=-1)
        return scores_TE, shares_TK / shares_TK.sum(-1, keepdim=True), chosen_TK

    ids = torch.arange(30).view(2, 15)
    with torch.no_grad():
        before = whole(ids).logits
        router.register_forward_hook(never)
        wanted = whole(ids).logits
        small = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        torch.testing.assert_close(small(ids).logits, wanted, rtol=1e-5, atol=1e-5)
    assert (wanted - before).abs().max() > 1e-3


def test_quantized_weights_are_decoded_and_cut(tmp_path: Path) -> None:
    hf = tiny_models.llama(tmp_path / "hf")
    save_scores(tmp_path / "scores", open_source(hf).config)
    quantize(hf, tmp_path / "q", recipe="mxfp4", fsync=False)
    reshard(tmp_path / "q", tmp_path / "whole", fsync=False)
    options: dict[str, Any] = {"pruning_scores": tmp_path / "scores", "ffn_hidden_size": 128}
    for source in ("q", "whole"):
        reshard(tmp_path / source, tmp_path / f"of {source}", hidden_size=96, **options)
    assert verify(tmp_path / "of q", tmp_path / "of whole").verdict == "equal"
    assert not verify(tmp_path / "q", tmp_path / "of q").differences


def test_an_interrupted_run_does_not_resume_with_other_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans of equal sizes differ by what they leave out."""
    from megtool.reshard import execute

    fingerprints = []
    build = execute.build_plan

    def watch(*args: Any, **options: Any) -> Any:
        fingerprints.append((plan := build(*args, **options)).fingerprint)
        return plan

    monkeypatch.setattr(execute, "build_plan", watch)
    hf = tiny_llama.save(tmp_path / "hf")
    for seed in (0, 1, 1):
        save_scores(tmp_path / "scores", open_source(hf).config, seed)
        options: dict[str, Any] = {"pruning_scores": tmp_path / "scores", "dry_run": True}
        reshard(hf, tmp_path / "out", hidden_size=16, **options)
    assert fingerprints[0] != fingerprints[1] == fingerprints[2]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"ffn_hidden_size": 16}, UsageError, "no effect without --pruning-scores"),
        ({"pruning_scores": "scores"}, UsageError, "no effect without a smaller size"),
        ({"pruning_scores": "scores", "ffn_hidden_size": 49}, UsageError, "the model has 48"),
        ({"pruning_scores": "scores", "num_attention_heads": 3}, UsageError, "in 2 groups"),
        ({"pruning_scores": "scores", "num_query_groups": 3}, UsageError, "query.* 3, .* has 2"),
        ({"pruning_scores": "scores", "num_experts": 1}, UsageError, "the model has 0"),
        ({"layers": "3-1"}, UsageError, "'3-1' end before they begin"),
        (
            {"pruning_scores": "scores", "num_layers": 1, "layers": "0"},
            UsageError,
            "exclude each other",
        ),
        ({"pruning_scores": "none", "hidden_size": 16}, FormatError, "does not exist"),
        ({"pruning_scores": "hf/config.json", "hidden_size": 16}, FormatError, "no scores"),
        ({"pruning_scores": "others", "hidden_size": 16}, FormatError, "ffn_hidden_size 40"),
    ],
)
def test_what_cannot_be_pruned(
    options: dict[str, Any], error: type[Exception], said: str, tmp_path: Path
) -> None:
    hf = tiny_llama.save(tmp_path / "hf")
    save_scores(tmp_path / "scores", open_source(hf).config)
    other = tiny_llama.save(tmp_path / "other", intermediate_size=40)
    save_scores(tmp_path / "others", open_source(other).config)
    if "pruning_scores" in options:
        options = options | {"pruning_scores": tmp_path / options["pruning_scores"]}
    with pytest.raises(error, match=said):
        reshard(hf, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_damaged_scores_are_refused(tmp_path: Path) -> None:
    hf = tiny_llama.save(tmp_path / "hf")
    good = save_scores(tmp_path / "scores", open_source(hf).config)
    changes: list[dict[str, Any]] = [
        {"version": 9},
        {"hidden": [1.0]},
        {"hidden": [float("nan")] * 32},
        {"ffn": {"0": "x"}},
        {"hidden": [True] * 32},
        {"hidden": ["1"] * 32},
        {"sizes": 3},
    ]
    for change in changes:
        (tmp_path / "scores").write_text(json.dumps(good | change))
        with pytest.raises(FormatError):
            reshard(hf, tmp_path / "out", pruning_scores=tmp_path / "scores", hidden_size=16)


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        (
            "latent attention, a layer that predicts further, experts",
            {"num_attention_heads": 2},
            "latent attention",
        ),
        (
            "latent attention, a layer that predicts further, experts",
            {"num_experts": 2},
            "multi-token prediction",
        ),
        (
            "latent attention, a layer that predicts further, experts",
            {"hidden_size": 8},
            "cannot be cut",
        ),
    ],
)
def test_models_whose_parts_are_not_cut(
    name: str, sizes: dict[str, Any], said: str, tmp_path: Path, materialize: Any
) -> None:
    model = config(**MODELS[name])
    write(tmp_path / "source", model, ParallelConfig(), materialize)
    save_scores(tmp_path / "scores", model)
    with raises(MappingError, said, id="unsupported-model"):
        reshard(
            tmp_path / "source",
            tmp_path / "out",
            pruning_scores=tmp_path / "scores",
            **sizes,
        )


def test_a_model_without_its_further_layers_is_cut(tmp_path: Path, materialize: Any) -> None:
    model = config(**MODELS["latent attention, a layer that predicts further, experts"])
    write(tmp_path / "source", model, ParallelConfig(), materialize)
    save_scores(tmp_path / "scores", model)
    reshard(
        tmp_path / "source",
        tmp_path / "out",
        pruning_scores=tmp_path / "scores",
        exclude=["*mtp.*"],
        hidden_size=8,
        num_experts=2,
    )
    found = verify(tmp_path / "source", tmp_path / "out")
    assert len(found.compared) > 100
    assert found.verdict == "equal"
    assert any("multi-token prediction, which it lacks" in note for note in found.notes)
    args = open_checkpoint(tmp_path / "out").metadata["args"]
    assert (args["hidden_size"], args["num_experts"], args["mtp_num_layers"]) == (8, 2, None)


def test_a_config_that_cannot_say_the_sizes_is_refused(tmp_path: Path) -> None:
    """GPT-2's says that heads have the hidden size between them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    keys = GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=50, n_positions=32)
    GPT2LMHeadModel(keys).save_pretrained(tmp_path / "hf")
    save_scores(tmp_path / "scores", open_source(tmp_path / "hf").config)
    options: dict[str, Any] = {"pruning_scores": tmp_path / "scores"}
    with raises(MappingError, "head_dim", id="unsupported-model"):
        reshard(tmp_path / "hf", tmp_path / "out", hidden_size=8, **options)
    reshard(tmp_path / "hf", tmp_path / "out", ffn_hidden_size=24, **options)
    assert stored_tensors(tmp_path / "out")
    assert verify(tmp_path / "hf", tmp_path / "out").verdict == "equal"


def test_parts_of_a_model_that_is_not_known_are_not_chosen(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    with raises(MappingError, "family and configuration", id="no-model-config", hint="--family"):
        reshard(tmp_path / "a.safetensors", tmp_path / "out", to="torch_dist", layers="0")
