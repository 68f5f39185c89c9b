"""The engine as its callers see it, in one thread. See also test_engine_*.py."""

import gc
import time

import mlx.core as mx
import numpy as np
import pytest
from engine_runs import alone, engine_of, finish, prompts
from oracle import DATA, goldens, model

import tiny_llm
from tiny_llm import Engine, SamplingParams
from tiny_llm.engine import Piece
from tiny_llm.errors import (
    ChatTemplateError,
    EngineClosedError,
    OutOfPagesError,
    ParameterError,
    PromptError,
    RequestError,
)

TEXT = "llama_llama3rope_bias"  # it has a tokenizer


@pytest.fixture(scope="module")
def loaded():
    return tiny_llm.load(DATA / TEXT)


@pytest.fixture
def engine(loaded):
    with engine_of(*loaded) as engine:
        yield engine
        finish(engine)


def sampling(max_tokens=12, **options):
    return SamplingParams(max_tokens=max_tokens, **options)


def plain_ids(loaded, prompt, n):
    """What stream_text answers, and the text of it."""
    result = tiny_llm.generate(*loaded, prompt, max_new_tokens=n)
    return result.token_ids, result.text


@pytest.mark.parametrize("variant", ["llama_tied", "mistral_swa", "qwen2", "qwen3"])
@pytest.mark.parametrize("pipeline", [False, True])
def test_requests_side_by_side_get_the_reference_tokens(variant, pipeline):
    with engine_of(variant, pipeline=pipeline) as engine:
        handles = [engine.submit(g.ids, sampling(24)) for g in goldens(variant)]
        finish(engine)
        for handle, golden in zip(handles, goldens(variant), strict=True):
            result = handle.result()
            assert result.token_ids == golden.greedy
            assert (result.finish_reason, result.error) == ("length", None)
            assert result.prompt_tokens == len(golden.ids)


def test_a_prompt_may_be_text_messages_or_token_ids(engine, loaded):
    tokenizer = loaded.tokenizer
    messages = [{"role": "user", "content": "Hello"}]
    options = {"add_generation_prompt": False}
    for prompt, given, ids in [
        ("Hello", None, tokenizer.encode("Hello")),
        (messages, None, tokenizer.encode_chat(messages)),
        (messages, options, tokenizer.encode_chat(messages, **options)),
        ([1, 362], None, [1, 362]),
        (np.array([1, 362]), None, [1, 362]),
        (mx.array([1, 362]), None, [1, 362]),
    ]:
        handle = engine.submit(prompt, sampling(6), template_options=given)
        assert handle.prompt_tokens == len(ids)
        assert handle.result().token_ids == plain_ids(loaded, ids, 6)[0]


def test_pieces_together_are_the_result_and_its_text_is_all_ids_decoded(engine, loaded):
    handles = [engine.submit(p, sampling(40)) for p in ("Hello world", "ab", "日本")]
    for handle in handles:
        pieces = list(handle)
        assert all(isinstance(piece, Piece) for piece in pieces)
        result = handle.result()
        ids = [token for piece in pieces for token in piece.token_ids]
        assert ids == result.token_ids == handle.token_ids
        shown = [i for i in ids if i not in loaded.tokenizer.eos_token_ids]
        text = "".join(piece.text for piece in pieces)
        assert text == result.text == loaded.tokenizer.decode(shown)
        assert list(handle) == []  # each piece comes once


def test_a_character_cut_off_at_the_end_comes_as_a_last_piece_without_tokens(loaded):
    tokenizer = loaded.tokenizer
    half = next(i for i in range(384) if tokenizer.decode([i]) == "\ufffd")
    with engine_of(*loaded) as engine:
        forced = sampling(2, logit_bias={half: 1e6})
        pieces = list(engine.submit("a", forced))
    assert [piece.token_ids for piece in pieces] == [[half], [half], []][: len(pieces)]
    assert pieces[-1].text
    assert "".join(p.text for p in pieces) == tokenizer.decode([half, half])


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_an_eos_id_stops_also_exactly_at_the_limit(loaded, pipeline, extra):
    # eos_token_id is 2 in config.json, [2, 3] in generation_config.json
    for eos in (2, 3):
        drawn = iter([310, 311, eos, 312, 313, 314, 315])
        params = sampling(3 + extra, sampler=lambda _, d=drawn: mx.array([next(d)]))
        with engine_of(*loaded, pipeline=pipeline) as engine:
            result = engine.submit("Hello", params).result()
            finish(engine)
        assert result.token_ids == [310, 311, eos]
        assert result.finish_reason == "stop"
        assert result.text == loaded.tokenizer.decode([310, 311])


