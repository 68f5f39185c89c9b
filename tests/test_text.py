import mlx.core as mx
import numpy as np
import pytest
from oracle import DATA
from thinking_model import scripted, thinking

import tiny_llm
from tiny_llm import generate, make_sampler, stream_text
from tiny_llm.errors import (
    ChatTemplateError,
    OutOfPagesError,
    ParameterError,
    PromptError,
)
from tiny_llm.speculation import PromptLookup


@pytest.fixture(scope="module")
def loaded():
    return tiny_llm.load(DATA / "llama_llama3rope_bias")


def test_generate_returns_all_that_the_stream_gave(loaded):
    stream = stream_text(*loaded, "Hello world", max_new_tokens=20)
    text = "".join(stream)
    result = generate(*loaded, "Hello world", max_new_tokens=20)
    assert result.text == text == stream.result.text
    assert result.token_ids == stream.result.token_ids
    assert result.text == loaded.tokenizer.decode(
        [t for t in result.token_ids if t not in loaded.tokenizer.eos_token_ids]
    )
    assert result.prompt_tokens == 4  # BOS and three
    assert result.prompt_seconds > 0
    assert result.prompt_tokens_per_second > 0


def test_a_prompt_may_be_text_messages_or_token_ids(loaded):
    tokenizer = loaded.tokenizer
    messages = [{"role": "user", "content": "Hello"}]
    for prompt, ids in [
        ("Hello", tokenizer.encode("Hello")),
        (messages, tokenizer.encode_chat(messages)),
        ([1, 362], [1, 362]),
        (np.array([1, 362]), [1, 362]),
    ]:
        direct = tiny_llm.stream_generate(
            loaded.model,
            ids,
            max_new_tokens=8,
            eos_token_ids=tokenizer.eos_token_ids,
        )
        assert generate(*loaded, prompt, max_new_tokens=8).token_ids == list(direct)


def test_text_that_begins_with_bos_gets_exactly_one(loaded):
    bos = loaded.tokenizer.bos_token
    plain = generate(*loaded, "Hello", max_new_tokens=8)
    marked = generate(*loaded, bos + "Hello", max_new_tokens=8)
    assert marked.prompt_tokens == plain.prompt_tokens
    assert marked.token_ids == plain.token_ids


def test_every_eos_id_ends_the_text_and_is_not_shown(loaded):
    # eos_token_id is 2 in config.json, [2, 3] in generation_config.json
    assert loaded.tokenizer.eos_token_ids == {2, 3}
    for eos in (2, 3):
        drawn = iter([310, 311, eos, 312])

        def scripted(logprobs, drawn=drawn):
            return mx.array([next(drawn)])

        result = generate(*loaded, "Hello", sampler=scripted, max_new_tokens=4)
        assert result.token_ids == [310, 311, eos]
        assert result.finish_reason == "stop"
        assert result.text == loaded.tokenizer.decode([310, 311])


def test_finish_reason_is_length_when_the_limit_is_reached(loaded):
    result = generate(*loaded, "Hello", max_new_tokens=3)
    assert (result.finish_reason, len(result.token_ids)) == ("length", 3)


def test_a_stream_may_be_closed_early(loaded):
    cache = loaded.model.create_kv_cache()
    stream = stream_text(*loaded, "Hello world", max_new_tokens=50, cache=cache)
    next(stream)
    stream.close()
    assert list(stream) == []
    assert stream.result.finish_reason == ""
    held = stream.result.prompt_tokens + len(stream.result.token_ids)
    assert cache[0].offset == held


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([], {}, PromptError),
        ("x" * 9000, {}, PromptError),
        ("x", {"max_new_tokens": -1}, ParameterError),
        ([{"role": "user"}], {}, ChatTemplateError),
        (b"abc", {}, PromptError),
        (5, {}, PromptError),
        ([{"role": "user", "content": "x"}], {"template_options": 5}, ParameterError),
        ("x", {"template_options": {"bos_token": ""}}, ParameterError),
        ([1, 2], {"template_options": {"bos_token": ""}}, ParameterError),
    ],
)
def test_bad_requests_fail_at_the_call(loaded, prompt, options, error):
    with pytest.raises(error):
        stream_text(*loaded, prompt, **options)


