"""Reasoning told apart from the answer, with tags as published tokenizers have them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinking_model import with_tokens

from tiny_llm.answer_text import AnswerText, Part
from tiny_llm.errors import ParameterError
from tiny_llm.reasoning import ReasoningSplit, begins_inside, reasoning_tags

PAIRS = [
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
]


PLAIN, SPECIAL = (with_tokens(*PAIRS[0], special=special) for special in (False, True))


def read(tokenizer, ids, prompt=(), **options):
    """(reasoning, answer) of a whole stream, with no empty part on the way."""
    text, found = AnswerText(tokenizer, prompt, **options), ["", ""]
    for part in [part for token in ids for part in text.add(token)] + text.finish():
        assert part.text
        found[not part.reasoning] += part.text
    return tuple(found)


# --- tags


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_tags_are_found_that_are_single_tokens_special_or_not(pair, special):
    tokenizer = with_tokens(*pair, special=special)
    assert reasoning_tags(tokenizer) == (*pair, 384, 385)
    text = f"{pair[0]}\nBecause.\n{pair[1]}\n\nSo."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert read(tokenizer, ids) == ("Because.", "So.")


def test_a_tokenizer_that_spells_tags_or_has_one_of_them_declares_none():
    for tokenizer in (with_tokens(), with_tokens("<think>"), with_tokens("</think>")):
        assert reasoning_tags(tokenizer) is None
    tokenizer = with_tokens()
    text = "<think>\nBecause.\n</think>\n\nSo."
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert read(tokenizer, ids) == ("", text)


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|end_header_id|>\n<think>\n", True),
        ("<think>", True),
        ("<think>\n \n", True),
        ("</think>\n<think>\n\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("<think>\nOkay", False),
        ("What is <think>?<|eot_id|>", False),  # a tag that a user wrote
        ("What is <think><|eot_id|>\n", False),
        ("", False),
        ("Hello", False),
    ],
)
@pytest.mark.parametrize("tokenizer", [PLAIN, SPECIAL], ids=["plain", "special"])
def test_an_answer_begins_inside_where_the_prompt_ends_with_the_tag(
    tokenizer, prompt, inside
):
    tags = reasoning_tags(tokenizer)
    ids = tokenizer.encode(prompt)
    assert begins_inside(tags, tokenizer, ids) is inside
    answer = tokenizer.encode("\nhm\n</think>\n\nyes", add_special_tokens=False)
    expected = ("hm", "yes") if inside else ("", tokenizer.decode(answer))
    assert read(tokenizer, answer, ids) == expected


def test_prompt_ids_that_the_tokenizer_lacks_are_not_white_space():
    assert not begins_inside(reasoning_tags(PLAIN), PLAIN, [384, 999])


# --- the split


def divide(tokens, inside):
    """The definition: sections between tags, less the newlines next to a tag.

    tokens: texts, and the tags among them. Returns (reasoning, answer).
    """
    opening, closing = PAIRS[0]
    sections = [[inside, ""]]
    for token in tokens:
        if token == opening and not sections[-1][0]:
            sections.append([True, ""])
        elif token == closing and sections[-1][0]:
            sections.append([False, ""])
        elif token != opening:
            sections[-1][1] += token
    for i, section in enumerate(sections):
        if i > 0 or inside:
            section[1] = section[1].lstrip("\n")
        if i + 1 < len(sections):
            section[1] = section[1].rstrip("\n")
    thoughts = [text for is_inside, text in sections if is_inside and text]
    return "\n\n".join(thoughts), "".join(
        t for is_inside, t in sections if not is_inside
    )


@given(
    tokens=st.lists(
        st.sampled_from([*PAIRS[0], "\n", "\n\n", "a", "b\n", "\nc", " ", ""]),
        max_size=14,
    ),
    inside=st.booleans(),
)
@settings(max_examples=1500, deadline=None)
def test_reasoning_and_answer_are_what_lies_between_the_tags(tokens, inside):
    tags = reasoning_tags(PLAIN)
    ids = {PAIRS[0][0]: 384, PAIRS[0][1]: 385}
    split, shown = ReasoningSplit(tags, begins_inside=inside), ("", "")
    for i, token in enumerate(tokens):
        more = split.add(ids.get(token, 5), token)
        shown = tuple(a + b for a, b in zip(shown, more, strict=True))
        for part, whole in zip(shown, divide(tokens, inside), strict=True):
            assert whole.startswith(part)
        for part, so_far in zip(shown, divide(tokens[: i + 1], inside), strict=True):
            assert part == so_far.rstrip("\n"), "only newlines are held back"
    rest = split.finish()
    assert tuple(map("".join, zip(shown, rest, strict=True))) == divide(tokens, inside)


@given(ids=st.lists(st.integers(4, 385), max_size=40), inside=st.booleans())
@settings(max_examples=500, deadline=None)
def test_no_text_is_lost_but_tags_and_the_newlines_next_to_them(ids, inside):
    """Tags come between the bytes of a character too."""
    prompt = [384] if inside else []
    for tokenizer in (PLAIN, SPECIAL):
        reasoning, answer = read(tokenizer, ids, prompt)
        # (unlike the tags, the newlines are easily taken out of both)
        kept = sorted((reasoning + answer).replace("\n", ""))
        if tokenizer is SPECIAL:
            assert kept == sorted(tokenizer.decode(ids).replace("\n", ""))
        whole = tokenizer.decode(ids)
        if 384 not in ids and not inside:
            assert (reasoning, answer) == ("", whole)


def test_a_special_tag_and_a_plain_one_divide_alike():
    text = "\n<think>\n\nHm,  \n\nwell.\n</think>\n\n  So \n<think>x</think>it is.\n"
    for tokenizer in (PLAIN, SPECIAL):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids.count(384) == ids.count(385) == 2
        assert read(tokenizer, ids) == ("Hm,  \n\nwell.\n\nx", "  So it is.\n")


def test_half_a_character_before_a_tag_is_of_the_part_that_it_ends():
    first, *_ = PLAIN.encode("\N{WAVING HAND SIGN}", add_special_tokens=False)
    half = "\N{REPLACEMENT CHARACTER}"
    assert read(PLAIN, [384, first, 385, first]) == (half, half)
    assert read(PLAIN, [first, 384, first]) == (half, half)


def test_reasoning_that_is_cut_off_is_reasoning_to_the_end():
    ids = PLAIN.encode("<think>\nHm\n", add_special_tokens=False)
    assert read(PLAIN, ids) == ("Hm\n", "")


def test_parts_come_as_soon_as_they_are_sure():
    text = AnswerText(PLAIN, [])
    tokens = {t: PLAIN.encode(t, add_special_tokens=False)[0] for t in "H\n"}
    assert text.add(384) == []
    assert text.add(tokens["H"]) == [Part("H", True)]
    assert text.add(tokens["\n"]) == []
    assert text.add(tokens["H"]) == [Part("\nH", True)]
    assert text.add(385) == []
    assert text.add(tokens["H"]) == [Part("H", False)]


def test_reasoning_may_be_left_in_the_answer():
    text = "<think>\nHm\n</think>\n\nSo."
    ids = PLAIN.encode(text, add_special_tokens=False)
    assert read(PLAIN, ids, reasoning=False) == ("", text)
    assert read(SPECIAL, ids, reasoning=False) == ("", "\nHm\n\n\nSo.")


# --- with stop strings


def test_stop_strings_end_the_answer_and_not_the_reasoning():
    ids = PLAIN.encode(
        "<think>a stop\n\nb</think>\n\nyes, stop it", add_special_tokens=False
    )
    assert read(PLAIN, ids, stop=["stop", "\n\n"]) == ("a stop\n\nb", "yes, ")
    # nor does one lie across both
    assert read(PLAIN, ids, stop="byes") == ("a stop\n\nb", "yes, stop it")
    with pytest.raises(ParameterError, match='stop holds ""'):
        AnswerText(PLAIN, [], stop="")


def test_a_stop_that_is_complete_only_with_the_last_text_ends_it():
    first, *others = PLAIN.encode("\N{WAVING HAND SIGN}", add_special_tokens=False)
    assert others
    text = AnswerText(PLAIN, [], stop="\N{REPLACEMENT CHARACTER}")
    assert text.add(first) == []
    assert text.stop is None
    assert text.finish() == []
    assert text.stop == "\N{REPLACEMENT CHARACTER}"


def test_a_part_of_a_stop_is_released_at_the_end():
    ids = PLAIN.encode("yes, st", add_special_tokens=False)
    assert read(PLAIN, ids, stop="stop") == ("", "yes, st")