def test_stop_ids_stop_and_ignore_eos_leaves_only_them(engine, loaded):
    first = sampling(1, logit_bias={2: 1e6})
    assert engine.submit("a", first).result().finish_reason == "stop"
    first = sampling(3, logit_bias={2: 1e6}, ignore_eos=True)
    ignored = engine.submit("a", first).result()
    assert (ignored.token_ids, ignored.finish_reason) == ([2, 2, 2], "length")
    ids, _ = plain_ids(loaded, "Hello", 12)
    stop = ids[5]
    result = engine.submit("Hello", sampling(stop_token_ids=[stop])).result()
    assert result.token_ids == ids[: ids.index(stop) + 1]
    assert result.finish_reason == "stop"
    assert result.text == loaded.tokenizer.decode(ids[: ids.index(stop)])


def test_the_answer_ends_where_the_context_is_full(engine):
    # at positions 510 and 511, and the one after
    lengths = {510: 3, 512: 1}
    for length, tokens in lengths.items():
        result = engine.submit([7] * length, sampling(50, ignore_eos=True)).result()
        assert (len(result.token_ids), result.finish_reason) == (tokens, "length")
        alone = tiny_llm.stream_generate(engine.model, [7] * length, max_new_tokens=50)
        assert result.token_ids == list(alone)


@pytest.mark.parametrize("pipeline", [False, True])
@pytest.mark.parametrize("after", range(6))
def test_a_cancelled_request_keeps_what_it_has_and_is_gone_after_a_step(
    pipeline, after
):
    ids, other = prompts("qwen3", [90, 20], 24)
    options = {"pipeline": pipeline, "max_step_tokens": 32}
    with engine_of("qwen3", **options) as engine:
        beside = engine.submit(other, sampling(24))
        handle = engine.submit(ids, sampling(24))
        for _ in range(after):
            engine.step()
        handle.cancel()
        handle.cancel()
        engine.step()
        assert handle.state == "done"
        in_use = engine.stats.pages_in_use
        assert in_use <= 3  # the neighbour's
        result = handle.result()
        assert (result.finish_reason, result.error) == ("cancelled", None)
        assert result.token_ids == alone("qwen3", ids, 24)[: len(result.token_ids)]
        assert len(result.token_ids) < 24
        finish(engine)
        assert beside.result().token_ids == alone("qwen3", other, 24)
        handle.cancel()  # it may be done
        assert handle.result() is result
        assert result.finish_reason == "cancelled"


def test_states_and_progress_of_a_request():
    ids, other = prompts("qwen3", [90, 20], 8)
    with engine_of("qwen3", max_batch=1, max_step_tokens=32) as engine:
        first, second = engine.submit(ids, sampling(8)), engine.submit(other)
        assert (first.state, first.prefilled, first.token_ids) == ("waiting", 0, [])
        engine.step()
        assert (first.state, second.state) == ("prefilling", "waiting")
        assert 0 < first.prefilled <= 32
        assert engine.stats.running == engine.stats.waiting == 1
        assert engine.stats.pages_in_use > 0
        while first.state == "prefilling":
            engine.step()
        assert (first.state, first.prefilled) == ("decoding", 90)
        assert first.token_ids == alone("qwen3", ids, 8)[:1]
        second.cancel()
        finish(engine)
        assert (first.state, second.state) == ("done", "done")
        assert second.result().token_ids == []
        stats = engine.stats
        assert stats.rows == 90 + 7  # the last token is not computed
        assert stats.steps >= 3 + 7
        assert (stats.prompt_tokens, stats.cached_tokens) == (90, 0)
        assert 90 * 2 * 2 * 2 * 32 * 4 <= stats.kv_bytes <= 1 << 20
        assert stats.pages == 64


