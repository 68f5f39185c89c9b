"""benchmarks/speculation.py runs, and its figures are what it says they are."""

import importlib
import json

import pytest
from oracle import DATA

from tiny_llm.speculation import Counts

PROSE = {"prose": ["Hello there.", "A second one."], "quotes": ["one two three " * 9]}


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(DATA.parent.parent / "benchmarks")
    return importlib.import_module("speculation")


def answer(benchmark, kind, plain, guessed, **more):
    return benchmark.Answer(kind, 1, 10, [1] * 11, plain, guessed, **more)


def test_ratios_are_medians_of_the_rounds_own_ratios(benchmark):
    one = answer(benchmark, "quotes", [1.0, 8.0, 3.0], [1.0, 2.0, 1.5])
    assert one.ratio == 2.0
    assert one.speed(one.plain) == pytest.approx(10 / 3)
    answers = [one]
    for kind, ratio in [("code edit", 1.0), ("quotes", 3.0), ("prose", 0.5)]:
        answers.append(answer(benchmark, kind, [ratio], [1.0]))
    assert benchmark.groups(answers) == {
        "quotes": 2.5,
        "copying": 2.0,
        "code edit": 1.0,
        "prose": 0.5,
    }


def test_the_report_tells_what_was_right_and_what_was_not_the_same(benchmark):
    counts = Counts(passes=4, drafted=20, accepted=10)
    good = answer(benchmark, "quotes", [2.0], [1.0], counts=counts)
    bad = answer(benchmark, "prose", [1.0], [1.0], same=False)
    rows = benchmark.report([good, bad], "here").splitlines()
    assert rows[4] == (
        "| quotes 1 | 10, 11 | 5.0 | 10.0 | 2.00 | 10 of 20 in 4 passes | 3.5 | yes |"
    )
    assert rows[5].endswith("| 0 of 0 in 0 passes | 1.0 | NO |")
    assert "prose: 1.00 times plain decoding (the bar is 0.97)" in rows


def test_it_runs_with_another_model_and_prompts(benchmark, tmp_path, capsys):
    prompts, lines = tmp_path / "prompts.json", tmp_path / "lines.json"
    prompts.write_text(json.dumps(PROSE))
    options = ["--model", str(DATA / "llama_llama3rope_bias"), "--new-tokens", "12"]
    options += ["--rounds", "2", "--prompts", str(prompts), "--json", str(lines)]
    assert benchmark.main(options) == 0
    shown = capsys.readouterr().out
    record = json.loads(lines.read_text())
    assert json.loads(shown.splitlines()[-1]) == record
    assert [(p["kind"], p["number"]) for p in record["prompts"]] == [
        ("prose", 1),
        ("prose", 2),
        ("quotes", 1),
    ]
    assert all(len(p["plain"]) == len(p["guessed"]) == 2 for p in record["prompts"])
    assert set(record["ratios"]) == {"prose", "quotes", "copying"}


def test_it_refuses_what_it_cannot_measure(benchmark, capsys):
    for wrong in (["--rounds", "0"], ["--new-tokens", "1"]):
        with pytest.raises(SystemExit) as ended:
            benchmark.main(wrong)
        assert ended.value.code == 2
    assert "--rounds must be at least 1" in capsys.readouterr().err


def test_its_prompts_are_of_four_kinds(benchmark):
    prompts = json.loads(benchmark.PROMPTS.read_text("utf-8"))
    assert list(prompts) == ["code edit", "extraction", "quotes", "prose"]
    assert all(len(texts) >= 2 for texts in prompts.values())
