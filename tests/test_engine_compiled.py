"""Decoding steps that are replayed, not built: the same tokens, and nothing copied."""

import mlx.core as mx
import pytest
from engine_cases import any_model
from engine_runs import alone, engine_of, finish, prompts
from oracle import model

from tiny_llm import SamplingParams
from tiny_llm.engine import compiled
from tiny_llm.errors import ParameterError

ANSWER = 40
LENGTHS = [3, 17, 9, 30, 12]


@pytest.fixture
def traces(monkeypatch):
    """Every shape is worth a trace from its second step on; counts the traces."""
    made = []
    trace = compiled.CompiledDecode._trace

    def count(self, ids, *arrays):
        made.append(ids.shape[0])
        return trace(self, ids, *arrays)

    monkeypatch.setattr(compiled, "_RECURRING", 2)
    monkeypatch.setattr(compiled.CompiledDecode, "_trace", count)
    return made


def compiled_engine(variant, **options):
    return engine_of(variant, page_views=False, compile_decode=True, **options)


def answers(m, asked, **options):
    """The engine's answers, and how many steps it took."""
    with engine_of(m, page_views=False, **options) as engine:
        params = SamplingParams(max_tokens=ANSWER)
        handles = [engine.submit(ids, params) for ids in asked]
        finish(engine)
        found = [handle.result().token_ids for handle in handles]
        return found, engine.stats.steps


@pytest.mark.parametrize("variant", ["llama_tied", "mistral_swa", "qwen3"])
@pytest.mark.parametrize("pipeline", [False, True])
def test_replayed_steps_give_the_tokens_of_a_run_alone(variant, pipeline, traces):
    asked = prompts(variant, LENGTHS, ANSWER)
    options = {"pipeline": pipeline, "compile_decode": True}
    found, steps = answers(model(variant), asked, **options)
    assert found == [alone(variant, ids, ANSWER) for ids in asked]
    assert 4 in traces
    assert len(traces) < steps / 2  # most were replayed


@pytest.mark.parametrize("variant", ["llama_wide", "qwen2_wide"])
@pytest.mark.parametrize("bits", [8, 4])
def test_replayed_steps_over_packed_pages_are_built_steps(variant, bits, traces):
    m = any_model(variant)
    asked = [list(range(5, 5 + n)) for n in LENGTHS]
    built, _ = answers(m, asked, kv_bits=bits)
    assert not traces
    replayed, steps = answers(m, asked, kv_bits=bits, compile_decode=True)
    assert replayed == built
    assert 0 < len(traces) < steps / 2


def test_requests_come_and_go_between_replayed_steps(traces):
    variant = "llama_tied"
    asked = prompts(variant, LENGTHS * 2, ANSWER)
    with compiled_engine(variant, pages=20) as engine:  # too few: some are preempted
        handles = []
        for ids in asked:
            handles.append(engine.submit(ids, SamplingParams(max_tokens=ANSWER)))
            for _ in range(7):
                engine.step()
                engine.check_integrity()
        finish(engine)
        for ids, handle in zip(asked, handles, strict=True):
            assert handle.result().token_ids == alone(variant, ids, ANSWER)
    assert len(set(traces)) > 1


def test_a_replayed_step_copies_no_array_of_the_pool(traces):
    with compiled_engine("llama_tied", kv_memory=1 << 24) as engine:
        handle = engine.submit([5, 6, 7], SamplingParams(max_tokens=ANSWER))
        for _ in range(10):
            engine.step()
        engine.pool.back(0, engine.pool.allocators[0].count - 1)  # all its memory
        for _ in range(3):  # (of another shape: traced anew)
            engine.step()
        assert engine.pool.nbytes > 1 << 23
        before, known = mx.get_active_memory(), len(traces)
        mx.reset_peak_memory()
        for _ in range(10):
            engine.step()
        assert mx.get_peak_memory() - before < 1 << 20
        assert len(traces) == known
        finish(engine)
        assert handle.result().finish_reason == "length"


def test_what_cuts_a_trace_off_leaves_no_trace(monkeypatch, traces):
    """Ctrl-C while a step is traced: the pool holds real arrays, and work goes on."""
    variant = "llama_tied"
    (ids,) = prompts(variant, [9], ANSWER)
    with compiled_engine(variant) as engine:
        m = engine.model
        handle = engine.submit(ids, SamplingParams(max_tokens=ANSWER))
        layer, calls = type(m.layers[-1]).__call__, []

        def interrupted(self, *arguments):
            out = layer(self, *arguments)
            if self is m.layers[-1] and len(traces) == 1 and not calls:
                calls.append(1)
                raise KeyboardInterrupt
            return out

        monkeypatch.setattr(type(m.layers[-1]), "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            finish(engine)
        mx.eval(engine.pool.rows)
        finish(engine)
        assert handle.result().token_ids == alone(variant, ids, ANSWER)
    assert len(traces) > 1


def test_few_traces_are_kept(monkeypatch, traces):
    monkeypatch.setattr(compiled, "_MOST", 2)
    with compiled_engine("llama_tied") as engine:
        for number in (1, 2, 3, 4):
            for ids in prompts("llama_tied", LENGTHS[:number], ANSWER):
                engine.submit(ids, SamplingParams(max_tokens=12))
            finish(engine)
        assert {1, 2, 3, 4} <= set(traces)
        assert len(engine._core.runner.compiled._steps) == 2


def test_views_cannot_be_compiled():
    with pytest.raises(ParameterError, match="page_views=False"):
        engine_of("llama_tied", page_views=True, compile_decode=True)
    with pytest.raises(ParameterError, match="compile_decode must be True or False"):
        engine_of("llama_tied", compile_decode="yes")
