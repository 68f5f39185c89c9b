"""The text of the engine's answers: stop strings, reasoning, restrictions in words."""

import pytest
from engine_runs import engine_of, finish
from thinking_model import scripted, thinking

import tiny_llm
from tiny_llm import SamplingParams
from tiny_llm.errors import ParameterError
from tiny_llm.speculation import Drafter, PromptLookup

PIPELINE = pytest.mark.parametrize("pipeline", [False, True])
SAID = "one two three <tag> four"


def say(engine, text, **params):
    """A handle whose tokens are those of a text."""
    tokenizer = engine.tokenizer
    sampler = scripted(tokenizer, text)
    return engine.submit("Hello", SamplingParams(sampler=sampler, **params))


@PIPELINE
@pytest.mark.parametrize("stop", ["two", "wo th", ("zzz", "three"), "e <", "e two"])
def test_text_ends_before_the_stop_string(stop, pipeline):
    """Case 15, in a batch: beside one that does not stop and one that does later."""
    with engine_of(*thinking(), pipeline=pipeline, kv_memory=1 << 22) as engine:
        handles = [
            say(engine, SAID, stop=stop),
            say(engine, SAID),
            say(engine, SAID, stop="four"),
        ]
        pieces = list(handles[0])
        finish(engine)
        results = [handle.result() for handle in handles]
    stops = (stop,) if isinstance(stop, str) else stop
    first = min(SAID.find(s) for s in stops if s in SAID)
    assert "".join(piece.text for piece in pieces) == results[0].text == SAID[:first]
    assert results[0].finish_reason == "stop"
    assert results[0].stop_reason in stops
    assert results[1].text == SAID
    assert results[1].stop_reason in engine.tokenizer.eos_token_ids
    assert results[2].text == SAID[: SAID.index("four")]


def test_held_back_text_comes_at_the_end():
    with engine_of(*thinking(), kv_memory=1 << 22) as engine:
        result = say(engine, SAID, stop="four and more").result()
    assert result.text == SAID


def test_stop_strings_count_from_min_tokens_on():
    with engine_of(*thinking(), kv_memory=1 << 22) as engine:
        tokenizer = engine.tokenizer
        count = len(tokenizer.encode("one two", add_special_tokens=False))
        text = "one two one two one two"
        plain = say(engine, text, stop="two").result()
        later = say(engine, text, stop="two", min_tokens=count).result()
    assert plain.text == "one "
    assert later.text.startswith("one two")
    assert later.text == "one two one "


def test_reasoning_is_told_apart_also_after_a_restart():
    text = "why not?</think>\n\nBecause of this."
    messages = [{"role": "user", "content": "Hi"}]
    with engine_of(*thinking(), kv_memory=1 << 22) as engine:
        sampler = scripted(engine.tokenizer, text)
        handle = engine.submit(messages, SamplingParams(sampler=sampler))
        for _ in range(4):
            engine.step()
        engine._core.restart()  # as after Ctrl-C
        finish(engine)
        result = handle.result()
        pieces = list(handle)
    assert result.reasoning == "why not?"
    assert result.text == "Because of this."
    assert "".join(piece.reasoning for piece in pieces) == "why not?"


def test_what_needs_text_is_refused_without_a_tokenizer():
    with engine_of(thinking().model) as engine:
        for params in (
            {"stop": "x"},
            {"bad_words": ("word",)},
            {"dry_multiplier": 1.0, "dry_sequence_breakers": ("\n",)},
        ):
            with pytest.raises(ParameterError, match=next(iter(reversed(params)))):
                engine.submit([1, 2], SamplingParams(**params))
        # (breakers that nobody chose are left out)
        params = SamplingParams(max_tokens=1, dry_multiplier=1.0)
        assert engine.submit([1, 2], params).result().error is None


@PIPELINE
def test_bad_words_in_text_are_not_said(pipeline):
    model, tokenizer = thinking()
    plain = tiny_llm.generate(model, tokenizer, "Hello", max_new_tokens=20)
    pieces = [tokenizer.decode([token]) for token in plain.token_ids]
    words = [piece.strip() for piece in pieces if piece.strip().isalnum()][:2]
    assert words
    with engine_of(model, tokenizer, pipeline=pipeline, kv_memory=1 << 22) as engine:
        params = SamplingParams(max_tokens=20, bad_words=tuple(words))
        result = engine.submit("Hello", params).result()
    said = tokenizer.encode(result.text, add_special_tokens=False)
    for word in words:
        for text in (word, " " + word):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert not any(
                result.token_ids[i : i + len(ids)] == ids for i in range(len(said))
            )


def test_a_stop_within_an_accepted_run_ends_the_answer_there():
    model, tokenizer = thinking()
    plain = tiny_llm.generate(model, tokenizer, "Hello Hello Hello", max_new_tokens=40)
    stop = plain.text[len(plain.text) // 2 :][:3]
    expected = tiny_llm.generate(
        model, tokenizer, "Hello Hello Hello", max_new_tokens=40, stop=stop
    )
    with engine_of(
        model, tokenizer, kv_memory=1 << 22, speculation=PromptLookup(min_ngram=1)
    ) as engine:
        params = SamplingParams(max_tokens=40, stop=stop)
        result = engine.submit("Hello Hello Hello", params).result()
        engine.check_integrity()
    assert result.text == expected.text
    assert result.token_ids == expected.token_ids


def test_a_draft_model_that_fails_costs_no_answer(caplog):
    model, tokenizer = thinking()
    expected = tiny_llm.generate(model, tokenizer, "Hello", max_new_tokens=20)
    speculation = PromptLookup(min_ngram=1)
    speculation.drafter = lambda vocabulary: Broken()
    with engine_of(
        model, tokenizer, kv_memory=1 << 22, speculation=speculation
    ) as engine:
        result = engine.submit("Hello", SamplingParams(max_tokens=20)).result()
        engine.check_integrity()
    assert result.token_ids == expected.token_ids
    assert "no more guesses for request 0" in caplog.text


class Broken(Drafter):
    def look(self, tokens):
        return 0

    def propose(self, tokens, most):
        raise RuntimeError("out of memory")
