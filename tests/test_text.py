import numpy as np
import pytest
from oracle import DATA

import tiny_llm
from tiny_llm import generate, make_sampler, stream_text
from tiny_llm.errors import ChatTemplateError, ParameterError, PromptError


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
            import mlx.core as mx

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