def test_the_sampler_is_used(loaded):
    texts = {
        generate(
            *loaded, "Hello", max_new_tokens=12, sampler=make_sampler(2.0, seed=seed)
        ).text
        for seed in range(4)
    }
    assert len(texts) == 4


# --- stop strings


def answer(loaded, text, **options):
    """The result of a model that is made to say a text."""
    sampler = scripted(loaded.tokenizer, text)
    return generate(*loaded, "Hello", sampler=sampler, **options)


@pytest.mark.parametrize(
    ("text", "stop", "expected", "found"),
    [
        ("one two three", "two", "one ", "two"),
        ("one two three", ["three", "wo"], "one t", "wo"),
        ("ABCDEFGHIJKLM", "DEFGHIJ", "ABC", "DEFGHIJ"),
        ("one two thr", "three", "one two thr", None),
        ("one two three", (), "one two three", None),
        ("one two", "one", "", "one"),
    ],
)
def test_a_text_ends_before_a_stop_string(loaded, text, stop, expected, found):
    result = answer(loaded, text, stop=stop)
    assert result.text == expected
    eos = min(loaded.tokenizer.eos_token_ids)
    assert (result.finish_reason, result.stop_reason) == ("stop", found or eos)


def test_greedy_text_is_cut_where_the_whole_text_has_the_stop(loaded):
    whole = generate(*loaded, "Hello world", max_new_tokens=20)
    for begin in range(len(whole.text)):
        stop = whole.text[begin : begin + 3]
        stream = stream_text(*loaded, "Hello world", max_new_tokens=20, stop=stop)
        pieces = list(stream)
        assert "".join(pieces) == stream.result.text
        assert stream.result.text == whole.text[: whole.text.index(stop)]
        assert stream.result.stop_reason == stop
        tokens = stream.result.token_ids
        assert tokens == whole.token_ids[: len(tokens)]
        assert stop in loaded.tokenizer.decode(tokens)
        if "\N{REPLACEMENT CHARACTER}" not in stop:  # (which half a character is too)
            # it ends with the very token that completes the stop
            assert stop not in loaded.tokenizer.decode(tokens[:-1])


def test_the_cache_holds_the_tokens_of_the_stop_and_no_more(loaded):
    cache = loaded.model.create_kv_cache()
    result = answer(loaded, "one two three", stop="two", cache=cache)
    tokens = loaded.tokenizer.encode("one two three", add_special_tokens=False)
    assert result.token_ids == tokens[: len(result.token_ids)]
    assert len(result.token_ids) < len(tokens)
    assert cache[0].offset == result.prompt_tokens + len(result.token_ids)


def test_with_speculation_too_the_cache_ends_with_the_stop(loaded):
    """Verified tokens behind the stop were in the cache already."""
    prompt = loaded.tokenizer.encode("abc abc abc abc")
    model = loaded.model
    greedy = generate(*loaded, prompt, max_new_tokens=40)
    # a prompt that holds the answer, so that guesses are right
    prompt = prompt + greedy.token_ids + prompt
    plain = generate(*loaded, prompt, max_new_tokens=40)
    stop = plain.text[-4:-1]
    results = []
    for speculation in (None, PromptLookup()):
        cache = model.create_kv_cache()
        result = generate(
            *loaded,
            prompt,
            max_new_tokens=40,
            stop=stop,
            cache=cache,
            speculation=speculation,
        )
        assert cache[0].offset == len(prompt) + len(result.token_ids)
        results.append((result.text, result.token_ids, result.stop_reason))
    assert results[0] == results[1]
    assert results[0][2] == stop


def test_logits_processors_reach_the_generation(loaded):
    seen = []

    def only_five(tokens, logits):
        seen.append(tokens.tolist())
        return mx.where(mx.arange(logits.shape[-1]) == 5, logits, -mx.inf)

    prompt = loaded.tokenizer.encode("Hello")
    result = generate(*loaded, "Hello", max_new_tokens=3, logits_processors=[only_five])
    assert result.token_ids == [5, 5, 5]
    assert seen == [prompt, [*prompt, 5], [*prompt, 5, 5]]


def test_the_end_releases_what_might_have_become_a_stop(loaded):
    stream = stream_text(
        *loaded,
        "Hello",
        sampler=scripted(loaded.tokenizer, "one two"),
        max_new_tokens=len(loaded.tokenizer.encode("one two")) - 1,  # less BOS
        stop="two!",
    )
    assert "".join(stream) == "one two"
    assert (stream.result.finish_reason, stream.result.stop_reason) == ("length", None)


