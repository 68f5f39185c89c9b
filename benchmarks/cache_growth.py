"""What one more token costs in every cache layout, as the context grows.

One run measures all layouts in turn, round after round, and beside them the cache of
many tutorials, which concatenates per token: the time to append a token's keys and
values, the time to append and attend (what the layout costs when it is read), the bytes
a step takes beyond those held, and the bytes held. The shape is SmolLM2-135M's (9 query
heads, 3 KV heads of 64 numbers, float32), but of --layers layers, evaluated together
after every token; times and bytes are per layer. What a layout does once per token for
all layers weighs the more, the fewer there are. Printed is Markdown; --plot draws it.

    pip install -e '.[plot]' && python benchmarks/cache_growth.py --plot docs
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import tiny_llm  # before mlx: it preloads the BLAS  # isort: skip

import mlx.core as mx

from tiny_llm.cache import create_kv_cache
from tiny_llm.kernels import attention
from tiny_llm.memory import KvShape

HEADS, KV_HEADS, DIM = 9, 3, 64
SCALE = DIM**-0.5
WINDOW, KEEP = 1024, 4
BAR = 1.2  # the longest context's append may cost so many times the shortest's


class ConcatenatingCache:
    """The tutorial's: each token makes new arrays, one token longer."""

    def __init__(self) -> None:
        self.state: list[mx.array] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self.state)

    def update_and_fetch(self, key: mx.array, value: mx.array) -> list[mx.array]:
        """Append [B, Hkv, S, D]; returns all keys and values."""
        if self.state:
            key = mx.concatenate([self.state[0], key], axis=2)
            value = mx.concatenate([self.state[1], value], axis=2)
        self.state = [key, value]
        return self.state

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float
    ) -> mx.array:
        """Append, then the same attention as the other layouts use."""
        return attention(q, *self.update_and_fetch(k, v), scale=scale)


Maker = Callable[[], Sequence[Any]]  # a cache: one entry per layer


def layouts(layers: int, room: int) -> dict[str, Maker]:
    """By name, what makes a cache for all layers. A pool has room for `room` tokens."""
    shape = KvShape((None,) * layers, KV_HEADS, DIM, 4)

    def kind(name: str, **options: Any) -> Maker:
        return lambda: create_kv_cache(name, shape, mx.float32, options)

    return {
        "dense": kind("dense"),
        "quantized, 8 bits": kind("quantized", bits=8),
        "quantized, 4 bits": kind("quantized", bits=4),
        f"rotating, window {WINDOW}": kind("rotating", window=WINDOW),
        f"rotating, keep {KEEP}": kind("rotating", window=WINDOW, keep=KEEP),
        "paged": kind("paged", tokens=room),
        "paged, 8 bits": kind("paged", tokens=room, bits=8),
        "concatenating": lambda: [ConcatenatingCache() for _ in range(layers)],
    }


class Cost(NamedTuple):
    """Of one layout at one context, per layer: seconds and bytes."""

    append: float
    first: float  # the append after the fill: where the buffer is full, it grows
    attend: float
    extra: float  # allocated at most, beyond what was, while a token is appended
    held: float  # as the layout counts it
    active: float  # as MLX counts it; of a pool, all pages


