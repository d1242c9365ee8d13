"""Hostile objects through reshard to every format that has pickles: refused, or left out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megtool import inspect, reshard, strip_amax, verify
from megtool.errors import CoverageError, FormatError, MegtoolError
from megtool.formats import open_checkpoint
from megtool.options.layout import ParallelConfig
from megtool.pickles.allow_list import ALLOWED_GLOBALS
from megtool.pickles.zip_writer import encode_object
from megtool.reshard.foreign_objects import find_foreign_objects
from tests.support.checkpoints import te_payloads
from tests.support.checkpoints.hostile_pickles import (
    PLACES,
    HostileVariant,
    globals_in,
    hostile_values,
    hostile_variants,
    name,
    stacked,
    text,
)
from tests.support.checkpoints.trained import config, write

TARGETS: dict[str, dict[str, Any]] = {
    "torch_dist": {"to": "torch_dist"},
    "new core": {"to": "torch_dist", "core_version": "0.19"},
    "megatron": {"to": "megatron"},
    "dcp": {"to": "dcp"},
    "zarr": {"to": "zarr"},
    "tensorstore": {"to": "tensorstore"},
}
"""Every format that has pickles."""


def targets_of(kind: str) -> list[str]:
    """The targets of a source; `dcp` without a sidecar has no configuration for rank files."""
    return [target for target in TARGETS if (kind, target) != ("dcp", "megatron")]


FORBIDDEN = {"os.system", "os.exec", "subprocess.Popen", "socket.connect", "shutil.rmtree"}
ALLOWED = set(ALLOWED_GLOBALS)
PLAIN = (
    name("mycompany", "Settings") + b")R",
    stacked("torch.serialization", "load") + text("a") + b"\x85R",
    name("numpy.distutils.exec_command", "exec_command") + text("a") + b"\x85R",
)
"""Values that the reader does not know, so that only the allow-list refuses them."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, materialize: Any) -> dict[str, Path]:
    """A sound training state of every format that has pickles, with objects."""
    from megtool.megatron_state.extra_states.te_state import make_bytes_tensor

    root = tmp_path_factory.mktemp("sound")
    state = encode_object([make_bytes_tensor(te_payloads.DELAYED_2_4)])
    objects = {
        f"decoder.layers.self_attention.linear_qkv._extra_state/shard_{k}_4": state
        for k in range(4)
    }
    objects["rng_state/shard_0.0_1.1"] = encode_object([[{"random_rng_state": (3, (1,), None)}]])
    small = {"opt_param_scheduler": {"num_steps": 4}}
    model = config()
    write(
        root / "torch_dist",
        model,
        ParallelConfig(),
        materialize,
        objects=objects,
        beside={"tokenizer/tokenizer.json": b"{}"},
        small_state=small,
    )
    for kind in ("megatron", "dcp", "zarr"):
        reshard(root / "torch_dist", root / kind, to=kind, fsync=False)
    return {kind: root / kind for kind in PLACES}


@pytest.fixture
def hostile(sound: dict[str, Path], tmp_path: Path) -> Callable[[HostileVariant], Path]:
    """Copies of sound checkpoints, made hostile."""

    def copy(variant: HostileVariant) -> Path:
        folder = tmp_path / "hostile"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound[variant.kind], folder)
        for sidecar in folder.rglob("megtool.json"):
            sidecar.unlink()
        variant.patch(folder)
        return folder

    return copy


def attempt(source: Path, out: Path, **options: Any) -> MegtoolError | None:
    """Reshard, and check that nothing hostile is in what is written."""
    try:
        reshard(source, out, fsync=False, threads=1, overwrite=True, **options)
    except MegtoolError as e:
        assert e.message
        return e
    assert globals_in(out) <= ALLOWED
    assert not Path("pwned").exists()
    return None


