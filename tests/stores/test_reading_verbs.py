"""Every verb takes locations in stores wherever it takes a path, and does the same."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import megtool
from megtool.report.sections import Report
from tests.support.attack import specimens
from tests.support.models.adapted_models import save_adapter
from tests.support.shared_folder import shared_folder
from tests.support.stores.read_counts import CountingStore

Verb = Callable[[str, Path], Report]

TRAIN: dict[str, Any] = {
    "seq_length": 32,
    "global_batch_size": 2,
    "train_iters": 1,
    "threads": 1,
    "fsync": False,
}

VERBS: dict[str, Verb] = {
    "lint": lambda at, out: megtool.lint(f"{at}/vllm"),
    "explain_recipe": lambda at, out: megtool.explain_recipe(f"{at}/source", f"{at}/recipe.yaml"),
    "show_recipe": lambda at, out: megtool.show_recipe(f"{at}/recipe.yaml"),
    "inspect_amax": lambda at, out: megtool.inspect_amax(f"{at}/torch_dist"),
    "tokenize": lambda at, out: megtool.tokenize(
        f"{at}/text.jsonl", out / "data", tokenizer=f"{at}/source"
    ),
    "tokenize parquet": lambda at, out: megtool.tokenize(
        f"{at}/text.parquet", out / "data", tokenizer=f"{at}/torch_dist"
    ),
    "generate": lambda at, out: megtool.generate(
        f"{at}/megatron", prompts=f"{at}/prompts.txt", max_new_tokens=3, tokenizer=f"{at}/hf"
    ),
    "evaluate": lambda at, out: megtool.evaluate(
        f"{at}/source", data=f"{at}/text.jsonl", against=f"{at}/zarr", max_tokens=100
    ),
    "evaluate tokens": lambda at, out: megtool.evaluate(
        f"{at}/source", data=f"{at}/tokens.bin", max_tokens=100
    ),
    "export gguf": lambda at, out: megtool.export(
        f"{at}/source", out / "model.gguf", to="gguf", outtype="q8_0", fsync=False
    ),
    "export quantized": lambda at, out: megtool.export(
        f"{at}/fp8", out / "vllm", to="vllm", fsync=False
    ),
    "quantize": lambda at, out: megtool.quantize(
        f"{at}/source", out / "fp8", f"{at}/recipe.yaml", fsync=False
    ),
    "quantize on data": lambda at, out: megtool.quantize(
        f"{at}/torch_dist",
        out / "quantized",
        "fp8",
        data=f"{at}/text.jsonl",
        samples=2,
        seq_length=32,
        fsync=False,
    ),
    "quantize by a file": lambda at, out: megtool.quantize(
        f"{at}/torch_dist", out / "quantized", "fp8", calibration=[f"{at}/amax"], fsync=False
    ),
    "reshard like": lambda at, out: megtool.reshard(
        f"{at}/dcp", out / "hf", to="hf", like=f"{at}/source", fsync=False
    ),
    "reshard the mean": lambda at, out: megtool.reshard(
        f"{at}/hf", out / "hf", to="hf", average=[f"{at}/source"], fsync=False
    ),
    "reshard with an adapter": lambda at, out: megtool.reshard(
        f"{at}/torch_dist", out / "hf", to="hf", adapter=f"{at}/adapter", fsync=False
    ),
    "verify quantized": lambda at, out: megtool.verify(f"{at}/nvfp4", f"{at}/source"),
    "finetune": lambda at, out: megtool.finetune(
        f"{at}/source", out / "run", data=[f"{at}/text.jsonl"], teacher=f"{at}/hf", **TRAIN
    ),
    "finetune on tokens": lambda at, out: megtool.finetune(
        f"{at}/torch_dist", out / "run", data=[f"{at}/tokens"], **TRAIN
    ),
}
NAMES = (*specimens.COMMANDS,)
_CHANGING = re.compile(r"second|stages|peak|memory|fingerprint|threads|rate|rss")
_OWN_FILES = re.compile(r"finetune\.json|log\.jsonl|data/|loss\.png")
"""What names the source, or the time."""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in every format, and data."""
    pytest.importorskip("pyarrow")
    made = specimens.shared_specimens(tmp_path_factory)

    def fill(folder: Path) -> None:
        shutil.copytree(made, folder, dirs_exist_ok=True)
        add_data(folder)

    return shared_folder(tmp_path_factory, "specimens-with-data", fill)


