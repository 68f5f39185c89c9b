"""Corners of the engine that a review found: each was wrong once."""

import json
import sys

import pytest
from engine_runs import alone, prompts
from oracle import DATA, goldens, model

import tiny_llm
from tiny_llm import Engine, ParameterError, SamplingParams
from tiny_llm.cache import PageTable
from tiny_llm.cache import pool as pool_module
from tiny_llm.engine import handle as handles
from tiny_llm.engine import kv
from tiny_llm.engine.runner import Launched, Runner

VARIANT = "llama_tied"


def params(n=8, **options):
    return SamplingParams(max_tokens=n, ignore_eos=True, **options)


@pytest.fixture
def engine():
    with Engine(model(VARIANT), page_size=16, max_batch=4) as engine:
        yield engine


def test_waiting_for_a_result_beside_a_thread_sleeps(engine, monkeypatch):
    calls = []
    ask = handles.Handle._ask
    monkeypatch.setattr(handles.Handle, "_ask", lambda *a: calls.append(1) or ask(*a))
    engine.start()
    handle = engine.submit([1, 2], params(60))
    assert len(handle.result().token_ids) == 60
    assert len(calls) <= 62  # once a token, and not as often as it can
    assert len(handle._wakers) <= 1
    assert "".join(piece.text for piece in handle) == ""


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_numbers_beyond_a_float_are_refused(name):
    with pytest.raises(ParameterError, match=name):
        SamplingParams(**{name: 10**400})


@pytest.mark.parametrize("bias", [10**400, 1e39, -1e39, float("inf"), 1e7])
def test_a_bias_that_would_overflow_is_refused(bias):
    with pytest.raises(ParameterError, match="logit_bias of token 5"):
        SamplingParams(logit_bias={5: bias})


def test_a_failing_sampler_does_not_cost_others_the_prefix(engine):
    system = goldens(VARIANT)[1].ids * 3
    system = (system * 64)[:64]
    engine.submit([*system, 1], params()).result()
    assert engine.submit([*system, 2], params()).result().cached_tokens == 64
    bad = engine.submit([*system, 3], params(sampler=lambda p: 1 / 0)).result()
    assert bad.finish_reason == "error"
    assert engine.submit([*system, 4], params()).result().cached_tokens == 64


@pytest.mark.parametrize("threaded", [False, True])
def test_a_sampler_that_exits_ends_its_own_request(engine, threaded):
    alone = engine.submit([5, 6, 7], params()).result().token_ids
    if threaded:
        engine.start()
    neighbour = engine.submit([5, 6, 7], params())
    gone = engine.submit([1, 2], params(sampler=lambda p: sys.exit()))
    assert gone.result().finish_reason == "error"
    assert "SystemExit" in str(gone.result().error)
    assert neighbour.result().token_ids == alone


def test_a_sampler_cannot_step_its_own_engine(engine):
    handle = engine.submit([1, 2], params(sampler=lambda p: engine.step()))
    assert "must not step" in str(handle.result().error)
    assert engine.submit([1, 2], params()).result().finish_reason == "length"


def test_what_was_cached_stays_what_it_was_after_a_cut(engine, monkeypatch):
    handle = engine.submit(list(range(1, 66)), params())
    for _ in range(4):
        engine.step()
    runner = engine._core.runner

    def cut(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", cut)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert handle.result().cached_tokens == 0
    assert engine.stats.cached_tokens == 0


def test_stats_count_who_is_preempted_now_and_no_cancellation():
    shape = model(VARIANT).config.kv_shape(4)
    memory = 9 * 16 * shape.row_bytes() * len(shape.windows)
    with Engine(model(VARIANT), page_size=16, max_batch=4, kv_memory=memory) as engine:
        engine._scheduler._answers, engine._scheduler._answer_tokens = 1, 1
        for n in range(3):
            engine.submit([n, *range(40)], params(60))
        seen = 0
        while engine.step():
            unfinished = [*engine._scheduler.running, *engine._scheduler.waiting]
            now = sum(request.preemptions for request in unfinished)
            assert engine.stats.preemptions >= max(seen, now)
            seen = engine.stats.preemptions
        assert seen > 0
        done = engine.submit([1], params(1))
        done.result()
        done.cancel()
        assert engine.stats.waiting == 0


def test_template_options_are_refused_where_there_is_no_template(engine):
    with pytest.raises(ParameterError, match="template_options"):
        engine.submit([1, 2], template_options={"x": 1})
    loaded = tiny_llm.load(DATA / "llama_llama3rope_bias")
    with Engine(*loaded) as chatty, pytest.raises(ParameterError, match="template_op"):
        chatty.submit("Hello", template_options={"x": 1})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefix_cache": "no"}, "prefix_cache must be True or False"),
        ({"pipeline": 1}, "pipeline must be True or False"),
        ({"page_views": "no"}, "page_views must be True or False"),
    ],
)
def test_options_that_would_be_misread_are_refused(options, words):
    with pytest.raises(ParameterError, match=words):
        Engine(model("qwen3"), **options)


