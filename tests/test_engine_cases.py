"""Field reports about batches, prefixes and preemption, through the engine."""

import random

import mlx.core as mx
import pytest
from engine_runs import GAP, alone, engine_of, finish, prompts
from oracle import model, random_model

import tiny_llm
from tiny_llm import Engine, SamplingParams, stream_generate

PIPELINE = pytest.mark.parametrize("pipeline", [False, True])
PAGE = 16


def sampling(max_tokens, **options):
    return SamplingParams(max_tokens=max_tokens, **options)


# case 1: answers leak between users


WORDS = (
    "zebra kiwi violin anchor pepper lantern glacier saddle "
    "walnut comet thimble orchid barrel falcon mitten quartz"
).split()


def beyond_doubt(m, ids, tokens):
    """How many first tokens are chosen with a gap to the second best."""
    logits = m(mx.array([[*ids, *tokens[:-1]]]), logits_to_keep=len(tokens))[0]
    best = mx.sort(logits, axis=-1)[:, -2:]
    gaps = (best[:, 1] - best[:, 0]).tolist()
    close = [place for place, gap in enumerate(gaps) if gap < GAP]
    return close[0] if close else len(tokens)


@pytest.mark.smollm2
def test_no_user_ever_sees_anothers_secret(smollm2_gguf):
    m, tokenizer = tiny_llm.load(smollm2_gguf)
    draw = random.Random(1)
    filler = "It is said that a word is worth a thousand pictures at least. "
    users = []
    for i, word in enumerate(WORDS):
        # every second user's prompt begins like the others'
        shared = filler * (i % 4) if i % 2 else ""
        ids = tokenizer.encode(
            f"{shared}The secret word of user {i} is {word}. Repeat it:"
        )
        expected = list(stream_generate(m, ids, max_new_tokens=12))
        users.append((word, ids, expected))
    assert min(len(ids) for _, ids, _ in users) >= 8
    assert max(len(ids) for _, ids, _ in users) <= 64
    doubtful = set()
    with Engine(m, tokenizer, max_batch=8, page_size=8, kv_memory=32 << 20) as engine:
        for _ in range(3):
            draw.shuffle(users)
            results = engine.generate(
                [ids for _, ids, _ in users], sampling(12, ignore_eos=True)
            )
            engine.check_integrity()
            for (word, ids, expected), result in zip(users, results, strict=True):
                if result.token_ids != expected:
                    sure = beyond_doubt(m, ids, expected)
                    assert result.token_ids[:sure] == expected[:sure]
                    doubtful.add(word)
                said = result.text.lower()
                assert not [w for w in WORDS if w != word and w in said]
            assert all(result.error is None for result in results)
        assert len(doubtful) <= 2
        assert engine.stats.cached_tokens > 600
        finish(engine)


# case 6: the same prompt twice


@PIPELINE
@pytest.mark.parametrize("variant", ["qwen3", "mistral_swa"])
@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_the_same_prompt_twice_computes_its_last_token_again(pipeline, variant, length):
    (ids,) = prompts(variant, [length], 20)
    expected = alone(variant, ids, 20)
    found = (length - 1) // PAGE * PAGE  # full pages, but not the last token
    with engine_of(variant, pipeline=pipeline) as engine:
        for cached in (0, found, found):
            rows = engine.stats.rows
            result = engine.submit(ids, sampling(20)).result()
            finish(engine)
            assert result.token_ids == expected
            assert result.cached_tokens == cached
            # (pipelined, the last row may be computed in vain)
            computed = engine.stats.rows - rows
            assert computed - (length - cached + 19) in ({0, 1} if pipeline else {0})
    with engine_of(variant, pipeline=pipeline) as engine:  # side by side
        handles = [engine.submit(ids, sampling(20)) for _ in range(2)]
        engine.step()
        handles += [engine.submit(ids, sampling(20)) for _ in range(3)]
        finish(engine)
        assert [handle.result().token_ids for handle in handles] == [expected] * 5
        later = [handle.result().cached_tokens for handle in handles[2:]]
        assert max(later) == found


# case 7: preemption with prefix hits


@PIPELINE
@pytest.mark.parametrize("variant", ["llama_tied", "qwen3"])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_two_requests_in_seven_pages_equal_their_run_alone(
    pipeline, variant, cached, shared
):
    first, second = prompts(variant, [34, 34], 35)
    if shared:
        for seed in range(50):
            (tail,) = prompts(variant, [2], 1, seed=seed)
            second = [*first[:32], *tail]
            try:
                alone(variant, second, 35)
                break
            except AssertionError:
                continue
    options = {"pipeline": pipeline, "prefix_cache": cached}
    with engine_of(variant, pages=7, **options) as engine:
        (allocator,) = engine.pool.allocators
        assert allocator.count == allocator.free == 7
        # an answer was short, so both are let in
        engine.submit([5], sampling(1)).result()
        handles = [engine.submit(ids, sampling(35)) for ids in (first, second)]
        finish(engine)
        for ids, handle in zip((first, second), handles, strict=True):
            assert handle.result().token_ids == alone(variant, ids, 35)
        assert allocator.free == 7
        # 5 pages each: without two in common they do not fit side by side
        assert (engine.stats.preemptions > 0) or (shared and cached)


