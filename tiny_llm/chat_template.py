"""Chat messages to a prompt, by the Jinja template that comes with a model.

The environment follows the convention of Hugging Face's chat templates, so that
published templates render as their authors saw them. Templates come with the model
and are sandboxed: no attribute of Python's inner life can be reached, nothing that
was passed in can be changed, loops and products are bounded. The bounds stop
accidents and simple attacks; a hostile template can still waste memory.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import ChatTemplateError, TokenizerError

if TYPE_CHECKING:
    import jinja2

MAX_STEPS = 10_000_000  # loop steps and calls in one rendering
MAX_REPEAT = 1_000_000  # items of a string or list made by multiplication
MAX_EXPONENT = 64
MAX_PRODUCT_BITS = 10_000
_BUDGET = "_tiny_llm_budget"  # the name of the counter among the variables

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """The chat templates of a model, by name; compiled when first used.

    `sources` maps names to Jinja sources: "default", and perhaps "tool_use", which
    is taken when tools are given. It may be empty: then every use says so.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = dict(sources)
        self._compiled: dict[str, jinja2.Template] = {}
        self._variables: frozenset[str] | None = None

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`; `variables` are further template variables.

        Nothing passed in is changed. Raises ChatTemplateError when there is no
        template, when messages or tools are malformed, and with the template's own
        words when it refuses them.
        """
        name = self._choose(tools)
        values = {
            "messages": normalize_messages(messages),
            "tools": _checked_tools(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
            _BUDGET: _Budget(),
        }
        try:
            if name not in self._compiled:
                self._compiled[name] = _environment().from_string(self.sources[name])
            return self._compiled[name].render(values)
        except ChatTemplateError:
            raise
        except Exception as error:  # whatever a template can do wrong
            raise ChatTemplateError(_explain(error)) from error

    def variables(self) -> frozenset[str]:
        """The names of all variables that the templates read and may be given.

        Raises ChatTemplateError for a template that is no Jinja.
        """
        from jinja2 import meta

        if self._variables is None:
            environment = _environment()
            try:
                found = (
                    meta.find_undeclared_variables(environment.parse(source))
                    for source in self.sources.values()
                )
                self._variables = frozenset().union(*found)
            except Exception as error:  # whatever a template can do wrong
                raise ChatTemplateError(_explain(error)) from error
        return self._variables

    def _choose(self, tools: Tools | None) -> str:
        if tools and "tool_use" in self.sources:
            return "tool_use"
        if "default" in self.sources:
            return "default"
        if self.sources:
            raise ChatTemplateError(
                "the model has no default chat template, only "
                + ", ".join(sorted(self.sources))
            )
        raise ChatTemplateError(
            "the model has no chat template; it may not be a chat model. "
            "Give it plain text, or put a chat_template.jinja beside its tokenizer"
        )


def parse_chat_template(value: Any, where: str) -> dict[str, str]:
    """Templates by name from the `chat_template` value of a JSON file.

    The value is null, a string, or a list of {"name": ..., "template": ...}. Raises
    TokenizerError naming `where` for anything else.
    """
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list():
            templates = {}
            for item in value:
                match item:
                    case {"name": str(name), "template": str(template)}:
                        templates[name] = template
                    case _:
                        break
            else:
                return templates
    raise TokenizerError(
        f"{where}: chat_template is neither a string nor a list of name and template"
    )


def normalize_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as templates expect them: `content` is a string in each.

    None becomes "" and a list of text parts is joined. Raises ChatTemplateError,
    naming the message by its index, for what is not a message.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise ChatTemplateError(
            f"messages must be a list of messages, not {type(messages).__name__}"
        )
    if not messages:
        raise ChatTemplateError("messages is empty; give at least one message")
    normal = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ChatTemplateError(
                f'{where} must be an object with "role" and "content", '
                f"not {type(message).__name__}"
            )
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ChatTemplateError(
                f"{where}.role must be a non-empty string, not {role!r}"
            )
        if "content" not in message and role != "assistant":
            raise ChatTemplateError(f"{where} (role {role!r}) has no content")
        content = _text_content(message.get("content"), f"{where}.content")
        normal.append({**message, "content": content})
    return normal


def _text_content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ChatTemplateError(
            f"{where} must be a string, null or a list of text parts, "
            f"not {type(content).__name__}"
        )
    texts = []
    for index, part in enumerate(content):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "text"}:
                raise ChatTemplateError(f"{where}[{index}].text must be a string")
            case {"type": kind}:
                raise ChatTemplateError(
                    f"{where}[{index}] has the type {kind!r}; "
                    'only parts of type "text" are supported'
                )
            case _:
                raise ChatTemplateError(f"{where}[{index}] is not a part with a type")
    return "".join(texts)


def _checked_tools(tools: Any) -> list[Any] | None:
    if tools is None:
        return None
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise ChatTemplateError(
            f"tools must be a list of tools, not {type(tools).__name__}"
        )
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ChatTemplateError(
                f"tools[{index}] must be an object, not {type(tool).__name__}"
            )
    return list(tools)


def _explain(error: Exception) -> str:
    import jinja2

    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"the chat template is broken: line {error.lineno}: {error.message}"
    words = str(error)
    kind = type(error).__name__
    return (
        f"the chat template failed: {kind}: {words}"
        if words
        else (f"the chat template failed: {kind}")
    )


class _Budget:
    """Counts the loop steps and calls of one rendering."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise OverflowError(f"more than {MAX_STEPS} loop steps and calls")


@cache
def _environment() -> "jinja2.Environment":
    """Built once and on first use: importing jinja2 takes longer than we do."""
    from jinja2 import nodes, pass_context
    from jinja2.compiler import CodeGenerator, Frame
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Accepts {% generation %}, which marks the assistant's text for training."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class CountingGenerator(CodeGenerator):
        """Passes what each `for` runs over through the filter `_counted`."""

        def visit_Template(
            self, node: nodes.Template, frame: Frame | None = None
        ) -> None:
            for loop in node.find_all(nodes.For):
                loop.iter = nodes.Filter(
                    loop.iter, "_counted", [], [], None, None, lineno=loop.lineno
                )
            super().visit_Template(node, frame)

    class Environment(ImmutableSandboxedEnvironment):
        """The sandbox bounds range(); we bound loops, calls and products too."""

        code_generator_class = CountingGenerator
        intercepted_binops = frozenset({"*", "**"})

        def call(
            __self,  # named so by jinja2: templates may pass a `self`
            __context: Context,
            __obj: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            __context.parent[_BUDGET].spend()
            return super().call(__context, __obj, *args, **kwargs)

        def call_binop(
            self, context: Context, operator: str, left: Any, right: Any
        ) -> Any:
            _check_product(operator, left, right)
            return super().call_binop(context, operator, left, right)

    @pass_context
    def counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
        budget = context.parent[_BUDGET]
        for item in items:
            budget.spend()
            yield item

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["_counted"] = counted
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]
    return environment


def _check_product(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        if abs(left) > MAX_REPEAT or abs(right) > MAX_EXPONENT:
            raise OverflowError(f"{left} ** {right} is too large")
        return
    for items, times in ((left, right), (right, left)):
        if isinstance(items, str | list | tuple) and len(items) * times > MAX_REPEAT:
            raise OverflowError(f"{len(items)} items times {times} is too large")
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if bits > MAX_PRODUCT_BITS:
            raise OverflowError(f"a product of {bits} bits is too large")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter would escape <, > and & for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise ChatTemplateError(f"the chat template refused the messages: {message}")


def _strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)
