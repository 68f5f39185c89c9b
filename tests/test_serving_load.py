"""serving_load's traces are what they say, its clock is fair, its numbers are right."""

import importlib
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiny_llm

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
TINY = ROOT / "tests" / "data" / "qwen3"
VOCABULARY = 49152


@pytest.fixture
def load_module(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def traces(load_module):
    return load_module("serving_traces")


@pytest.fixture
def report(load_module):
    return load_module("serving_report")


# --- the traces


@pytest.mark.parametrize("name", ["a", "b", "c", "c-all", "d", "e"])
def test_a_trace_is_the_same_at_every_call_and_in_order_of_arrival(traces, name):
    trace = traces.arrivals(name, VOCABULARY)
    assert trace == traces.arrivals(name, VOCABULARY)
    times = [request.at for request in trace]
    assert times == sorted(times)
    assert times[0] == 0
    ids = {i for request in trace for i in request.prompt}
    assert min(ids) >= 491
    assert max(ids) < VOCABULARY - 491
    assert len({tuple(request.prompt) for request in trace}) == len(trace)


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "new"),
    [("a", 8, 128, 64), ("b", 32, 128, 64), ("e", 8, 16, 128)],
)
def test_a_b_and_e_are_prompts_of_one_length_at_once(
    traces, name, requests, prompt, new
):
    trace = traces.arrivals(name, VOCABULARY)
    assert [(r.at, len(r.prompt), r.new_tokens) for r in trace] == [
        (0, prompt, new)
    ] * requests


def test_c_has_half_its_requests_behind_one_system_prompt(traces):
    trace = traces.arrivals("c", VOCABULARY)
    assert len(trace) == 64
    behind = [r for r in trace if r.system]
    assert len(behind) == 32
    assert {tuple(r.prompt[:200]) for r in behind} == {tuple(behind[0].prompt[:200])}
    assert {r.system for r in behind} == {200}
    own = [len(r.prompt) - r.system for r in trace]
    assert 20 <= min(own) < 60
    assert 360 < max(own) <= 400
    answers = [r.new_tokens for r in trace]
    assert 10 <= min(answers) < 30
    assert 180 < max(answers) <= 200


def test_c_arrives_at_about_its_rate_and_irregularly(traces):
    times = [r.at for r in traces.arrivals("c", VOCABULARY)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 0.27, rel=0.3)
    assert max(gaps) > 3 * mean
    assert min(gaps) < mean / 5


def test_c_all_is_c_at_once(traces):
    one, other = (traces.arrivals(name, VOCABULARY) for name in ("c", "c-all"))
    assert [r._replace(at=0.0) for r in one] == other


def test_d_is_a_long_prompt_among_streams_that_run(traces):
    *streams, late = traces.arrivals("d", VOCABULARY)
    assert [(len(r.prompt), r.new_tokens, r.after) for r in streams] == [
        (64, 256, 0)
    ] * 8
    assert (len(late.prompt), late.new_tokens, late.after) == (4000, 32, 16)


@pytest.mark.parametrize("name", ["a", "b", "c", "c-all", "d", "e"])
def test_quick_traces_are_small_and_can_end(traces, name):
    for answers in (1.0, 0.01):
        trace = traces.arrivals(name, 320, quick=True, answers=answers)
        assert 2 <= len(trace) <= 16
        assert sum(len(r.prompt) + r.new_tokens for r in trace) < 1200
        for n, request in enumerate(trace):
            assert all(r.new_tokens >= request.after for r in trace[:n])
            assert min(request.prompt) >= 3
            assert max(request.prompt) < 317


def test_answers_are_scaled_and_prompts_are_not(traces):
    trace = traces.arrivals("a", VOCABULARY, answers=0.25)
    assert {(len(r.prompt), r.new_tokens) for r in trace} == {(128, 16)}


