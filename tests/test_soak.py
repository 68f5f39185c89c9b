"""benchmarks/soak.py in its short form, and that it would find a leak."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tests" / "data" / "qwen3"
ARGUMENTS = ["--quick", "--model", str(TINY), "--kv-memory", "150000"]


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("soak")


def test_300_requests_a_third_cancelled_leave_nothing_behind():
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "benchmarks" / "soak.py", *ARGUMENTS],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    lines = done.stdout.splitlines()
    (ended,) = [line for line in lines if line.startswith("ended: ")]
    reasons = json.loads(ended.removeprefix("ended: ").replace("'", '"'))
    assert sum(reasons.values()) == 300
    assert set(reasons) >= {"cancelled", "error", "length", "refused"}
    assert reasons["cancelled"] > 20
    assert "pages not given back: 0" in lines
    assert "running=0, pages=" in done.stdout


def test_growth_is_the_slope_over_the_last_half(soak):
    def line(*resident):
        return [soak.Sample(100 * i, r) for i, r in enumerate(resident, start=1)]

    assert soak.growth(line(1, 2, 50, 50, 50, 50)) == pytest.approx(0)
    assert soak.growth(line(9, 9, 9, 10, 11, 12)) == pytest.approx(3)
    assert soak.growth(line(10, 0, 12, 11, 10, 9)) == pytest.approx(-3)


def test_a_leak_or_growth_is_told_by_the_exit_status(soak, monkeypatch, capsys):
    crowd = soak.Crowd(None, 100, 0)

    def main(samples, leaked, *arguments):
        monkeypatch.setattr(sys, "argv", ["soak.py", *arguments])
        monkeypatch.setattr(soak, "run", lambda args: (samples, crowd, leaked))
        status = soak.main()
        return status, capsys.readouterr().out

    flat = [soak.Sample(i, 100.0) for i in range(1, 50)]
    growing = [soak.Sample(i, 100.0 + i) for i in range(1, 50)]
    assert main(flat, 0)[0] == 0
    assert main(growing, 0)[0] == 1
    status, out = main(flat, 3)
    assert status == 1
    assert "pages not given back: 3" in out


def test_an_engine_that_keeps_pages_is_found(soak, monkeypatch, capsys):
    from tiny_llm.engine.kv import KvMemory

    close, calls = KvMemory.close, []

    def leaky(self, request):
        calls.append(request.table)  # (kept, so that nothing frees it)
        if len(calls) == 40:
            request.table = None
        close(self, request)

    monkeypatch.setattr(KvMemory, "close", leaky)
    monkeypatch.setattr(sys, "argv", ["soak.py", *ARGUMENTS])
    with pytest.raises(AssertionError):
        soak.main()
