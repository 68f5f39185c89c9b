"""What packing keys and values to 8 and 4 bits costs in quality.

Over a text of several thousand tokens (this project's own prose, or --text), in windows
that each start with an empty cache, the model predicts every token with full keys and
values and with packed ones: perplexity, KL divergence (full || packed), how often the
likeliest token is the same; then 64 tokens written freely from passages of the text.
The engine packs each token as it is written. What it would buy to keep the newest
tokens as they are is simulated, exactly for every query. A control holds the engine's
packed cache against the simulation with none kept. Printed is Markdown.

    pip install -e . && python benchmarks/kv_quality.py
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import tiny_llm  # before mlx: it preloads the BLAS  # isort: skip

import mlx.core as mx
from kv_layouts import Layout

from tiny_llm.kernels import exp_below

ROOT = Path(__file__).resolve().parent.parent
PACKINGS = [(8, 64), (8, 32), (4, 64), (4, 32)]  # bits, group size
NEWEST = [0, 32, 128]  # so many are kept as they are; 0 is what the engine does
BAR = 1e-4  # the control's largest difference of two logits


class Divergence(NamedTuple):
    """How the predictions at some positions differ from those of full attention."""

    nll: mx.array  # -log p(next token), full
    other_nll: mx.array  # the same, packed
    kl: mx.array  # sum p log(p / q), in nats
    same: mx.array  # whether the likeliest token is the same


def log_probabilities(logits: mx.array) -> mx.array:
    top = mx.max(logits, axis=-1, keepdims=True)
    total = mx.sum(exp_below(logits, top), axis=-1, keepdims=True)
    return logits - (top + mx.log(total))


def divergence(p: mx.array, q: mx.array, targets: mx.array) -> Divergence:
    """Of log-probabilities q [L, V] from p; targets [L] are the tokens that follow."""
    at = targets[:, None]
    return Divergence(
        -mx.take_along_axis(p, at, axis=-1)[:, 0],
        -mx.take_along_axis(q, at, axis=-1)[:, 0],
        mx.sum(exp_below(p, mx.array(0.0)) * (p - q), axis=-1),
        mx.argmax(p, axis=-1) == mx.argmax(q, axis=-1),
    )


@dataclass(frozen=True)
class Quality:
    """One layout against full keys and values."""

    perplexity: float
    perplexity_difference: float
    nll_difference: float  # mean, nats per token
    nll_error: float  # its standard error
    kl_mean: float
    kl_max: float
    same_argmax: float  # share of positions


def summary(parts: Sequence[Divergence]) -> Quality:
    """Over all positions of all parts."""
    nll, other, kl, same = (
        [x for part in parts for x in getattr(part, field).tolist()]
        for field in Divergence._fields
    )
    changes = [b - a for a, b in zip(nll, other, strict=True)]
    perplexity, full = (math.exp(statistics.fmean(x)) for x in (other, nll))
    return Quality(
        perplexity,
        perplexity - full,
        statistics.fmean(changes),
        statistics.stdev(changes) / math.sqrt(len(changes)),
        statistics.fmean(kl),
        max(kl),
        statistics.fmean(same),
    )


def logits_of(
    model: Any, cache: Any, window: Sequence[int], chunk: int
) -> Iterator[mx.array]:
    """Logits [n, V] for the window's tokens, in chunks through the cache."""
    for start in range(0, len(window), chunk):
        ids = mx.array([list(window[start : start + chunk])])
        logits = model(ids, offset=start, cache=cache)[0].astype(mx.float32)
        mx.eval(logits, [entry.state for entry in cache])
        yield logits


def compare(
    model: Any, windows: Sequence[Sequence[int]], layouts: Sequence[Layout], chunk: int
) -> dict[Layout, Quality]:
    """Teacher-forced: every layout against full attention at every position."""
    parts: dict[Layout, list[Divergence]] = {layout: [] for layout in layouts}
    for window in windows:
        inputs, targets = window[:-1], mx.array(list(window[1:]))
        # (kept for the window: 400 MB for 2,048 tokens of a vocabulary of 49,152)
        logits = logits_of(model, Layout().cache(model), inputs, chunk)
        full = [log_probabilities(x) for x in logits]
        mx.eval(full)
        for layout, found in parts.items():
            start = 0
            others = logits_of(model, layout.cache(model), inputs, chunk)
            for expected, other in zip(full, others, strict=True):
                stop = start + other.shape[0]
                q = log_probabilities(other)
                part = divergence(expected, q, targets[start:stop])
                mx.eval(part)
                found.append(part)
                start = stop
    return {layout: summary(found) for layout, found in parts.items()}


