"""The commands that the documentation shows: run them, compare or replace the output below them.

A `console` block holds commands behind `$` and what they print; a line `...` stands for lines that
were left out. A block with a title is a file of that name, written before the commands below it
run. A `python` block without a title is run as a script. `bash` blocks are for other machines
(several nodes, a package index): they are not run, but their options have to exist.

Every page runs in a folder of its own, which holds `work`, the folder that `megtool demo work`
makes, and this repository's README. A page with the line `<!-- test: slow -->` needs all of
`work`; any other page needs `work/hf` and `work/tp3-pp2` alone.

    python docs/run_commands.py PAGE...           compare
    python docs/run_commands.py --write PAGE...   replace outputs that differ in more than figures
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<head>[^`\n]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S
)
_TITLE = re.compile(r'title="([^"]+)"')
_FIGURE = re.compile(
    r"\d+:\d\d(?::\d\d)?|\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?(?: (?:B|KiB|MiB|GiB|s)\b)?"
)
_STATUS = re.compile(r"exit status (\d+)")
_NOT_RUN = ("make demo", "megtool demo work", ". .venv/bin/activate")
DEMO = "demo.txt"
ELISION = "..."
SLOW = "<!-- test: slow -->"


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page: its language, title and text, and where its text starts."""

    language: str
    title: str
    text: str
    start: int
    line: int


@dataclass(frozen=True, slots=True)
class Example:
    """A command in a `console` block, with the output that is shown and where that starts."""

    command: str
    output: str
    start: int
    line: int
    exit_status: int = 0


def pages() -> list[Path]:
    """The README and every page of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def is_slow(text: str) -> bool:
    """Whether a page's commands take long, and need all of `work`."""
    return SLOW in text.splitlines()


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    for match in _FENCE.finditer(text):
        head = match["head"].strip()
        title = _TITLE.search(head)
        yield Block(
            head.partition(" ")[0],
            title[1] if title else "",
            match["body"],
            match.start("body"),
            text.count("\n", 0, match.start("body")) + 1,
        )


def examples(block: Block) -> Iterator[Example]:
    """The commands of a `console` block; a command goes on behind a backslash."""
    for match in re.finditer(
        r"^\$ (?P<command>(?:[^\n]*\\\n)*[^\n]*)\n(?P<output>(?:(?!\$ )[^\n]*\n)*)",
        block.text,
        re.M,
    ):
        command, _, comment = re.sub(r"\\\n\s*", "", match["command"]).partition("  #")
        status = _STATUS.search(comment)
        yield Example(
            command.strip(),
            match["output"],
            block.start + match.start("output"),
            block.line + block.text.count("\n", 0, match.start()),
            int(status[1]) if status else 2 if match["output"].startswith("error:") else 0,
        )


def masked(text: str) -> list[str]:
    """The lines of an output without figures, which differ between machines."""
    return [" ".join(_FIGURE.sub("#", line).split()) for line in text.strip().splitlines()]


def matches(shown: str, printed: str) -> bool:
    """Whether a command printed what the page shows, but for figures and elided lines."""
    lines = masked(printed)
    parts: list[list[str]] = [[]]
    for line in masked(shown):
        if line == ELISION:
            parts.append([])
        else:
            parts[-1].append(line)
    if len(parts) == 1:
        return lines == parts[0]
    if lines[: len(parts[0])] != parts[0]:
        return False
    position = len(parts[0])
    for part in parts[1:-1]:
        starts = range(position, len(lines) - len(part) + 1)
        position = next((i for i in starts if lines[i : i + len(part)] == part), -1) + len(part)
        if position < len(part):
            return False
    last = parts[-1]
    return len(lines) - len(last) >= position and lines[len(lines) - len(last) :] == last


def shortened(shown: str, printed: str) -> str:
    """What a command printed, elided where the page elides it."""
    lines, old = printed.rstrip("\n").splitlines(), shown.splitlines()
    marks = [i for i, line in enumerate(old) if line.strip() == ELISION]
    if marks:
        head, tail = marks[0], len([x for x in old[marks[-1] + 1 :] if x.strip()])
        lines = [*lines[:head], ELISION, *lines[len(lines) - tail :]]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def argv(command: str) -> list[str]:
    """A shown command as arguments of this Python.

    Raises:
        ValueError: the program is not one that a page may show in a `console` block.
    """
    words = shlex.split(command)
    if words[0] == "megtool":
        return [sys.executable, "-m", *words]
    if words[0] == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    raise ValueError(f"no test can run this command: {command}")


