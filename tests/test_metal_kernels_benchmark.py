"""benchmarks/metal_kernels.py runs, and says what is so. (How fast, nobody asserts.)"""

import dataclasses
import importlib
import re
import subprocess
import sys
from pathlib import Path

import metal_emulator
import mlx.core as mx
import pytest
from emulator_tools import needs_emulator

from tiny_llm.devices import DEVICES, find_device
from tiny_llm.errors import KernelError
from tiny_llm.kernels import cached, metal
from tiny_llm.memory import KvShape, kv_cache_bytes
from tiny_llm.roofline import DecoderCost, decode_work

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
README = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8")
NAMES = ("kernels", "ways", "cases", "timing", "report", "roofline")
WITHOUT_METAL = pytest.mark.skipif(mx.metal.is_available(), reason="Metal is here")


@pytest.fixture
def bench(monkeypatch):
    """The benchmark's modules by name; TINY_LLM_KERNELS is as before afterwards."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv(metal.VARIABLE, "reference")
    before = mx.default_device()
    mx.set_default_device(mx.Device(mx.cpu))
    yield type("Bench", (), {n: importlib.import_module(f"metal_{n}") for n in NAMES})
    mx.set_default_device(before)


def run(*arguments):
    command = [sys.executable, "-W", "error", FOLDER / "metal_kernels.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def tables(text):
    """Each Markdown table as a list of lines, a line as a dict of its cells."""
    found, head = [], None
    for line in text.splitlines():
        if not line.startswith("|"):
            head = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if head is None:
            head, lines = cells, []
            found.append(lines)
        elif not cells[0].startswith("---"):
            lines.append(dict(zip(head, cells, strict=True)))
    return found


def test_it_runs_over_the_references_and_says_that_these_are_no_metal_figures():
    done = run("--cpu", "--quick")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("**References on the CPU, no Metal figure:**")
    assert re.search(r"mlx \d+\.\d+.*\d{4}-\d\d-\d\d", done.stdout)
    assert "Load average" in done.stdout
    attention, new_rows = tables(done.stdout)
    assert {line["heads"] for line in attention + new_rows} == {"SmolLM2-135M"}
    assert {line["requests"] for line in attention} == {"1", "3"}
    assert {line["rows"] for line in attention} == {"1", "4"}
    assert {line["new rows"] for line in new_rows} == {"1", "3", "256"}
    assert {line["context"] for line in attention} == {"128", "32 to 128"}
    assert {line["numbers"] for line in attention} >= {
        *("bfloat16", "float16", "8 bits, bfloat16", "4 bits, bfloat16"),
        *("8 bits, bfloat16, dense", "4 bits, bfloat16, dense"),
    }
    timed = re.compile(r"[\d.,]+ ±\d+%")
    for line in attention + new_rows:
        assert timed.fullmatch(line["ours, µs"]), line
        assert line["canary"] == "not run"
        assert line["of bandwidth"] == "-"
    for line in attention:
        assert re.fullmatch(
            timed.pattern + r" \([\d.]+x\)", line["(gather,) (dequantize,) sdpa"]
        )
        assert all(float(error) < 0.04 for error in line["errors"].split())


@WITHOUT_METAL
def test_without_metal_it_says_so_in_one_line():
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no Metal here" in done.stderr


def test_the_readme_has_the_computed_tables(bench, capsys):
    assert bench.kernels.main(["--roofline"]) == 0
    shown = capsys.readouterr().out
    (held,) = re.findall(
        r"<!-- roofline -->\n(.*?)<!-- end of roofline -->", README, re.DOTALL
    )
    assert held.strip() == shown.strip()
    assert shown.startswith("**Computed, not measured.**")


def test_the_readme_has_the_numbers_of_the_rules_and_its_links_lead_to_files():
    words = " ".join(README.split())
    wanted = f"{cached._THREADGROUPS} threadgroups wanted, {cached._KEYS} keys a split"
    assert f"{cached.SIMDS} SIMD groups a threadgroup, {wanted}" in words
    assert f"up to {cached._REGISTERS} numbers of each" in words
    assert f"up to {cached.MOST_SPLITS} threadgroups" in words
    assert f"at most {cached.MOST_ROWS} new tokens" in words
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "//" not in link]
    assert [link for link in links if not (ROOT / "kernels" / link).exists()] == []
    files = set(re.findall(r"`([a-z_]+\.(?:py|metal|h))`", README))
    names = {path.name for path in (ROOT / "kernels").iterdir()}
    assert files - {"name.py", "name.metal"} <= names
    assert {name for name in names if name.endswith((".metal", ".h"))} <= files


@pytest.mark.parametrize("packing", [(None, None), (8, 64), (4, 64)])
def test_the_bytes_read_are_those_of_the_cache(bench, packing):
    bits, group_size = packing
    for model in bench.roofline.MODELS:
        shape = KvShape((None,) * model.layers, model.kv_heads, model.dim, 2)
        work = bench.roofline.attention_work(model, 8 * 4096, bits=bits)
        options = {"kind": "paged", "bits": bits, "group_size": group_size}
        held = kv_cache_bytes(shape, tokens=4096, batch=8, **options)
        assert model.layers * work.bytes == held
        cost = DecoderCost(0, 0, model.heads, shape, 0)
        step = decode_work(cost, batch=8, context=4096)
        assert model.layers * work.flops == step.flops


def test_a_cell_of_the_computed_tables_by_hand(bench):
    # SmolLM2: 2 (K, V) * 30 layers * 3 heads * 64 * 2 bytes * 4096 tokens = 94.4 MB
    assert 2 * 30 * 3 * 64 * 2 * 4096 == 94_371_840
    first = tables(bench.roofline.step_table(bench.roofline.SMOLLM2))[0]
    by_chip = {line["ms a step"]: line for line in first}
    assert by_chip["MB read"]["4,096 x 1, bf16"] == "94.4"
    assert by_chip["M4 Pro"]["4,096 x 1, bf16"] == "0.346"  # / 273 GB/s
    chips = ", ".join(name for name in by_chip if name != "MB read")
    listed = {d.name for d in DEVICES if not d.name.startswith("M5")}
    assert set(chips.split(", ")) == listed


def test_bandwidth_is_what_limits_in_the_computed_tables(bench):
    for model in bench.roofline.MODELS:
        for device in DEVICES:
            for bits in bench.roofline.KINDS.values():
                least = bench.roofline.least_time(model, 4096, 1, bits, device)
                assert least.limit == "bandwidth"


def test_what_rotating_while_writing_saves_by_hand(bench):
    smollm2, qwen3 = tables(bench.roofline.rotation_table(4096))[0]
    # 30 layers * (write + read) * (9 + 3) heads * 64 * 2 bytes
    assert smollm2["saved"] == f"{30 * 2 * 12 * 64 * 2:,}"
    assert qwen3["saved"] == f"{28 * 2 * 24 * 128 * 2:,}"
    assert smollm2["weights read"] == f"{2 * 134_479_872:,}"
    assert smollm2["saved of the step"] == f"{92_160 / (94_371_840 + 268_959_744):.3%}"


def small_cases(bench):
    model = bench.roofline.SMOLLM2
    case = bench.cases.Case(model, 2, 128)
    return {
        "numbers": case,
        "alone": case._replace(batch=1, dtype=mx.float16),
        "ragged": case._replace(batch=3, context=150, ragged=True, bits=8),
        "four rows": case._replace(rows=4, bits=4, model=bench.roofline.QWEN3),
        "dense": case._replace(bits=8, paged=False),
    }


KINDS = ("numbers", "alone", "ragged", "four rows", "dense")


@needs_emulator
@pytest.mark.parametrize("kind", KINDS)
def test_our_kernels_get_what_they_need_and_pass_its_check(bench, kind, monkeypatch):
    monkeypatch.setenv(metal.VARIABLE, "metal")
    monkeypatch.setenv("TINY_LLM_EMULATOR_MODE", "fast")
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_emulator.metal_kernel)
    monkeypatch.setattr(bench.ways, "LONG", 128)  # so that splits are fixed, too
    metal.forget()
    found = bench.ways.problem(small_cases(bench)[kind], 1)
    fixed = {"splits 1", "splits 16"} if kind != "four rows" else set()
    assert fixed - {f"splits {found.splits}"} <= {way.name for way in found.ways}
    with metal_emulator.recording() as runs:
        for way in found.ways:
            outcome = bench.timing.check(way, found.tolerance)
            assert outcome.problem is None, way.name
            assert outcome.error > 0
    assert {name for name, _ in runs if "cached_attention" in name}
    metal.forget()


@needs_emulator
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_new_rows_are_right_in_both_ways(bench, bits, monkeypatch):
    monkeypatch.setenv(metal.VARIABLE, "metal")
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_emulator.metal_kernel)
    metal.forget()
    found = bench.ways.rows_problem(bench.roofline.SMOLLM2, 3, bits)
    with metal_emulator.recording() as runs:
        errors = [way.error() for way in found.ways]
    assert runs
    assert max(errors) <= found.tolerance
    assert (min(errors) > 0) == (bits is not None)
    metal.forget()


def test_all_ways_know_the_same_answer(bench):
    for case in small_cases(bench).values():
        found = bench.ways.problem(case, 3 * case.work.bytes)
        assert found.ways[0].name == "ours"
        assert len(found.ways) >= 2
        for way in found.ways:
            assert 0 < way.error() < found.tolerance, (case, way.name)


def effort(bench):
    return bench.timing.Effort(2, 1e-4, 1, 2**30)


@needs_emulator
def test_where_there_is_metal_the_kernels_run_after_their_canary(
    bench, monkeypatch, capsys
):
    monkeypatch.setenv("TINY_LLM_EMULATOR_MODE", "fast")
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_emulator.metal_kernel)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(bench.timing, "MOST_CALLS", 1)
    metal.forget()
    arguments = "--models SmolLM2-135M --batches 2 --contexts 128 --rounds 1"
    with metal_emulator.recording() as runs:
        status = bench.kernels.main(
            [*arguments.split(), "--working-set", "1", "--device", "M4 Pro"]
        )
    metal.forget()
    assert status == 0
    shown = capsys.readouterr().out
    assert "no Metal figure" not in shown
    assert "M4 Pro: 273 GB/s as published" in shown
    attention, new_rows = tables(shown)
    assert len(attention) == 3 * 2 + 1 + 2 + 2
    for line in attention + new_rows:
        assert line["canary"] == "right"
        assert line["of bandwidth"].endswith("%")
    assert len({name for name, _ in runs}) >= 5


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        (lambda out: mx.zeros_like(out), "WRONG by 1"),
        (lambda out: out * 1.1, "WRONG by 0.1"),
        (lambda out: out * mx.nan, "WRONG by nan"),
        (lambda out: mx.concatenate([out[1:], out[:1]]), "WRONG by"),
    ],
)
def test_a_wrong_kernel_is_shown_and_not_timed(bench, fault, shown, monkeypatch):
    right = bench.ways.paged_attention
    monkeypatch.setattr(
        bench.ways, "paged_attention", lambda *a, **k: fault(right(*a, **k))
    )
    case = small_cases(bench)["numbers"]
    found = bench.ways.problem(case, 1)
    outcomes = bench.timing.measure(found, effort(bench))
    assert outcomes["ours"].seconds == []
    assert len(outcomes["gather + sdpa"].seconds) == 2
    line = bench.report.attention_line(case, found, outcomes, None, True)
    cells = dict(zip(bench.report.ATTENTION, line, strict=True))
    assert cells["ours, µs"].startswith(shown)
    assert cells["GB/s"] == "-"
    assert "x" not in cells["(gather,) (dequantize,) sdpa"]


def test_what_the_canary_found_is_in_the_table(bench, monkeypatch):
    def refuse(*arguments, **options):
        raise KernelError("it returns zeros | only")

    monkeypatch.setattr(bench.ways, "paged_attention", refuse)
    case = small_cases(bench)["numbers"]
    found = bench.ways.problem(case, 1)
    outcomes = bench.timing.measure(found, effort(bench))
    line = bench.report.attention_line(case, found, outcomes, None, True)
    cells = dict(zip(bench.report.ATTENTION, line, strict=True))
    assert cells["ours, µs"] == "it returns zeros / only"
    assert cells["canary"] == "fault"
    assert cells["errors"].startswith("- ")


def test_a_line_has_rates_and_ratios(bench):
    case = small_cases(bench)["numbers"]
    found = bench.ways.Problem([], case.work, 1.0, 4)
    outcome = bench.timing.Outcome
    outcomes = {
        "ours": outcome(1e-3, [10e-6, 10e-6, 12e-6, 9e-6, 10e-6]),
        "splits 1": outcome(1e-3, [20e-6]),
        "gather + sdpa": outcome(2e-3, [25e-6]),
    }
    device = dataclasses.replace(find_device("M4 Pro"), bandwidth=98304e5)
    line = bench.report.attention_line(case, found, outcomes, device, True)
    assert dict(zip(bench.report.ATTENTION, line, strict=True)) == {
        "heads": "SmolLM2-135M",
        "numbers": "bfloat16",
        "requests": "2",
        "context": "128",
        "rows": "1",
        "ours, µs": "10.0 ±0%",
        "GB/s": "19.7",  # 2 * 128 * 2 * 3 * 64 * 2 bytes / 10 µs
        "of bandwidth": "200%",
        "roofline, µs": "20.0",
        "(gather,) (dequantize,) sdpa": "25.0 ±0% (2.50x)",
        "quantized_matmul, or sdpa of one run": "-",
        "splits": "4",
        "splits 1": "20.0 ±0% (2.00x)",
        "splits 16": "-",
        "canary": "right",
        "errors": "1e-03 1e-03 2e-03",
    }


def test_the_spread_is_the_interquartile_range(bench):
    outcome = bench.timing.Outcome(0.0, [8.0, 9.0, 10.0, 12.0, 100.0])
    assert outcome.median == 10
    assert outcome.spread == pytest.approx(0.3)


def test_the_contexts_are_ragged_and_scattered_and_the_caches_many(bench):
    case = bench.cases.Case(bench.roofline.SMOLLM2, 4, 400, ragged=True)
    assert case.lengths == [100, 200, 300, 400]
    assert case.copies(10 * case.work.bytes + 1) == 11
    assert case.copies(1) == 1
    assert case.bytes(1) == case.work.bytes + 2 * case.gathered


def test_a_case_that_memory_has_no_room_for_is_named(bench):
    case = small_cases(bench)["numbers"]
    little = bench.timing.Effort(1, 1e-4, 1, case.bytes(1) - 1)
    lines, left_out = bench.kernels.run_attention([case], little, None, False)
    assert lines == []
    assert left_out == ["SmolLM2-135M, bfloat16, 2 x 128 (memory)"]


def test_no_evaluation_holds_more_than_half_the_memory(bench):
    built = []

    def build(n):
        built.append(n)
        return [mx.zeros(1)]

    way = bench.ways.Way("", build, lambda: 0.0, extra=100)
    calls = bench.timing.calls_for(way, bench.timing.Effort(1, 1e9, 1, 1000))
    assert calls == 5
    assert max(built) <= 5


@pytest.mark.parametrize(
    ("chip", "cores", "name"),
    [
        ("Apple M4 Pro", 20, "M4 Pro"),
        ("Apple M4 Max", 40, "M4 Max 40-core"),
        ("Apple M4 Max", 32, "M4 Max 32-core"),
        ("Apple M3 Max", None, None),
        ("Apple Paravirtual device", None, None),
    ],
)
def test_the_chip_is_found_by_its_name_and_cores(bench, chip, cores, name):
    device = bench.report.device_of(chip, cores)
    assert (device and device.name) == name


def test_the_cores_are_read_from_the_registry(bench):
    text = '+-o AGXAcceleratorG16X  <class AGX>\n    {\n      "gpu-core-count" = 20\n'
    assert bench.report.read_cores(text) == 20
    assert bench.report.read_cores("") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "at least 1"),
        (["--device", "M9"], "unknown device 'M9'; there are: M1"),
        (["--models", "GPT-5"], "GPT-5"),
    ],
)
def test_what_it_cannot_measure_is_refused(bench, arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.kernels.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