def control(model: Any, window: Sequence[int], layout: Layout, chunk: int) -> float:
    """The largest difference of a logit: the engine's cache and the simulation."""
    pairs = zip(
        logits_of(model, layout.cache(model), window, chunk),
        logits_of(model, layout.simulated(model), window, chunk),
        strict=True,
    )
    return max(float(mx.max(mx.abs(a - b)).item()) for a, b in pairs)


def rechunk(model: Any, window: Sequence[int], layout: Layout, chunk: int) -> Quality:
    """One layout against itself, read in chunks a quarter as long.

    Products of other shapes differ in their last bits. That can round a number of a
    packed row the other way, by a whole step, and so on in every layer above.
    """
    inputs, targets = window[:-1], mx.array(list(window[1:]))
    p, q = (
        log_probabilities(
            mx.concatenate(list(logits_of(model, layout.cache(model), inputs, n)))
        )
        for n in (chunk, max(chunk // 4, 1))
    )
    return summary([divergence(p, q, targets)])


def write(
    model: Any, prompts: Sequence[Sequence[int]], cache: Any, tokens: int
) -> list[list[int]]:
    """Greedy tokens after each of some prompts of the same length, as a batch."""
    ids, offset, steps = mx.array([list(row) for row in prompts]), 0, []
    for _ in range(tokens):
        logits = model(ids, offset=offset, cache=cache, logits_to_keep=1)
        offset += ids.shape[1]
        ids = mx.argmax(logits, axis=-1)
        mx.eval(ids, [entry.state for entry in cache])
        steps.append(ids[:, 0].tolist())
    return [list(row) for row in zip(*steps, strict=True)]


class Writing(NamedTuple):
    """Tokens written freely, against those written with full keys and values."""

    first_differences: list[int]  # per prompt, from 0; the length if there is none
    same: float  # share of equal tokens at equal places


def compare_writing(full: list[list[int]], other: list[list[int]]) -> Writing:
    """Of rows of the same length."""
    firsts, equal = [], []
    for a, b in zip(full, other, strict=True):
        matches = [x == y for x, y in zip(a, b, strict=True)]
        firsts.append(matches.index(False) if False in matches else len(matches))
        equal += matches
    return Writing(firsts, statistics.fmean(equal))


def prose() -> str:
    """The paragraphs of README and docs, then the docstrings of the package.

    Without the page that shows the results, or pasting them would change them.
    """
    parts = []
    pages = [p for p in sorted((ROOT / "docs").glob("*.md")) if p.stem != "kv-cache"]
    for path in [ROOT / "README.md", *pages]:
        text = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
        lines = text.splitlines()
        parts.append("\n".join(x for x in lines if not x.startswith(("|", "<!--"))))
    for folder in ("tiny_llm", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    parts.append(ast.get_docstring(node) or "")
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(part for part in parts if part))


def report(
    model_name: str,
    qualities: dict[Layout, Quality],
    writings: dict[Layout, Writing],
    controls: dict[Layout, float],
    chunks: dict[Layout, Quality],
    about: str,
    tokens: int,
) -> str:
    """Markdown: what was measured, and a row for each layout."""
    from importlib.metadata import version

    perplexity = next(
        q.perplexity - q.perplexity_difference for q in qualities.values()
    )
    worst = max(controls.values())
    lines = [
        f"{model_name}, {about}; perplexity with full keys and values "
        f"{perplexity:.3f}. {platform.machine()}, {os.cpu_count()} cores, "
        f"{mx.default_device()}, mlx {version('mlx')}, {date.today()}.",
        "",
        f"Control: the engine's packed cache and an explicit quantise-dequantise "
        f"differ by {worst:.1e} in a logit at most "
        f"({'within' if worst <= BAR else 'ABOVE'} the bar of {BAR:.0e}).",
        "",
        "| bits | group | newest in full | perplexity | difference | mean KL, nats "
        "| max KL | same likeliest token | freely: first difference (median, lowest) "
        "| equal tokens |",
        "|" + " ---: |" * 10,
    ]
    for layout, quality in qualities.items():
        writing = writings[layout]
        firsts = writing.first_differences
        cells = [
            f"{layout.bits}",
            f"{layout.group_size}",
            f"{layout.newest}",
            f"{quality.perplexity:.3f}",
            f"{quality.perplexity_difference / perplexity:+.2%}",
            f"{quality.kl_mean:.1e}",
            f"{quality.kl_max:.1e}",
            f"{quality.same_argmax:.2%}",
            f"{statistics.median(firsts):g}, {min(firsts)} of {tokens}",
            f"{writing.same:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "The same layout read in chunks a quarter as long, against itself:",
        "",
        "| bits | group | mean KL, nats | max KL | same likeliest token |",
        "|" + " ---: |" * 5,
    ]
    for layout, quality in chunks.items():
        lines.append(
            f"| {layout.bits or 'full'} | {layout.group_size if layout.bits else ''} | "
            f"{abs(quality.kl_mean):.1e} | {quality.kl_max:.1e} | "
            f"{quality.same_argmax:.2%} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, metavar="FILE", help="another text")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--window", type=int, default=2048, help="tokens of a window")
    parser.add_argument(
        "--chunk", type=int, default=256, help="tokens per forward pass"
    )
    parser.add_argument("--prompts", type=int, default=8, help="to write on from")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines")
    parser.add_argument("--quick", action="store_true", help="short and inexact")
    args = parser.parse_args(arguments)
    packings, newest = PACKINGS, NEWEST
    if args.quick:
        args.windows, args.window, args.chunk = 1, 128, 64
        args.prompts, args.prompt, args.new_tokens = 2, 32, 4
        packings, newest = [(8, 64), (4, 32)], [0, 32]
    sizes = (args.windows, args.chunk, args.prompts, args.prompt, args.new_tokens)
    if min(sizes) < 1 or args.window < 3:
        parser.error("all numbers must be at least 1, --window at least 3")
    started = time.perf_counter()
    model, tokenizer = tiny_llm.load(args.model)
    text = prose() if args.text is None else args.text.read_text("utf-8")
    ids = tokenizer.encode(text)
    needed = args.windows * args.window
    if len(ids) < needed:
        parser.error(f"the text has {len(ids)} tokens; {needed} are needed")
    ids = ids[:needed]
    if args.prompt * args.prompts > needed:
        parser.error(f"the prompts do not fit into {needed} tokens")
    windows = [ids[i : i + args.window] for i in range(0, needed, args.window)]
    layouts = [Layout(*packing, n) for n in newest for packing in packings]
    qualities = compare(model, windows, layouts, args.chunk)
    engine = [layout for layout in layouts if layout.newest == 0]
    short = windows[0][:513]
    # (not the last token: a chunk of few queries is multiplied in another way)
    controls = {x: control(model, short[:-1], x, args.chunk) for x in engine}
    chunks = {x: rechunk(model, short, x, args.chunk) for x in [Layout(), *engine]}
    step = needed // args.prompts
    prompts = [ids[i * step :][: args.prompt] for i in range(args.prompts)]
    full = write(model, prompts, Layout().cache(model), args.new_tokens)
    writings = {}
    for layout in layouts:
        rows = write(model, prompts, layout.cache(model), args.new_tokens)
        writings[layout] = compare_writing(full, rows)
    source = "the project's prose" if args.text is None else args.text.name
    digest = hashlib.sha256(str(ids).encode()).hexdigest()[:8]
    about = (
        f"{source} (token ids {digest}), {args.windows} windows of {args.window} "
        f"tokens in chunks of {args.chunk}; freely: {args.prompts} prompts of "
        f"{args.prompt} tokens"
    )
    name = Path(args.model).stem
    print(report(name, qualities, writings, controls, chunks, about, args.new_tokens))
    print(f"\n({time.perf_counter() - started:.0f} s)")
    if args.json:
        lines = [
            json.dumps(
                {
                    **asdict(layout),
                    **asdict(quality),
                    **writings[layout]._asdict(),
                    "control": controls.get(layout),
                    "token_ids": digest,
                }
            )
            for layout, quality in qualities.items()
        ]
        args.json.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if max(controls.values()) <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
