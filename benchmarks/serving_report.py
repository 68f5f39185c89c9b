"""The tables of serving_load.py: medians over the rounds, and ratios."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from serving_traces import TRACES

PEER, FLOOR = "mlx-lm", "one at a time"
OTHER_CLASS = "llama.cpp (4-bit)"
P50_P95 = "p50", "p95"


class Run(NamedTuple):
    """One engine, one trace, one round."""

    metrics: dict[str, float]  # serving_traces.metrics, and memory in MiB
    tokens: list[list[int]]


Runs = dict[str, dict[str, list[Run]]]  # trace -> engine -> rounds; [] where it failed


def medians(rounds: Sequence[Run]) -> dict[str, float]:
    """Each number's own median over the rounds."""
    keys = rounds[0].metrics
    return {key: statistics.median(run.metrics[key] for run in rounds) for key in keys}


def summary(runs: Runs) -> dict[str, dict[str, dict[str, float]]]:
    """Trace -> engine -> medians, of those that did not fail."""
    return {
        trace: {name: medians(rounds) for name, rounds in by_engine.items() if rounds}
        for trace, by_engine in runs.items()
    }


def same_tokens(by_engine: dict[str, list[Run]], name: str) -> str:
    """How many requests got the tokens that the floor gives them (first round)."""
    floor = by_engine.get(FLOOR)
    if not floor or name == OTHER_CLASS:
        return "-"
    pairs = list(zip(by_engine[name][0].tokens, floor[0].tokens, strict=True))
    return f"{sum(a == b for a, b in pairs)}/{len(pairs)}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, numbers to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def report_trace(name: str, by_engine: dict[str, list[Run]]) -> str:
    """What was measured, and its ratios to mlx-lm."""
    found = {engine: medians(rounds) for engine, rounds in by_engine.items() if rounds}
    late = any("stall" in m for m in found.values())
    head = ["", "new/s", "prompt/s", "both/s", "first p50", "p95", "whole p50", "p95"]
    head += ["gap p50", "p95", "max", "peak MiB", "beyond model", "same tokens"]
    if late:
        head += ["max / median gap", "max / calm gap", "late first"]
    rows = []
    for engine in by_engine:
        if engine not in found:
            rows.append([engine, *["failed"] * (len(head) - 1)])
            continue
        m = found[engine]
        cells = [f"{m[f'{what}_per_second']:.1f}" for what in ("new", "prompt", "all")]
        cells += [
            f"{m[f'{what}_{p}']:.2f}" for what in ("first", "whole") for p in P50_P95
        ]
        cells += [f"{m[f'gap_{p}'] * 1e3:.0f}" for p in (*P50_P95, "max")]
        cells += [f"{m['peak']:.0f}", f"{m['beyond_model']:.0f}"]
        cells += [same_tokens(by_engine, engine)]
        if late:
            cells += [f"{m['stall']:.1f}", f"{m['stall_calm']:.1f}"]
            cells += [f"{m['late_first']:.2f}"]
        rows.append([engine, *cells])
    parts = [f"### Trace {name}: {TRACES[name]}", "", table(head, rows)]
    if PEER in found:
        parts.append(ratios(found))
    return "\n".join(parts)


RATIOS = {
    "tokens/s": "all_per_second",
    "first p50": "first_p50",
    "first p95": "first_p95",
    "whole p50": "whole_p50",
    "whole p95": "whole_p95",
    "gap p50": "gap_p50",
    "gap max": "gap_max",
    "peak memory": "peak",
}


def ratios(found: dict[str, dict[str, float]]) -> str:
    """Each engine's numbers divided by mlx-lm's; its rate also by the floor's."""
    head = [f"divided by {PEER}'s", *RATIOS, f"tokens/s / {FLOOR}"]
    rows = []
    for engine, m in found.items():
        cells = [f"{m[key] / found[PEER][key]:.2f}" for key in RATIOS.values()]
        floor = found.get(FLOOR)
        rate = m["all_per_second"]
        cells.append(f"{rate / floor['all_per_second']:.2f}" if floor else "-")
        rows.append([engine, *cells])
    return table(head, rows)


def record(trace: str, engine: str, turn: int, run: Run) -> str:
    """A JSON line of one run."""
    return json.dumps({"trace": trace, "engine": engine, "round": turn, **run.metrics})
