"""Threads, coroutines and Ctrl-C."""

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time

import mlx.core as mx
import pytest
from engine_runs import Wrapped, alone, engine_of, finish, prompts
from oracle import DATA, model

import tiny_llm
from tiny_llm import SamplingParams, make_sampler
from tiny_llm.errors import EngineClosedError, ParameterError, RequestError

VARIANT, ANSWER = "qwen3", 12
PIPELINE = pytest.mark.parametrize("pipeline", [False, True])


def sampling(max_tokens=ANSWER, **options):
    return SamplingParams(max_tokens=max_tokens, **options)


def in_threads(*works):
    """Run each in a thread of its own; all must end, and well."""
    failed = []

    def run(work):
        try:
            work()
        except BaseException as error:
            failed.append(error)
        finally:
            mx.clear_streams()  # (else MLX may abort the process as it ends)

    threads = [threading.Thread(target=run, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "somebody waits for ever"
    for error in failed:
        raise error


@pytest.fixture
def started(request):
    """An engine with its thread; afterwards nothing is left behind."""
    options = getattr(request, "param", {})
    with engine_of(VARIANT, **options) as engine:
        engine.start()
        yield engine
    engine.check_integrity()
    assert engine.stats.pages_in_use == 0
    names = [thread.name for thread in threading.enumerate()]
    assert "tiny_llm engine" not in names


def quiet(engine):
    """Wait until the thread has nothing to do."""
    for _ in range(2000):
        stats = engine.stats
        if not (stats.waiting or stats.running or stats.pages_in_use):
            return
        time.sleep(0.005)
    raise AssertionError(stats)


def several(count, seed=0):
    lengths = [3 + 7 * i % 60 for i in range(count)]
    return prompts(VARIANT, lengths, ANSWER, seed=seed)


pipelined = pytest.mark.parametrize(
    "started", [{"pipeline": False}, {"pipeline": True}], indirect=True
)


@pipelined
def test_many_threads_submit_and_read_at_once(started):
    def user(own):
        def work():
            for ids in own:
                handle = started.submit(ids, sampling())
                tokens = [token for piece in handle for token in piece.token_ids]
                assert tokens == alone(VARIANT, ids, ANSWER)
                assert handle.result().token_ids == tokens

        return work

    everything = several(24)
    for ids in everything:
        alone(VARIANT, ids, ANSWER)  # (not while others run: that is slow)
    in_threads(*[user(everything[i::8]) for i in range(8)])


def test_a_prompt_that_takes_long_to_encode_keeps_nobody_s_place(monkeypatch):
    """Requests are numbered as they arrive: the queues are kept in that order."""
    engine = engine_of(VARIANT)
    first, second = several(2)
    encode, others = engine._intake.request, []

    def slow(prompt, *rest):
        if prompt is first and not others:
            others.append(engine.submit(second, sampling()))
            engine.step()
            engine.step()
        return encode(prompt, *rest)

    monkeypatch.setattr(engine._intake, "request", slow)
    handles = [engine.submit(first, sampling()), *others]
    engine.check_integrity()
    found = [handle.result().token_ids for handle in handles]
    assert found == [alone(VARIANT, ids, ANSWER) for ids in (first, second)]


@pipelined
def test_one_thread_submits_and_others_read_and_cancel(started):
    everything = several(16)
    for ids in everything:
        alone(VARIANT, ids, ANSWER)
    handles = [started.submit(ids, sampling()) for ids in everything]

    def read(handle, ids, cancel):
        def work():
            tokens = []
            for piece in handle:
                tokens += piece.token_ids
                if cancel and len(tokens) >= 3:
                    handle.cancel()
            expected = alone(VARIANT, ids, ANSWER)
            assert tokens == handle.result().token_ids == expected[: len(tokens)]
            if not cancel:
                assert len(tokens) == ANSWER

        return work

    in_threads(
        *[
            read(handle, ids, i % 3 == 0)
            for i, (handle, ids) in enumerate(zip(handles, everything, strict=True))
        ]
    )
    quiet(started)


@pipelined
def test_many_coroutines_iterate_wait_and_are_cancelled(started):
    everything = several(24)
    for ids in everything:
        alone(VARIANT, ids, ANSWER)

    async def iterate(ids):
        handle = started.submit(ids, sampling())
        tokens = []
        async for piece in handle:
            tokens += piece.token_ids
        assert tokens == (await handle.aresult()).token_ids
        assert tokens == alone(VARIANT, ids, ANSWER)

    async def wait(ids):
        result = await started.submit(ids, sampling()).aresult()
        assert result.token_ids == alone(VARIANT, ids, ANSWER)

    async def leave(ids):
        handle = started.submit(ids, sampling(400))
        try:
            await handle.aresult()
        finally:
            handle.cancel()

    async def scene():
        leaving = [asyncio.create_task(leave(ids)) for ids in everything[::3]]
        rest = [iterate(ids) for ids in everything[1::3]]
        rest += [wait(ids) for ids in everything[2::3]]
        others = asyncio.gather(*rest)
        await asyncio.sleep(0.02)
        for task in leaving:
            task.cancel()
        ended = await asyncio.gather(*leaving, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended)
        await others

    asyncio.run(asyncio.wait_for(scene(), 60))
    quiet(started)


def test_coroutines_start_the_thread_themselves_and_see_failures():
    (ids,) = prompts(VARIANT, [9], ANSWER)

    def sampler(logprobs):
        raise ZeroDivisionError("no")

    async def scene(engine):
        bad = engine.submit(ids, sampling(sampler=sampler))
        with pytest.raises(RequestError, match="failed: no"):
            async for _ in bad:
                pass
        assert (await bad.aresult()).finish_reason == "error"
        good = engine.submit(ids, sampling())
        assert (await good.aresult()).token_ids == alone(VARIANT, ids, ANSWER)
        with pytest.raises(ParameterError, match="own thread"):
            engine.step()

    with engine_of(VARIANT) as engine:
        asyncio.run(asyncio.wait_for(scene(engine), 60))


def test_a_coroutine_whose_event_loop_ends_keeps_nobody_waiting(started):
    ids, other = prompts(VARIANT, [9, 30], ANSWER)
    handle = started.submit(ids, sampling(400))

    async def scene():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(handle.aresult(), 0.01)

    asyncio.run(scene())
    assert started.submit(other, sampling()).result().error is None
    handle.cancel()
    assert handle.result().finish_reason == "cancelled"


def test_generate_works_with_a_thread_and_ctrl_c_cancels_its_prompts_only(started):
    everything = several(6)
    own = started.submit(everything[0], sampling(60))
    results = started.generate(everything, sampling())
    for ids, result in zip(everything, results, strict=True):
        assert result.token_ids == alone(VARIANT, ids, ANSWER)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        started.generate(everything, sampling(400), progress=interrupt)
    result = own.result()
    assert result.finish_reason == "length"
    assert len(result.token_ids) == 60
    quiet(started)


def test_loading_and_generating_in_threads_of_their_own():
    # case 32
    found, (ids,) = {}, prompts(VARIANT, [20], ANSWER)

    def load():
        found["model"] = tiny_llm.load_model(DATA / VARIANT)

    def use():
        with engine_of(found["model"]) as engine:
            assert engine.generate([ids], sampling())[0].token_ids == expected
            unseeded = sampling(temperature=2.0)
            first, second = engine.generate([ids, ids], unseeded)
            assert first.token_ids != second.token_ids
            seeded = sampling(temperature=2.0, seed=3)
            assert engine.generate([ids], seeded)[0].token_ids == drawn

    expected = alone(VARIANT, ids, ANSWER)
    drawn = list(
        tiny_llm.stream_generate(
            model(VARIANT),
            ids,
            max_new_tokens=ANSWER,
            sampler=make_sampler(2.0, seed=3),
        )
    )
    in_threads(load)
    in_threads(use)
    in_threads(use)
    use()


def test_an_engine_may_be_driven_by_one_thread_after_the_other_and_by_two_at_once():
    everything = several(8)
    with engine_of(VARIANT) as engine:

        def work(own):
            def run():
                for ids in own:
                    result = engine.submit(ids, sampling()).result()
                    assert result.token_ids == alone(VARIANT, ids, ANSWER)

            return run

        for ids in everything:
            alone(VARIANT, ids, ANSWER)
        in_threads(work(everything))
        in_threads(work(everything))
        in_threads(*[work(everything[i::3]) for i in range(3)])
        finish(engine)


@PIPELINE
def test_closing_while_busy_wakes_everybody(pipeline):
    engine = engine_of(VARIANT, pipeline=pipeline)
    engine.start()
    handles = [engine.submit(ids, sampling(400)) for ids in several(8)]
    reasons = []

    def wait(handle):
        return lambda: reasons.append(handle.result().finish_reason)

    async def aresult():
        reasons.append((await handles[0].aresult()).finish_reason)

    def close():
        next(handles[1])
        engine.close()
        engine.close()

    in_threads(
        *[wait(handle) for handle in handles], lambda: asyncio.run(aresult()), close
    )
    assert reasons == ["cancelled"] * 9
    assert engine.stats.pages_in_use == 0
    with pytest.raises(EngineClosedError):
        engine.submit([5])
    engine.check_integrity()


@pipelined
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_our_own_mistake_fails_the_requests_and_the_thread_lives_on(
    started, error, monkeypatch
):
    everything = several(5)
    schedule, calls = started._scheduler.schedule, []

    def mistaken(settled=True):
        calls.append(1)
        if len(calls) >= 4:
            raise error("a mistake")
        return schedule(settled)

    monkeypatch.setattr(started._scheduler, "schedule", mistaken)
    handles = [started.submit(ids, sampling(100)) for ids in everything]
    for handle in handles:
        result = handle.result()
        assert (result.finish_reason, type(result.error)) == ("error", RequestError)
        assert "a mistake" in str(result.error)
    monkeypatch.undo()
    results = started.generate(everything, sampling())
    for ids, result in zip(everything, results, strict=True):
        assert result.token_ids == alone(VARIANT, ids, ANSWER)


def test_by_hand_our_own_mistake_is_raised_and_the_requests_can_go_on(monkeypatch):
    everything = several(5)
    with engine_of(VARIANT) as engine:
        handles = [engine.submit(ids, sampling()) for ids in everything]
        for _ in range(3):
            engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(engine._scheduler, "schedule", lambda settled: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        engine.check_integrity()
        finish(engine)
        for ids, handle in zip(everything, handles, strict=True):
            assert handle.result().token_ids == alone(VARIANT, ids, ANSWER)


def test_a_sampler_that_exits_does_not_take_the_thread_along(started):
    (ids,) = prompts(VARIANT, [9], ANSWER)

    def sampler(logprobs):
        raise SystemExit(3)

    bad = started.submit(ids, sampling(sampler=sampler))
    assert bad.result().finish_reason == "error"
    good = started.submit(ids, sampling()).result()
    assert good.token_ids == alone(VARIANT, ids, ANSWER)


# Ctrl-C


FILES = ("/engine/", "cache/prefix.py", "cache/table.py", "cache/pages.py")


def interrupted(operation, after):
    """Run until so many lines of the engine are done; whether it came to that."""
    lines, cut = 0, False

    def trace(frame, event, argument):
        nonlocal lines, cut
        if not any(part in frame.f_code.co_filename for part in FILES):
            return None
        caller = frame
        while caller is not None:
            if caller.f_code.co_name == "_abandon":
                return None  # in a finalizer, where Python drops what is raised
            caller = caller.f_back
        if event == "line":
            lines += 1
            if lines > after:
                sys.settrace(None)
                cut = True
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return cut


@pytest.fixture(scope="module")
def texts():
    """A model with a tokenizer, prompts and what becomes of each alone."""
    loaded = tiny_llm.load(DATA / "llama_llama3rope_bias")
    every = ["日本 wörld 👋🏽", "Hello world", "one two three one two three " * 2]
    stop = tiny_llm.generate(*loaded, every[1], max_new_tokens=6).token_ids[5]
    params = [
        sampling(logprobs=True, ignore_eos=True),
        sampling(stop_token_ids=[stop]),
        sampling(temperature=1.5, seed=3, ignore_eos=True),
        sampling(4),
    ]
    every.append(every[2] + "four")
    with engine_of(*loaded, prefix_cache=False) as engine:
        results = [
            engine.generate([t], p)[0] for t, p in zip(every, params, strict=True)
        ]
    assert [result.finish_reason for result in results][1] == "stop"
    return loaded, every, params, results


@pytest.mark.usefixtures("quick_collections")
@PIPELINE
@pytest.mark.parametrize("part", range(4))
def test_ctrl_c_at_any_line_of_a_step_leaves_books_and_answers_right(
    texts, pipeline, part
):
    loaded, every, params, results = texts
    after, cuts = 5 * part, 0
    while True:
        options = {"pages": 12, "max_step_tokens": 24, "page_size": 8}
        engine = engine_of(*loaded, pipeline=pipeline, **options)
        handles = [
            engine.submit(text, own) for text, own in zip(every, params, strict=True)
        ]
        cancelled = engine.submit("gone", sampling(60))
        for _ in range(part):
            engine.step()

        def work(engine=engine, cancelled=cancelled):
            for step in range(20):
                engine.step()
                if step == 3:
                    cancelled.cancel()

        if not interrupted(work, after):
            break
        cuts += 1
        gc.collect()
        engine.check_integrity()
        cancelled.cancel()
        finish(engine)
        assert cancelled.result().finish_reason == "cancelled"
        for handle, expected in zip(handles, results, strict=True):
            pieces = list(handle)
            result = handle.result()
            assert result.token_ids == expected.token_ids
            assert result.text == expected.text
            assert "".join(piece.text for piece in pieces) == expected.text
            ids = [token for piece in pieces for token in piece.token_ids]
            assert ids == expected.token_ids
            assert result.finish_reason == expected.finish_reason
            assert len(result.logprobs or []) == len(expected.logprobs or [])
        engine.close()
        after += 1301 + 101 * part
    assert cuts > 5


@pytest.mark.parametrize("lines", range(1, 60, 4))
def test_ctrl_c_twice_is_no_different(lines):
    everything = several(3)
    with engine_of(VARIANT) as engine:
        handles = [engine.submit(ids, sampling()) for ids in everything]

        def work():
            try:
                for _ in range(9):
                    engine.step()
            finally:
                raise KeyboardInterrupt

        def twice():
            assert interrupted(work, 700)
            assert interrupted(engine.step, lines)

        def fails(m, *arguments, **named):
            raise KeyboardInterrupt

        twice()
        restart = engine._core.restart
        engine._core.restart = lambda: interrupted(restart, lines)
        call, engine._core.runner.model = model(VARIANT), Wrapped(model(VARIANT), fails)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine._core.restart, engine._core.runner.model = restart, call
        finish(engine)
        for ids, handle in zip(everything, handles, strict=True):
            assert handle.result().token_ids == alone(VARIANT, ids, ANSWER)


SCRIPT = """
import sys, threading, time, signal, os
import tiny_llm
from tiny_llm import Engine, SamplingParams

m = tiny_llm.load_model(sys.argv[1])
engine = Engine(m, max_batch=4, page_size=16, kv_memory=1 << 20)
if sys.argv[2] == "thread":
    engine.start()
ids = [[5 + i] * (7 * i + 3) for i in range(8)]
params = SamplingParams(max_tokens=400)
alone = engine.generate(ids, SamplingParams(max_tokens=12))
for seconds in (0.0, 0.03, 0.07, 0.2):
    timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT])
    try:
        timer.start()
        while True:
            engine.generate(ids, params)
    except KeyboardInterrupt:
        pass
    if sys.argv[2] == "hand":
        assert engine.stats.pages_in_use == 0, engine.stats
    engine.check_integrity()
    again = engine.generate(ids, SamplingParams(max_tokens=12))
    assert [r.token_ids for r in again] == [r.token_ids for r in alone]
engine.close()
engine.check_integrity()
assert engine.stats.pages_in_use == 0
print("right")
"""


@pytest.mark.parametrize("how", ["hand", "thread"])
def test_a_real_ctrl_c_cancels_and_the_engine_goes_on(how):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, DATA / VARIANT, how],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")


@pytest.mark.parametrize("how", ["hand", "thread"])
def test_a_program_that_ends_without_closing_its_engine_ends(how):
    script = SCRIPT.split("alone =")[0] + "engine.submit(ids[0])\nprint('end')"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, DATA / VARIANT, how],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_mx_arrays_of_the_engines_thread_can_be_used_elsewhere(started):
    seen = []

    def sampler(logprobs):
        seen.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    (ids,) = prompts(VARIANT, [9], ANSWER)
    result = started.submit(ids, sampling(sampler=sampler)).result()
    assert [mx.argmax(p).item() for p in seen[:ANSWER]] == result.token_ids