def test_the_warm_up_shares_no_token_with_a_trace(traces):
    warm = {i for r in traces.warm_up(VOCABULARY) for i in r.prompt}
    assert warm.isdisjoint(
        i for r in traces.arrivals("c", VOCABULARY) for i in r.prompt
    )
    assert traces.warm_up(50)[0].prompt == [0] * 48


def test_a_trace_that_is_none_is_refused(traces):
    with pytest.raises(ValueError, match=r"no trace 'f'.*a, b, c, c-all, d, e"):
        traces.arrivals("f", VOCABULARY)


# --- the clock


class Clock:
    def __init__(self):
        self.now, self.slept = 100.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def request(traces, at=0.0, new=2, after=0):
    return traces.Arrival(at, [1, 2, 3], new, after=after)


def test_requests_are_due_once_when_their_time_has_come(traces, clock):
    trace = [request(traces, at) for at in (0.0, 0.0, 2.0, 5.0)]
    load = traces.Load(trace, clock, clock.sleep)
    clock.now = 200.0
    load.start()
    assert load.due() == [0, 1]
    assert load.due() == []
    load.rest()
    assert clock.slept == [2.0]
    assert load.due() == [2]
    clock.now += 7
    assert load.due() == [3]
    # the engine looked late: they had arrived all the same
    assert load.arrived == [0.0, 0.0, 2.0, 5.0]


def test_a_late_request_arrives_with_the_token_that_it_waits_for(traces, clock):
    trace = [request(traces), request(traces), request(traces, after=2)]
    load = traces.Load(trace, clock, clock.sleep)
    load.start()
    assert load.due() == [0, 1]
    for seconds, number in enumerate([0, 0, 1]):
        clock.now = 100.0 + seconds
        load.token(number, 7)
        assert load.due() == []
    load.rest()
    assert clock.slept == [0.001]
    clock.now = 110.0
    load.token(1, 8)
    clock.now = 111.0
    assert load.due() == [2]
    assert load.arrived == [0.0, 0.0, 10.0]


def test_a_load_is_done_with_its_last_token(traces, clock):
    load = traces.Load([request(traces, new=1), request(traces, new=2)], clock)
    load.start()
    for number, token in ((1, 5), (0, 6)):
        load.token(number, token)
        assert not load.done
    clock.now = 101.5
    load.token(1, 7)
    assert load.done
    assert load.tokens == [[6], [5, 7]]
    assert load.times == [[0.0], [0.0, 1.5]]


# --- the numbers


def test_percentiles_interpolate(traces):
    assert traces.percentile([4, 1, 3, 2], 50) == 2.5
    assert traces.percentile(range(101), 95) == 95
    assert traces.percentile([7.0], 95) == 7
    assert math.isnan(traces.percentile([], 50))


def test_the_metrics_are_those_of_the_definition(traces):
    trace = [request(traces, 1.0, 3), request(traces, 2.0, 2)]
    found = traces.metrics(trace, [1.0, 2.0], [[2.0, 2.5, 4.5], [5.0, 6.0]])
    assert found["makespan"] == 5.0
    assert found["new_per_second"] == 1.0
    assert found["prompt_per_second"] == 6 / 5
    assert found["all_per_second"] == 11 / 5
    assert found["first_p50"] == 2.0
    assert found["first_p95"] == pytest.approx(2.9)
    assert found["whole_p50"] == 3.75
    assert found["gap_p50"] == 1.0  # of 0.5, 2.0 and 1.0
    assert found["gap_p95"] == pytest.approx(1.9)
    assert found["gap_max"] == 2.0
    assert "stall" not in found


def test_a_stall_is_measured_on_the_streams_that_were_running(traces):
    trace = [request(traces, new=8), request(traces, new=2, after=5)]
    stream = [1.0, 11.0, 12.0, 13.0, 14.0, 20.0, 22.0, 24.0]
    found = traces.metrics(trace, [0.0, 14.0], [stream, [18.0, 33.0]])
    assert found["gap_max"] == 15.0
    assert found["stall"] == 3.0  # 6 seconds (not 10), the median of all being 2
    assert found["stall_calm"] == 6.0
    assert found["late_first"] == 4.0


