"""Grammars in the engine: every answer obeys its own, whoever shares the batch."""

import json
import re

import jsonschema
import pytest
from engine_runs import engine_of, finish
from guesses import Guesses
from oracle import DATA
from thinking_model import thinking

import tiny_llm
from tiny_llm import Engine, SamplingParams
from tiny_llm.errors import GrammarError, ParameterError
from tiny_llm.grammar import Grammar

PIPELINE = pytest.mark.parametrize("pipeline", [False, True])
PHONE = Grammar.regex(r"[0-9]{3}-[0-9]{4}")
COLOUR = Grammar.choice(["red", "green", "blue"])
SCHEMA = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
RULES = (
    {"grammar": PHONE},
    {"grammar": COLOUR, "temperature": 1.5, "seed": 1},
    {"grammar": SCHEMA, "temperature": 0.8, "seed": 2, "repetition_penalty": 1.2},
    {"grammar": PHONE, "temperature": 2.0, "top_k": 3, "seed": 3},
    {},
)


def check(results):
    assert all(result.error is None for result in results)
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", results[0].text)
    assert results[1].text in ("red", "green", "blue")
    if results[2].finish_reason == "stop":
        found = json.loads(results[2].text)
        assert isinstance(found["a"], int)
        assert found["b"] in ("x", "y")
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", results[3].text)


def answers(pipeline, speculation=None, rules=RULES):
    with engine_of(
        *thinking(), pipeline=pipeline, kv_memory=1 << 22, speculation=speculation
    ) as engine:
        handles = [
            engine.submit("Hello", SamplingParams(max_tokens=60, **rule))
            for rule in rules
        ]
        finish(engine)
        return [handle.result() for handle in handles]


@PIPELINE
def test_answers_of_a_mixed_batch_obey_and_are_as_alone(pipeline):
    results = answers(pipeline)
    check(results)
    alone = [answers(False, rules=[rule])[0].token_ids for rule in RULES]
    assert [result.token_ids for result in results] == alone


@PIPELINE
def test_guesses_change_nothing(pipeline):
    plain = answers(False)
    prompt = thinking().tokenizer.encode("Hello")
    known = [(*prompt, *result.token_ids) for result in plain]
    guesses = Guesses(5, known, 386)
    found = answers(pipeline, guesses)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    assert guesses.counts.accepted > 20
    assert guesses.counts.accepted < guesses.counts.drafted


def test_an_answer_cut_by_max_tokens_is_told_from_a_complete_one():
    rules = [{"grammar": Grammar.regex("[a-z]{200}")}]
    (cut,) = answers(False, rules=rules)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 60)
    (whole,) = answers(False, rules=[{"grammar": PHONE}])
    assert whole.finish_reason == "stop"


def test_a_restart_and_preemption_begin_the_grammar_anew():
    with engine_of(*thinking(), kv_memory=1 << 22) as engine:
        handles = [
            engine.submit("Hello", SamplingParams(max_tokens=60, **rule))
            for rule in RULES
        ]
        for _ in range(4):
            engine.step()
        engine._core.restart()
        finish(engine)
        found = [handle.result() for handle in handles]
    check(found)
    assert [r.token_ids for r in found] == [r.token_ids for r in answers(False)]


def test_a_refused_grammar_is_an_error_before_any_work():
    with engine_of(*thinking(), kv_memory=1 << 22) as engine:
        with pytest.raises(GrammarError):
            engine.submit("Hello", SamplingParams(grammar=Grammar.regex("(")))
        assert not engine.step()
        assert engine.stats.steps == 0


def test_a_grammar_that_is_complete_counts_for_more_than_min_tokens():
    rule = {"grammar": COLOUR, "min_tokens": 50}
    (result,) = answers(False, rules=[rule])
    assert result.text in ("red", "green", "blue")
    with pytest.raises(ParameterError, match="ignore_eos"):
        SamplingParams(grammar=COLOUR, ignore_eos=True)


def test_where_nothing_is_allowed_the_request_fails_alone():
    tokenizer = thinking().tokenizer
    first = [[i] for i in range(384) if tokenizer.decode([i])[:1] in "rgb"]
    rules = [{"grammar": COLOUR, "bad_words": first}, {"grammar": COLOUR}]
    failed, good = answers(False, rules=rules)
    assert "no token is allowed" in str(failed.error)
    assert good.error is None


@pytest.mark.smollm2
def test_smollm2_obeys_50_schemas_that_it_is_too_small_to_obey(smollm2_gguf):
    """One after another in a batch, drawn, guesses verified: every answer validates."""
    loaded = tiny_llm.load(smollm2_gguf)
    schemas = json.loads((DATA / "schemas.json").read_text())
    schemas = [entry.get("schema", entry) for entry in schemas]
    assert len(schemas) == 50
    messages = [{"role": "user", "content": "Describe a small house as JSON."}]
    with Engine(*loaded, speculation=tiny_llm.PromptLookup()) as engine:
        results = engine.generate(
            [messages] * 50,
            [
                SamplingParams(
                    max_tokens=80,
                    temperature=0.7,
                    seed=seed,
                    grammar=Grammar.json_schema(schema, max_whitespace=1),
                )
                for seed, schema in enumerate(schemas)
            ],
        )
    ended = [r.finish_reason for r in results].count("stop")
    assert ended >= 35
    for schema, result in zip(schemas, results, strict=True):
        assert result.error is None
        if result.finish_reason == "stop":
            jsonschema.validate(json.loads(result.text), schema)
        else:
            assert result.finish_reason == "length"
