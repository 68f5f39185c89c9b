"""Guesses and their number: plain Python, without a model."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiny_llm.errors import ParameterError
from tiny_llm.speculation import (
    Counts,
    Drafter,
    Drafting,
    DraftLength,
    PromptLookup,
    Speculation,
    StepCosts,
)

# --- prompt lookup


def lookup(tokens, most=4, **options):
    return PromptLookup(**options).drafter(100).propose(tokens, most)


@pytest.mark.parametrize(
    ("tokens", "options", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 1, 2], {}, [3, 4, 5, 6]),
        ([1, 2, 3, 1, 2, 4, 1, 2], {}, [4, 1, 2, 4]),  # the newest of equals
        ([9, 1, 2, 3, 7, 1, 2, 4, 9, 1, 2], {}, [3, 7, 1, 2]),  # the longest first
        ([9, 1, 2, 3, 7, 1, 2, 4, 9, 1, 2], {"max_ngram": 2}, [4, 9, 1, 2]),
        ([5, 5, 5], {}, [5, 5, 5, 5]),  # runs into the end, and goes on
        ([7, 1, 2, 1, 2], {}, [1, 2, 1, 2]),
        ([1, 2, 3, 4, 5, 1], {}, []),  # one token is no match
        ([1, 2, 3, 4, 5, 1], {"min_ngram": 1}, [2, 3, 4, 5]),
        ([1, 2, 3, 4, 1, 2], {"min_ngram": 3}, []),
        ([1, 2, 3], {}, []),
        ([1], {"min_ngram": 1}, []),
        ([], {}, []),
    ],
)
def test_what_followed_the_longest_and_newest_match_is_the_guess(
    tokens, options, draft
):
    assert lookup(tokens, **options) == draft


def naive(tokens, least, most_ngram, most):
    """Every earlier place, the newest first."""
    best = 0
    for place in range(len(tokens) - 1, least - 1, -1):
        match = 0
        while match < min(most_ngram, place) and (
            tokens[place - match - 1] == tokens[len(tokens) - match - 1]
        ):
            match += 1
        if match >= least and match > best:
            best, found = match, place
    if not best:
        return None, []
    text = list(tokens)
    for n in range(most):
        text.append(text[found + n])
    return best - least, text[len(tokens) :]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=9),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 9),
)
def test_the_index_finds_what_a_search_of_the_whole_text_finds(
    pieces, least, more, most
):
    drafter = PromptLookup(least + more, least).drafter(100)
    tokens = []
    for piece in pieces:
        tokens += piece
        level, draft = naive(tokens, least, least + more, most)
        assert drafter.look(tokens) == level
        assert drafter.propose(tokens, most) == draft


class Read(list):
    """Tokens that count how many are read."""

    reads = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.reads += len(found) if isinstance(place, slice) else 1
        return found


@pytest.mark.parametrize("texts", [[[3, 1, 2], [4, 1, 2]], [[7]], [[1, 2, 3, 4, 5, 6]]])
def test_a_look_reads_few_tokens_however_long_the_text(texts):
    drafter = PromptLookup().drafter(100)
    tokens, most = Read(), 0
    while len(tokens) < 4000:
        for token in texts[len(tokens) * 7919 % len(texts)]:
            tokens.append(token)
            tokens.reads = 0
            drafter.look(tokens)
            most = max(most, tokens.reads)
    # at most 32 places, and at each two reads for a token of the match
    assert most <= 32 * 2 * 8


def test_a_shorter_text_is_indexed_anew():
    drafter = PromptLookup().drafter(100)
    drafter.look([1, 2, 3, 4, 1, 2, 9])
    assert drafter.propose([8, 9, 5, 8, 9], 2) == [5, 8]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_draft": 0}, "max_draft must be a whole number of at least 1, got 0"),
        ({"max_draft": 64}, "max_draft is 64.* at most 63"),
        ({"min_ngram": 0}, "min_ngram must be"),
        ({"min_ngram": 3, "max_ngram": 2}, "max_ngram is 2, less than min_ngram.* 3"),
        ({"max_ngram": "3"}, "max_ngram must be a whole number"),
    ],
)
def test_settings_that_cannot_be_used_are_named(options, words):
    with pytest.raises(ParameterError, match=words):
        PromptLookup(**options)


# --- costs


def test_costs_are_guessed_until_they_are_measured():
    costs = StepCosts()
    assert costs.estimate(1) == 1.0
    assert costs.estimate(4) == pytest.approx(1.9)
    assert costs.estimate(6) == pytest.approx(2.25)  # halfway from 4 to 8
    estimates = [costs.estimate(rows) for rows in range(1, 65)]
    assert estimates == sorted(estimates)


def test_the_first_step_of_a_size_is_not_believed():
    costs = StepCosts()
    for rows, seconds in [(1, 9.0), (1, 0.1), (4, 9.0), (4, 0.3)]:
        costs.observe(rows, seconds)
    assert costs.estimate(1) == pytest.approx(0.1, rel=0.1)
    assert costs.estimate(4) == pytest.approx(0.3)


def test_a_size_not_measured_is_judged_by_its_neighbour():
    costs = StepCosts()
    for rows, seconds in [(1, 0.1), (1, 0.1), (4, 0.38), (4, 0.38)]:
        costs.observe(rows, seconds)
    assert costs.estimate(8) == pytest.approx(0.52)  # as the 4, twice the table
    assert costs.estimate(2) == pytest.approx(0.13)  # as the 1


def test_one_slow_step_is_forgotten_after_some_hundred_plain_ones():
    costs = StepCosts()
    for rows, seconds in [(1, 0.1), (1, 0.1), (8, 5.0), (8, 5.0)]:
        costs.observe(rows, seconds)
    for _ in range(1000):
        costs.observe(1, 0.1)
    assert costs.estimate(8) == pytest.approx(0.26, rel=0.2)


# --- how many


def expected_speed(length, level, k):
    """Tokens per second of a pass over k guesses, by summing over its outcomes."""
    likely = [length.likelihood(level + n) for n in range(k)]
    tokens = 0.0
    for right in range(k + 1):
        p = 1.0
        for n in range(right):
            p *= likely[n]
        if right < k:
            p *= 1 - likely[right]
        tokens += p * (right + 1)
    costs = length.costs
    return tokens / (costs.estimate(k + 1) + k * costs.draft_seconds)


@pytest.mark.parametrize("right", [0.0, 0.3, 0.5, 0.7, 0.9, 1.0])
@pytest.mark.parametrize("draft_seconds", [0.0, 0.1, 0.4])
def test_the_number_chosen_gives_the_most_tokens_per_second(right, draft_seconds):
    length = DraftLength()
    length.costs.draft_seconds = draft_seconds
    for n in range(200):
        length.observe(0, int(n * right % 1 + right >= 1), 1)
    k = length.choose(0, 15)
    speeds = [expected_speed(length, 0, n) for n in range(16)]
    assert speeds[k] == pytest.approx(max(speeds[1:]) if k else 1.0)
    if k == 0:
        assert max(speeds[1:]) <= 1.05
    assert (k > 0) == (max(speeds[1:]) > 1.05)


def test_the_more_is_right_the_more_is_guessed():
    numbers = []
    for right in range(11):
        length = DraftLength()
        for n in range(400):
            length.observe(0, int(n % 10 < right), 1)
        numbers.append(length.choose(0, 15))
    assert numbers == sorted(numbers)
    assert (numbers[0], numbers[-1]) == (0, 15)
    assert 0 < length.choose(0, 3) <= 3  # never more than asked for
    assert length.choose(0, 0) == 0


@pytest.mark.parametrize("beside", [0, 1, 3, 7, 15])
def test_beside_others_guesses_pay_if_all_get_more_tokens_a_second(beside):
    length = DraftLength()
    for _ in range(200):
        length.observe(0, 1, 1)
    k = length.choose(0, 8, beside)
    likely = length.likelihood(0)
    speeds = [
        (beside + sum(likely**n for n in range(k + 1)))
        / length.costs.estimate(beside + k + 1)
        for k in range(9)
    ]
    assert speeds[k] == max(speeds)
    for rows in [*range(1, 33)] * 2:
        length.costs.observe(rows, float(rows**2))
    assert length.choose(0, 8, beside) == 0


def test_dear_passes_are_not_made():
    length = DraftLength()
    for rows in [1, 1, *range(2, 17), *range(2, 17)]:
        length.costs.observe(rows, 1.0 if rows == 1 else 20.0)
    for _ in range(100):
        length.observe(0, 15, 15)
    assert length.choose(0, 15) == 0


def test_levels_are_judged_by_themselves():
    length = DraftLength(levels=4, free=True)
    for _ in range(100):
        length.observe(0, 0, 1)
        length.observe(3, 1, 1)
    assert length.likelihood(0) < 0.1
    assert length.likelihood(3) == length.likelihood(9) > 0.9
    assert length.choose(0, 8) == 0
    assert length.choose(3, 8) == 8


def test_a_run_of_guesses_is_judged_level_by_level():
    length = DraftLength(levels=4, free=True)
    before = [length.likelihood(level) for level in range(4)]
    length.observe(0, 2, 5)  # right, right, wrong, and two that nobody looked at
    after = [length.likelihood(level) for level in range(4)]
    assert after[0] > before[0]
    assert after[1] > before[1]
    assert after[2] < before[2]
    assert after[3] == before[3]


def test_guesses_that_cost_are_tried_again_ever_more_rarely():
    length, tries = DraftLength(), []
    for _ in range(50):
        length.observe(0, 0, 1)
    for token in range(2000):
        if length.choose(0, 15):
            assert length.choose(0, 15) == 4
            tries.append(token)
            length.observe(0, 0, 4)
        else:
            length.skipped()
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps == [33, 65, 129, 257, 513, 513]


def test_a_try_that_was_right_begins_anew():
    length = DraftLength()
    for _ in range(50):
        length.observe(0, 0, 1)
    for _ in range(16):
        assert length.choose(0, 15) == 0
        length.skipped()
    length.observe(0, length.choose(0, 15), 4)
    assert length.likelihood(0) == DraftLength().likelihood(0)
    assert length.choose(0, 15) > 0


# --- together


class Fixed(Speculation):
    """Always guesses the same, and may refuse to."""

    def __init__(self, draft, free=False):
        super().__init__(8)
        self.draft, self.free = draft, free

    def drafter(self, vocabulary):
        return FixedDrafter(self.draft, self.free)


class FixedDrafter(Drafter):
    def __init__(self, draft, free):
        self.draft, self.free = draft, free

    def look(self, tokens):
        return None if self.draft is None else 0

    def propose(self, tokens, most):
        return self.draft


@pytest.mark.parametrize(
    ("guessed", "draft"),
    [([1, 2, 3], [1, 2, 3]), ([1, 50, 3], [1]), ([-1], []), ([1] * 20, [1] * 5)],
)
def test_only_ids_of_the_vocabulary_and_not_too_many_are_drafted(guessed, draft):
    drafting = Drafting(Fixed(guessed), [5], 50)
    drafting.length.choose = lambda level, most, beside: most
    assert drafting.draft(5) == draft


def test_there_is_no_draft_without_evidence():
    drafting = Drafting(Fixed(None), [5], 50)
    assert not drafting.ready(5)
    assert drafting.draft(5) == []


def test_free_guesses_are_judged_without_a_pass():
    speculation = Fixed([7], free=True)
    drafting = Drafting(speculation, [5], 50)
    for _ in range(30):
        drafting.add(8)
    assert drafting.length.likelihood(0) < 0.1
    assert not drafting.ready(5)
    for _ in range(60):
        drafting.add(7)
    assert drafting.ready(5)
    assert speculation.counts == Counts()
    assert drafting.tokens == [5] + [8] * 30 + [7] * 60


def test_what_became_of_a_draft_is_counted():
    speculation = Fixed([7, 7, 7])
    drafting = Drafting(speculation, [5], 50)
    drafting.verified(3, 1, [7, 9])
    drafting.verified(3, 3, [7, 7, 7, 4])
    assert speculation.counts == Counts(passes=2, drafted=6, accepted=4)
    assert speculation.counts.acceptance == pytest.approx(4 / 6)
    assert Counts().acceptance == 0.0
    assert drafting.tokens == [5, 7, 9, 7, 7, 7, 4]


def test_nothing_is_measured_while_the_caller_was_away():
    drafting = Drafting(Fixed([7]), [5], 50)
    drafting.lap(1)
    drafting.lap(1)
    measured = drafting.costs.estimate(1)
    with drafting.away():
        time.sleep(0.02)
    drafting.lap(1)
    assert drafting.costs.estimate(1) == measured
    time.sleep(0.02)
    drafting.lap(1)
    assert drafting.costs.estimate(1) > measured