def check(variant: HostileVariant, source: Path, out: Path, target: str, audit: Any) -> str:
    """Push a hostile checkpoint through a reshard, with and without `--drop-objects`."""
    shutil.rmtree(out, ignore_errors=True)
    audit.seen.clear()
    audit.watching = True
    try:
        error = attempt(source, out, **TARGETS[target])
        rest = attempt(source, out, drop_objects=True, **TARGETS[target])
    finally:
        audit.watching = False
    assert not {event for event, _ in audit.seen} & FORBIDDEN
    assert not [x for event, x in audit.seen if event == "import" and "mycompany" in str(x)]
    if error is None:
        assert rest is None
        return "written without it"
    assert isinstance(error, FormatError), (variant.id, error)
    assert error.hint or "pickle" in error.message, (variant.id, error)
    assert str(source) in (error.file or ""), (variant.id, error)
    return "left out" if rest is None else f"refused: {rest}"


@pytest.mark.parametrize(
    "shift", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(TARGETS)))]
)
@pytest.mark.parametrize("kind", PLACES)
def test_nothing_hostile_is_passed_on(
    hostile: Callable[[HostileVariant], Path], tmp_path: Path, audit: Any, kind: str, shift: int
) -> None:
    for number, (place, patch) in enumerate(PLACES[kind].items()):
        targets = targets_of(kind)
        target = targets[(number + shift) % len(targets)]
        value = PLAIN[number % len(PLAIN)]
        variant = HostileVariant(place, kind, lambda folder, p=patch, v=value: p(folder, v))
        source = hostile(variant)
        outcome = check(variant, source, tmp_path / "out", target, audit)
        is_written = place not in (".metadata", "planner data", "a file of the tokenizer")
        if is_written and "random" not in place:
            assert outcome == "left out", (place, outcome)
        elif not is_written:
            assert not outcome.startswith("refused"), (place, outcome)


@pytest.mark.parametrize(
    ("kind", "place", "target"),
    [
        ("megatron", "a rank file", "megatron"),
        ("megatron", "args", "torch_dist"),
        ("torch_dist", "an object", "dcp"),
        ("dcp", "an object", "zarr"),
        ("zarr", "common.pt", "megatron"),
    ],
)
def test_a_number_that_only_one_unpickler_parses_hides_nothing(
    hostile: Callable[[HostileVariant], Path],
    tmp_path: Path,
    kind: str,
    place: str,
    target: str,
) -> None:
    payload = b"\x80\x02I0x10\n0cmycompany\nSettings\n)R."
    value = b"C" + bytes((len(payload),)) + payload
    source = hostile(HostileVariant(place, kind, lambda folder: PLACES[kind][place](folder, value)))
    with pytest.raises(FormatError, match=r"mycompany\.Settings"):
        reshard(source, tmp_path / "out", fsync=False, **TARGETS[target])
    reshard(source, tmp_path / "out", fsync=False, drop_objects=True, **TARGETS[target])
    files = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert not any(b"mycompany" in p.read_bytes() for p in files if p.name != "megtool.json")


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACES)
def test_hundreds_of_hostile_checkpoints(
    hostile: Callable[[HostileVariant], Path], tmp_path: Path, audit: Any, kind: str
) -> None:
    outcomes = []
    targets = targets_of(kind)
    for number, variant in enumerate(hostile_variants(kind, every=5)):
        source = hostile(variant)
        target = targets[number % len(targets)]
        outcomes.append(check(variant, source, tmp_path / "out", target, audit))
    assert len(outcomes) >= 150
    assert outcomes.count("left out") > 50


def damaged(hostile: Callable[[HostileVariant], Path], kind: str, place: str) -> Path:
    patch = PLACES[kind][place]
    return hostile(HostileVariant(place, kind, lambda folder: patch(folder, PLAIN[0])))


def test_the_error_names_globals_file_and_the_way_out(
    hostile: Callable[[HostileVariant], Path], tmp_path: Path
) -> None:
    source = damaged(hostile, "torch_dist", "args")
    with pytest.raises(FormatError) as e:
        reshard(source, tmp_path / "out", tp=2)
    assert "mycompany.Settings" in e.value.message
    assert "common state: args.evil" in e.value.message
    assert (e.value.file or "").endswith("common.pt")
    assert "--drop-objects" in (e.value.hint or "")
    assert e.value.id == "hostile-pickle"
    assert not (tmp_path / "out").exists()


