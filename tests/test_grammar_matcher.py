"""Matchers: where an output may end, what may follow, back and forth."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from grammar_cases import SCHEMAS, TOKENIZERS, WIDTH, compiler, draw, ids, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_llm.errors import GrammarError, ParameterError
from tiny_llm.grammar import Grammar
from tiny_llm.grammar.compiler import GrammarCompiler
from tiny_llm.tokenizer import Tokenizer

# Two EOS ids, as of models with one for a turn and one for a text
TWO_ENDS = GrammarCompiler(
    Tokenizer(tokenizer("qwen2").backend, eos_token_ids=[0, 2, 99999]), WIDTH
)
GRAMMARS = [
    Grammar.json_schema(SCHEMAS[10]["schema"]),
    Grammar.json_schema(True),
    Grammar.regex("(ab|a)*c?"),
    Grammar.choice(["hello", "hello world", "help"]),
]


def encode(text):
    return tokenizer("qwen2").encode(text, add_special_tokens=False)


def at(grammar, text):
    matcher = TWO_ENDS.compile(grammar)
    for token in encode(text):
        matcher.advance(token)
    return matcher


def state(matcher):
    return (
        ids(matcher.mask()),
        matcher.accepting,
        matcher.finished,
        len(matcher),
    )


def test_all_eos_ids_are_allowed_where_the_grammar_may_end_and_only_there():
    matcher = at(Grammar.regex("ab+"), "a")
    assert not matcher.accepting
    assert not {0, 2} & set(ids(matcher.mask()))
    with pytest.raises(GrammarError, match="does not allow token 2 as token 1"):
        matcher.advance(2)
    matcher.advance(encode("b")[0])
    assert matcher.accepting
    assert not matcher.finished
    assert {0, 2} < set(ids(matcher.mask()))
    for end in (0, 2):
        ended = matcher.copy()
        ended.advance(end)
        for one in (ended, ended.copy()):
            assert one.finished
            assert one.accepting
            assert len(one) == 3


def test_an_eos_id_is_never_text_even_if_it_is_spelt_as_such():
    end = encode("b")[0]
    own = GrammarCompiler(
        Tokenizer(tokenizer("qwen2").backend, eos_token_ids=[end]), WIDTH
    )
    matcher = own.compile(Grammar.regex("ab?"))
    matcher.advance(encode("a")[0])
    assert ids(matcher.mask()) == [end]
    matcher.advance(end)
    assert matcher.finished
    with pytest.raises(GrammarError, match="no token of this tokenizer can follow"):
        own.compile(Grammar.regex("b"))


def test_nothing_but_eos_follows_where_the_grammar_has_ended():
    matcher = at(Grammar.choice(["hello"]), "hello")
    assert matcher.finished
    assert ids(matcher.mask()) == [0, 2]
    matcher.advance(2)
    assert ids(matcher.mask()) == [0, 2]
    assert matcher.finished
    with pytest.raises(GrammarError, match="does not allow"):
        matcher.advance(encode("a")[0])
    matcher.rollback(1)
    assert matcher.finished
    matcher.rollback(1)
    assert not matcher.finished


@pytest.mark.parametrize("token", [-1, WIDTH, 390, 1, 10**9])
def test_ids_that_are_no_text_are_refused_and_change_nothing(token):
    matcher = at(Grammar.regex("(?s:.*)"), "a")
    before = state(matcher)
    with pytest.raises(GrammarError, match=f"does not allow token {token} as token 1"):
        matcher.advance(token)
    assert matcher.allowed([token]) == 0
    assert state(matcher) == before


def test_the_mask_is_one_bit_per_column_of_the_logits():
    matcher = at(Grammar.regex("a"), "")
    mask = matcher.mask()
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-WIDTH // 32),)
    assert not mask.flags.writeable
    rows = np.zeros((2, mask.size), dtype=np.uint32)
    matcher.fill(rows[1])
    assert rows[1].tolist() == mask.tolist()
    assert not rows[0].any()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_token_may_be_taken_exactly_if_the_mask_has_it(name):
    """Also where two ids are spelt alike, as byte tokens and characters are."""
    own = compiler(name)
    for grammar in GRAMMARS:
        matcher = own.compile(grammar)
        for token in draw(matcher.copy(), own.vocabulary, seed=3, limit=12):
            allowed = set(ids(matcher.mask()))
            assert allowed == {t for t in range(WIDTH) if matcher.allowed([t])}
            matcher.advance(token)


@pytest.mark.parametrize(
    ("tokens", "valid"),
    [
        ([], 0),
        (encode("hello"), len(encode("hello"))),
        ([*encode("hello"), 2], len(encode("hello")) + 1),
        ([*encode("hello"), 0, 2, *encode("a")], len(encode("hello")) + 2),
        ([2], 0),
        ([*encode("hell"), 2], len(encode("hell"))),
        ([*encode("hello"), *encode("x")], len(encode("hello"))),
        ([*encode("hello"), *encode(" world"), 2], None),
        ([390], 0),
    ],
)
def test_allowed_counts_the_valid_tokens_of_a_draft(tokens, valid):
    matcher = at(GRAMMARS[3], "")
    before = state(matcher)
    assert matcher.allowed(tokens) == (len(tokens) if valid is None else valid)
    assert state(matcher) == before


def test_masks_of_a_draft_are_those_met_on_the_way():
    matcher = at(GRAMMARS[3], "")
    draft = [*encode("hello"), 2, *encode("x")]
    masks = matcher.masks(draft)
    valid = len(encode("hello")) + 1
    assert masks.shape == (valid + 1, -(-WIDTH // 32))
    walker = at(GRAMMARS[3], "")
    for row, token in zip(masks, [*draft[:valid], None], strict=True):
        assert row.tolist() == walker.mask().tolist()
        if token is not None:
            walker.advance(token)
    assert state(matcher) == state(at(GRAMMARS[3], ""))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(GRAMMARS),
    st.lists(
        st.one_of(
            st.tuples(st.just("advance"), st.integers(0, 10**6)),
            st.tuples(st.just("rollback"), st.integers(0, 4)),
            st.tuples(st.just("copy"), st.just(0)),
            st.tuples(st.just("mask"), st.just(0)),
        ),
        max_size=25,
    ),
)
def test_any_way_to_a_state_equals_a_fresh_replay(grammar, steps):
    matcher, taken = TWO_ENDS.compile(grammar), []
    left = []  # those that copies were made of, and where they stood
    for step, number in steps:
        if step == "advance":
            allowed = ids(matcher.mask())
            taken.append(allowed[number % len(allowed)])
            matcher.advance(taken[-1])
        elif step == "rollback":
            number = min(number, len(taken))
            matcher.rollback(number)
            taken = taken[: len(taken) - number]
        elif step == "mask":
            matcher.mask()
        else:
            left.append((matcher, list(taken)))
            matcher = matcher.copy()
    for one, tokens in [*left, (matcher, taken)]:
        replay = TWO_ENDS.compile(grammar)
        assert replay.allowed(tokens) == len(tokens)
        for token in tokens:
            replay.advance(token)
        assert state(one) == state(replay)


def test_matchers_of_one_grammar_work_in_threads_at_the_same_time():
    own = compiler()
    grammars = [Grammar.json_schema(case["schema"]) for case in SCHEMAS[:20]]

    def outputs(seed):
        return [draw(own.compile(g), own.vocabulary, seed, 60) for g in grammars]

    alone = [outputs(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(outputs, range(6))) == alone


def test_no_more_can_be_taken_back_than_was_taken():
    matcher = at(Grammar.regex("a+"), "a")
    with pytest.raises(ParameterError, match="cannot take back 2 tokens of 1"):
        matcher.rollback(2)
    with pytest.raises(ParameterError, match="count must be"):
        matcher.rollback(-1)
    assert len(matcher) == 1
    matcher.rollback(1)
    assert state(matcher) == state(at(Grammar.regex("a+"), ""))


def test_a_state_beyond_the_librarys_limits_is_an_error_that_says_so():
    """Many optional rules: compiled, but too many ways to go on."""
    grammar = Grammar.lark("start: " + "a? " * 4000 + '\na: "b"')
    with pytest.raises(GrammarError, match=r"Current row has .* items"):
        at(grammar, "bbb")