def measure(make: Maker, context: int, steps: int) -> Cost:
    """Fill a new cache with `context` tokens, append `steps`, then attend with more."""
    prompt, token = (mx.random.normal((1, KV_HEADS, n, DIM)) for n in (context, 1))
    query = mx.random.normal((1, HEADS, 1, DIM))
    mx.eval(prompt, token, query)
    # (what others have freed is handed out again, in buffers larger than asked for)
    mx.clear_cache()
    base = mx.get_active_memory()
    cache = make()
    layers = len(cache)

    def append(x: mx.array) -> float:
        start = time.perf_counter()
        for layer in cache:
            layer.update_and_fetch(x, x)  # what it returns is not kept: in place
        mx.eval([layer.state for layer in cache])
        return (time.perf_counter() - start) / layers

    def attend() -> float:
        start = time.perf_counter()
        mx.eval([layer.attend(query, token, token, scale=SCALE) for layer in cache])
        return (time.perf_counter() - start) / layers

    append(prompt)
    first = append(token)
    times, extras = [], []
    for _ in range(steps):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        times.append(append(token))
        # (where nothing is allocated at all, MLX leaves the peak at 0)
        extras.append(max(mx.get_peak_memory() - before, 0) / layers)
    held = sum(layer.nbytes for layer in cache) / layers
    active = (mx.get_active_memory() - base) / layers
    attends = [attend() for _ in range(max(steps // 4, 1))]
    return Cost(
        statistics.median(times),
        first,
        statistics.median(attends),
        statistics.median(extras),
        held,
        active,
    )


Runs = dict[str, dict[int, list[Cost]]]  # layout -> context -> one for each round


def run(contexts: Sequence[int], layers: int, rounds: int, steps: int) -> Runs:
    """All layouts at all contexts, in turn; one unmeasured round comes first."""
    makers = layouts(layers, max(contexts) + 2 * steps + 1)
    runs: Runs = {name: {c: [] for c in contexts} for name in makers}
    for turn in range(rounds + 1):
        for context in contexts:
            for name, make in makers.items():
                cost = measure(make, context, steps)
                if turn:
                    runs[name][context].append(cost)
    return runs


def median(costs: Sequence[Cost], field: str) -> float:
    return float(statistics.median(getattr(cost, field) for cost in costs))


def ratio(by_context: dict[int, list[Cost]]) -> float:
    """Median over the rounds of the longest context's append to the shortest's."""
    short, long = by_context[min(by_context)], by_context[max(by_context)]
    pairs = zip(long, short, strict=True)
    return statistics.median(a.append / b.append for a, b in pairs)


def spread(by_context: dict[int, list[Cost]], field: str) -> float:
    """Interquartile range of the rounds / median, the largest of the contexts."""
    widest = 0.0
    for costs in by_context.values():
        values = [getattr(cost, field) for cost in costs]
        if len(values) > 1:
            low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
            widest = max(widest, (high - low) / middle)
    return widest


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, numbers to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def kib(count: float) -> str:
    return f"{count / 1024:,.0f}" if count >= 10240 else f"{count / 1024:.1f}"


def report(runs: Runs, layers: int, steps: int, load: tuple[float, float]) -> str:
    """Markdown: where and how it was measured, three tables, and the bar."""
    from importlib.metadata import version

    contexts = list(next(iter(runs.values())))
    short, long = contexts[0], contexts[-1]
    rounds = len(next(iter(runs.values()))[short])
    titles = [f"{context:,}" for context in contexts]

    def times(name: str, field: str) -> list[str]:
        cells = [milliseconds(median(c, field)) for c in runs[name].values()]
        return [name, *cells, f"{spread(runs[name], field):.0%}"]

    appends = (
        [
            *times(name, "append"),
            f"{ratio(runs[name]):.2f}",
            milliseconds(median(runs[name][long], "first")),
        ]
        for name in runs
    )
    held = (
        [
            name,
            *(kib(median(costs, "held")) for costs in by_context.values()),
            kib(median(by_context[long], "active")),
            kib(median(by_context[short], "extra")),
            kib(median(by_context[long], "extra")),
        ]
        for name, by_context in runs.items()
    )
    verdicts = "; ".join(
        f"{name} {found:.2f} ({'within' if found <= BAR else 'ABOVE'} the bar of {BAR})"
        for name in ("dense", "paged")
        for found in [ratio(runs[name])]
    )
    return "\n".join(
        [
            f"{platform.machine()}, {os.cpu_count()} cores, {mx.default_device()}, "
            f"{tiny_llm.blas.chosen().name or 'BLAS as it came'}, "
            f"mlx {version('mlx')}, {date.today()}; load average {load[0]:.2f} before "
            f"and {load[1]:.2f} after. {layers} layers of {KV_HEADS} KV heads of {DIM} "
            f"numbers, float32. "
            f"Per layer; medians of {rounds} rounds, each of {steps} appends; spread: "
            f"interquartile range of the rounds, at the worst context.",
            "",
            f"Append one token, ms. {long:,} / {short:,}: {verdicts}. First: the one "
            f"after the prompt, for which full buffers grow.",
            "",
            table(
                ["", *titles, "spread", f"{long:,} / {short:,}", f"first at {long:,}"],
                appends,
            ),
            "Append one token and attend, ms.",
            "",
            table(["", *titles, "spread"], (times(name, "attend") for name in runs)),
            f"Held, KiB; active: as MLX counts it (of a pool, all pages, for {long:,} "
            f"tokens); extra: allocated beyond that while one token is appended.",
            "",
            table(
                [
                    "",
                    *titles,
                    f"active at {long:,}",
                    f"extra at {short:,}",
                    f"extra at {long:,}",
                ],
                held,
            ),
        ]
    ).rstrip()


def plot(runs: Runs, folder: Path) -> list[Path]:
    """Draw cache_growth.svg and .png: append, append and attend, bytes held."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # the text as text, and the same file from the same numbers
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tiny_llm"})
    panels = [
        ("append", 1e3, "append one token, one layer (ms)"),
        ("attend", 1e3, "append and attend, one layer (ms)"),
        ("held", 1 / 2**20, "held by one layer (MiB)"),
    ]
    # seen without colour: no two series share marker and line
    markers, dashes = "os^Dvx*P", ["-", "--", "-.", ":"]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.6), layout="constrained")
    for axis, (field, factor, label) in zip(axes, panels, strict=True):
        for number, (name, by_context) in enumerate(runs.items()):
            axis.plot(
                list(by_context),
                [median(costs, field) * factor for costs in by_context.values()],
                marker=markers[number],
                linestyle=dashes[number % 4],
                markersize=6,
                fillstyle="none",
                label=name,
            )
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(list(by_context), [str(context) for context in by_context])
        axis.set_xlabel("context (tokens)")
        axis.set_ylabel(label)
        axis.grid(True, which="major", alpha=0.3)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"cache_growth.{suffix}" for suffix in ("svg", "png")]
    figure.savefig(paths[0], metadata={"Date": None})
    figure.savefig(paths[1], dpi=110)
    plt.close(figure)
    return paths


def records(runs: Runs) -> list[str]:
    """A JSON line for each layout, context and round."""
    return [
        json.dumps({"layout": name, "context": context, "round": n, **cost._asdict()})
        for name, by_context in runs.items()
        for context, costs in by_context.items()
        for n, cost in enumerate(costs)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    contexts = [256, 1024, 2048, 4096, 8192]
    parser.add_argument("--contexts", type=int, nargs="+", default=contexts)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=64, help="appends per round")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw SVG and PNG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines")
    parser.add_argument("--quick", action="store_true", help="short and inexact")
    args = parser.parse_args(arguments)
    if args.quick:
        args.contexts, args.rounds, args.steps = [256, 1024], 2, 8
    if min(*args.contexts, args.layers, args.rounds, args.steps) < 1:
        parser.error("contexts, layers, rounds and steps must be at least 1")
    tiny_llm.blas.keep_freed_memory()  # as loading a model does
    before = os.getloadavg()[0]
    runs = run(sorted(set(args.contexts)), args.layers, args.rounds, args.steps)
    load = before, os.getloadavg()[0]
    print(report(runs, args.layers, args.steps, load))
    if args.json:
        args.json.write_text("\n".join(records(runs)) + "\n", encoding="utf-8")
    if args.plot:
        try:
            paths = plot(runs, args.plot)
        except ImportError:
            print("\nno plot: it needs matplotlib, pip install -e '.[plot]'")
            return 1
        print("\nplotted: " + ", ".join(map(str, paths)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