# --- the tables


def some_run(report, traces, seconds, tokens):
    trace = [request(traces, new=len(t)) for t in tokens]
    times = [[seconds * (i + 1) for i in range(len(t))] for t in tokens]
    found = traces.metrics(trace, [0.0] * len(trace), times)
    return report.Run({**found, "peak": 100.0 * seconds, "beyond_model": 7.0}, tokens)


def cells(text):
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("|")]
    return {
        row[0]: row[1:]
        for line in lines
        for row in [[cell.strip() for cell in line.split("|")]]
    }


def test_the_table_has_medians_equal_tokens_and_ratios(report, traces):
    floor, other = [[1, 2], [3, 4]], [[1, 2], [3, 5]]
    by_engine = {
        "tiny_llm": [some_run(report, traces, s, floor) for s in (1.0, 0.5, 9.0)],
        "mlx-lm": [some_run(report, traces, s, other) for s in (2.0, 2.5, 2.0)],
        "llama.cpp (4-bit)": [some_run(report, traces, 4.0, [[0, 0], [0, 0]])],
        "one at a time": [some_run(report, traces, 4.0, floor)],
    }
    first, second = report.report_trace("a", by_engine).split("divided by")
    assert first.startswith("### Trace a: 8 prompts of 128")
    rows = cells(first)
    assert rows["tiny_llm"] == (
        "2.0 3.0 5.0 1.00 1.00 2.00 2.00 1000 1000 1000 100 7 2/2".split()
    )
    assert rows["mlx-lm"][-1] == "1/2"
    assert rows["llama.cpp (4-bit)"][-1] == "-"
    rows = cells(second)
    assert rows["tiny_llm"] == ["2.00", *["0.50"] * 7, "4.00"]
    assert rows["mlx-lm"] == ["1.00"] * 8 + ["2.00"]


def test_an_engine_that_failed_has_its_row(report, traces):
    by_engine = {"tiny_llm": [some_run(report, traces, 1.0, [[1, 2]])], "mlx-lm": []}
    text = report.report_trace("c", by_engine)
    rows = cells(text)
    assert set(rows["mlx-lm"]) == {"failed"}
    assert rows["tiny_llm"][-1] == "-"  # without the floor nothing to compare with
    assert "divided by" not in text


def test_the_stalls_are_in_the_table_of_d(report, traces):
    run = some_run(report, traces, 1.0, [[1, 2]])
    run.metrics.update(stall=2.5, stall_calm=3.25, late_first=4.125)
    text = report.report_trace("d", {"tiny_llm": [run]})
    assert cells(text)["tiny_llm"][-3:] == ["2.5", "3.2", "4.12"]
    assert "max / median gap" in text


def test_the_plot_is_readable_without_colour(load_module, traces, report, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install -e '.[plot]'")
    run = some_run(report, traces, 1.0, [[1, 2]])
    runs = {"a": {"tiny_llm": [run], "mlx-lm": []}, "d": {"tiny_llm": [run] * 2}}
    runs["d"]["mlx-lm"] = [run]
    file = tmp_path / "new" / "plot.svg"
    plot = load_module("serving_plot").plot
    plot(report.summary(runs), ["tiny_llm", "mlx-lm"], file)
    text = file.read_text()
    for shown in ("tiny_llm", "mlx-lm", "peak memory (MiB)", "trace"):
        assert f">{shown}<" in text
    assert "<pattern" in text  # hatches
    first = file.read_bytes()
    plot(report.summary(runs), ["tiny_llm", "mlx-lm"], file)
    assert file.read_bytes() == first


# --- our adapter, with a scripted engine


class ScriptedEngine:
    """Writes tokens 10, 11, ...; one token per request and step."""

    most = 99  # tokens before it ends a request
    asleep = False

    def __init__(self, model, *, max_batch):
        self.handles, self.asked = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, prompt, params):
        handle = SimpleNamespace(token_ids=[], state="waiting", want=params.max_tokens)
        handle.result = lambda: SimpleNamespace(finish_reason="error", error="NaN")
        self.handles.append(handle)
        return handle

    def step(self):
        open_ = [h for h in self.handles if h.state != "done"]
        if self.asleep or not open_:
            return False
        for handle in open_:
            handle.token_ids.append(10 + len(handle.token_ids))
            if len(handle.token_ids) >= min(handle.want, self.most):
                handle.state = "done"
        return True


