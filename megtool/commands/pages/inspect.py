"""The page of `inspect`: bytes by module, ranks, dtypes, statistics over layers, tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megtool.commands.inspection.rank_contents import RankContents
from megtool.commands.reports.inspect import InspectReport, TensorLine
from megtool.console import format_bytes
from megtool.report.figures import (
    HeatGrid,
    LineSeries,
    TreeNode,
    bar_figure,
    heat_figure,
    line_figure,
    treemap,
)
from megtool.report.finding import warning
from megtool.report.page import (
    Page,
    PageColumn,
    PageFigure,
    PageSection,
    PageTable,
    PageTile,
)
from megtool.report.sections import count, shown

MAX_HISTOGRAMS = 4_000
"""Histograms on a page, of what is no expert first; the JSON of the command has all."""

_STATISTICS = (
    ("spread", "std"),
    ("mean", "mean"),
    ("largest magnitude", "largest"),
    ("share of zeros", "zeros"),
)


def inspect_page(report: InspectReport) -> Page:
    """The page of a checkpoint's contents."""
    tiles = [
        PageTile(label="parameters", value=count(report.parameters)),
        PageTile(label="bytes of tensors", value=format_bytes(report.num_bytes)),
        PageTile(label="tensors", value=f"{report.num_tensors:,}"),
        PageTile(label="files", value=f"{report.num_files:,}"),
        PageTile(label="format", value=report.format),
    ]
    if report.iteration is not None:
        tiles.append(PageTile(label="iteration", value=str(report.iteration)))
    if report.digests is None:
        tiles.append(PageTile(label="digests", value="none", tone="warning"))
    return Page(
        title=report.title(),
        command="inspect",
        tiles=tiles,
        facts=[*report.rows()],
        sections=[*_sections(report)],
        data=_page_data(report),
    )


def _page_data(report: InspectReport) -> dict[str, Any]:
    """The report as JSON; of very many tensors without histograms, and numbers in five digits."""
    data = report.to_json()
    if len(report.tensors) > MAX_HISTOGRAMS:
        data["tensors"] = [
            {
                key: float(f"{value:.5g}") if isinstance(value, float) else value
                for key, value in line.items()
                if key != "histogram"
            }
            for line in data["tensors"]
        ]
    return data


def _sections(report: InspectReport) -> Iterator[PageSection]:
    yield PageSection(
        title="Bytes",
        text="Each box is a module, as large as its share of the bytes. A click opens it, "
        "the bar above goes back.",
        blocks=[_module_map(report.modules), _dtypes(report.dtypes)],
    )
    if len(report.ranks) > 1:
        yield PageSection(
            title="Ranks",
            text="What each rank of the layout holds that the checkpoint was saved at. Replicas "
            "are counted at the first of their ranks.",
            blocks=[_rank_grid(report.ranks)],
        )
    elif len(report.largest_files) > 1:
        yield PageSection(title="Files", blocks=[_files(report.largest_files)])
    if report.layers:
        yield PageSection(
            title="Statistics",
            text="Each line is one kind of tensor over the layers. A click on a name hides it, a "
            "double click shows it alone.",
            blocks=[*_layer_figures(report)],
        )
        yield PageSection(
            title="Outliers",
            text="Tensors that are far from the same kind in other layers.",
            findings=[warning("outlier", o.name, o.text, "") for o in report.outliers],
        )
    yield PageSection(title="Tensors", blocks=[_tensors(report)])


