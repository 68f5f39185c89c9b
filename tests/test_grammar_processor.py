"""A logits processor that follows one output, also backwards."""

import json

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from grammar_cases import SCHEMAS, WIDTH, compiler, ids, tokenizer

from tiny_llm.errors import GrammarError, ParameterError
from tiny_llm.grammar import Grammar
from tiny_llm.grammar.compiler import GrammarCompiler
from tiny_llm.grammar.processor import GrammarProcessor

PROMPT = [5, 6, 7]
GRAMMAR = Grammar.choice(["hello", "help", "world"])


def allowed(processor, output):
    logits = processor(mx.array([*PROMPT, *output]), mx.zeros((1, WIDTH)))
    return np.flatnonzero(np.array(logits[0]) == 0).tolist()


def fresh(output):
    matcher = compiler().compile(GRAMMAR)
    for token in output:
        matcher.advance(token)
    return ids(matcher.mask())


def encode(text):
    return tokenizer("qwen2").encode(text, add_special_tokens=False)


def test_any_history_gives_the_mask_of_a_fresh_matcher():
    """Longer, by several tokens, shorter, another one, and the same again."""
    processor = GrammarProcessor(compiler().compile(GRAMMAR), len(PROMPT))
    hello, world = encode("hello"), encode("world")
    assert len(hello) > 1
    histories = [[], hello[:1], hello, [*hello, 2], hello[:1], world, [], world, world]
    for output in histories:
        assert allowed(processor, output) == fresh(output)


def test_the_template_is_not_advanced():
    matcher = compiler().compile(GRAMMAR)
    processor = GrammarProcessor(matcher, 3)
    allowed(processor, encode("hello"))
    assert len(matcher) == 0


def test_a_history_that_the_grammar_does_not_allow_is_an_error_each_time():
    processor = GrammarProcessor(compiler().compile(GRAMMAR), len(PROMPT))
    wrong = [*encode("hello"), *encode("x")]
    for _ in range(2):
        with pytest.raises(GrammarError, match="does not allow token"):
            allowed(processor, wrong)
    assert allowed(processor, encode("hello")) == fresh(encode("hello"))


def test_a_history_without_its_prompt_is_refused():
    processor = GrammarProcessor(compiler().compile(GRAMMAR), 3)
    for tokens in (mx.array([1, 2]), mx.array([[1, 2, 3, 4]])):
        with pytest.raises(ParameterError, match="do not hold the prompt of 3 tokens"):
            processor(tokens, mx.zeros((1, WIDTH)))


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    import tiny_llm

    loaded = tiny_llm.load(smollm2_gguf)
    vocabulary = loaded.model.config.vocab_size
    return loaded, GrammarCompiler(loaded.tokenizer, vocabulary)


def greedy(loaded, processor, prompt, limit):
    """The slow obvious loop: one forward pass a token, argmax of what is allowed."""
    cache = loaded.model.create_kv_cache("dense")
    tokens, new = list(prompt), prompt
    while len(tokens) < len(prompt) + limit:
        logits = loaded.model(
            mx.array([new]), offset=cache[0].offset, cache=cache, logits_to_keep=1
        )
        token = int(mx.argmax(processor(mx.array(tokens), logits[:, -1]), axis=-1))
        if token in loaded.tokenizer.eos_token_ids:
            break
        tokens.append(token)
        new = [token]
    return tokens[len(prompt) :]


@pytest.mark.smollm2
@pytest.mark.parametrize(
    "name",
    ["required properties", "a tool call", "names in other scripts"],
)
def test_smollm2_obeys_a_schema(smollm2, name):
    loaded, own = smollm2
    schema = next(case["schema"] for case in SCHEMAS if case["name"] == name)
    prompt = loaded.tokenizer.encode_chat(
        [{"role": "user", "content": f"Answer in JSON by this schema: {schema}"}]
    )
    matcher = own.compile(Grammar.json_schema(schema, max_whitespace=1))
    processor = GrammarProcessor(matcher, len(prompt))
    output = greedy(loaded, processor, prompt, limit=100)
    assert processor.matcher.accepting, "cut off"
    text = loaded.tokenizer.decode(output)
    jsonschema.validate(json.loads(text), schema)


@pytest.mark.smollm2
def test_what_smollm2_says_anyway_is_not_changed_by_a_grammar_that_allows_it(smollm2):
    loaded, own = smollm2
    prompt = loaded.tokenizer.encode_chat(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    free = greedy(loaded, lambda _, logits: logits, prompt, limit=24)
    matcher = own.compile(Grammar.regex("(?s:.*)"))
    kept = greedy(loaded, GrammarProcessor(matcher, len(prompt)), prompt, limit=24)
    assert kept == free
    assert len(free) > 3
