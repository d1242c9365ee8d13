"""Files as values with lines: what is read, and what is refused before it costs anything."""

from __future__ import annotations

import time

import pytest

from megtool.errors import RecipeError
from megtool.quant.recipes.located_yaml import MAX_BYTES, read_documents
from tests.support.limits import is_within


def one(text: str) -> object:
    (node,) = read_documents(text.encode(), file="x.yaml")
    return node.plain()


def test_values_know_their_lines() -> None:
    (node,) = read_documents(b"a: 1\nb:\n  - c\n  - d: [e]\n", file="x.yaml")
    assert node.plain() == {"a": 1, "b": ["c", {"d": ["e"]}]}
    assert node.keys == {"a": 1, "b": 2}
    assert node.value["b"].value[1].line == 4


def test_what_is_no_plain_value_is_text_and_json_is_yaml() -> None:
    assert one("d: 2026-01-01") == {"d": "2026-01-01"}
    assert one('{"a": [1, 2.5, null, true]}') == {"a": [1, 2.5, None, True]}


def test_anchors_and_merges_are_followed() -> None:
    text = "a: &x {n: 1, m: 2}\nb: {<<: *x, m: 3}\n"
    assert one(text) == {"a": {"n": 1, "m": 2}, "b": {"m": 3, "n": 1}}


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BOMB, "more than 20,000 values"),
        ("a: &a [*a]", "nested more than 40 deep"),
        ("[" * 100_000, "YAML is invalid"),
        ("a: " + "x" * MAX_BYTES, "the recipe has"),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' is a duplicate, first at line 1"),
        ("a: !!python/object/apply:os.system ['true']", "line 1"),
        ("a: !thing 3", "line 1: the tag '!thing'"),
        ("a: [1,\nb: 2", "line 2: the YAML is invalid"),
        ("? [a, b]\n: 1", "a key that is not a string"),
        ("a: \x00", "YAML is invalid"),
    ],
)
def test_refused(text: str, told: str) -> None:
    begin = time.process_time()
    with pytest.raises(RecipeError) as caught:
        one(text)
    assert told in str(caught.value)
    assert is_within(time.process_time() - begin, 5)