def test_what_is_no_model_is_told_by_name():
    for wrong in (None, "smollm2", (1, 2)):
        with pytest.raises(ParameterError, match=r"tiny_llm.load\(\.\.\.\)"):
            Engine(wrong)
    with pytest.raises(ParameterError, match="tokenizer is 'x'"):
        Engine(model(VARIANT), "x")


def test_no_bad_number_and_no_foreign_line_spoils_a_file_of_answers(run, tmp_path):
    prompts, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    huge = "1" + 400 * "0"
    prompts.write_text(
        f'{{"prompt": "a", "temperature": {huge}}}\n'
        '{"prompt": "a", "id": 1e999}\n'
        '{"prompt": "a", "id": 7}\n'
    )
    folder = str(DATA / "llama_llama3rope_bias")
    command = ["batch", str(prompts), "-o", str(answers), "--model", folder]
    command += ["--max-new-tokens", "2", "--raw"]
    answers.write_text('{"line": 1 precious')
    assert run(*command)[0] == 1
    assert answers.read_text() == '{"line": 1 precious'
    answers.write_text('{"line": 1,')  # torn
    status, _, told = run(*command)
    assert status == 1
    first, second, third = map(json.loads, answers.read_text().splitlines())
    assert "temperature" in first["error"]
    assert "id must be" in second["error"]
    assert third["id"] == 7
    assert "1" in told


def test_a_long_prompt_has_its_memory_made_without_stopping_the_streams(monkeypatch):
    monkeypatch.setattr(kv, "_AT_ONCE", 1)  # byte: a layer a step
    loaded = model(VARIANT)
    prompt = (goldens(VARIANT)[0].ids * 30)[:200]
    with Engine(loaded, page_size=16, max_batch=4) as engine:
        expected = engine.generate([prompt[:5], prompt], params(40))
    with Engine(loaded, page_size=16, max_batch=4) as engine:
        stream = engine.submit(prompt[:5], params(40))
        for _ in range(4):
            engine.step()
        before = [rows[0].shape[1] for rows in engine.pool.rows]
        assert len(before) > 1
        long, sizes = engine.submit(prompt, params(40)), []
        while long.prefilled == 0:
            tokens = len(stream.token_ids)
            engine.step()
            engine.check_integrity()
            assert len(stream.token_ids) == tokens + 1
            sizes.append([rows[0].shape[1] for rows in engine.pool.rows])
        for n, now in enumerate(sizes[: len(before)], start=1):
            assert [a > b for a, b in zip(now, before, strict=True)].count(True) == n
        assert len(sizes) == len(before)
        results = stream.result(), long.result()
    for result, same in zip(results, expected, strict=True):
        assert result.token_ids == same.token_ids


def test_memory_for_all_that_wait_is_allocated_at_once():
    with Engine(model(VARIANT), page_size=16, max_batch=4) as engine:
        for n in range(4):
            engine.submit([5 + n] * 20, params(12))
        engine.step()
        sizes = {rows[0].shape[1] for rows in engine.pool.rows}
        assert sizes == {4 * 32}  # 31 tokens each, in pages of 16
        while engine.step():
            assert {rows[0].shape[1] for rows in engine.pool.rows} == sizes


def test_a_request_found_but_for_its_last_token_waits_for_its_memory_too(monkeypatch):
    """After a cut it counts as decoding from the beginning."""
    monkeypatch.setattr(kv, "_AT_ONCE", 1)
    launch, states = Runner.launch, []

    def checked(runner, segments, before):
        for request, start, *_ in segments:
            (pages,) = request.table.pages
            held = (max(pages) + 1) * 16
            assert all(rows[0].shape[1] >= held for rows in runner.pool.rows)
            states.append((request.number, start, held))
        return launch(runner, segments, before)

    def cut(runner, segments, before):
        monkeypatch.setattr(Runner, "launch", checked)
        raise KeyboardInterrupt

    ids = (goldens(VARIANT)[0].ids * 30)[:40]
    for length in range(3, 19):  # of the older one, to have it stand as it must
        with Engine(
            model(VARIANT), page_size=16, max_batch=4, max_step_tokens=4
        ) as engine:
            expected = engine._scheduler
            expected._answers, expected._answer_tokens = 1, 4
            older = engine.submit([7, *ids[:length]], params(12))
            other = engine.submit(ids[:14], params(150))
            while len(other.token_ids) < 3:
                engine.step()
            if (1 + length + len(older.token_ids)) % 16 != 4:
                continue
            monkeypatch.setattr(Runner, "launch", cut)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            expected._answer_tokens = 1000
            before = [rows[0].shape[1] for rows in engine.pool.rows]
            assert other.result().error is None
            assert older.result().error is None
            mine = [(start, held) for n, start, held in states if n == 1]
            assert mine[0][0] == 16  # all but its last token was found
            assert mine[0][1] > max(before)
            return
    raise AssertionError("the older one never stood as it must")