def environment() -> dict[str, str]:
    """The environment of a command: this checkout, no colours, one line a row of a table."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "NO_COLOR": "1",
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_ERROR_FILE": "",
    }


def run(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in `folder`."""
    return subprocess.run(
        arguments, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )


def prepare(folder: Path, *, whole: bool) -> None:
    """Make `folder`/work as the pages expect it, and `folder`/demo.txt, what the demo printed.

    Raises:
        RuntimeError: a command failed.
    """
    from megtool.commands.demo import demo_weights

    commands = [
        f"megtool reshard {shlex.quote(str(demo_weights()))} work/hf --no-fsync",
        "megtool reshard work/hf work/tp3-pp2 --to torch_dist --tp 3 --pp 2 --no-fsync",
    ]
    printed = ""
    for command in ["megtool demo work"] if whole else commands:
        done = run(argv(command), folder)
        if done.returncode:
            raise RuntimeError(done.stderr)
        printed = done.stdout
    (folder / DEMO).write_text(printed if whole else "")


def page_folder(folder: Path, prepared: Path) -> Path:
    """A folder to run one page in: links to the files of `prepared`/work, and the README."""
    shutil.copytree(prepared / "work", folder / "work", copy_function=os.link)
    shutil.copy(prepared / DEMO, folder)
    shutil.copy(ROOT / "README.md", folder)
    return folder


def run_page(page: Path, folder: Path) -> Iterator[tuple[Example, str]]:
    """Run a page's commands in order; yield each with what it printed.

    A command ends with the exit status in the comment after it (`# exit status 7`), with 2 if the
    page shows an error, else with 0. Where it prints nothing, what it wrote to stderr is compared.

    Raises:
        RuntimeError: a command ended otherwise, with its output.
    """
    for block in blocks(page.read_text()):
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text)
        elif block.language == "python":
            (folder / "example.py").write_text(block.text)
            done = run([sys.executable, "example.py"], folder)
            if done.returncode:
                raise RuntimeError(f"{page.name}:{block.line}: {done.stderr}")
        elif block.language == "console":
            for example in examples(block):
                if example.command == "make demo" and (demo := (folder / DEMO).read_text()):
                    yield example, _without_folder(demo)
                if example.command in _NOT_RUN:
                    continue
                done = run(argv(example.command), folder)
                if done.returncode != example.exit_status:
                    raise RuntimeError(
                        f"{page.name}:{example.line}: {example.command}\n"
                        f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
                    )
                yield example, done.stdout or done.stderr


def _without_folder(text: str) -> str:
    """What the demo prints, as if it had run in a temporary folder."""
    lines = [x for x in text.splitlines() if not x.startswith(("  folder ", "  page "))]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compare the outputs on the pages named, or write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="replace outputs that differ")
    parser.add_argument("--prepared", type=Path, help="a folder with `work` in it, made before")
    options = parser.parse_args()
    different = 0
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as temporary:
        prepared = options.prepared
        if prepared is None:
            prepared = Path(temporary) / "prepared"
            prepared.mkdir()
            whole = any(is_slow(page.read_text()) for page in options.pages)
            prepare(prepared, whole=whole)
        for page in options.pages:
            text, edits = page.read_text(), []
            with tempfile.TemporaryDirectory(dir=prepared) as scratch:
                folder = page_folder(Path(scratch), prepared)
                try:
                    for example, printed in run_page(page, folder):
                        if example.output.strip() and not matches(example.output, printed):
                            edits.append((example, shortened(example.output, printed)))
                            print(f"{page}:{example.line}: {example.command}")
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    different += 1
            different += len(edits)
            if options.write and edits:
                if page.read_text() != text:
                    print(f"{page} was edited meanwhile: run this again", file=sys.stderr)
                    continue
                for example, output in reversed(edits):
                    end = example.start + len(example.output)
                    text = text[: example.start] + output + text[end:]
                page.write_text(text)
    return 1 if different and not options.write else 0


if __name__ == "__main__":
    sys.exit(main())