def module_nodes(sizes: Mapping[str, int]) -> list[TreeNode]:
    """Boxes of a treemap from sizes by dotted path; a chain of single modules is one box."""
    totals: dict[str, int] = defaultdict(int)
    children: dict[str, set[str]] = defaultdict(set)
    for path, size in sizes.items():
        parts = path.split(".")
        for depth in range(len(parts)):
            here = ".".join(parts[: depth + 1])
            totals[here] += size
            children[".".join(parts[:depth])].add(here)
    nodes: list[TreeNode] = []
    colors: dict[str, int] = {}

    def add(path: str, parent: str, label: str) -> None:
        while len(children[path]) == 1 and path not in sizes:
            (path,) = children[path]
            label = f"{label}.{path.rpartition('.')[2]}"
        color = _CONTAINER if _is_layer_branch(label) else colors.setdefault(label, len(colors) % 7)
        nodes.append(
            TreeNode(
                path=path,
                parent=parent,
                label=label,
                size=totals[path],
                text=format_bytes(totals[path]),
                color=color,
            )
        )
        rest = sizes.get(path, 0) if children[path] else 0
        if rest:
            nodes.append(
                TreeNode(
                    path=f"{path} (itself)",
                    parent=path,
                    label="(itself)",
                    size=rest,
                    text=format_bytes(rest),
                    color=color,
                )
            )
        for child in sorted(children[path], key=_natural):
            add(child, path, child.rpartition(".")[2])

    for root in sorted(children[""]):
        add(root, "", root)
    return nodes


_CONTAINER = 7
"""The color slot of boxes that hold others of every kind."""


def _is_layer_branch(label: str) -> bool:
    return label.isdecimal() or label.split(".")[0] in ("model", "optimizer", "layers", "decoder")


def _natural(path: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(p) if p.isdecimal() else -1, p) for p in path.split("."))


def _module_map(modules: Mapping[str, int]) -> PageFigure:
    total = sum(modules.values())
    largest = max(modules, key=lambda m: modules[m], default="")
    return treemap(
        "Bytes by module",
        f"A treemap of {format_bytes(total)} in {len(modules):,} modules; the largest single one "
        f"is {largest}.",
        module_nodes(modules),
        unit="bytes",
    )


def _dtypes(dtypes: Mapping[str, int]) -> PageFigure:
    ordered = sorted(dtypes.items(), key=lambda item: -item[1])
    return bar_figure(
        "Bytes by dtype",
        ", ".join(f"{name} {format_bytes(n)}" for name, n in ordered),
        [(name, float(n), format_bytes(n)) for name, n in ordered],
    )


def _files(files: Sequence[tuple[str, int]]) -> PageFigure:
    return bar_figure(
        "Bytes by file, the largest first",
        f"{len(files):,} files",
        [(name, float(n), format_bytes(n)) for name, n in files[:40]],
        colors=["@0"] * min(len(files), 40),
    )


def _rank_grid(ranks: Sequence[RankContents]) -> PageFigure:
    """Rows are stages; columns are tensor-parallel ranks, by expert-parallel rank if there are."""
    has_experts = any(r.ep for r in ranks)
    width = (max(r.tp for r in ranks) + 1) * (max(r.ep for r in ranks) + 1)
    rows = [ranks[i : i + width] for i in range(0, len(ranks), width)]
    columns = [(f"ep {r.ep} " if has_experts else "") + f"tp {r.tp}" for r in rows[0]]

    def grid(values: list[list[float | None]], unit: str) -> HeatGrid:
        return HeatGrid(
            rows=[f"pp {row[0].pp}" for row in rows],
            columns=columns,
            values=values,
            texts=[[_describe(r) for r in row] for row in rows],
            unit=unit,
        )

    variants = {
        "bytes": grid([[r.num_bytes / (1 << 20) for r in row] for row in rows], "MiB"),
        "tensors": grid([[float(r.num_tensors) for r in row] for row in rows], "tensors"),
    }
    if any(r.expert_bytes for r in ranks):
        values: list[list[float | None]] = [[r.expert_bytes / (1 << 20) for r in x] for x in rows]
        variants["bytes of experts"] = grid(values, "MiB")
    sizes = [r.num_bytes for r in ranks]
    return heat_figure(
        "Bytes by rank",
        f"A grid of {len(ranks):,} model-parallel ranks, from {format_bytes(min(sizes))} to "
        f"{format_bytes(max(sizes))} each.",
        variants,
        x="expert-parallel and tensor-parallel rank" if has_experts else "tensor-parallel rank",
        y="pipeline stage",
    )


