"""Outputs drawn at random, but for the grammar, are what was asked for."""

import ast
import json
import re

import jsonschema
import pytest
import tokenizers
from grammar_cases import (
    SCHEMAS,
    TOKENIZERS,
    WIDTH,
    compiler,
    draw,
    ids,
    outputs,
    tokenizer,
)

from tiny_llm.errors import GrammarError
from tiny_llm.grammar import Grammar
from tiny_llm.grammar.compiler import GrammarCompiler
from tiny_llm.grammar.schema import _ENFORCED, _LIST, _MAP, _ONE, FORMATS
from tiny_llm.grammar.vocabulary import GrammarVocabulary
from tiny_llm.tokenizer import Tokenizer

each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def keywords(schema):
    if isinstance(schema, dict):
        for key, value in schema.items():
            yield key
            if key in _MAP:
                value = list(value.values())
            if key in _MAP | _LIST | _ONE:
                yield from keywords(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from keywords(item)


def test_the_schemas_use_every_keyword_and_format_that_is_claimed():
    assert len(SCHEMAS) == len({case["name"] for case in SCHEMAS}) == 50
    used = {key for case in SCHEMAS for key in keywords(case["schema"])}
    assert used >= _ENFORCED | _LIST | _MAP | _ONE
    formats = set(re.findall(r'"format": "([a-z0-9-]+)"', json.dumps(SCHEMAS)))
    assert formats == FORMATS


@each_tokenizer
@pytest.mark.parametrize("case", SCHEMAS, ids=lambda case: case["name"])
def test_every_output_validates_against_its_schema(name, case):
    schema = case["schema"]
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    texts = outputs(name, Grammar.json_schema(schema), seeds=range(4))
    assert texts, "all were cut off"
    for text in texts:
        validator.validate(json.loads(text))


def test_validation_can_fail():
    for case in SCHEMAS:
        wrong = [None, {}, [], "", -1, 0.25, True, {"a": "x"}, [[1]]]
        validator = jsonschema.Draft202012Validator(case["schema"])
        fails = [value for value in wrong if not validator.is_valid(value)]
        assert fails or case["name"] in ("anything", "empty schema")


def test_an_output_that_is_cut_off_says_so():
    own = compiler()
    for case in SCHEMAS:
        matcher = own.compile(Grammar.json_schema(case["schema"]))
        tokens = draw(matcher, own.vocabulary, seed=5, limit=6)
        text = tokenizer("qwen2").decode(tokens)
        try:
            json.loads(text)
            whole = True
        except ValueError:
            whole = False
        # a number or a pattern may go on where JSON could end, never the reverse
        assert whole or not matcher.accepting


REGEXES = [
    r"[0-9]{3}-[0-9]{4}",
    r"(foo|bar)+baz?",
    r"\d{1,3}(\.\d+)?",
    r"[a-zà-ÿ]{2,9}",
    r'"[^"\n]{0,8}"',
    r"(?i)yes|no",
    r"^x*y$",
    r"a/b\\[\n\t]{1,2}",
    r"[一-龥ぁ-ん]{1,4}",
    r"(😀|👋🏽|e\u0301)*",
]


@each_tokenizer
@pytest.mark.parametrize("pattern", REGEXES)
def test_every_output_matches_the_regex_as_a_whole(name, pattern):
    texts = outputs(name, Grammar.regex(pattern), seeds=range(8))
    assert texts
    for text in texts:
        assert re.fullmatch(pattern, text), text


CHOICES = ["yes", "no", "yes, but", 'a "quote"', "back\\slash", "a\nb\t\x01", "日本 😀"]


@each_tokenizer
def test_every_output_is_one_of_the_choices(name):
    texts = outputs(name, Grammar.choice(CHOICES), seeds=range(60))
    assert len(texts) == 60
    assert set(texts) == set(CHOICES)


def test_four_thousand_choices_are_possible():
    choices = [f"{n} bottles" for n in range(4096)]
    texts = outputs("qwen2", Grammar.choice(choices), seeds=range(4))
    assert len(texts) == 4
    assert set(texts) <= set(choices)


LARK = r"""
// sums and products
start: sum
sum: product (("+" | "-") product)*
product: factor ("*" factor)*
factor: NUMBER | "(" sum ")"
NUMBER: /[1-9][0-9]{0,2}/
%ignore / {1,2}/
"""


@each_tokenizer
def test_every_output_of_a_lark_grammar_parses(name):
    texts = outputs(name, Grammar.lark(LARK), seeds=range(8), limit=120)
    assert texts
    for text in texts:
        assert re.fullmatch(r"[-+*() 0-9]+", text)
        ast.parse(text.strip(), mode="eval")


def test_a_json_schema_inside_a_lark_grammar_is_kept():
    lark = 'start: "<call>" %json {"type": "object", "required": ["q"]} "</call>"'
    texts = outputs("qwen2", Grammar.lark(lark), seeds=range(8))
    assert texts
    for text in texts:
        inner = re.fullmatch(r"<call>(.*)</call>", text, re.DOTALL)
        assert "q" in json.loads(inner[1])


GBNF = r"""
# settings, one per line
root    ::= setting ("\n" setting)*
setting ::= key " = " (number | "\"" text "\"")
key     ::= [a-z] [a-z_]*
number  ::= "-"? [0-9]{1,3}
text    ::= [^"\\\n]{0,6}
"""


@each_tokenizer
def test_every_output_of_a_gbnf_grammar_is_derived_from_its_root(name):
    texts = outputs(name, Grammar.gbnf(GBNF), seeds=range(8), limit=120)
    assert texts
    for text in texts:
        for line in text.split("\n"):
            assert re.fullmatch(
                r'[a-z][a-z_]* = (-?[0-9]{1,3}|"[^"\\\n]{0,6}")', line
            ), text


@each_tokenizer
def test_only_tokens_that_are_text_are_allowed_in_an_output(name):
    """Not special tokens, nor ids beyond the tokenizer; EOS where it may end."""
    own, tokens = compiler(name), tokenizer(name)
    matcher = own.compile(Grammar.regex("(?s:.*)"))
    allowed = set(ids(matcher.mask()))
    special = set(tokens.backend.get_added_tokens_decoder())
    assert own.vocabulary.eos_ids <= special
    assert allowed & special == own.vocabulary.eos_ids
    assert max(allowed) < tokens.vocab_size < WIDTH
    assert len(allowed) > 200


def test_a_model_narrower_than_its_tokenizer_gets_no_ids_beyond_its_logits():
    vocabulary = GrammarVocabulary(tokenizer("qwen2"), 300)
    assert len(vocabulary.tokens) == 300
    assert max(ids(vocabulary.text)) < 300
    assert vocabulary.text.shape == (10,)


@pytest.mark.parametrize(
    ("name", "found"), [("llama_tied", False), ("gemma", True), ("qwen2", True)]
)
def test_a_first_space_is_allowed_where_it_is_not_dropped(name, found):
    own = compiler(name)
    if not found:
        with pytest.raises(GrammarError, match="no token of this tokenizer can follow"):
            own.compile(Grammar.regex(" a"))
    else:
        assert outputs(name, Grammar.regex(" a"), seeds=[1]) == [" a"]
    # later spaces are all the same
    assert outputs(name, Grammar.regex("a b"), seeds=[1]) == ["a b"]


@each_tokenizer
def test_the_bytes_of_tokens_are_those_of_their_text(name):
    own, tokens = compiler(name), tokenizer(name)
    text = 'naïve {"a": 1}\n日本語 👋🏽 ' * 2
    found = tokens.encode(text, add_special_tokens=False)
    spelt = b"".join(own.vocabulary.tokens[token] for token in found)
    assert spelt.decode().lstrip(" ") == text
    assert spelt.decode().strip() == tokens.decode(found).strip()


@pytest.mark.parametrize("scheme", ["always", "never"])
def test_spaces_that_a_decoder_drops_within_the_first_token_are_not_text(scheme):
    words = ["</s>", "▁", "a", "▁a", "a▁a"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: n for n, word in enumerate(words)}, [])
    )
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    own = GrammarCompiler(Tokenizer(backend, eos_token_ids=[0]), len(words))
    seen = set()
    for seed in range(30):
        matcher = own.compile(Grammar.regex("[a ]{1,4}"))
        found = draw(matcher, own.vocabulary, seed)
        text = b"".join(own.vocabulary.tokens[token] for token in found).decode()
        assert text == backend.decode(found)
        seen.add(text)
    assert ("a a" in seen, " a" in seen) == (True, scheme == "never")


def test_a_tokenizer_that_joins_words_by_spaces_is_refused():
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "</s>": 1, "?": 2}, unk_token="?")
    )
    words = Tokenizer(backend, eos_token_ids=[1])
    with pytest.raises(GrammarError, match="it joins them by spaces"):
        GrammarVocabulary(words, 2)
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(GrammarError, match=r"the step .*WordPiece"):
        GrammarVocabulary(words, 2)


def test_drawing_reaches_many_tokens():
    """The draws that the tests above rest on are not always the same few."""
    own = compiler()
    grammar = Grammar.json_schema({"type": "string", "minLength": 60})
    seen = set()
    for seed in range(10):
        seen.update(draw(own.compile(grammar), own.vocabulary, seed, 100))
    assert len(seen) > 150
