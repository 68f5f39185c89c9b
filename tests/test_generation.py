import mlx.core as mx
import numpy as np
import pytest
from oracle import VARIANTS, goldens, model, naive_greedy

from tiny_llm import stream_generate
from tiny_llm.errors import ParameterError, PromptError, TinyLLMError


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("prompt", range(3))
@pytest.mark.parametrize("chunk", [2048, 1, 7, 16])
def test_greedy_tokens_equal_the_reference(variant, prompt, chunk):
    golden = goldens(variant)[prompt]
    tokens = stream_generate(
        model(variant), golden.ids, max_new_tokens=24, prefill_chunk=chunk
    )
    assert list(tokens) == golden.greedy


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_uncached_forward_gives_the_reference_tokens(variant):
    golden = goldens(variant)[1]
    assert naive_greedy(model(variant), golden.ids, 24) == golden.greedy


@pytest.mark.parametrize("stop_after", range(1, 6))
@pytest.mark.parametrize("how", ["close", "limit", "eos"])
def test_a_given_cache_holds_the_prompt_and_all_that_was_yielded(stop_after, how):
    golden = goldens("qwen3")[1]
    m = model("qwen3")
    cache = m.create_kv_cache()
    seen = []
    tokens = stream_generate(
        m,
        golden.ids,
        max_new_tokens=stop_after if how == "limit" else 20,
        eos_token_ids=[golden.greedy[stop_after - 1]] if how == "eos" else (),
        cache=cache,
    )
    for token in tokens:
        seen.append(token)
        if how == "close" and len(seen) == stop_after:
            tokens.close()
    if how == "eos":  # the id may come earlier too
        assert seen[-1] == golden.greedy[stop_after - 1]
    assert seen == golden.greedy[: len(seen)]
    assert [entry.offset for entry in cache] == [len(golden.ids) + len(seen)] * 2
    # ... so the next turn is as if everything were one prompt
    more = [5, 6, 7]
    history = [*golden.ids, *seen, *more]
    continued = stream_generate(m, more, max_new_tokens=8, cache=cache)
    assert list(continued) == naive_greedy(m, history, 8)


def test_max_new_tokens_zero_yields_nothing_but_fills_the_cache():
    m = model("llama_tied")
    cache = m.create_kv_cache()
    assert list(stream_generate(m, [1, 2, 3], max_new_tokens=0, cache=cache)) == []
    assert cache[0].offset == 3
    assert list(stream_generate(m, [1, 2, 3], max_new_tokens=0)) == []


def test_an_eos_id_is_yielded_and_ends_the_stream():
    golden = goldens("llama_tied")[1]
    eos = golden.greedy[4]
    first = golden.greedy.index(eos)
    tokens = stream_generate(model("llama_tied"), golden.ids, eos_token_ids={eos})
    assert list(tokens) == golden.greedy[: first + 1]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ([], {}, PromptError, "empty"),
        ([384], {}, PromptError, "384 is not in the vocabulary of 384"),
        ([-1], {}, PromptError, "-1 is not in the vocabulary"),
        ([1] * 513, {}, PromptError, "513 tokens.*512"),
        ([1], {"max_new_tokens": -1}, ParameterError, "-1"),
        ([1], {"max_new_tokens": 1.5}, ParameterError, "max_new_tokens.*1.5"),
        ([1], {"max_new_tokens": None}, ParameterError, "max_new_tokens.*None"),
        ([1], {"prefill_chunk": 0}, ParameterError, "prefill_chunk"),
        ([1], {"eos_token_ids": 2}, ParameterError, "eos_token_ids is 2"),
        ([1], {"eos_token_ids": None}, ParameterError, "eos_token_ids is None"),
        ([1], {"eos_token_ids": ["</s>"]}, ParameterError, "eos_token_ids is"),
        ([1], {"eos_token_ids": [2.0]}, ParameterError, "eos_token_ids is"),
        ([1], {"sampler": 5}, ParameterError, "sampler is 5"),
        ([1], {"progress": 3}, ParameterError, "progress is 3"),
        (None, {}, PromptError, "the prompt is None"),
        (5, {}, PromptError, "the prompt is 5"),
        (b"abc", {}, PromptError, "the prompt is b'abc'"),
        (mx.zeros((2, 3), dtype=mx.int32), {}, PromptError, r"shape \(2, 3\)"),
        ([1.0], {}, PromptError, "1.0, which is no token id"),
        ("text", {}, PromptError, "the prompt is 'text'"),
    ],
)
def test_bad_requests_fail_at_the_call_before_any_work(prompt, options, error, words):
    m = model("llama_tied")
    cache = m.create_kv_cache()
    with pytest.raises(error, match=words) as caught:
        stream_generate(m, prompt, cache=cache, **options)
    assert isinstance(caught.value, TinyLLMError)
    assert isinstance(caught.value, ValueError)
    assert cache[0].offset == 0
    cache[1].rewind(0)
    uneven = m.create_kv_cache()
    m.layers[0](mx.zeros((1, 1, 64)), m.config.rope.rotation(0, 1, 1), uneven[0])
    for wrong in ([], cache[:1], cache[:1] * 2, 5, [None, None], uneven):
        with pytest.raises(ParameterError, match=r"use model\.create_kv_cache"):
            stream_generate(m, [1], cache=wrong)


