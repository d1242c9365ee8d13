"""Chat templates: transformers' own rendering as the oracle, and templates that never end."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

from megtool.data import chat_template
from megtool.data.chat_template import TemplateFault, TemplateRefusal, TemplateRenderer
from megtool.data.tokenizer import Tokenizer
from megtool.errors import MappingError, StorageError
from tests.support.errors import raises
from tests.support.limits import is_within, run_limited
from tests.support.models import tiny_tokenizer

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief", "tool_calls": None},
    {
        "role": "user",
        "content": [{"type": "text", "text": "<b>\u00fc \u4e2d</b>"}, {"type": "image"}],
    },
    {"role": "assistant", "content": "it reads", "reasoning": "hm", "calls": (1, 2.5, True)},
]

TEMPLATES = {
    "loop": "{% for m in messages %}\n  {{ loop.index }} {{ m.role }}: {{ m.content }}\n{% endfor %}",  # noqa: E501
    "json": "{{ messages | tojson }} {{ messages | tojson(indent=2, ensure_ascii=True) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'user' %}{% continue %}{% endif %}{{ ns.n }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% break %}{% endfor %}",
    "reasoning": "{{ messages[2].reasoning_content }} {{ messages[2].thinking }}",
    "missing": "{{ messages[0].tool_calls is defined }} {{ tools is none }} {{ documents }}",
    "special": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ add_generation_prompt }}|{{ own }}",  # noqa: E501
    "dict": "{{ dict(a=1).items() | list }} {{ dict.fromkeys('ab', 3) }}",
    "filters": "{{ messages[1].content | map(attribute='type') | join(',') | upper | indent(4) }}",
    "macro": "{% macro x(a) %}[{{ a }}]{% endmacro %}{{ x(1) }}{{ '%s-%d' | format('a', 3) }}",
    "spaces": "  {%- if true %}\n a\n  {% endif %}\n{# c #}\nb\n",
    "value": "{{ messages[2].calls }} {{ 7 // 2 }} {{ 'a' * 3 }} {{ range(4) | list }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    folder = tiny_tokenizer.save(tmp_path, template=TEMPLATES[name])
    peer = AutoTokenizer.from_pretrained(str(folder))
    expected = peer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, own=5)
    assert Tokenizer.from_folder(folder).chat_text(CHAT, own=5) == expected
    assert expected


def test_a_hook_that_finds_this_package_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(chat_template.__file__).parents[2]
    places = [p for p in sys.path if Path(p or ".").resolve() != root]
    if root.name == "site-packages":
        pytest.skip("the package is installed beside those that it needs")
    monkeypatch.setattr(sys, "path", places)
    assert TemplateRenderer("{{ 6 * 7 }}").render(CHAT, {}) == "42"


def test_the_date_is_today() -> None:
    text = TemplateRenderer("{{ strftime_now('%Y') }}").render(CHAT, {})
    assert text == str(time.localtime().tm_year)


BOMBS = {
    "repetition": "{{ 'x' * 10**10 }}",
    "list": "{{ [0] * 10**10 }}",
    "padding": "{{ '%1000000000d' | format(1) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "center": "{{ 'x' | center(10**9) }}",
    "indent": "{{ ('a\\n' * 10**4) | indent(10**6) }}",
    "tojson": "{{ [[1] * 10**4] * 10**4 | int }}{{ ([[1] * 10**5] * 10**4) | tojson(indent=100) }}",
    "lipsum": "{{ lipsum(n=10**7, min=100, max=200) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "concatenation": "{% set ns = namespace(s='x') %}{% for _ in range(60) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "replace": "{{ ('x' * 10**5) | replace('x', 'x' * 10**5) }}",
    "batch": "{{ range(9) | batch(10**9, 0) | list }}",
    "output": "{{ 'x' * (100 * 1024 * 1024) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "unary": "{{ " + "not " * 100_000 + "1 }}",
}

RENDER = """
import sys, json, resource
from megtool.data import chat_template
from megtool.data.chat_template import TemplateFault, TemplateRenderer, TemplateRefusal
import dataclasses
chat_template.LIMITS = dataclasses.replace(chat_template.LIMITS, cpu_seconds=2)
for name, template in json.load(open(sys.argv[1])).items():
    renderer = TemplateRenderer(template)
    try:
        text = renderer.render([{"role": "user", "content": "x"}], {})
        print(name, "text", len(text))
    except (TemplateFault, TemplateRefusal) as e:
        print(name, "refused", e)
    del renderer
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10, "MiB")
"""


@pytest.mark.slow
def test_templates_that_take_all_memory_or_time_end(tmp_path: Path) -> None:
    import json

    (tmp_path / "bombs.json").write_text(json.dumps(BOMBS))
    done = run_limited(["-c", RENDER, tmp_path / "bombs.json"], timeout=100)
    assert done.status == 0, done.err
    *lines, children = done.out.splitlines()
    assert len(lines) == len(BOMBS)
    assert [line for line in lines if "refused" not in line] == []
    assert done.peak_bytes < 640 << 20  # which includes the processes that it started
    assert int(children.split()[0]) < 640


@pytest.mark.parametrize("name", ["repetition", "output", "nesting", "power"])
def test_a_template_that_exceeds_a_limit_is_to_blame(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = chat_template.ChildLimits(
        memory_bytes=256 << 20, cpu_seconds=1, wall_seconds=120, reply_bytes=16 << 20
    )
    monkeypatch.setattr(chat_template, "LIMITS", limits)
    folder = tiny_tokenizer.save(tmp_path, template=BOMBS[name])
    tokenizer = Tokenizer.from_folder(folder)
    start = time.monotonic()
    with raises(MappingError, "chat template", file="chat_template.jinja", hint="--chat"):
        tokenizer.chat([{"role": "user", "content": "hi"}])
    assert is_within(time.monotonic() - start, 15, time.monotonic)
    with raises(MappingError, "chat template"):  # and again, in a new process
        tokenizer.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{% set ns = namespace(_x=1) %}",
        "{% include '/etc/passwd' %}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_is_closed(template: str) -> None:
    with pytest.raises((TemplateFault, TemplateRefusal)):
        TemplateRenderer(template).render([{"role": "user", "content": "x"}], {})


def test_one_process_renders_all_and_ends_with_its_renderer() -> None:
    children = psutil.Process().children
    before = set(children())
    renderer = TemplateRenderer("{{ messages[0].content }}")
    texts: dict[int, list[str]] = {}

    def render(number: int, renderer: TemplateRenderer = renderer) -> None:
        messages = [{"role": "user", "content": f"{number}"}]
        texts[number] = [renderer.render(messages, {}) for _ in range(50)]

    threads = [threading.Thread(target=render, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: [str(n)] * 50 for n in range(4)}
    (child,) = set(children()) - before
    del renderer, render
    assert psutil.wait_procs([child], timeout=10)[1] == []


def test_a_process_that_is_killed_starts_again() -> None:
    before = set(psutil.Process().children())
    renderer = TemplateRenderer("{{ messages[0].content }}")
    messages = [{"role": "user", "content": "x"}]
    assert renderer.render(messages, {}) == "x"
    (child,) = set(psutil.Process().children()) - before
    child.kill()
    child.wait(10) if child.is_running() else None
    with pytest.raises(TemplateFault):
        renderer.render(messages, {})
    assert renderer.render(messages, {}) == "x"


def test_a_forked_process_has_a_renderer_of_its_own() -> None:
    renderer = TemplateRenderer("{{ messages[0].content }}")
    messages = [{"role": "user", "content": "x"}]
    assert renderer.render(messages, {}) == "x"
    number = os.fork()
    if not number:
        os._exit(0 if renderer.render(messages, {}) == "x" else 1)
    assert os.waitpid(number, 0)[1] == 0
    assert renderer.render(messages, {}) == "x"


def test_no_process_to_be_had_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    def refuse(*_: Any, **__: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with raises(StorageError, "process", hint="ulimit -u"):
        TemplateRenderer("x").render([{"role": "user", "content": "x"}], {})
