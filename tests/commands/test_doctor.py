"""`megtool doctor`: one page about this machine."""

from __future__ import annotations

import json
from pathlib import Path

from megtool import doctor
from megtool.storage.stores.connect import register_store
from megtool.storage.stores.memory import MemoryStore

URL = "memory://doctor-verb"


def test_the_report_names_what_works_and_what_to_install(tmp_path: Path) -> None:
    report = doctor(tmp_path)
    text = "\n".join(report.lines())
    assert str(tmp_path) in text
    for ability in report.abilities:
        line = next(line for line in text.splitlines() if line.startswith(ability.name))
        assert line.split(ability.name, 1)[1].split()[0] == ("yes" if ability.works else "no")
    for extra in report.extras:
        if any(not p.installed for p in extra.packages) and extra.name != "te":
            assert extra.command in text


def test_json_holds_the_same(tmp_path: Path) -> None:
    report = doctor(tmp_path)
    values = json.loads(json.dumps(report.to_json()))
    assert values["place"]["location"] == str(tmp_path)
    assert [a["name"] for a in values["abilities"]] == [a.name for a in report.abilities]
    assert {e["name"] for e in values["extras"]} == {e.name for e in report.extras}


def test_a_store_is_told_in_one_line() -> None:
    register_store(MemoryStore(URL))
    text = "\n".join(doctor(f"{URL}/run").lines())
    assert f"{URL}/run: a store that keeps all that a commit needs" in text
