"""Stop strings: field report case 15, and equality with a search in the whole text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_detokenizer import FOLDERS, ORACLES

from tiny_llm.errors import ParameterError
from tiny_llm.stop_strings import (
    MAX_CHARACTERS,
    MAX_STOPS,
    Found,
    StopStrings,
    checked_stops,
)
from tiny_llm.tokenizer import Tokenizer


def search(text, stops):
    """The definition: (text before the stop, the stop), looking from every place."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def longest_safe(text, stops):
    """How much of a text is sure to stay, whatever follows."""
    futures = [
        text + stop[known:]
        for stop in stops
        for known in range(len(stop))
        if text.endswith(stop[:known])
    ]
    return min([len(text), *(len(search(future, stops)[0]) for future in futures)])


def stream(pieces, stops):
    """(all that was shown, the stop), fed piece by piece."""
    search, shown = StopStrings(stops), ""
    for piece in pieces:
        found = search.add(piece)
        shown += found.text
        if found.stop is not None:
            assert search.finish() == ""
            return shown, found.stop
    return shown + search.finish(), None


LETTERS = st.text(alphabet="ab", max_size=14)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


@given(pieces=st.lists(LETTERS, max_size=12), stops=STOPS)
@settings(max_examples=1500, deadline=None)
def test_any_cut_of_a_text_ends_where_a_search_in_all_of_it_does(pieces, stops):
    text = "".join(pieces)
    assert stream(pieces, stops) == search(text, stops)
    assert stream(text, stops) == search(text, stops)
    assert stream([text], stops) == search(text, stops)


@given(pieces=st.lists(LETTERS, max_size=6), stops=STOPS)
@settings(max_examples=1000, deadline=None)
def test_what_is_shown_is_the_longest_text_that_is_sure_to_stay(pieces, stops):
    running, text, shown = StopStrings(stops), "", ""
    for piece in pieces:
        text += piece
        found = running.add(piece)
        shown += found.text
        if found.stop is not None:
            assert (shown, found.stop) == search(text, stops)
            break
        assert shown == text[: longest_safe(text, stops)]


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        # spanning pieces; starting inside one; followed by text in the same one
        (["one ", "ST", "OP", " two"], ["STOP"], ("one ", "STOP")),
        (["one S", "TOP two"], ["STOP"], ("one ", "STOP")),
        (["one STOP two"], ["STOP"], ("one ", "STOP")),
        (["ABC", "DEF", "GHIJ", "K"], ["DEFGHIJ"], ("ABC", "DEFGHIJ")),
        (["ABC", "DEFGHI"], ["DEFGHIJ"], ("ABCDEFGHI", None)),
        (["aaa", "b"], "aab", ("a", "aab")),
        (["abab", "abac"], "ababac", ("ab", "ababac")),
        # the first to be complete; of those that end together, the longest
        (["abcd"], ["abcd", "c"], ("ab", "c")),
        (["abcd"], ["bcd", "d", "cd"], ("a", "bcd")),
        (["ab", "x"], ["abc", "b"], ("a", "b")),
        (
            ["", "é\N{WAVING HAND SIGN}", "", "ü!"],
            "\N{WAVING HAND SIGN}ü",
            ("é", "\N{WAVING HAND SIGN}ü"),
        ),
        (["STOP"], ["STOP"], ("", "STOP")),
        (["a", "b"], [], ("ab", None)),
        ([], ["x"], ("", None)),
    ],
)
def test_the_text_ends_before_the_stop(pieces, stops, expected):
    assert stream(pieces, stops) == expected


def test_nothing_is_held_back_for_a_stop_that_another_one_comes_before():
    running = StopStrings(["abxc", "x"])
    assert running.add("ab") == Found("ab", None)
    assert running.add("xc") == Found("", "x")


def test_only_the_beginning_of_a_stop_is_held_back_and_the_end_releases_it():
    running = StopStrings(["###", "\n\nUser:"])
    assert running.add("a\n\n") == Found("a", None)
    assert running.add("b#") == Found("\n\nb", None)
    assert running.add("#") == Found("", None)
    assert running.stop is None
    assert running.finish() == "##"
    assert running.finish() == ""


def test_after_a_stop_nothing_more_is_shown():
    running = StopStrings("b")
    assert running.add("abc") == Found("a", "b")
    assert running.add("more b") == Found("", "b")
    assert (running.stop, running.finish()) == ("b", "")


def find_every_stop(tokenizer):
    text = "Hello world, wörld 日本語 \N{WAVING HAND SIGN} ABCDEFGHIJKL and so on"
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    pieces = [*map(detokenizer.add, ids), detokenizer.finish()]
    whole = "".join(pieces)
    assert "ABCDEFGHIJKL" in whole
    for begin in range(len(whole)):
        for length in (1, 2, 7):
            stop = whole[begin : begin + length]
            assert stream(pieces, [stop]) == (whole[: whole.index(stop)], stop)
    assert stream(pieces, ["DEFGHIJ"])[0].endswith("ABC")
    assert stream(pieces, ["so on!"]) == (whole, None)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_stop_at_any_place_of_tokenized_text_is_found(name):
    """Stops begin and end inside tokens; characters may be several tokens."""
    find_every_stop(ORACLES[name])


@pytest.mark.smollm2
def test_a_stop_at_any_place_of_the_default_models_text_is_found(smollm2_gguf):
    from tiny_llm.gguf_file import GGUFFile

    find_every_stop(Tokenizer.from_gguf(GGUFFile(smollm2_gguf).metadata))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", 'stop holds ""'),
        (["a", ""], 'stop holds ""'),
        (["a", 5], "stop holds 5, which is no string"),
        (5, "stop must be a string or a list of strings, got 5"),
        (None, "got None"),
        (b"a", "got b'a'"),
        ({"a"}, "got {'a'}"),
        (["a"] * (MAX_STOPS + 1), "stop has 17 strings; at most 16"),
        ("a" * (MAX_CHARACTERS + 1), "a string of 1001 characters; at most 1000"),
    ],
)
def test_what_are_no_stop_strings_is_refused(value, message):
    with pytest.raises(ParameterError, match=message):
        checked_stops(value)
    with pytest.raises(ParameterError, match=message):
        StopStrings(value)


def test_stop_strings_may_be_one_or_several():
    assert checked_stops("ab") == ("ab",)
    assert checked_stops(["ab", "c"]) == ("ab", "c")
    assert checked_stops(()) == ()
    longest = ["b" * n + "a" * (MAX_CHARACTERS - n) for n in range(MAX_STOPS)]
    assert checked_stops(longest) == tuple(longest)


def test_the_longest_stops_over_the_most_repetitive_text_are_exact():
    stops = ["a" * (MAX_CHARACTERS - 1 - n) + "b" * (n + 1) for n in range(MAX_STOPS)]
    text = "a" * 20_000
    assert stream([text[i : i + 5] for i in range(0, len(text), 5)], stops) == (
        text,
        None,
    )
    assert stream([text + "bbbb"], stops) == (text[: 20_001 - MAX_CHARACTERS], stops[0])
