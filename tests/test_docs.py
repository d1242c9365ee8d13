"""The documentation is what the code says: reference pages, commands, options, links."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer

from megtool.cli.app import app
from tests.support.shared_folder import shared_folder


def load_script(name: str) -> Any:
    """A script in docs/, as a module."""
    path = Path(__file__).resolve().parent.parent / "docs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"docs_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


generate_docs, run_docs = load_script("generate"), load_script("run_commands")
PAGES = run_docs.pages()
FOREIGN = {
    "--ckpt-format",  # Megatron-LM
    "--finetune",
    "--no-load-optim",
    "--use-checkpoint-args",
    "--kv-cache-dtype",  # vLLM
    "--nnodes",  # torchrun
    "--nproc-per-node",
    "--max-restarts",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--gpus-per-node",  # Slurm
    "--nodes",
    "--ntasks-per-node",
    "--requeue",
    "--array",
    "--cpus-per-task",
    "--kill-on-bad-exit",
    "--signal",
    "--scale",  # tests/faults/test_attack.py
    "--hours",  # tests.support.simulation
    "--kind",
    "--processes",
    "--seeds",
    "--checkpoint_dir",  # trtllm-build
    "--gemm_plugin",
    "--output_dir",
    "--write",  # docs/run_commands.py
    "--number",  # the mutation of tests
    "--packages",
    "--minutes",
}
"""Options of other programs that pages name."""


def page_name(page: Path) -> str:
    return page.relative_to(run_docs.ROOT).as_posix()


def with_examples() -> Iterator[Any]:
    """The pages that show commands; long ones are marked."""
    for page in PAGES:
        text = page.read_text()
        if any(x.language in ("console", "python") for x in run_docs.blocks(text)):
            marks: list[Any] = [pytest.mark.slow] if run_docs.is_slow(text) else []
            if "--report " in text and find_spec("plotly") is None:
                marks.append(pytest.mark.skip(reason="plotly is not installed: megtool[report]"))
            yield pytest.param(page, marks=marks, id=page_name(page))


def prepared(factory: pytest.TempPathFactory, *, whole: bool) -> Path:
    """The folder with `work` that pages use."""
    name = "docs-whole" if whole else "docs-small"
    return shared_folder(factory, name, lambda folder: run_docs.prepare(folder, whole=whole))


@pytest.mark.parametrize("page", with_examples())
def test_commands_print_what_the_page_shows(
    page: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    source = prepared(tmp_path_factory, whole=run_docs.is_slow(page.read_text()))
    folder = run_docs.page_folder(tmp_path / "page", source)
    for example, printed in run_docs.run_page(page, folder):
        if example.output.strip():
            assert run_docs.matches(example.output, printed), (
                f"line {example.line}: {example.command}\nprints\n{printed}\n"
                f"python docs/run_commands.py --write {page_name(page)}"
            )


def test_the_readmes_python_example_runs(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    text = (run_docs.ROOT / "README.md").read_text()
    (script,) = [x.text for x in run_docs.blocks(text) if x.language == "python"]
    folder = run_docs.page_folder(tmp_path / "page", prepared(tmp_path_factory, whole=False))
    (folder / "example.py").write_text(script)
    done = run_docs.run(run_docs.argv("python example.py"), folder)
    assert done.returncode == 0, done.stderr
    num_bytes, num_digested = map(int, done.stdout.splitlines()[0].split())
    assert num_bytes == 2 * 134_515_008
    assert num_digested == 272


def test_the_console_blocks_are_found() -> None:
    text = "# A\n\n```console\n$ megtool a \\\n    b  # exit status 7\nx\ny\n$ megtool c\n```\n"
    (block,) = run_docs.blocks(text)
    first, second = run_docs.examples(block)
    assert (first.command, first.output, first.exit_status) == ("megtool a b", "x\ny\n", 7)
    assert (second.command, second.output, second.exit_status) == ("megtool c", "", 0)
    assert text[first.start :].startswith("x\n")


@pytest.mark.parametrize(
    ("shown", "printed", "equal"),
    [
        ("a 1.5 s\n", "a 2:03\n", True),
        ("a\nb\n", "a\n", False),
        ("a\n...\nz\n", "a\nb\nc\nz\n", True),
        ("a\n...\nz\n", "a\nb\nc\n", False),
        ("a\n...\nm\n...\nz\n", "a\nb\nm\nz\n", True),
        ("a\n...\nm\n...\nz\n", "a\nb\nz\n", False),
        ("a\n...\nb\n", "a\nb\n", True),
        ("a\n...\na\n", "a\n", False),
    ],
)
def test_outputs_are_compared_without_figures(shown: str, printed: str, equal: bool) -> None:
    assert run_docs.matches(shown, printed) is equal


def test_shortened_outputs_keep_their_ends() -> None:
    assert run_docs.shortened("1\n2\n...\n9\n", "a\nb\nc\nd\n") == "a\nb\n...\nd\n"


def test_generated_parts_are_up_to_date() -> None:
    assert generate_docs.outdated() == [], "run `make docs`, or python docs/generate.py"


def test_every_generated_part_is_on_a_page() -> None:
    texts = "".join(page.read_text() for page in generate_docs.pages())
    names = re.findall(r"<!-- generated: ([\w-]+) -->", texts)
    assert sorted(names) == sorted(generate_docs.PARTS)


def bash_commands() -> Iterator[Any]:
    """The `megtool` commands in blocks that are not run."""
    for page in PAGES:
        for block in run_docs.blocks(page.read_text()):
            if block.language != "bash":
                continue
            for line in re.sub(r"\\\n", " ", block.text).splitlines():
                words = shlex.split(line.partition(">")[0], comments=True)
                if "megtool" in words:
                    yield pytest.param(words[words.index("megtool") + 1 :], id=line.strip())


@pytest.mark.parametrize("words", bash_commands())
def test_commands_that_are_not_run_have_valid_options(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words[0]]
        words = words[1:]
    command.make_context("megtool", list(words))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    if page.name == "benchmarks.md":
        pytest.skip("names the options of its own scripts")
    text = page.read_text()
    blocks = " ".join(x.text for x in run_docs.blocks(text) if x.language in ("bash", "console"))
    inline = " ".join(re.findall(r"`([^`\n]+)`", text))
    names = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", f"{inline} {blocks}"))
    assert names - options() - FOREIGN == set()


def options() -> set[str]:
    """Every option of every command."""
    found, todo = {"--help"}, [typer.main.get_command(app)]
    while todo:
        command: Any = todo.pop()
        todo += getattr(command, "commands", {}).values()
        for parameter in command.params:
            found |= {*parameter.opts, *parameter.secondary_opts}
    return found


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.is_file(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text()), target


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in headings
    } | set(re.findall(r"\{ *#([\w.-]+) *\}", text))


@pytest.mark.slow
def test_the_site_builds_without_warnings(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    docs = tmp_path / "docs"
    shutil.copytree(checkout / "docs", docs, ignore=shutil.ignore_patterns("site", ".cache"))
    program = Path(sys.executable).parent / "zensical"
    done = subprocess.run(
        [program, "build", "--strict", "--config-file", "zensical.toml"],
        cwd=docs,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (docs / "site" / "index.html").is_file()


def test_every_page_is_in_the_navigation(checkout: Path) -> None:
    config = (checkout / "docs" / "zensical.toml").read_text()
    pages = {x.relative_to(checkout / "docs").as_posix() for x in PAGES if x.name != "README.md"}
    assert set(re.findall(r'"([\w/-]+\.md)"', config)) == pages


def test_the_glossary_is_short(checkout: Path) -> None:
    rows = (checkout / "docs/development/glossary.md").read_text().count("\n| ") - 2
    assert 40 <= rows <= 50


def test_the_architecture_page_names_every_folder(checkout: Path) -> None:
    text = (checkout / "docs/development/architecture.md").read_text()
    named = re.findall(r"^\| `([\w/]+)/`", text, flags=re.MULTILINE)
    folders = [x.parent for x in (checkout / "megtool").glob("*/__init__.py")]
    assert {x.relative_to(checkout).as_posix() for x in folders} <= set(named)
    assert [x for x in named if not (checkout / x).is_dir()] == []


def test_the_recipe_format_page_names_every_key(checkout: Path) -> None:
    from megtool.quant.recipes import algorithm, recipe

    text = (checkout / "docs/reference/recipe-format.md").read_text()
    keys = {*recipe._TOP, *recipe._FORMAT, *recipe._RULE, *algorithm.METHODS}
    keys |= {option for options in algorithm.METHODS.values() for option in options}
    assert [key for key in sorted(keys) if f"`{key}" not in text] == []