def test_timings_are_ordered_and_within_what_really_passed():
    ids, other = prompts("qwen3", [90, 20], 8)
    with engine_of("qwen3", max_batch=1) as engine:
        start = time.perf_counter()
        handles = [engine.submit(p, sampling(8)) for p in (ids, other)]
        cancelled = engine.submit(ids)
        time.sleep(0.02)
        finish_first = handles[0].result()
        cancelled.cancel()
        finish(engine)
        passed = time.perf_counter() - start
    first, second = finish_first, handles[1].result()
    for result in (first, second):
        assert 0.02 <= result.queued_seconds < result.first_token_seconds
        assert result.first_token_seconds < result.total_seconds <= passed
        assert result.decode_tokens_per_second == 7 / result.decode_seconds
    assert second.queued_seconds >= first.total_seconds
    never = cancelled.result()
    assert 0.02 <= never.queued_seconds == never.total_seconds <= passed


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.5, "seed": 3},
        {"logit_bias": {9: 4.0}},
        {"sampler": lambda p: mx.argsort(p, axis=-1)[:, -3]},
    ],
)
def test_logprobs_are_the_models_own_log_softmax(options):
    ids, other = prompts("qwen3", [20, 30], 8)
    with engine_of("qwen3") as engine:
        beside = engine.submit(other, sampling(8))
        result = engine.submit(ids, sampling(8, logprobs=True, **options)).result()
        finish(engine)
        assert beside.result().logprobs is None
    sequence = mx.array([[*ids, *result.token_ids[:-1]]])
    logits = np.array(model("qwen3")(sequence, logits_to_keep=8)[0], dtype=np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = logprobs[np.arange(8), result.token_ids]
    assert np.abs(np.array(result.logprobs) - expected).max() < 1e-4


def test_what_was_found_in_the_cache_and_why_not_more():
    (ids,) = prompts("qwen3", [70], 8)
    with engine_of("qwen3") as engine:

        def cached(prompt):
            result = engine.submit(prompt, sampling(1)).result()
            return result.cached_tokens, result.cache_miss_reason

        assert cached(ids) == (0, None)
        assert cached(ids) == (64, None)
        assert cached(ids[:64]) == (48, None)
        other = [*ids[:20], 3, *ids[21:]]
        assert cached(other) == (16, "first difference at token 20")
        assert engine.stats.cached_tokens == 64 + 48 + 16
        assert engine.stats.prompt_tokens == 70 * 3 + 64
        assert engine.stats.cached_pages > 0
    with engine_of("qwen3", prefix_cache=False) as engine:
        assert [cached(ids), cached(ids)] == [(0, None)] * 2
        assert engine.stats.cached_pages == 0


def test_a_chat_pays_for_its_new_turn_only():
    with engine_of("qwen3") as engine:
        history, paid = [], []
        for turn in range(5):
            history += [10 + turn, 40, 41 + turn] * 7
            result = engine.submit(history, sampling(16)).result()
            assert result.cached_tokens % 16 == 0
            paid.append(len(history) - result.cached_tokens)
            fresh = tiny_llm.stream_generate(engine.model, history, max_new_tokens=16)
            assert result.token_ids == list(fresh)
            history += result.token_ids
        assert paid[0] == 21
        # the turn, the last answer's newest token, and what is no full page
        assert all(cost <= 21 + 1 + 15 for cost in paid[1:])
        finish(engine)


# generate


def test_generate_returns_results_in_the_order_of_the_prompts(engine, loaded):
    texts = ["Hello world", "a", "one two three four five", "日本", "x" * 30, "b"]
    results = engine.generate(texts, sampling())
    for text, result in zip(texts, results, strict=True):
        assert (result.token_ids, result.text) == plain_ids(loaded, text, 12)
    own = [sampling(n + 1) for n in range(6)]
    results = engine.generate(tuple(texts), own)
    assert [len(result.token_ids) for result in results] == [1, 2, 3, 4, 5, 6]
    assert engine.generate([]) == []
    assert len(engine.generate(["Hello"])[0].token_ids) > 12


def test_a_prompt_that_cannot_be_used_gives_an_error_result_and_the_others_go_on(
    engine, loaded
):
    bad = [[], [384], b"abc", 5, [{"role": "user"}], [1] * 600, "x" * 9000]
    kinds = [PromptError] * 4 + [ChatTemplateError] + [PromptError] * 2
    results = engine.generate(["Hello", *bad, "a"], sampling())
    assert results[0].token_ids == plain_ids(loaded, "Hello", 12)[0]
    assert results[-1].token_ids == plain_ids(loaded, "a", 12)[0]
    for result, kind in zip(results[1:-1], kinds, strict=True):
        assert (result.finish_reason, result.token_ids) == ("error", [])
        assert isinstance(result.error, kind)


def test_generate_tells_how_many_answers_are_done(engine):
    told = []
    params = [sampling(n) for n in (3, 9, 6)]
    engine.generate(["a", "b", []], params, progress=lambda *p: told.append(p))
    assert told == sorted(told)
    assert told[0] == (1, 3)  # the bad one
    assert told[-1] == (3, 3)
    assert {total for _, total in told} == {3}


@pytest.mark.parametrize("pipeline", [False, True])
def test_ctrl_c_in_generate_cancels_all_and_the_engine_goes_on(loaded, pipeline):
    calls = []

    def interrupt(done, total):
        calls.append(done)
        if len(calls) == 4:
            raise KeyboardInterrupt

    with engine_of(*loaded, pipeline=pipeline) as engine:
        own = engine.submit("Hello", sampling())
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["a", "b"] * 5, sampling(), progress=interrupt)
        assert engine.stats.waiting + engine.stats.running == 1
        assert own.result().token_ids == plain_ids(loaded, "Hello", 12)[0]
        again = engine.generate(["a"], sampling())[0]
        assert again.token_ids == plain_ids(loaded, "a", 12)[0]
        finish(engine)


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ("text", None, "prompts is 'text'"),
        (5, None, "prompts is 5"),
        (["a", "b"], [SamplingParams()], "1 params for 2 prompts"),
        (["a"], {"max_tokens": 3}, "params is"),
        (["a", "b"], [SamplingParams(), 3], "params is 3"),
    ],
)
def test_generate_refuses_other_arguments(engine, prompts, params, words):
    with pytest.raises(ParameterError, match=words):
        engine.generate(prompts, params)


