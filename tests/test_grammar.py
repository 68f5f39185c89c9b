"""What is asked for, and what is refused before any work."""

import json
import re
import sys
import threading

import pytest
from grammar_cases import compiler, tokenizer

from tiny_llm.errors import (
    GrammarError,
    MissingPackageError,
    ParameterError,
    TinyLLMError,
)
from tiny_llm.grammar import Grammar
from tiny_llm.grammar.compiler import GrammarCompiler
from tiny_llm.grammar.matcher import Matcher
from tiny_llm.tokenizer import Tokenizer


def nested(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Grammar.json_schema({"minimun": 3}), "'minimun' .at #. is not supp"),
        (
            lambda: Grammar.json_schema(
                {"properties": {"tags": {"type": "array", "uniqueItems": True}}}
            ),
            "'uniqueItems' .at #/properties/tags. is not supported",
        ),
        (lambda: Grammar.json_schema({"allOf": [{"not": {}}]}), "'not' .at #/allOf/0."),
        (
            lambda: Grammar.json_schema({"x-guidance": {"lenient": True}}),
            "'x-guidance' .* is not supported",
        ),
        (lambda: Grammar.json_schema({"format": "int32"}), "format 'int32' .* uuid"),
        (lambda: Grammar.json_schema({"items": [{}]}), "write prefixItems"),
        (lambda: Grammar.json_schema({"minProperties": 2}), "minProperties 2 .* 1 and"),
        (lambda: Grammar.json_schema({"properties": {"\n": {}}}), "control character"),
        (lambda: Grammar.json_schema({"items": 3}), "at #/items must be .* not 3"),
        (lambda: Grammar.json_schema([]), r"must be an object, .* not \[\]"),
        (lambda: Grammar.json_schema('{"type"'), "is not JSON: Expecting"),
        (lambda: Grammar.json_schema('{"const": NaN}'), "NaN is no JSON value"),
        (lambda: Grammar.json_schema({"const": float("inf")}), "is not JSON"),
        (lambda: Grammar.json_schema({"const": {1, 2}}), "set is not JSON"),
        (lambda: Grammar.json_schema({"const": "\ud800"}), "is not Unicode text"),
        (lambda: Grammar.json_schema(nested(64)), "more than 64 levels"),
        (lambda: Grammar.json_schema(nested(5000)), "more than 64 levels"),
        (
            lambda: Grammar.json_schema({"const": nested(5000)}),
            "is not JSON: .*recursion",
        ),
        (lambda: Grammar.json_schema({"anyOf": [{}] * 5000}), "more than 4096 schemas"),
        (
            lambda: Grammar.json_schema(
                {"properties": {str(n): {} for n in range(401)}}
            ),
            "401 properties at #; at most 400",
        ),
        (lambda: Grammar.json_schema({"title": "x" * 300_000}), "has 3000.. bytes; at"),
        (lambda: Grammar.json_schema({}, max_whitespace=-1), "max_whitespace must be"),
        (lambda: Grammar.regex("a" * 300_000), "the regex has 300000 bytes"),
        (lambda: Grammar.regex("a{2,100001}"), "repeats something 100001 times"),
        (lambda: Grammar.regex(b"a"), "must be a string, not bytes"),
        (lambda: Grammar.choice([]), "there are 0 choices"),
        (lambda: Grammar.choice("ab"), "a list of strings is needed"),
        (lambda: Grammar.choice(["a", 3]), "a choice must be a string, not int"),
        (lambda: Grammar.choice(["a"] * 4097), "4097 choices; 1 to 4096"),
        (lambda: Grammar.lark("start: <think> /a/"), "uses '<think>'"),
        (lambda: Grammar.lark("start: <[0-5]>"), "uses '<.0-5.>'"),
        (lambda: Grammar.lark('start: a\na[max_tokens=3]: "a"'), "'max_tokens='"),
        (lambda: Grammar.lark('start: a\na[stop="b"]: /a+/'), "'stop='"),
        (lambda: Grammar.lark('start: A\nA: ~"a"'), "uses '~'"),
        (lambda: Grammar.lark("%llguidance {}\nstart: /a/"), "'%llguidance'"),
        (lambda: Grammar.lark('start: %json {"foo": 1}'), "%json .* 'foo' .at #."),
        (lambda: Grammar.lark("a: /a/\n" * 513), "has 513 rules; at most 512"),
        (lambda: Grammar.gbnf('a ::= "a"\n' * 513), "has 513 rules; at most 512"),
        # what looks like that in strings, comments and regexes is text
        (
            lambda: Grammar.lark('start: "<a>~ stop=" /<b>~/ // <c>\n# %llguidance'),
            None,
        ),
        (lambda: Grammar.lark('start: "a"~2..3'), None),
    ],
)
def test_a_grammar_is_checked_when_it_is_made(make, found):
    if found is None:
        make()
        return
    with pytest.raises(ParameterError, match=found):
        make()