def _describe(r: RankContents) -> str:
    lines = [
        f"tp {r.tp}, pp {r.pp}, ep {r.ep}" + (f" ({r.num_ranks} ranks)" if r.num_ranks > 1 else ""),
        f"{format_bytes(r.num_bytes)} in {r.num_tensors:,} tensors",
    ]
    if r.layers:
        lines.append(f"layers {r.layers}")
    if r.expert_bytes:
        lines.append(f"experts {format_bytes(r.expert_bytes)}")
    lines += [f"{format_bytes(n)} of {name}" for name, n in r.largest]
    return "\n".join(lines)


def _layer_figures(report: InspectReport) -> Iterator[PageFigure]:
    states = dict.fromkeys(m.state for m in report.layers)
    for state in states:
        members = [m for m in report.layers if m.state == state]
        roles = dict.fromkeys(m.role for m in members)
        variants = {
            label: [
                LineSeries(
                    name=role.removeprefix("decoder."),
                    x=[m.layer for m in members if m.role == role],
                    y=[getattr(m, name) for m in members if m.role == role],
                )
                for role in roles
            ]
            for label, name in _STATISTICS
        }
        yield line_figure(
            f"Statistics over layers{f': {state}' if state else ''}",
            f"{len(roles)} kinds of tensors over the layers.",
            variants,
            x="layer",
            y="",
        )


def _tensors(report: InspectReport) -> PageTable:
    if not report.tensors:
        return PageTable(
            title="Tensors, layers folded",
            columns=[
                PageColumn(name="tensor", kind="code"),
                PageColumn(name="shape"),
                PageColumn(name="dtype"),
                PageColumn(name="tensors", kind="count"),
                PageColumn(name="bytes", kind="bytes"),
            ],
            rows=[(f.name, shown(f.shape), f.dtype, f.count, f.num_bytes) for f in report.tree],
            note="--tensors lists each, and --stats adds statistics and histograms.",
        )
    columns = [
        PageColumn(name="tensor", kind="code"),
        PageColumn(name="shape"),
        PageColumn(name="dtype"),
        PageColumn(name="bytes", kind="bytes"),
        PageColumn(name="shards", kind="count"),
    ]
    if report.tensors[0].statistics is not None:
        names = ("mean", "std", "largest")
        columns += [PageColumn(name=name, kind="number") for name in names]
        columns += [
            PageColumn(name="zeros", kind="share"),
            PageColumn(name="NaN, Inf", kind="count"),
            PageColumn(name="histogram", kind="bins"),
        ]
    note = ""
    if report.tensors[0].statistics is not None:
        note = "A click on a histogram shows it: the values by power of two."
        if len(report.tensors) > MAX_HISTOGRAMS:
            note += f" {MAX_HISTOGRAMS:,} tensors have theirs here, and all with --json."
    drawn = _with_histograms(report)
    return PageTable(
        title="Tensors",
        columns=columns,
        rows=[[*_cells(t, t.name in drawn)] for t in report.tensors],
        note=note,
    )


def _with_histograms(report: InspectReport) -> set[str]:
    names = sorted((t.name for t in report.tensors), key=lambda name: "experts." in name)
    return set(names[:MAX_HISTOGRAMS])


def _cells(t: TensorLine, has_histogram: bool) -> Iterator[object]:
    yield from (t.name, shown(t.shape), t.dtype, t.num_bytes, t.num_shards)
    if (s := t.statistics) is not None:
        for value in (s.mean, s.std, s.largest):
            yield None if value is None else float(f"{value:.5g}")
        yield s.zeros / max(s.count, 1)
        yield s.nan + s.inf
        yield s.histogram if has_histogram else None