# refusals


@pytest.mark.parametrize(
    ("prompt", "params", "options", "error", "words"),
    [
        ([], None, {}, PromptError, "empty"),
        ([384], None, {}, PromptError, "384 is not in the vocabulary of 384"),
        ([-1], None, {}, PromptError, "-1 is not in the vocabulary"),
        ([1] * 513, None, {}, PromptError, "513 tokens.*512"),
        (None, None, {}, PromptError, "the prompt is None"),
        ({"role": "user"}, None, {}, PromptError, "the prompt is {"),
        ([{"role": "user"}], None, {}, ChatTemplateError, "has no content"),
        (
            [{"role": "user", "content": "x"}],
            None,
            {"template_options": 5},
            ParameterError,
            "template_options is 5",
        ),
        ("a", {"max_tokens": 3}, {}, ParameterError, "SamplingParams are needed"),
        (
            "a",
            SamplingParams(stop_token_ids=[384]),
            {},
            ParameterError,
            "stop_token_ids has the token id 384.*vocabulary of 384",
        ),
        (
            "a",
            SamplingParams(logit_bias={400: 1.0}),
            {},
            ParameterError,
            "logit_bias has the token id 400",
        ),
    ],
)
def test_submit_refuses_by_type_and_name_and_nothing_has_changed(
    engine, prompt, params, options, error, words
):
    before = engine.stats
    with pytest.raises(error, match=words) as caught:
        engine.submit(prompt, params, **options)
    assert type(caught.value) is error
    assert engine.stats == before
    assert not engine.step()


def test_text_without_a_tokenizer_is_refused():
    with engine_of("qwen3") as engine:
        with pytest.raises(PromptError, match="no tokenizer"):
            engine.submit("text")
        with pytest.raises(PromptError):
            engine.submit([{"role": "user", "content": "x"}])
        result = engine.submit([5], sampling(3)).result()
        assert (len(result.token_ids), result.text) == (3, "")


