"""Write the parts of the documentation that come from the code, and the stub of the Python API.

A page marks such a part with `<!-- generated: NAME -->` and `<!-- end -->`; everything else on it
is written by hand. tests/test_docs.py compares the pages with the code.

    python docs/generate.py            rewrite the pages, and megtool/__init__.pyi
    python docs/generate.py --check    list the files that are out of date; status 1 if any
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

_PART = re.compile(
    r"(?P<begin><!-- generated: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in x)} |\n" for x in lines
    )


def code(text: str) -> str:
    """Text as inline code."""
    return f"`{text}`"


def cli() -> str:
    """Every command with its options."""
    from megtool.cli.reference import render_cli_reference

    return render_cli_reference()


def python_api() -> str:
    """The functions of the package, each with the command whose options it takes."""
    from megtool.commands.api import positional_names
    from megtool.commands.verbs import VERBS
    from megtool.options.field import option_fields

    rows = []
    for verb in VERBS:
        names = ", ".join(positional_names(option_fields(verb.options)))
        anchor = f"megtool-{verb.command.replace(' ', '-')}"
        text = (inspect.getdoc(verb.options) or "").partition("\n\n")[0]
        rows.append(
            (
                code(f"megtool.{verb.api}({names}, ...)" if names else f"megtool.{verb.api}()"),
                f"[{code(verb.command)}](cli.md#{anchor})",
                " ".join(text.split()),
            )
        )
    return table(("Function", "Options", "What it does"), rows)


def checkpoint_formats() -> str:
    """The formats of checkpoints: what they hold, and which command writes them."""
    from megtool.commands.options.export import ExportOptions
    from megtool.formats import FORMATS
    from megtool.options.field import option_fields

    (to,) = [x for x in option_fields(ExportOptions) if x.name == "to"]
    rows = []
    for x in reversed(FORMATS):
        for name, text in x.contents.items():
            verbs = ["reshard"] * x.writable + ["export"] * (name in to.choices)
            written = ", ".join(map(code, verbs)) or "no"
            rows.append((code(name), _sentence(text), written))
    return table(("Format", "Contents", "Written by"), rows)


def number_formats() -> str:
    """The number formats of weights, with what engines call them."""
    from megtool.quant.recipes.formats import FORMATS

    return table(
        ("`algo`", "Weights", "Inputs", "Bits", "Group sizes", "Needs calibration"),
        (
            (
                code(x.algo),
                x.weights,
                x.inputs,
                str(x.bits),
                ", ".join(map(str, x.groups)) or "-",
                "yes" if x.calibrates else "no",
            )
            for x in FORMATS.values()
        ),
    )


def algorithm_options() -> str:
    """The options of calibration methods with their ranges."""
    from megtool.quant.recipes.algorithm import METHODS

    return table(
        ("Method", "Option", "Value"),
        (
            (code(method), code(name), option.describe())
            for method, options in METHODS.items()
            for name, option in options.items()
        ),
    )


def families() -> str:
    """The model families."""
    from megtool.convert.families.detection import families
    from megtool.export.gguf.architectures import is_exported

    return table(
        ("Family", "Hugging Face architectures", "`model_type`", "GGUF", "Limits in Megatron"),
        (
            (
                code(x.name),
                ", ".join(map(code, x.architectures)) or "-",
                ", ".join(map(code, x.model_types)) or "-",
                "; ".join(
                    [f"reads {code(a)}" for a in x.gguf_architectures if x.gguf]
                    + ["writes"] * is_exported(x)
                )
                or "-",
                "; ".join(text for _, text in x.limits) or "-",
            )
            for x in families()
        ),
    )


def unknown_families() -> str:
    """The causal models of transformers that no family is called like.

    They are those of the release that is tested with; beside another, the page stays as it is.
    """
    from megtool.convert.families.detection import families

    tested = re.search(r"^transformers==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    if tested is None or version("transformers") != tested[1]:
        page = (ROOT / "docs" / "reference" / "families.md").read_text()
        return page.partition("<!-- generated: unknown-families -->")[2].partition("<!-- end -->")[
            0
        ]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = {a for x in families() for a in x.architectures}
    listed = {
        a
        for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        for a in ([names] if isinstance(names, str) else names)
    }
    unknown = sorted(listed - known, key=str.lower)
    return f"transformers {tested[1]}: {', '.join(map(code, unknown))}.\n"


def settings_by_family() -> str:
    """The keys that a family reads, those of which it knows one value, and those it ignores."""
    from megtool.convert.families.detection import families

    rows = []
    for family in families():
        known = {k: text for x in family.settings for k, text in x.known_values().items()}
        ignored = [*family.ignores, *(family.nested.ignored if family.nested else ())]
        read = [
            k for x in family.settings for k in x.stored_keys if k not in known and k not in ignored
        ]
        cells = (
            ", ".join(map(code, dict.fromkeys(read))),
            "; ".join(f"{code(k)} {text}" for k, text in known.items()),
            ", ".join(map(code, ignored)),
        )
        rows.append((code(family.name), *(cell or "-" for cell in cells)))
    return table(("Family", "Read", "One value known", "Ignored by the class"), rows)


def settings_without_effect() -> str:
    """The keys without effect, by reason."""
    from megtool.convert.config.without_effect import WITHOUT_EFFECT

    rows = ((_sentence(r), ", ".join(map(code, keys))) for r, keys in WITHOUT_EFFECT.items())
    return table(("Reason", "Keys"), rows)


def recipes() -> str:
    """The shipped recipes, each with the text of its file."""
    parts = [
        "| Recipe | Algorithm | Result |\n| --- | --- | --- |\n",
    ]
    from megtool.quant.recipes.dialects import load_recipe

    files = sorted((ROOT / "quant_recipes").glob("*.yaml"))
    loaded = {x.stem: load_recipe(x) for x in files}
    for name, recipe in loaded.items():
        parts.append(
            f"| [{code(name)}](#{name}) | {code(recipe.method)} | {recipe.description} |\n"
        )
    for file in files:
        parts.append(f"\n## {file.stem}\n\n```yaml\n{file.read_text()}```\n")
    return "".join(parts)


def engine_support() -> str:
    """Which number formats each engine loads, and from which version on."""
    from megtool.quant.recipes.engine_support import TABLE

    kinds = {
        "linear": "linear layers",
        "kv": "KV cache",
        "mixed": "several formats in one model",
        "blocks": "gpt-oss expert blocks",
    }
    return table(
        ("Engine", "Since", "For", "Formats", "Source"),
        (
            (
                code(x.engine),
                x.since,
                kinds.get(x.part, x.part) + (" (no experts)" if x.dense else ""),
                ", ".join(map(code, x.algos)),
                x.source,
            )
            for x in TABLE
        ),
    )


def lint_rules() -> str:
    """The rules of `megtool lint`, with the engines that have them."""
    from megtool.lint.rules import load_rules

    parts = []
    for rule in load_rules():
        sources = ", ".join(
            f"[{engine}]({url})" if re.fullmatch(r"https?://\S+", url) else f"{engine} ({url})"
            for engine, url in rule.text.sources.items()
        )
        parts.append(
            f"## {rule.id}\n\n"
            f"{_sentence(rule.text.effect)}\n\n"
            f"- Severity: {rule.text.severity}\n"
            f"- Fix: {rule.text.hint}\n"
            f"- Engines: {sources}\n\n"
        )
    return "".join(parts)


def audit_rules() -> str:
    """What `megtool audit` looks for."""
    from megtool.audit.rules import AUDIT_RULES

    return "".join(
        f"## {rule.id}\n\n{_sentence(rule.title)}\n\n"
        f"- Severity: {rule.severity}\n"
        f"- Seen by: {rule.check}\n"
        f"- What to do: {rule.hint}\n"
        f"- With `--quick`: {'no' if rule.needs_data else 'yes'}\n\n"
        for rule in AUDIT_RULES
    )


def _sentence(text: str) -> str:
    """A text with a capital and a full stop."""
    return text[:1].upper() + text[1:].rstrip(".") + "." if text else ""


def error_ids() -> str:
    """The id and the exit status of every error class, and the finer ids of it."""
    from megtool import errors
    from megtool.quantize.layout.write import VerificationError

    classes = [x for x in vars(errors).values() if inspect.isclass(x)]
    kinds = [x for x in classes if issubclass(x, errors.MegtoolError)]
    rows = []
    for kind in sorted([*kinds, VerificationError], key=lambda x: x.exit_status):
        text = " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
        status = str(kind.exit_status)
        rows.append((status, code(kind.default_id), code(kind.__name__), text))
        rows += [
            (status, code(name), code(kind.__name__), _sentence(meaning))
            for name, meaning in errors.ERROR_IDS.get(kind, {}).items()
        ]
    return table(("Status", "Id", "Class", "Meaning"), rows)


PARTS: Mapping[str, Callable[[], str]] = {
    "audit-rules": audit_rules,
    "cli": cli,
    "python-api": python_api,
    "checkpoint-formats": checkpoint_formats,
    "number-formats": number_formats,
    "algorithm-options": algorithm_options,
    "families": families,
    "unknown-families": unknown_families,
    "settings-by-family": settings_by_family,
    "settings-without-effect": settings_without_effect,
    "recipes": recipes,
    "engine-support": engine_support,
    "lint-rules": lint_rules,
    "error-ids": error_ids,
}


def generated(text: str) -> str:
    """A page with its generated parts made anew."""
    return _PART.sub(
        lambda m: f"{m['begin']}\n{PARTS[m['name']]().strip()}\n\n{m['end']}",
        text,
    )


def pages() -> list[Path]:
    """The pages that have generated parts."""
    return [x for x in sorted((ROOT / "docs").rglob("*.md")) if _PART.search(x.read_text())]


def outputs() -> dict[Path, str]:
    """The text of every page with generated parts, and of the stub of the Python API."""
    from megtool.cli.reference import render_api_stub

    texts = {x: generated(x.read_text()) for x in pages()}
    return texts | {ROOT / "megtool" / "__init__.pyi": render_api_stub()}


def outdated() -> list[str]:
    """The files that differ from what the code says now."""
    return [
        x.relative_to(ROOT).as_posix() for x, text in outputs().items() if text != x.read_text()
    ]


def main() -> int:
    """Rewrite the files, or check them."""
    if "--check" in sys.argv[1:]:
        for name in (names := outdated()):
            print(f"{name} is out of date: run `make docs`")
        return 1 if names else 0
    for path, text in outputs().items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
