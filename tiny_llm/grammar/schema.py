"""JSON schemas before they are compiled: refuse what would not be enforced.

By the specification a keyword that nobody knows is a comment. Here it is an error: a
schema with a misspelt keyword would be accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import GrammarError

MAX_SCHEMAS = 4096
MAX_DEPTH = 64
MAX_PROPERTIES = 400  # of one object; beyond, the compiled grammar fails when it runs

# where other schemas lie inside of a schema
_ONE = frozenset({"items", "additionalProperties"})
_LIST = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_MAP = frozenset({"properties", "patternProperties", "$defs", "definitions"})

_ENFORCED = frozenset(
    {
        *("type", "enum", "const", "$ref"),
        *("minItems", "maxItems"),
        *("required", "minProperties", "maxProperties"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)
_NOTES = frozenset(
    {
        *("$schema", "$id", "$anchor", "$comment", "title", "description"),
        *("default", "examples", "deprecated", "readOnly", "writeOnly"),
    }
)
_KNOWN = _ONE | _LIST | _MAP | _ENFORCED | _NOTES

FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    }
)


def check_schema(schema: object) -> None:
    """Raise GrammarError for a schema that is too large or not wholly enforced.

    What is wrong inside of a supported keyword is left to the compiler to find.
    """
    waiting = [(schema, "#", 1)]
    count = 0
    while waiting:
        part, path, depth = waiting.pop()
        count += 1
        if count > MAX_SCHEMAS:
            raise GrammarError(
                f"the JSON schema has more than {MAX_SCHEMAS} schemas inside"
            )
        if depth > MAX_DEPTH:
            raise GrammarError(
                f"the JSON schema is nested more than {MAX_DEPTH} levels deep"
            )
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict):
            raise GrammarError(
                f"the JSON schema at {path:.100} must be an object, true or false, not "
                f"{part!r:.60}"
            )
        _check_keywords(part, path)
        waiting += ((inner, place, depth + 1) for inner, place in _inner(part, path))


def _check_keywords(schema: dict[str, Any], path: str) -> None:
    for keyword in schema:
        if keyword not in _KNOWN:
            raise GrammarError(
                f"the JSON schema's keyword {keyword!r:.60} (at {path:.100}) is not "
                f"supported"
            )
    form = schema.get("format")
    if form is not None and (not isinstance(form, str) or form not in FORMATS):
        raise GrammarError(
            f"the JSON schema's format {form!r:.60} (at {path:.100}) is not supported; "
            f"supported are {', '.join(sorted(FORMATS))}"
        )
    if isinstance(schema.get("items"), list):
        raise GrammarError(
            f"the JSON schema's items at {path:.100} is a list, as in older drafts; "
            f"write prefixItems"
        )
    # A name that is not listed may come twice, and JSON readers keep the last one.
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    distinct = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, (int, float)) and least > max(1, distinct):
        raise GrammarError(
            f"the JSON schema's minProperties {least} (at {path:.100}) is not "
            f"supported beyond 1 and the number of required properties"
        )
    names = schema.get("properties")
    names = names if isinstance(names, dict) else {}
    if len(names) > MAX_PROPERTIES:
        raise GrammarError(
            f"the JSON schema has {len(names)} properties at {path:.100}; at most "
            f"{MAX_PROPERTIES} are possible"
        )
    for name in names:
        # it can be written in two ways, and the grammar knows one
        if not isinstance(name, str) or any(ord(character) < 32 for character in name):
            raise GrammarError(
                f"the JSON schema's property {name!r:.60} (at {path:.100}) has a "
                f"control character in its name or is no string; that is not supported"
            )


def _inner(schema: dict[str, Any], path: str) -> Iterator[tuple[object, str]]:
    """The schemas directly inside, and where."""
    for keyword, value in schema.items():
        place = f"{path}/{keyword}"
        if keyword in _ONE:
            yield value, place
        elif keyword in _LIST and isinstance(value, list):
            yield from ((item, f"{place}/{n}") for n, item in enumerate(value))
        elif keyword in _MAP and isinstance(value, dict):
            yield from ((item, f"{place}/{name}") for name, item in value.items())