def test_a_full_pool_releases_it_too_before_the_error(loaded):
    said = "one two three four five six"
    stream = stream_text(
        *loaded,
        "Hello",
        sampler=scripted(loaded.tokenizer, said),
        cache=loaded.model.create_kv_cache("paged", tokens=16, page_size=4),
        stop=said + "!",
    )
    pieces = []
    with pytest.raises(OutOfPagesError):
        pieces.extend(stream)
    text = loaded.tokenizer.decode(stream.result.token_ids)
    assert len(text) > 3
    assert "".join(pieces) == stream.result.text == text


def test_a_stop_that_is_complete_at_the_limit_is_a_stop(loaded):
    whole = generate(*loaded, "Hello", max_new_tokens=5)
    result = generate(*loaded, "Hello", max_new_tokens=5, stop=whole.text[-1])
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("stop", ["", ["a", ""], 5, None])
def test_what_is_no_stop_string_is_refused_at_the_call(loaded, stop):
    with pytest.raises(ParameterError, match="stop"):
        stream_text(*loaded, "Hello", stop=stop)


# --- reasoning


@pytest.mark.parametrize("special", [False, True])
def test_reasoning_is_no_part_of_the_text(special):
    model = thinking(special=special)
    said = "<think>\nHm, well.\n</think>\n\nYes."
    result = answer(model, said)
    assert (result.reasoning, result.text) == ("Hm, well.", "Yes.")
    assert model.tokenizer.decode(result.token_ids, skip_special_tokens=False) == (
        said + "<|end_of_text|>"
    )
    result = answer(model, said, reasoning=False)
    assert result.reasoning == ""
    assert result.text == model.tokenizer.decode(result.token_ids)


def test_a_stream_shows_the_answer_or_all_parts():
    model = thinking()
    said = "<think>\nHm, well.\n</think>\n\nYes."
    stream = stream_text(*model, "Hello", sampler=scripted(model.tokenizer, said))
    assert "".join(stream) == "Yes."
    assert stream.result.reasoning == "Hm, well."
    stream = stream_text(*model, "Hello", sampler=scripted(model.tokenizer, said))
    reasoning = ""
    for part in stream.parts():
        assert part.reasoning == (not stream.result.text)
        reasoning += part.text if part.reasoning else ""
        assert reasoning == stream.result.reasoning
    assert reasoning == "Hm, well."


def test_the_template_decides_per_request_where_the_answer_begins():
    model = thinking()
    messages = [{"role": "user", "content": "Hello"}]
    for options, expected in [
        (None, ("Hm.", "Yes.")),
        ({"enable_thinking": True}, ("Hm.", "Yes.")),
        ({"enable_thinking": False}, ("", "Hm.\n</think>\n\nYes.")),
    ]:
        result = generate(
            *model,
            messages,
            sampler=scripted(model.tokenizer, "Hm.\n</think>\n\nYes."),
            template_options=options,
        )
        assert (result.reasoning, result.text) == expected
        ids = model.tokenizer.encode_chat(messages, **(options or {}))
        assert result.prompt_tokens == len(ids)


def test_reasoning_to_the_limit_leaves_no_text():
    model = thinking()
    messages = [{"role": "user", "content": "Hello"}]
    said = scripted(model.tokenizer, "Hm, well. " * 9)
    result = generate(*model, messages, sampler=said, max_new_tokens=4)
    assert result.text == ""
    assert result.reasoning == model.tokenizer.decode(result.token_ids)
    assert result.finish_reason == "length"


def test_a_stop_string_within_the_reasoning_is_none():
    result = answer(thinking(), "<think>one two</think>\n\nthree two one", stop="two")
    assert (result.reasoning, result.text) == ("one two", "three ")


def test_template_options_that_the_template_never_reads_are_refused(loaded):
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(ParameterError, match="no variable 'enable_thinking'"):
        generate(*loaded, messages, template_options={"enable_thinking": False})
    # (special tokens are variables too, and may be replaced)
    plain, marked = (
        generate(*loaded, messages, template_options=options, max_new_tokens=1)
        for options in (None, {"bos_token": ""})
    )
    assert marked.prompt_tokens == plain.prompt_tokens - 1
