"""Renders chat templates, which come with a model, in a child process with limits.

A template is a program: `{{ 'x' * 10**9 }}` takes all memory, and nested loops never end. The
child is one interpreter with jinja2 alone, in the sandbox and with the filters and globals that
transformers gives a template. It renders many conversations.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megtool.process.child import ChildLimits, ChildProcess, LimitError, serve

if TYPE_CHECKING:
    from jinja2 import Template

LIMITS = ChildLimits(memory_bytes=512 << 20, cpu_seconds=10, wall_seconds=120, reply_bytes=64 << 20)
Message = Mapping[str, Any]
GENERATION_MARKS = "generation_marks"
"""The variable with two texts to put around `{% generation %}` blocks; templates do not see it."""

_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateFault(Exception):
    """A template that cannot be used; the text says why."""


class TemplateRefusal(Exception):
    """A template refuses these messages; the text says why."""


class TemplateRenderer:
    """Renders one template. Any thread may call."""

    def __init__(self, template: str) -> None:
        self._template = template
        self._child = ChildProcess(__name__, LIMITS)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The text of a conversation; `variables` are further variables of the template.

        Raises:
            TemplateFault: the template is invalid or unsafe, or exceeds a limit.
            TemplateRefusal: it raises an error about these messages.
            StorageError: no process can be started.
        """
        return self.render_prefixes(messages, [(len(messages), variables)])[0]

    def render_prefixes(
        self, messages: Sequence[Message], prefixes: Sequence[tuple[int, Mapping[str, Any]]]
    ) -> list[str]:
        """The texts of the first messages of a conversation: so many, with these variables.

        Raises:
            TemplateFault, TemplateRefusal, StorageError: as `render`.
        """
        conversation = [
            _plain(_with_reasoning({k: v for k, v in m.items() if v is not None})) for m in messages
        ]
        parts = [(number, _plain(variables)) for number, variables in prefixes]
        try:
            answer = self._child.request((self._template, conversation, parts))
        except LimitError as e:
            raise TemplateFault(f"it {e}") from e
        if "limit" in answer:
            raise TemplateFault(f"it {answer['limit']}")
        kind, texts = answer["value"]
        if kind == "fault":
            raise TemplateFault(texts[0])
        if kind == "refusal":
            raise TemplateRefusal(texts[0])
        return [str(text) for text in texts]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under the names that templates read."""
    value = next((message[k] for k in _REASONING if message.get(k) is not None), None)
    if value is None:
        return message
    return {"thinking": value, **message, "reasoning_content": value}


def _plain(value: Any) -> Any:
    """A value of plain types alone: what a template sees has no methods that do anything."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, list):
        return [*map(_plain, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not value.shape:
        return _plain(value.item())
    return f"<{type(value).__name__}>"


# ---- in the child


def serve_requests() -> None:
    """Answer requests in the child: a template, messages and prefixes to `[kind, texts]`.

    The kind is `text`, `fault` of the template, or `refusal` of the messages.
    """
    from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

    def answer(request: tuple[str, list[Any], list[tuple[int, dict[str, Any]]]]) -> Any:
        source, messages, prefixes = request
        try:
            template = compile_template(source)
            texts = []
            for number, variables in prefixes:
                _MARKS[:] = variables.pop(GENERATION_MARKS, None) or ["", ""]
                texts.append(template.render(variables | {"messages": messages[:number]}))
            "".join(texts).encode()
            return "text", texts
        except (SecurityError, TemplateSyntaxError, *_BROKEN) as e:
            return "fault", [" ".join(str(e).split())[:200] or type(e).__name__]
        except (TemplateError, AttributeError, LookupError, TypeError, ValueError) as e:
            return "refusal", [str(e)[:2000]]

    serve(answer)


_MARKS = ["", ""]
"""What stands around `{% generation %}` blocks in the text that is rendered now."""

_BROKEN = (OverflowError, SyntaxError, RecursionError, ZeroDivisionError)
"""What a template runs into that asks for more than the sandbox gives."""


@lru_cache
def compile_template(source: str) -> Template:
    """A template in the environment that transformers uses."""
    from datetime import datetime

    import jinja2
    import jinja2.ext
    import jinja2.utils
    from jinja2 import nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` blocks, which mark answers and add nothing."""

        tags = {"generation"}  # noqa: RUF012 - as the base class declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_block")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _block(self, caller: Any) -> Any:
            begin, end = _MARKS
            return f"{begin}{caller()}{end}"

    class Namespace(jinja2.utils.Namespace):
        """A namespace without private attributes."""

        def __init__(*args: Any, **values: Any) -> None:
            self, rest = args[0], args[1:]
            attributes = dict(*rest, **values)
            for name in attributes:
                check(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            check(name)
            super().__setitem__(name, value)

    class Dict:
        """The function `dict`, without the attributes of the type."""

        def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
            return dict(*args, **values)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has the private attribute {name!r}")

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment.from_string(source)