def test_the_report_lists_what_is_left_out_and_strict_refuses_it(
    hostile: Callable[[HostileVariant], Path], tmp_path: Path
) -> None:
    for place, left_out in (
        ("args", "common state: args.evil"),
        ("common.pt", "common state: evil"),
        ("an object", "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4"),
        ("modelopt_state", "modelopt_state/common.pt"),
        ("a file of NeMo", "context/0b2c.bin"),
    ):
        source = damaged(hostile, "torch_dist", place)
        report = reshard(source, tmp_path / place, drop_objects=True, fsync=False)
        (drop,) = [d for d in report.dropped if d.name == left_out]
        assert drop.is_lost
        assert "mycompany.Settings" in drop.reason
        assert any(left_out in line and "Settings" in line for line in report.lines())
        names = [n for kinds in (report.moved, report.derived) for ns in kinds.values() for n in ns]
        assert left_out not in names
        with pytest.raises(CoverageError):
            reshard(source, tmp_path / "strict", drop_objects=True, strict=True)


def test_what_is_left_out_changes_nothing_else(
    hostile: Callable[[HostileVariant], Path], sound: dict[str, Path], tmp_path: Path
) -> None:
    source = damaged(hostile, "torch_dist", "args")
    reshard(source, tmp_path / "a", drop_objects=True, tp=2, fsync=False)
    reshard(sound["torch_dist"], tmp_path / "b", tp=2, fsync=False)
    assert verify(tmp_path / "a", tmp_path / "b").verdict == "equal"
    a, b = (open_checkpoint(tmp_path / x) for x in "ab")
    assert a.metadata["args"] == b.metadata["args"]
    assert a.objects.keys() == b.objects.keys()
    assert find_foreign_objects(a) == []


def test_amax_takes_the_option_too(
    hostile: Callable[[HostileVariant], Path], tmp_path: Path
) -> None:
    source = damaged(hostile, "torch_dist", "args")
    with pytest.raises(FormatError, match=r"mycompany\.Settings"):
        strip_amax(source, tmp_path / "out", fsync=False)
    strip_amax(source, tmp_path / "out", drop_objects=True, fsync=False)
    assert globals_in(tmp_path / "out") <= ALLOWED


def test_a_target_without_pickles_needs_no_option(
    hostile: Callable[[HostileVariant], Path], tmp_path: Path
) -> None:
    for place in ("args", "an object", "a file of the tokenizer"):
        source = damaged(hostile, "torch_dist", place)
        reshard(source, tmp_path / place, to="safetensors", fsync=False)
        assert globals_in(tmp_path / place) == set()


@pytest.mark.parametrize("kind", PLACES)
def test_inspect_and_verify_name_them(hostile: Callable[[HostileVariant], Path], kind: str) -> None:
    for place in PLACES[kind]:
        source = damaged(hostile, kind, place)
        report = inspect(source)
        if place in (".metadata", "planner data", "a file of the tokenizer"):
            continue  # what is never read, and never written
        (foreign,) = report.foreign_objects
        assert "mycompany.Settings" in foreign.text
        assert any("mycompany.Settings" in line for line in report.lines())
        assert report.to_json()["foreign_objects"][0]["name"] == foreign.name
        checked = verify(source)
        assert checked.exit_status == 7
        assert [d.kind for d in checked.differences] == ["object"]
        assert "mycompany.Settings" in checked.differences[0].text


@pytest.mark.parametrize("kind", PLACES)
def test_sound_checkpoints_have_none(sound: dict[str, Path], kind: str) -> None:
    assert inspect(sound[kind]).foreign_objects == ()
    assert verify(sound[kind]).exit_status == 0
    assert globals_in(sound[kind]) <= ALLOWED


def test_every_value_has_an_id() -> None:
    titles = [title for title, _ in hostile_values()]
    assert len(set(titles)) == len(titles)