@pytest.fixture
def play_ours(load_module, monkeypatch):
    class Params(SimpleNamespace):
        pass

    monkeypatch.setattr(tiny_llm, "load_model", lambda folder: None)
    monkeypatch.setattr(tiny_llm, "Engine", ScriptedEngine, raising=False)
    monkeypatch.setattr(tiny_llm, "SamplingParams", Params, raising=False)
    return load_module("serving_peers").ENGINES["tiny_llm"](Path(), [])


def test_our_adapter_hands_out_every_token_and_submits_late_requests(play_ours, traces):
    late = request(traces, at=0.02, new=1)
    load = traces.Load([request(traces, new=3), request(traces, new=5), late])
    play_ours(load)
    assert load.tokens == [[10, 11, 12], [10, 11, 12, 13, 14], [10]]
    assert load.arrived == [0.0, 0.0, 0.02]
    assert load.times[2][0] >= 0.02


def test_our_adapter_says_which_request_ended_early(play_ours, traces, monkeypatch):
    monkeypatch.setattr(ScriptedEngine, "most", 2)
    with pytest.raises(RuntimeError, match=r"request 0 ended after 2 of 3.*NaN"):
        play_ours(traces.Load([request(traces, new=3)]))


def test_our_adapter_does_not_wait_for_an_idle_engine(play_ours, traces, monkeypatch):
    monkeypatch.setattr(ScriptedEngine, "asleep", True)
    with pytest.raises(RuntimeError, match="1 not done"):
        play_ours(traces.Load([request(traces)]))


# --- the program


def run(*arguments, check=True):
    command = [sys.executable, "-W", "error", FOLDER / "serving_load.py", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=check, timeout=300
    )


def test_it_runs_prints_its_tables_and_writes_json(tmp_path):
    file = tmp_path / "runs.jsonl"
    shown = run(
        *("--quick", "--rounds", "2", "--traces", "a", "d", "--model", TINY),
        *("--engines", "one at a time", "--json", file),
    ).stdout
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["trace"], r["engine"], r["round"]) for r in records] == [
        (trace, "one at a time", n) for trace in "ad" for n in range(2)
    ]
    for record in records:
        assert 0 < record["first_p50"] <= record["whole_p50"] <= record["makespan"]
        assert record["peak"] > record["beyond_model"]
    assert "load average" in shown
    assert "lengths / 8" in shown
    assert shown.count("| one at a time |") == 2
    assert "| 2/2 |" in shown


def test_our_engine_gets_the_tokens_of_one_at_a_time():
    shown = run(
        *("--quick", "--rounds", "1", "--traces", "c-all", "d", "--model", TINY),
        *("--engines", "tiny_llm", "one at a time"),
    ).stdout
    for tokens in ("16/16", "3/3"):
        assert shown.count(f"| {tokens} |") == 2


def test_an_engine_that_fails_is_told_and_the_others_go_on(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 320}')
    done = run(
        *("--quick", "--rounds", "2", "--traces", "a", "--model", tmp_path),
        *("--engines", "one at a time"),
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.count("one at a time failed in trace a: ") == 1
    assert "| one at a time | failed |" in done.stdout


def test_what_cannot_be_run_is_refused(load_module, capsys):
    main = load_module("serving_load").main
    for wrong, why in (
        (["--rounds", "0"], "at least 1"),
        (["--new-tokens", "0"], "more than 0"),
        (["--model", str(TINY)], "cannot be run by llama.cpp"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(wrong)
        assert ended.value.code == 2
        assert why in capsys.readouterr().err