def test_a_prompt_that_fits_only_without_the_cache_is_refused():
    m = model("llama_tied")
    cache = m.create_kv_cache()
    list(stream_generate(m, [1] * 500, max_new_tokens=0, cache=cache))
    with pytest.raises(PromptError, match="after 500 tokens in the cache"):
        stream_generate(m, [1] * 13, cache=cache)
    assert cache[0].offset == 500


def test_generation_stops_where_the_context_is_full():
    m = model("llama_tied")
    cache = m.create_kv_cache()
    tokens = list(stream_generate(m, [1] * 510, max_new_tokens=50, cache=cache))
    assert len(tokens) == 3  # at positions 510 and 511, and the one after
    assert cache[0].offset == 512
    assert list(stream_generate(m, [1] * 510, max_new_tokens=50)) == tokens
    assert len(list(stream_generate(m, [1] * 512, max_new_tokens=50))) == 1


def test_the_sampler_gets_log_probabilities_and_decides():
    golden = goldens("qwen2")[1]
    sums, shapes = [], []

    def second_best(logprobs):
        sums.append(mx.exp(logprobs).sum().item())
        shapes.append(logprobs.shape)
        return mx.argsort(logprobs, axis=-1)[:, -2]

    m = model("qwen2")
    tokens = list(stream_generate(m, golden.ids, max_new_tokens=4, sampler=second_best))
    assert shapes == [(1, 384)] * 4
    assert sums == pytest.approx([1.0] * 4, abs=1e-5)
    ids = list(golden.ids)
    for token in tokens:
        logits = m(mx.array([ids]))[0, -1]
        assert token == mx.argsort(logits)[-2].item()
        ids.append(token)


def test_a_failing_sampler_leaves_the_cache_with_what_was_yielded():
    m = model("qwen2")
    cache, calls = m.create_kv_cache(), []

    def sampler(logprobs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no third token")
        return mx.argmax(logprobs, axis=-1)

    seen = []
    stream = stream_generate(m, [1, 2, 3], sampler=sampler, cache=cache)
    with pytest.raises(RuntimeError, match="no third"):
        seen.extend(stream)
    assert [entry.offset for entry in cache] == [3 + len(seen)] * 2
    assert len(seen) == 1


def test_progress_is_told_after_each_chunk():
    told = []
    stream = stream_generate(
        model("qwen2"),
        list(range(10)),
        max_new_tokens=1,
        prefill_chunk=4,
        progress=lambda done, total: told.append((done, total)),
    )
    list(stream)
    assert told == [(4, 10), (8, 10), (10, 10)]


def test_prompts_may_be_arrays():
    golden = goldens("qwen2")[1]
    for prompt in (
        mx.array(golden.ids),
        mx.array([golden.ids]),
        np.array(golden.ids),
        tuple(golden.ids),
        iter(golden.ids),
    ):
        eos = golden.greedy[5]
        tokens = stream_generate(model("qwen2"), prompt, eos_token_ids=mx.array([eos]))
        assert list(tokens) == golden.greedy[: golden.greedy.index(eos) + 1]


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (lambda p: mx.array([384]), "token id 384.*vocabulary of 384"),
        (lambda p: mx.array([1 << 40]), "token id 1099511627776"),
        (lambda p: mx.array([-1]), "token id -1"),
        (lambda p: mx.argmax(p, axis=-1, keepdims=True), r"\(1, 1\)"),
        (lambda p: mx.array([1.0]), "float32"),
        (lambda p: 3, "returned 3"),
    ],
)
def test_a_sampler_that_returns_no_token_is_named(sampler, words):
    m = model("llama_tied")
    cache = m.create_kv_cache()
    stream = stream_generate(m, [1, 2, 3], sampler=sampler, cache=cache)
    with pytest.raises(ParameterError, match=words):
        list(stream)
    assert [entry.offset for entry in cache] == [3, 3]
    one = stream_generate(m, [1, 2, 3], sampler=sampler, max_new_tokens=1)
    with pytest.raises(ParameterError, match=words):
        list(one)


@pytest.mark.parametrize("calls_before", [0, 1, 3])
def test_an_interrupt_between_two_layers_leaves_the_cache_consistent(
    calls_before, monkeypatch
):
    m = model("qwen3")
    cache, calls = m.create_kv_cache(), []
    block = type(m.layers[1])
    call = block.__call__

    def interrupted(self, *args):
        if self is m.layers[1]:
            calls.append(1)
            if len(calls) == calls_before + 1:
                raise KeyboardInterrupt
        return call(self, *args)

    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(block, "__call__", interrupted)
        stream = stream_generate(m, [1, 2, 3], cache=cache)
        with pytest.raises(KeyboardInterrupt):
            seen.extend(stream)
    held = 3 + len(seen) if calls_before else 0
    assert [entry.offset for entry in cache] == [held] * 2
    history = [*([1, 2, 3] if calls_before else []), *seen, 9]
    after = list(stream_generate(m, [9], max_new_tokens=5, cache=cache))
    assert after == naive_greedy(m, history, 5)