def test_a_pipelined_step_holds_no_arrays_of_the_pool():
    with Engine(model(VARIANT), page_size=16, pipeline=True) as engine:
        engine.submit([5, 6, 7], params(40))
        for _ in range(3):
            engine.step()
        assert engine._core._launched.pages == []


@pytest.mark.parametrize("pipeline", [False, True])
def test_a_failed_chunk_behind_a_window_is_run_again_with_all_that_it_sees(
    monkeypatch, pipeline
):
    (ids,) = prompts("mistral_swa", [400], 8)  # a window of 12
    failed = []
    outputs = Launched.outputs

    def fail_once(launched):
        large = any(segment.count > 100 for segment in launched.segments)
        finishing = sys._getframe(1).f_code.co_name == "_finish"
        if finishing and large and not failed:
            failed.append(launched)
            raise RuntimeError("spurious")
        return outputs(launched)

    monkeypatch.setattr(Launched, "outputs", fail_once)
    options = {"page_size": 4, "max_step_tokens": 128, "pipeline": pipeline}
    with Engine(model("mistral_swa"), **options) as engine:
        result = engine.submit(ids, params(8)).result()
        assert failed
        assert result.error is None
        assert result.token_ids == alone("mistral_swa", ids, 8)
        again = engine.submit(ids, params(8)).result()  # what it stored is right
        assert again.token_ids == result.token_ids


def test_an_interrupt_while_the_pool_is_made_anew_leaves_it_whole(monkeypatch):
    with Engine(model(VARIANT), page_size=16) as engine:
        engine.submit([5, 6, 7], params(4)).result()

        def cut(*arrays):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pool_module.mx, "eval", cut)
            with pytest.raises(KeyboardInterrupt):
                engine.pool.renew()
        assert len(engine.pool.rows) == len(engine.pool.group_of)
        assert engine.submit([5, 6, 8], params(4)).result().error is None


def test_a_sampler_cannot_close_its_engine_and_leave_others_waiting(engine):
    engine.start()
    other = engine.submit([5, 6, 7], params(30))

    def closing(logprobs):
        engine.close()

    bad = engine.submit([5, 6, 8], params(4, sampler=closing)).result()
    assert "or close its own engine" in str(bad.error)
    assert other.result().finish_reason == "length"


def test_ctrl_c_while_a_request_is_opened_leaves_no_pages_behind(monkeypatch, engine):
    store = engine._memory
    prepare = PageTable.prepare

    def cut(table, *arguments, **options):
        prepare(table, *arguments, **options)
        raise KeyboardInterrupt

    handle = engine.submit([5, 6, 7], params(4))
    with monkeypatch.context() as patch:
        patch.setattr(PageTable, "prepare", cut)
        try:
            engine.step()
        except KeyboardInterrupt:  # its traceback holds the table
            assert store.pool.pages_in_use == 0
            patch.undo()
            engine.step()
            engine.check_integrity()
    assert handle.result().finish_reason == "length"


@pytest.mark.parametrize("how", ["result", "iterate", "generate"])
@pytest.mark.parametrize("threaded", [False, True])
def test_a_sampler_cannot_wait_for_its_own_engine(engine, how, threaded):
    if threaded:
        engine.start()
    other = engine.submit([5, 6, 7], params(30))
    waits = {
        "result": other.result,
        "iterate": lambda: next(other),
        "generate": lambda: engine.generate([[5, 6, 7]], params(2)),
    }

    def waiting(logprobs):
        waits[how]()

    bad = engine.submit([5, 6, 8], params(4, sampler=waiting)).result()
    assert "wait for" in str(bad.error)
    assert other.result().finish_reason == "length"
    while engine.stats.running or engine.stats.waiting:  # what generate had begun
        engine.submit([5], params(1)).result()


def test_a_step_that_is_undone_leaves_the_tables_of_ended_requests_empty(monkeypatch):
    outputs, failed = Launched.outputs, []

    def fail_once(launched):
        if sys._getframe(1).f_code.co_name == "_finish" and not failed:
            failed.append(launched)
            raise RuntimeError("spurious")
        return outputs(launched)

    with Engine(model(VARIANT), page_size=16, pipeline=True) as engine:
        stream = engine.submit([5, 6, 7], params(20))
        ended = engine.submit([8, 9], params(20))
        for _ in range(4):
            engine.step()
        tables = [ended.request.table, stream.request.table]
        ended.cancel()  # a row of it is in flight
        monkeypatch.setattr(Launched, "outputs", fail_once)
        while engine.step():
            engine.check_integrity()
        assert failed
        assert not any(table.length for table in tables)
        assert stream.result().finish_reason == "length"