@pytest.mark.parametrize(
    ("grammar", "found"),
    [
        (Grammar.json_schema(False), "nothing validates"),
        (Grammar.json_schema({"type": "foo"}), "JSON schema is refused: .*type: foo"),
        (
            Grammar.json_schema({"oneOf": [{"minimum": 3}, {"maximum": 5}]}),
            "oneOf constraints are not supported",
        ),
        (
            Grammar.json_schema({"$ref": "https://example.com/schema"}),
            "refused: .*example.com",
        ),
        (
            Grammar.json_schema({"type": "string", "pattern": "(?=a)b"}),
            "look-around, .* is not supported$",
        ),
        (
            Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
            r"minimum \(5\) is greater than maximum \(3\)$",
        ),
        (
            Grammar.json_schema({"$ref": "#"}),
            "after 0 tokens: no token .* not even EOS",
        ),
        (Grammar.regex(r"(a)\1"), "regex is refused: .*backreferences are not supp"),
        (Grammar.regex("("), "unclosed group"),
        (Grammar.regex("(" * 5000), "the regex is refused"),
        (Grammar.lark("start: b"), 'Lark grammar is refused: unknown name: "b"'),
        (Grammar.lark("start: " + "(" * 5000), "Lark grammar is refused"),
        (Grammar.lark("start: " + "a? " * 20000 + "\na: /b/"), "too big"),
        (Grammar.gbnf('rot = "x"'), "GBNF grammar is refused: Expected ::="),
        (Grammar.gbnf("root ::= x"), "GBNF grammar is refused: Rule 'x' not found"),
        (Grammar.gbnf("root ::= " + "(" * 50000), "GBNF grammar is refused"),
        (Grammar("foo", "x"), "'foo' is no kind of grammar"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.source[:30],
)
def test_what_the_library_refuses_is_refused_with_its_reason(grammar, found):
    with pytest.raises(GrammarError, match=found) as raised:
        compiler().compile(grammar)
    assert "backtrace" not in str(raised.value)
    assert len(str(raised.value)) < 700


def test_only_a_grammar_is_compiled():
    with pytest.raises(ParameterError, match="'a' is no Grammar"):
        compiler().compile("a")


def test_equal_grammars_are_compiled_once(monkeypatch):
    own = GrammarCompiler(tokenizer("qwen2"), 384, cache_size=2)
    compiled = []
    monkeypatch.setattr(
        own,
        "_compile",
        lambda grammar: (
            compiled.append(grammar.source) or GrammarCompiler._compile(own, grammar)
        ),
    )
    for source in ("a", "b", "a", "c", "a", "b"):
        first, second = (own.compile(Grammar.regex(source)) for _ in range(2))
        assert isinstance(first, Matcher)
        assert first is not second
    assert compiled == ["a", "b", "c", "b"]  # b was used least when c came
    assert len({Grammar.json_schema({"type": t}) for t in ("null", "null")}) == 1


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    grammar = Grammar.regex("a+")  # needs none
    with pytest.raises(MissingPackageError, match=r"pip install 'tiny_llm\[grammar\]'"):
        GrammarCompiler(tokenizer("qwen2"), 384).compile(grammar)
    assert issubclass(MissingPackageError, TinyLLMError)


def test_a_tokenizer_that_cannot_end_an_output_is_refused():
    without = Tokenizer(tokenizer("qwen2").backend)
    assert not without.eos_token_ids
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        GrammarCompiler(without, 384)


def test_whitespace_is_bounded_as_asked():
    schema = {"type": "array", "items": {"type": "null"}}
    texts = ["[null,null]", "[null, null]", "[null,\n   null]", "[null,     null]"]
    for most, expected in ((0, 1), (1, 2), (4, 3), (None, 4), (32, 4)):
        grammar = Grammar.json_schema(schema, max_whitespace=most)
        fitting = 0
        for text in texts:
            tokens = tokenizer("qwen2").encode(text, add_special_tokens=False)
            fitting += compiler().compile(grammar).allowed(tokens) == len(tokens)
        assert fitting == expected


def test_an_object_is_json_object():
    for text, fits in (('{"a": [1]}', True), ("[1]", False), ("3", False)):
        tokens = tokenizer("qwen2").encode(text, add_special_tokens=False)
        matcher = compiler().compile(Grammar.json_object())
        assert (matcher.allowed(tokens) == len(tokens)) is fits


def chain(count):
    definitions = {
        f"a{n}": {"type": "array", "items": {"$ref": f"#/$defs/a{n + 1}"}}
        for n in range(count)
    }
    definitions[f"a{count}"] = {"type": "integer"}
    return {"$ref": "#/$defs/a0", "$defs": definitions}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_schema(chain(2000)),
        Grammar.lark(
            "start: a0\n"
            + "".join(f'a{n}: a{n + 1} "a"\n' for n in range(500))
            + 'a500: "b"'
        ),
    ],
    ids=["schema", "rules"],
)
def test_the_deepest_grammars_compile_on_a_thread_with_little_stack(grammar):
    """Without a stack of its own, the library would end the process here."""
    found = []

    def run():
        matcher = compiler().compile(grammar)
        for _ in range(40):
            matcher.advance(matcher_token(matcher))
        found.append(len(matcher.copy()))

    before = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert found == [40]


def matcher_token(matcher):
    mask = matcher.mask()
    word = next(w for w, value in enumerate(mask) if value)
    value = int(mask[word])
    return 32 * word + (value & -value).bit_length() - 1


def test_the_order_of_properties_is_the_schemas():
    schema = {"properties": {"b": {}, "a": {}}, "required": ["a", "b"]}
    text = Grammar.json_schema(schema).source
    assert re.search('"b".*"a"', json.dumps(json.loads(text)["properties"]))
    assert Grammar.json_schema(json.dumps(schema)) == Grammar.json_schema(schema)