def add_data(root: Path) -> None:
    from pyarrow import Table, parquet

    recipe = Path(megtool.__file__).parent.parent / "quant_recipes" / "fp8_per_channel.yaml"
    shutil.copy(recipe, root / "recipe.yaml")
    save_adapter(root / "source", root / "adapter", target_modules=["q_proj", "up_proj"])
    (root / "prompts.txt").write_text("the model\nreads a text\n")
    megtool.tokenize(root / "text.jsonl", root / "tokens", tokenizer=root / "source")
    megtool.quantize(
        root / "torch_dist",
        root / "amax",
        "fp8",
        data=str(root / "text.jsonl"),
        samples=2,
        seq_length=32,
        calibrate_only=True,
    )
    rows = [json.loads(line) for line in (root / "text.jsonl").read_text().splitlines()]
    parquet.write_table(Table.from_pylist(rows), root / "text.parquet")


@pytest.fixture(scope="module")
def store(local: Path) -> Iterator[CountingStore]:
    made = CountingStore("memory://verbs")
    for path in local.iterdir():
        made.upload(path, path.name)
    yield made
    made.forget()


def facts(report: Report, at: str) -> Any:
    """What a report says, without times, sizes of memory, and where the source is."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if not _CHANGING.search(k)}
        return [strip(v) for v in value] if isinstance(value, list) else value

    return strip(json.loads(json.dumps(report.to_json(), default=str).replace(at, "AT")))


def written(folder: Path) -> dict[str, bytes]:
    return {
        name: path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not _OWN_FILES.search(name := path.relative_to(folder).as_posix())
    }


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_does_the_same(local: Path, store: CountingStore, tmp_path: Path, verb: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    expected = facts(VERBS[verb](str(local), out), str(local)), written(out)
    shutil.rmtree(out)
    out.mkdir()
    store.forget()
    actual = facts(VERBS[verb](store.url, out), store.url), written(out)
    assert actual[0] == expected[0]
    assert actual[1] == expected[1]
    assert store.reads


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "verb",
    [
        lambda path, _: megtool.inspect(path),
        lambda path, _: megtool.inspect(path, stats=True),
        lambda path, _: megtool.verify(path),
        lambda path, here: megtool.verify(path, here),
    ],
    ids=["inspect", "stats", "verify", "compare"],
)
def test_a_format_is_read_the_same(
    local: Path, store: CountingStore, name: str, verb: Callable[[str, Path], Report]
) -> None:
    here = specimens.path_of(local, name)

    def run(at: str) -> Any:
        try:
            return facts(verb(f"{at}/{here.name}", here), at)
        except megtool.errors.MegtoolError as e:
            return type(e), e.message, e.hint and e.hint.replace(at, "AT")

    expected = run(str(local))
    store.forget()
    actual = run(store.url)
    assert json.dumps(actual, default=str).replace(str(local), "AT") == json.dumps(
        expected, default=str
    )


@pytest.mark.parametrize("name", ["hf", "torch_dist", "legacy", "zarr", "tensorstore", "fp8"])
def test_a_checkpoint_is_resharded_the_same(
    local: Path, store: CountingStore, tmp_path: Path, name: str
) -> None:
    contents = []
    for at in (str(local), store.url):
        out = tmp_path / "out"
        megtool.reshard(f"{at}/{name}", out, to="torch_dist", tp=2, fsync=False)
        contents.append(written(out))
        shutil.rmtree(out)
    assert contents[0] == contents[1]
