"""What a user asks an output to look like: a JSON schema, a regex, a list, a grammar.

Nothing is compiled here, and the library that does it is not imported: see
compiler.py. What can be refused without it is refused when a Grammar is made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import GrammarError, whole_number
from .schema import check_schema

Kind = Literal["json_schema", "regex", "choice", "lark", "gbnf"]

# Grammars come from clients. These are far above what people write, and small enough
# that compiling ends in a second or so.
MAX_BYTES = 256 * 1024
MAX_CHOICES = 4096
MAX_RULES = 512
MAX_REPEATS = 100_000
# Spaces and line breaks allowed at one place of a JSON text. A small model that may
# write any number of them sometimes writes nothing else.
MAX_WHITESPACE = 32


@dataclass(frozen=True)
class Grammar:
    """A description of the allowed outputs; hashable, and cheap to pass around.

    Made by the class methods below, which check it: they raise GrammarError for what
    is too large, malformed, or uses a feature that is not supported.
    """

    kind: Kind
    source: str  # JSON for "json_schema" and "choice", else as the user wrote it
    max_whitespace: int | None = None  # for "json_schema"

    @classmethod
    def json_schema(
        cls,
        schema: dict[str, Any] | str | bool,
        *,
        max_whitespace: int | None = MAX_WHITESPACE,
    ) -> Grammar:
        """JSON texts that validate against a schema (JSON Schema 2020-12).

        schema: the schema, or its JSON text. max_whitespace: how many spaces, tabs and
        line breaks may stand at each place where JSON allows them (0: compact; None:
        any number). Properties come in the schema's order. Keywords that are not
        supported, and names that are no keywords, raise GrammarError: docs/decoding.md
        lists the supported ones.
        """
        if isinstance(schema, str):
            _check_size("the JSON schema", schema)
            try:
                schema = json.loads(schema, parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"the JSON schema is not JSON: {error}") from error
        check_schema(schema)
        if max_whitespace is not None:
            max_whitespace = whole_number("max_whitespace", max_whitespace, least=0)
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise GrammarError(f"the JSON schema is not JSON: {error}") from error
        _check_size("the JSON schema", text)
        return cls("json_schema", text, max_whitespace)

    @classmethod
    def json_object(cls, *, max_whitespace: int | None = MAX_WHITESPACE) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, max_whitespace=max_whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Texts that the pattern matches as a whole.

        The syntax is that of Rust's `regex` crate, which is much like Python's; there
        are no look-arounds, word borders or back-references.
        """
        _check_size("the regex", pattern)
        _check_repeats("the regex", pattern)
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """Exactly one of the strings given."""
        if isinstance(choices, (str, bytes)) or not isinstance(choices, Sequence):
            raise GrammarError(
                f"choices is {choices!r:.60}; a list of strings is needed"
            )
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise GrammarError(
                f"there are {len(choices)} choices; 1 to {MAX_CHOICES} are possible"
            )
        for choice in choices:
            _check_size("a choice", choice)
        text = json.dumps(list(choices), ensure_ascii=False)
        _check_size("the list of choices", text)
        return cls("choice", text)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Texts that a Lark grammar derives from its rule `start`.

        The dialect is llguidance's. Refused by name: special tokens (`<...>`), its
        `%llguidance` options, the rule attributes stop, max_tokens and temperature, and
        the operator `~` for "all but", which matches bytes that are no text.
        """
        _check_size("the Lark grammar", text)
        structure = _LARK_LITERALS.sub(" ", text)
        if found := _LARK_REFUSED.search(structure):
            raise GrammarError(
                f"the Lark grammar uses {found[0].strip()!r}, which is not supported"
            )
        for place in _LARK_JSON.finditer(text):
            try:
                check_schema(json.JSONDecoder().raw_decode(text, place.end())[0])
            except (ValueError, RecursionError) as error:
                raise GrammarError(f"%json in the Lark grammar: {error}") from error
        _check_rules("the Lark grammar", structure.count(":"))
        _check_repeats("the Lark grammar", text)
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> Grammar:
        """Texts that a grammar in llama.cpp's GBNF derives from its rule `root`.

        `.` does not match a line break here.
        """
        _check_size("the GBNF grammar", text)
        _check_rules("the GBNF grammar", text.count("::="))
        _check_repeats("the GBNF grammar", text)
        return cls("gbnf", text)


# Strings, comments, regexes: what is left of a Lark text without them is structure.
_LARK_LITERALS = re.compile(
    r""" "(?:\\.|[^"\\\n])*" | //[^\n]* | \#[^\n]* | /(?:\\.|[^/\\\n])+/ """, re.VERBOSE
)
_LARK_REFUSED = re.compile(
    r"<[^>\s]*>? | %llguidance | @\w+ | ~(?!\s*\d) "
    r"| \b(?:stop|max_tokens|temperature)\s*=",
    re.VERBOSE,
)
_LARK_JSON = re.compile(r"%json\s*")
_REPEAT = re.compile(r"\{\s*(\d*)\s*(?:,\s*(\d*)\s*)?\}|~\s*(\d+)(?:\s*\.\.\s*(\d+))?")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _check_size(what: str, text: object) -> None:
    if not isinstance(text, str):
        raise GrammarError(f"{what} must be a string, not {type(text).__name__}")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(f"{what} is not Unicode text: {error}") from error
    if size > MAX_BYTES:
        raise GrammarError(f"{what} has {size} bytes; at most {MAX_BYTES} are possible")


def _check_rules(what: str, rules: int) -> None:
    if rules > MAX_RULES:
        raise GrammarError(
            f"{what} has {rules} rules; at most {MAX_RULES} are possible"
        )


def _check_repeats(what: str, text: str) -> None:
    for match in _REPEAT.finditer(text):
        for count in match.groups():
            if count and (len(count) > 9 or int(count) > MAX_REPEATS):
                raise GrammarError(
                    f"{what} repeats something {count:.20} times; at most "
                    f"{MAX_REPEATS} are possible"
                )