@pytest.mark.parametrize("variant", ["qwen3", "mistral_swa"])
def test_what_can_never_fit_is_refused_with_the_numbers_and_what_just_fits_runs(
    variant,
):
    (ids,) = prompts(variant, [60], 21)
    with engine_of(variant, pages=5, max_step_tokens=32) as engine:
        pages = engine.stats.pages
        if variant == "qwen3":
            assert pages == 5
            words = r"60 tokens with up to 22 more needs 6 pages of 16.*holds 5"
            with pytest.raises(OutOfPagesError, match=words):
                engine.submit(ids, sampling(22))
        # the last token is not stored: 60 + 20 of 80
        handle = engine.submit(ids, sampling(21))
        finish(engine)
        assert handle.result().token_ids == alone(variant, ids, 21)


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": 0},
        {"max_step_tokens": 2},
        {"kv_memory": 5},
        {"kv_memory": "1GB"},
        {"page_size": 0},
        {"kv_bits": 5},
        {"kv_group_size": 32},
        {"kv_memory": 1 << 50},
    ],
)
def test_an_engine_refuses_bad_arguments(options):
    with pytest.raises(ParameterError):
        engine_of("qwen3", **options)


def test_kv_memory_holds_and_has_a_default():
    m = model("qwen3")
    for memory in (50_000, 131_071, 1 << 20):
        with engine_of(m, kv_memory=memory) as engine:
            assert 0.7 * memory < engine.pool.most_bytes <= memory
            most = engine.stats.pages * 16 // 2
            for _ in range(4):
                engine.submit([5] * most, sampling(most))
            finish(engine)
            assert 0.7 * memory < engine.stats.kv_bytes <= memory
    with Engine(m) as engine:
        assert engine.submit([1] * 512, sampling(1)).result().error is None


# the end


def test_closing_cancels_what_has_not_ended_and_may_be_repeated():
    ids, other = prompts("qwen3", [20, 30], 8)
    engine = engine_of("qwen3", max_batch=1)
    done = engine.submit(ids, sampling(8)).result()
    handles = [engine.submit(p, sampling(8)) for p in (ids, other)]
    engine.step()
    engine.step()
    waits = engine.submit(other)
    engine.close()
    engine.close()
    assert [h.result().finish_reason for h in (*handles, waits)] == ["cancelled"] * 3
    got = handles[0].result().token_ids
    assert got == done.token_ids[: len(got)]
    assert len(got) >= 1
    engine.check_integrity()
    assert engine.stats.pages_in_use == 0
    for call in (
        lambda: engine.submit(ids),
        lambda: engine.generate([ids]),
        engine.start,
    ):
        with pytest.raises(EngineClosedError, match="closed"):
            call()
    assert not engine.step()
    handles[0].cancel()
    assert list(waits) == []


def test_leaving_the_with_block_closes_also_after_an_error():
    engine = engine_of("qwen3")
    handle = engine.submit([5, 6])
    with pytest.raises(ZeroDivisionError), engine:
        raise ZeroDivisionError
    assert handle.result().finish_reason == "cancelled"
    with pytest.raises(EngineClosedError):
        engine.submit([5])


def test_handles_that_nobody_reads_keep_nobody_waiting():
    ids, other = prompts("qwen3", [20, 30], 12)
    with engine_of("qwen3", max_batch=2) as engine:
        for _ in range(5):
            engine.submit(ids, sampling())
        half_read = engine.submit(other, sampling())
        next(half_read)
        del half_read
        gc.collect()
        kept = engine.submit(other, sampling())
        assert kept.result().token_ids == alone("qwen3", other, 12)
        finish(engine)
    with engine_of("qwen3") as engine:
        handle = engine.submit(ids)
        next(handle)
    del engine
    gc.collect()
    assert handle.result().finish_reason == "cancelled"


def test_iterating_a_failed_request_gives_its_tokens_and_then_raises():
    (ids,) = prompts("qwen3", [20], 3)
    tokens, calls = alone("qwen3", ids, 3), iter(range(10))

    def sampler(logprobs):
        if next(calls) == 2:
            raise ZeroDivisionError("no third token")
        return mx.argmax(logprobs, axis=-1)

    with engine_of("qwen3") as engine:
        handle = engine.submit(ids, sampling(sampler=sampler))
        seen = []
        with pytest.raises(RequestError, match="request 0 failed: no third") as caught:
            seen.extend(piece.token_ids for piece in handle)
        result = handle.result()
    assert seen == [[tokens[0]], [tokens[1]]]
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (result.finish_reason, result.error) == ("error", caught.value)
    assert result.token_ids == tokens[:2]