# case 8: rows of very different length join a windowed batch


@PIPELINE
@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("layers", ["all", "mixed"])
def test_requests_of_any_length_join_a_windowed_batch(pipeline, views, layers):
    changes = {"sliding_window": 16}
    if layers == "all":
        m = random_model("mistral_swa", **changes)
    else:
        mixed = {"use_sliding_window": True, "max_window_layers": 1}
        m = random_model("qwen2", **changes, **mixed)
    draw = random.Random(2)
    lengths, expected, asked = [5, 40, 21, 90], [], []
    while len(asked) < 4:
        ids = [draw.randrange(300) for _ in range(lengths[len(asked)])]
        tokens = list(stream_generate(m, ids, max_new_tokens=24))
        if beyond_doubt(m, ids, tokens) == 24:
            asked.append(ids)
            expected.append(tokens)
    options = {"pipeline": pipeline, "page_views": views, "max_step_tokens": 48}
    with engine_of(m, **options) as engine:
        for _ in range(2):
            handles = [engine.submit(ids, sampling(24)) for ids in asked[:2]]
            for ids in asked[2:]:
                for _ in range(4):
                    engine.step()
                    engine.check_integrity()
                handles.append(engine.submit(ids, sampling(24)))
            finish(engine)
            assert [handle.result().token_ids for handle in handles] == expected


# prefixes


@PIPELINE
def test_chats_side_by_side_pay_for_their_new_turns_only(pipeline):
    system = prompts("qwen3", [50], 1)[0]
    draw = random.Random(3)
    with engine_of("qwen3", pipeline=pipeline, kv_memory=2 << 20) as engine:
        chats = [list(system) for _ in range(4)]
        for turn in range(4):
            new = [draw.randint(5, 30) for _ in chats]
            for chat, n in zip(chats, new, strict=True):
                chat += [draw.randrange(4, 320) for _ in range(n)]
            before = [len(chat) for chat in chats]
            results = engine.generate(chats, sampling(12))
            for chat, n, result in zip(chats, new, results, strict=True):
                fresh = list(stream_generate(model("qwen3"), chat, max_new_tokens=12))
                sure = beyond_doubt(model("qwen3"), chat, fresh)
                assert result.token_ids[:sure] == fresh[:sure]
                if turn:
                    # the last answer's newest token is not stored
                    least = len(chat) - n - 1
                    assert result.cached_tokens == least // PAGE * PAGE
                chat += result.token_ids
            assert [len(chat) - 12 for chat in chats] == before
        finish(engine)


def cached(engine, ids, n=1):
    result = engine.submit(ids, sampling(n)).result()
    assert result.token_ids == alone("qwen3", ids, n)
    return result.cached_tokens


def test_what_was_used_last_is_evicted_last_and_the_bound_holds():
    several = prompts("qwen3", [3 * PAGE + 1] * 3, 1)
    (big,) = prompts("qwen3", [5 * PAGE + 1], 1, seed=1)
    with engine_of("qwen3", pages=12) as engine:
        assert [cached(engine, ids) for ids in several] == [0, 0, 0]
        assert engine.stats.cached_pages == 9
        assert cached(engine, several[0]) == 3 * PAGE  # used again
        assert cached(engine, big) == 0  # takes 6 of 12, and 3 are free
        engine.check_integrity()
        assert cached(engine, several[0]) == 3 * PAGE
        result = engine.submit(several[1], sampling(1)).result()
        assert result.cached_tokens < 3 * PAGE
        if not result.cached_tokens:
            assert result.cache_miss_reason == "evicted"
        assert engine.stats.cached_pages <= 12
        assert engine.stats.kv_bytes <= engine.pool.most_bytes
        finish(engine)


def test_a_heads_pages_are_found_longer_than_its_tail():
    ids, other = prompts("qwen3", [5 * PAGE + 1, 3 * PAGE + 1], 1)
    with engine_of("qwen3", pages=7) as engine:
        assert cached(engine, ids) == 0
        assert cached(engine, other) == 0
        assert 0 < cached(engine, ids) < 5 * PAGE


@PIPELINE
def test_the_prefix_of_a_request_that_still_runs_is_found(pipeline):
    ids, tail = prompts("qwen3", [70, 9], 24)
    with engine_of("qwen3", pipeline=pipeline) as engine:
        first = engine.submit(ids, sampling(24))
        while first.state != "decoding":
            engine.step()
        longer = [*ids[:50], *tail]
        handles = [engine.submit(longer, sampling(3)) for _ in range(2)]
        engine.step()
        assert first.state == "decoding"
        in_use = engine.stats.pages_in_use
        assert in_use < 3 * 5 + 2  # three pages are shared
        finish(engine)
        fresh = list(stream_generate(model("qwen3"), longer, max_new_tokens=3))
        for handle in handles:
            assert handle.result().cached_tokens == 3 * PAGE
            assert handle.result().token_ids == fresh
        assert first.result().token_ids == alone("qwen3", ids, 24)
        # the answer's pages are found as well
        again = [*ids, *first.result().token_ids]
        assert cached(engine, again) == (70 + 23) // PAGE * PAGE
