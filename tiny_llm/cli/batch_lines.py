"""The lines that `tiny-llm batch` reads: what each asks for."""

from __future__ import annotations

import codecs
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, NamedTuple

from ..engine import SamplingParams
from ..errors import ParameterError, PromptError
from ..text import Messages
from .options import as_messages, check_text

# Not what JSON cannot hold, nor several answers: a line has one.
_NOT = ("sampler", "logits_processors", "grammar", "n", "best_of")
SAMPLING = tuple(
    field.name for field in dataclasses.fields(SamplingParams) if field.name not in _NOT
)
GRAMMARS = ("json_schema", "regex", "choice")  # as Grammar makes them
_KEYS = ("prompt", "messages", "id", *SAMPLING, *GRAMMARS)


class Line(NamedTuple):
    """A line of the input: its number from 1 on, and its bytes without the ending."""

    number: int
    content: bytes


class Settings(NamedTuple):
    """What holds for every line that says nothing else.

    chat: whether a prompt is a chat message. system: comes before messages that do not
    begin with one of their own.
    """

    chat: bool
    system: str | None
    params: SamplingParams


def numbered(source: Iterable[bytes]) -> Iterator[Line]:
    """The lines that are not blank."""
    for number, raw in enumerate(source, 1):
        content = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
        content = content.rstrip(b"\r\n")
        if content.strip():
            yield Line(number, content)


def key_of(settings: str, line: Line) -> str:
    """What an answer depends on, in two parts: the settings, and the line."""
    parts = ((settings.encode(), 4), (line.content, 8))
    return "-".join(blake2b(b, digest_size=size).hexdigest() for b, size in parts)


def fields_of(line: Line) -> dict[str, Any]:
    """The JSON object of a line. Raises ParameterError if there is none."""
    try:
        value = json.loads(line.content.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise ParameterError(f"not UTF-8: {error.reason}") from error
    except RecursionError as error:
        raise ParameterError("nested too deeply") from error
    except ValueError as error:  # also numbers of more than 4300 digits
        raise ParameterError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ParameterError('not a JSON object such as {"prompt": "Hello"}')
    return value


def id_of(fields: Mapping[str, Any]) -> dict[str, str | int | float]:
    """{"id": its id}, or {} if it has none. Raises ParameterError."""
    if "id" not in fields:
        return {}
    value = fields["id"]
    number = isinstance(value, int) and not isinstance(value, bool)
    number = number or (isinstance(value, float) and math.isfinite(value))
    if not number and not isinstance(value, str):
        raise ParameterError(f"id must be a string or a number, got {value!r:.60}")
    return {"id": value}


def prompt_of(fields: Mapping[str, Any], settings: Settings) -> str | Messages:
    """The text to be continued, or the messages. Raises ParameterError."""
    for name in fields:
        if name not in _KEYS:
            raise ParameterError(
                f"unknown key {name!r:.60}; there are {', '.join(_KEYS)}"
            )
    if ("prompt" in fields) == ("messages" in fields):
        raise ParameterError("either prompt or messages is needed")
    if "prompt" in fields:
        prompt = fields["prompt"]
        if not isinstance(prompt, str):
            raise PromptError(f"prompt must be a string, got {prompt!r:.60}")
        if not prompt:
            raise PromptError("the prompt is empty")
        check_text(prompt, "the prompt")
        return as_messages(prompt, settings.system) if settings.chat else prompt
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages must be a list of at least one message")
    if not all(isinstance(message, dict) for message in messages):
        raise PromptError('a message must be an object with "role" and "content"')
    if settings.system is not None and messages[0].get("role") != "system":
        return [{"role": "system", "content": settings.system}, *messages]
    return messages


def params_of(fields: Mapping[str, Any], settings: Settings) -> SamplingParams:
    """The settings, as the line changes them. Raises ParameterError."""
    own = {name: fields[name] for name in SAMPLING if name in fields}
    if isinstance(own.get("logit_bias"), dict):  # the keys of JSON are strings
        own["logit_bias"] = {_token(t): b for t, b in own["logit_bias"].items()}
    grammars = [name for name in GRAMMARS if name in fields]
    if len(grammars) > 1:
        raise ParameterError(f"{' and '.join(grammars)}: a line can have one of these")
    for name in grammars:
        from ..grammar import Grammar

        own["grammar"] = getattr(Grammar, name)(fields[name])
    return replace(settings.params, **own)


def _token(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ParameterError(f"logit_bias has {text!r:.60}, which is no token id")
    return int(text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")
