"""Beam search with 4 beams, beside 4 independent streams of our own engine.

    python benchmarks/beam.py

Both add as many tokens in as many steps of 4 rows. The beams have one prompt, and fork,
and copy last pages; the streams have a prompt each, are greedy and share nothing. They
take turns, round after round, in this one process; printed are medians, as Markdown:
the prompts, a step once all 4 rows decode, and everything.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import tiny_llm  # before mlx: it preloads the BLAS  # isort: skip

import mlx.core as mx

from tiny_llm import Engine, SamplingParams
from tiny_llm.beam import beam_search
from tiny_llm.models import Decoder

ROOT = Path(__file__).parent.parent


class Cost(NamedTuple):
    """Seconds: until the prompts are computed, of a decoding step, and in all."""

    prompt: float
    step: float
    total: float


Prompts = Sequence[list[int]]
Way = Callable[[Decoder, Prompts, int], Cost]


def beams(model: Decoder, prompts: Prompts, new_tokens: int) -> Cost:
    """One prompt, as many beams as there are prompts."""
    start = ready = time.perf_counter()

    def progress(done: int, total: int) -> None:
        nonlocal ready
        ready = time.perf_counter()

    (best,) = beam_search(
        model,
        prompts[0],
        num_beams=len(prompts),
        max_new_tokens=new_tokens,
        progress=progress,
    )
    end = time.perf_counter()
    assert len(best.token_ids) == new_tokens
    # (the first token comes with the prompt, which leaves so many steps)
    return Cost(ready - start, (end - ready) / (new_tokens - 1), end - start)


def streams(model: Decoder, prompts: Prompts, new_tokens: int) -> Cost:
    """As many requests as there are prompts, in one engine of token ids."""
    params = SamplingParams(max_tokens=new_tokens)
    with Engine(model, max_batch=len(prompts), prefix_cache=False) as engine:
        start = before = time.perf_counter()
        ready = None
        handles = [engine.submit(prompt, params) for prompt in prompts]
        steps = []
        decoding = False
        while engine.step():
            now = time.perf_counter()
            if decoding:
                steps.append(now - before)
            counts = [len(handle.token_ids) for handle in handles]
            if ready is None and min(counts):
                ready = now
            decoding = min(counts) > 0 and max(counts) < new_tokens
            before = now
        end = time.perf_counter()
    assert all(len(handle.token_ids) == new_tokens for handle in handles)
    assert ready is not None
    # (a short answer may end before the last prompt is computed)
    step = statistics.mean(steps) if steps else math.nan
    return Cost(ready - start, step, end - start)


WAYS: dict[str, Way] = {"beams": beams, "streams": streams}


def prompts_of(tokens: Sequence[int], length: int, count: int) -> list[list[int]]:
    """Different pieces of a text, again from its beginning where it is short."""
    text = list(tokens) * (1 + count * length // len(tokens))
    return [text[i * length : (i + 1) * length] for i in range(count)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 512])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="short and inexact")
    args = parser.parse_args(arguments)
    if args.quick:
        args.lengths, args.rounds, args.new_tokens = [16], 2, 8
    if min(*args.lengths, args.beams, args.rounds) < 1 or args.new_tokens < 4:
        parser.error("lengths, beams and rounds must be at least 1, --new-tokens 4")
    model, tokenizer = tiny_llm.load(args.model)
    text = tokenizer.encode((ROOT / "README.md").read_text(encoding="utf-8"))
    load = os.getloadavg()[0]
    runs: dict[int, dict[str, list[Cost]]] = {}
    for length in args.lengths:
        prompts = prompts_of(text, length, args.beams)
        runs[length] = {name: [] for name in WAYS}
        for turn in range(args.rounds + 1):  # one unmeasured round comes first
            for name, way in WAYS.items():
                cost = way(model, prompts, args.new_tokens)
                if turn:
                    runs[length][name].append(cost)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {mx.default_device()}, load "
        f"{load:.2f} before and {os.getloadavg()[0]:.2f} after; {args.beams} beams and "
        f"streams, {args.new_tokens} tokens each, medians of {args.rounds} rounds, ms\n"
    )
    print("| prompt | part | beams | streams | beams / streams |")
    print("|---:|---|---:|---:|---:|")
    for length, found in runs.items():
        for part in Cost._fields:
            pairs = zip(found["beams"], found["streams"], strict=True)
            ratio = statistics.median(
                getattr(a, part) / getattr(b, part) for a, b in pairs
            )
            cells = [
                f"{1e3 * statistics.median(getattr(c, part) for c in costs):.1f}"
                for costs in found.values()
            ]
            print(f"| {length} | {part} | {' | '.join(cells)} | {ratio:.2f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
