"""The benchmarks run, and what they compute is right. (How fast, nobody asserts.)"""

import ast
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tiny_llm import TinyKvFullCache, load_model, stream_generate
from tiny_llm.errors import ParameterError
from tiny_llm.memory import KvShape, kv_cache_bytes

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
TINY = ROOT / "tests" / "data" / "qwen3"  # heads of 32 numbers


@pytest.fixture
def growth(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("cache_growth")


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("kv_quality")


@pytest.fixture
def layouts(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("kv_layouts")


@pytest.fixture(scope="module")
def tiny():
    return load_model(TINY)


def run(name, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", FOLDER / f"{name}.py", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout


def table_rows(text):
    """First cell -> the others, of all Markdown tables."""
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


# --- cache_growth


def costs(growth, *appends):
    return [growth.Cost(a, *[1.0] * 5) for a in appends]


def test_the_ratio_is_the_median_of_the_rounds_own_ratios(growth):
    by_context = {
        256: costs(growth, 1.0, 2.0, 4.0),
        1024: costs(growth, 5.0, 5.0, 5.0),
        8192: costs(growth, 1.5, 2.0, 8.0),
    }
    assert growth.ratio(by_context) == 1.5


def test_the_spread_is_that_of_the_worst_context(growth):
    by_context = {
        256: costs(growth, 10.0, 10.0, 10.0, 10.0, 10.0),
        8192: costs(growth, 8.0, 9.0, 10.0, 12.0, 100.0),
    }
    assert growth.spread(by_context, "append") == pytest.approx(0.3)
    assert growth.spread({256: costs(growth, 1.0)}, "append") == 0.0


def test_the_concatenating_cache_attends_as_the_dense_one(growth):
    theirs, ours = growth.ConcatenatingCache(), TinyKvFullCache()
    for length in (7, 1, 1):
        q = mx.random.normal((1, 9, length, 64))
        k, v = mx.random.normal((2, 1, 3, length, 64))
        a, b = (cache.attend(q, k, v, scale=0.125) for cache in (theirs, ours))
        assert mx.max(mx.abs(a - b)).item() < 1e-6
    assert theirs.nbytes == 2 * 9 * 3 * 64 * 4


@pytest.mark.parametrize("context", [256, 1024])
def test_what_is_held_follows_the_formula(growth, context):
    shape = KvShape((None,), growth.KV_HEADS, growth.DIM, 4)
    options = {
        "dense": {},
        "quantized, 8 bits": {"kind": "quantized", "bits": 8},
        "quantized, 4 bits": {"kind": "quantized", "bits": 4},
        "rotating, window 1024": {"kind": "rotating", "window": 1024},
        "rotating, keep 4": {"kind": "rotating", "window": 1024, "keep": 4},
        "paged": {"kind": "paged"},
        "paged, 8 bits": {"kind": "paged", "bits": 8},
    }
    makers = growth.layouts(2, context + 64)
    assert sorted(makers) == sorted([*options, "concatenating"])
    for name, given in options.items():
        cost = growth.measure(makers[name], context, 4)
        tokens = context + 5
        assert cost.held == kv_cache_bytes(shape, tokens=tokens, **given), name
        if "paged" not in name:
            assert cost.active == pytest.approx(cost.held, rel=0.05), name


def test_only_concatenation_allocates_with_the_context(growth):
    makers = growth.layouts(2, 2048)
    extra = {
        name: [growth.measure(make, n, 4).extra for n in (256, 1024)]
        for name, make in makers.items()
    }
    row = 2 * 3 * 64 * 4
    short, long = extra.pop("concatenating")
    assert (short, long) > (256 * row // 2, 1024 * row // 2)
    assert long > 3 * short
    for name, found in extra.items():
        assert max(found) < 8 * row, name


def test_growth_runs_prints_its_tables_and_writes_json(tmp_path):
    lines = tmp_path / "growth.jsonl"
    shown = run("cache_growth", "--quick", "--json", lines)
    rows = table_rows(shown)
    heads = [row for row in rows if row[1:3] == ["256", "1,024"] or row[0] == "256"]
    assert len(heads) == 3
    assert sum(row[0] == "concatenating" for row in rows) == 3
    assert "the bar of 1.2" in shown
    assert "load average" in shown
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(records) == 8 * 2 * 2
    assert all(record["append"] > 0 and record["attend"] > 0 for record in records)


def test_the_plot_has_both_axes_named_with_units(growth, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install -e '.[plot]'")
    runs = {
        name: {c: costs(growth, 1e-5, 2e-5) for c in (256, 8192)}
        for name in growth.layouts(1, 1)
    }
    svg, png = growth.plot(runs, tmp_path / "new")
    assert (svg.name, png.name) == ("cache_growth.svg", "cache_growth.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    assert text.count("context (tokens)") == 3
    assert "(ms)" in text
    assert "(MiB)" in text
    for name in runs:
        assert f">{name}<" in text
    first = svg.read_bytes()
    growth.plot(runs, tmp_path / "new")
    assert svg.read_bytes() == first


def test_without_matplotlib_the_tables_are_printed_and_the_way_to_it(
    growth, monkeypatch, tmp_path, capsys
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert growth.main(["--quick", "--plot", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "concatenating" in shown
    assert "pip install -e '.[plot]'" in shown
    assert list(tmp_path.iterdir()) == []


def test_growth_refuses_what_it_cannot_measure(growth, capsys):
    for wrong in (["--rounds", "0"], ["--contexts", "0", "256"], ["--layers", "0"]):
        with pytest.raises(SystemExit) as ended:
            growth.main(wrong)
        assert ended.value.code == 2
    assert "at least 1" in capsys.readouterr().err


# --- kv_quality


def rounded(x, group, bits):
    """Quantised and dequantised, rows by themselves."""
    packed = mx.quantize(mx.array(x, dtype=mx.float32), group_size=group, bits=bits)
    return np.array(mx.dequantize(*packed, group_size=group, bits=bits), np.float64)


@pytest.mark.parametrize("newest", [0, 1, 3, 16, 1000])
def test_every_query_sees_the_newest_keys_in_full(layouts, newest):
    length, heads, kv_heads, dim = 40, 4, 2, 32
    generator = np.random.default_rng(newest)
    q = generator.normal(size=(1, heads, length, dim))
    k, v = generator.normal(size=(2, 1, kv_heads, length, dim))
    pk, pv = rounded(k, 32, 4), rounded(v, 32, 4)
    expected = np.zeros_like(q)
    for h in range(heads):
        g = h // 2
        for i in range(length):
            near = (np.arange(i + 1) > i - newest)[:, None]
            keys = np.where(near, k[0, g, : i + 1], pk[0, g, : i + 1])
            values = np.where(near, v[0, g, : i + 1], pv[0, g, : i + 1])
            weights = np.exp(keys @ q[0, h, i] * 0.3)
            expected[0, h, i] = weights / weights.sum() @ values
    cache = layouts.NewestKeptCache(4, 32, newest)
    for start, stop in [(0, 17), (17, 18), (18, 25), (25, 40)]:
        part = [mx.array(x[:, :, start:stop], dtype=mx.float32) for x in (q, k, v)]
        out = cache.attend(*part, scale=0.3)
        assert np.abs(np.array(out) - expected[:, :, start:stop]).max() < 1e-5
        assert cache.offset == stop


def test_a_window_is_not_simulated_but_refused(layouts):
    x = mx.zeros((1, 1, 2, 32))
    with pytest.raises(ParameterError, match=r"window.*8"):
        layouts.NewestKeptCache(8, 32, 4).attend(x, x, x, scale=1.0, window=8)


def test_the_divergence_is_that_of_the_definition(quality):
    generator = np.random.default_rng(5)
    a, b = generator.normal(size=(2, 6, 50)) * 3
    b[3] = a[3]
    targets = generator.integers(0, 50, 6)
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (a, b))
    found = quality.divergence(
        *(quality.log_probabilities(mx.array(x, dtype=mx.float32)) for x in (a, b)),
        mx.array(targets),
    )
    rows = np.arange(6)
    assert np.array(found.nll) == pytest.approx(-p[rows, targets], abs=1e-5)
    assert np.array(found.other_nll) == pytest.approx(-q[rows, targets], abs=1e-5)
    kl = (np.exp(p) * (p - q)).sum(-1)
    assert kl.max() > 1
    assert np.array(found.kl) == pytest.approx(kl, abs=1e-5)
    assert found.kl[3].item() == 0
    assert found.same.tolist() == (a.argmax(-1) == b.argmax(-1)).tolist()


def test_the_summary_counts_every_position_once(quality):
    parts = [
        quality.Divergence(
            *map(mx.array, ([1.0, 2.0], [1.5, 2.0], [0.1, 0.0], [1, 0]))
        ),
        quality.Divergence(*map(mx.array, ([3.0], [3.25], [0.5], [1]))),
    ]
    found = quality.summary(parts)
    assert found.perplexity == pytest.approx(math.exp(2.25))
    assert found.perplexity_difference == pytest.approx(math.exp(2.25) - math.exp(2))
    assert found.nll_difference == pytest.approx(0.25)
    assert found.nll_error == pytest.approx(0.25 / math.sqrt(3))
    assert found.kl_mean == pytest.approx(0.2)
    assert found.kl_max == pytest.approx(0.5)
    assert found.same_argmax == pytest.approx(2 / 3)


def test_the_first_difference_and_the_equal_tokens_are_counted(quality):
    found = quality.compare_writing([[1, 2, 3], [4, 5, 6]], [[1, 9, 3], [4, 5, 6]])
    assert found.first_differences == [1, 3]
    assert found.same == pytest.approx(5 / 6)


def test_all_kept_in_full_is_full_attention_and_fewer_are_worse(quality, layouts, tiny):
    window = np.random.default_rng(1).integers(0, 300, 65).tolist()
    kept = [layouts.Layout(4, 32, newest) for newest in (1000, 16, 0)]
    found = quality.compare(tiny, [window, window[::-1]], kept, 20)
    everything, some, none = (found[layout] for layout in kept)
    assert abs(everything.kl_mean) < 1e-6
    assert abs(everything.perplexity_difference) < 1e-6 * everything.perplexity
    assert everything.same_argmax == 1
    assert none.kl_mean > 2 * some.kl_mean > 1e-4
    eight = layouts.Layout(8, 32)
    finer = quality.compare(tiny, [window], [eight], 20)[eight]
    assert 1e-7 < finer.kl_mean < none.kl_mean / 20


def test_the_engines_packed_cache_equals_the_explicit_rounding(quality, layouts, tiny):
    window = np.random.default_rng(2).integers(0, 300, 60).tolist()
    for bits in (4, 8):
        layout = layouts.Layout(bits, 32)
        assert quality.control(tiny, window, layout, 16) <= quality.BAR
    # (which differs from full attention by more than that)
    full = list(quality.logits_of(tiny, layouts.Layout().cache(tiny), window, 16))
    other = list(
        quality.logits_of(tiny, layouts.Layout(4, 32).simulated(tiny), window, 16)
    )
    assert mx.max(mx.abs(full[0] - other[0])).item() > quality.BAR


def test_a_batch_writes_what_each_prompt_alone_writes(quality, layouts, tiny):
    prompts = np.random.default_rng(3).integers(0, 300, (3, 9)).tolist()
    written = quality.write(tiny, prompts, layouts.Layout().cache(tiny), 12)
    alone = [list(stream_generate(tiny, p, max_new_tokens=12)) for p in prompts]
    assert written == alone


def test_the_text_is_prose_and_not_the_page_of_results(quality, monkeypatch, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("First.\n```sh\ncode\n```\n| a | b |\nLast.\n")
    (tmp_path / "docs" / "kv-cache.md").write_text("Results.\n")
    (tmp_path / "docs" / "more.md").write_text("More.\n")
    (tmp_path / "tiny_llm").mkdir()
    source = '"""Module."""\n\ndef f():\n    """Function."""\n    return 1\n'
    (tmp_path / "tiny_llm" / "a.py").write_text(source)
    monkeypatch.setattr(quality, "ROOT", tmp_path)
    assert quality.prose().split() == "First. Last. More. Module. Function.".split()


@pytest.mark.smollm2
def test_the_text_has_the_tokens_for_the_full_run(quality, smollm2_gguf):
    from tiny_llm import load_tokenizer

    assert len(load_tokenizer(smollm2_gguf).encode(quality.prose())) >= 3 * 2048


@pytest.mark.smollm2
def test_quality_runs_prints_its_tables_and_writes_json(smollm2_gguf, tmp_path):
    lines = tmp_path / "quality.jsonl"
    shown = run("kv_quality", "--quick", "--json", lines, "--model", smollm2_gguf)
    rows = table_rows(shown)
    assert [row[:3] for row in rows if len(row) == 10][2:] == [
        ["8", "64", "0"],
        ["4", "32", "0"],
        ["8", "64", "32"],
        ["4", "32", "32"],
    ]
    assert "within the bar of 1e-04" in shown
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    kl = {(r["bits"], r["newest"]): r["kl_mean"] for r in records}
    assert kl[8, 0] < kl[4, 0] / 20
    assert kl[8, 32] < kl[8, 0]
    assert kl[4, 32] < kl[4, 0]
    assert all(r["control"] == 0 for r in records if r["newest"] == 0)


@pytest.mark.smollm2
def test_quality_refuses_a_text_that_is_too_short(
    quality, smollm2_gguf, tmp_path, capsys
):
    text = tmp_path / "short.txt"
    text.write_text("A few words.")
    with pytest.raises(SystemExit) as ended:
        quality.main(["--model", str(smollm2_gguf), "--text", str(text)])
    assert ended.value.code == 2
    assert "4096 are needed" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        quality.main(["--model", str(smollm2_gguf), "--chunk", "0"])
    assert ended.value.code == 2


# --- all


def test_every_benchmark_puts_the_blas_under_mlx_first():
    for path in FOLDER.glob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        names = [
            node.names[0].name.split(".")[0]
            for node in body
            if type(node) is ast.Import
        ]
        if "__main__" in path.read_text(encoding="utf-8"):
            assert names.index("tiny_llm") < names.index("mlx"), path.name


WITH_TOKENIZER = ROOT / "tests" / "data" / "llama_llama3rope_bias"


def test_sampling_is_timed_in_every_way(monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    sampling = importlib.import_module("sampling")
    options = ["--quick", "--batch", "3", "--model", str(WITH_TOKENIZER)]
    assert sampling.main(options) == 0
    shown = capsys.readouterr()
    records = [json.loads(line) for line in shown.err.splitlines() if line[:1] == "{"]
    assert [record["way"] for record in records] == list(sampling.WAYS)
    for record in records:
        assert 0 < record["sampling"] < 10
        assert f"{record['sampling'] / record['step']:.1%}" in shown.out


def test_beams_are_timed_beside_streams(monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    beam = importlib.import_module("beam")
    assert beam.main(["--quick", "--model", str(WITH_TOKENIZER)]) == 0
    assert "beams / streams" in capsys.readouterr().out
