"""The default model, from its GGUF file, against the reference."""

import mlx.core as mx
import numpy as np
import pytest
from oracle import naive_greedy, smollm2_cases

import tiny_llm
from tiny_llm import stream_generate, stream_text

pytestmark = pytest.mark.smollm2
CASES = smollm2_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])


@pytest.fixture(scope="module")
def loaded(smollm2_gguf):
    return tiny_llm.load(smollm2_gguf)


@each_case
def test_all_greedy_tokens_equal_the_reference(loaded, case):
    tokens = stream_generate(loaded.model, case["ids"], max_new_tokens=64)
    assert list(tokens) == case["greedy"]


@each_case
@pytest.mark.parametrize("chunk", [7, 256])
def test_chunked_prefill_gives_the_same_tokens(loaded, case, chunk):
    tokens = stream_generate(
        loaded.model, case["ids"], max_new_tokens=24, prefill_chunk=chunk
    )
    assert list(tokens) == case["greedy"][:24]


@pytest.mark.parametrize("name", ["one_token", "emoji"])
def test_the_uncached_forward_gives_the_same_tokens(loaded, name):
    case = next(c for c in CASES if c["name"] == name)
    assert naive_greedy(loaded.model, case["ids"], 16) == case["greedy"][:16]


@each_case
def test_log_probabilities_of_the_best_five_are_within_1e_3(loaded, case):
    steps = len(case["top5"])
    ids = mx.array([[*case["ids"], *case["greedy"][: steps - 1]]])
    logits = loaded.model(ids, logits_to_keep=steps)[0]
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    for row, best in zip(logprobs, case["top5"], strict=True):
        assert np.abs(row[best["ids"]] - np.array(best["logprobs"])).max() <= 1e-3


@each_case
def test_streamed_text_equals_the_reference_without_half_characters(loaded, case):
    prompt = case.get("messages") or case["prompt_text"]
    stream = stream_text(*loaded, prompt, max_new_tokens=64)
    pieces = list(stream)
    result = stream.result
    assert result.prompt_tokens == len(case["ids"])
    assert "".join(pieces) == result.text == case["text_until_eos"]
    assert all("\ufffd" not in piece for piece in pieces[:-1])
    if case["first_eos"] is None:
        assert (result.finish_reason, len(result.token_ids)) == ("length", 64)
    else:
        assert result.finish_reason == "stop"
        assert result.token_ids == case["greedy"][: case["first_eos"] + 1]
