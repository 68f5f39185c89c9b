"""Thousands of requests, a third cancelled at random moments: does anything leak?

Bursts of random arrivals with shared prefixes, short answers, some sampled, some that
fail; the KV memory is bounded. Watched are the resident memory, the pages and the
books. Exits with 1 if a page is not given back or memory grows over the last half.

    pip install -e . && python benchmarks/soak.py
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import tiny_llm  # before mlx: it preloads the BLAS  # isort: skip

import mlx.core as mx

from tiny_llm import Engine, SamplingParams
from tiny_llm.engine import Handle
from tiny_llm.errors import TinyLLMError

# A growth that a process cannot have by noise: the allocator's own wobble over some
# thousand requests stays below (see the samples that are printed).
MOST_GROWTH = 8.0  # MiB over the last half
LEAVING = 0.5  # a part of them only after the answer: a third is cancelled in all


class Sample(NamedTuple):
    """After so many requests: resident memory in MiB."""

    ended: int
    resident: float


def resident_mib() -> float:
    """Resident memory of this process now (on macOS: its peak), MiB."""
    status = Path("/proc/self/statm")
    if status.exists():
        pages = int(status.read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def growth(samples: list[Sample]) -> float:
    """MiB that a straight line through the last half's samples grows over it."""
    last = [s for s in samples if s.ended >= samples[-1].ended / 2]
    if len(last) < 3:
        return 0.0
    n = len(last)
    mean_x = sum(s.ended for s in last) / n
    mean_y = sum(s.resident for s in last) / n
    square = sum((s.ended - mean_x) ** 2 for s in last)
    slope = sum((s.ended - mean_x) * (s.resident - mean_y) for s in last) / square
    return slope * (last[-1].ended - last[0].ended)


class Crowd:
    """Users: what they ask, and when they leave."""

    def __init__(self, engine: Engine, vocabulary: int, seed: int) -> None:
        self.engine, self.vocabulary = engine, vocabulary
        self.random = random.Random(seed)
        self.prefixes = [self._ids(self.random.randint(10, 40)) for _ in range(5)]
        self.open: list[tuple[Handle, int | None]] = []  # leaves after so many steps
        self.submitted = self.refused = self.ended = 0
        self.reasons: dict[str, int] = {}

    def _ids(self, n: int) -> list[int]:
        return [self.random.randrange(self.vocabulary) for _ in range(n)]

    def arrive(self) -> None:
        """One more request."""
        draw = self.random
        prompt = self._ids(draw.randint(4, 60))
        if draw.random() < 0.5:
            prompt = draw.choice(self.prefixes) + prompt
        options: dict[str, Any] = {"max_tokens": draw.randint(1, 12)}
        if draw.random() < 0.01:  # nobody expects that: pages run short
            options["max_tokens"] = draw.randint(60, 120)
        if draw.random() < 0.3:
            options |= {"temperature": 0.8, "top_k": 20, "seed": draw.randrange(9)}
        leaves = draw.randint(0, 15) if draw.random() < LEAVING else None
        self.submitted += 1
        if self.submitted % 50 == 20:
            options["sampler"], leaves = (lambda logprobs: 1 / 0), None
        elif self.submitted % 50 == 40:
            prompt = [*prompt, self.vocabulary]  # refused
        try:
            handle = self.engine.submit(prompt, SamplingParams(**options))
        except TinyLLMError:
            self.refused += 1
            self._end("refused")
        else:
            self.open.append((handle, leaves))

    def step(self) -> None:
        """A step; then those leave whose patience is over."""
        self.engine.step()
        still = []
        for handle, leaves in self.open:
            if handle.state == "done":
                self._end(handle.result().finish_reason)
                continue
            if leaves == 0:
                handle.cancel()
            still.append((handle, None if leaves is None else leaves - 1))
        self.open = still

    def _end(self, reason: str) -> None:
        self.ended += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


def load(args: argparse.Namespace) -> Any:
    if args.model is not None:
        return tiny_llm.load_model(args.model)
    return tiny_llm.load_model("smollm2")


def run(args: argparse.Namespace) -> tuple[list[Sample], Crowd, int]:
    """The samples, the crowd, and the pages that were not given back."""
    from tiny_llm.progress import progress_bar

    model = load(args)
    samples = []
    with Engine(model, kv_memory=args.kv_memory, page_size=16) as engine:
        crowd = Crowd(engine, model.config.vocab_size, args.seed)
        each, checks, start = max(args.requests // 50, 1), 0, time.monotonic()
        with progress_bar("soaking") as progress:
            while crowd.ended < args.requests:
                room = args.requests - crowd.submitted
                if len(crowd.open) < 40 and room and crowd.random.random() < 0.3:
                    for _ in range(min(crowd.random.randint(1, 24), room)):
                        crowd.arrive()
                crowd.step()
                checks += 1
                if checks % 20 == 0:
                    engine.check_integrity()
                    assert engine.stats.kv_bytes <= args.kv_memory
                if crowd.ended >= each * (len(samples) + 1):
                    samples.append(Sample(crowd.ended, resident_mib()))
                    if len(samples) % 5 == 0:
                        seconds = time.monotonic() - start
                        print(
                            f"{crowd.ended:6d} requests {seconds:6.0f} s "
                            f"{samples[-1].resident:8.1f} MiB resident, "
                            f"{engine.stats.preemptions} preemptions",
                            flush=True,
                        )
                progress(crowd.ended, args.requests)
        while engine.step():
            pass
        engine.check_integrity()
        stats = engine.stats
        print(stats)
        return samples, crowd, stats.pages_in_use


def plot(samples: list[Sample], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
    axes.plot([s.ended for s in samples], [s.resident for s in samples], "k-")
    axes.set_xlabel("requests that have ended")
    axes.set_ylabel("resident memory, MiB")
    axes.set_ylim(bottom=0)
    axes.set_title("An engine under load, a third of its requests cancelled")
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--kv-memory", type=int, default=64 << 20, help="bytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a folder (default: SmolLM2)")
    parser.add_argument("--quick", action="store_true", help="300 requests")
    parser.add_argument("--plot", metavar="FILE", help="draw a .png or .svg")
    args = parser.parse_args()
    if args.quick:
        args.requests = min(args.requests, 300)
    mx.random.seed(args.seed)
    samples, crowd, leaked = run(args)
    grown = growth(samples)
    print(f"ended: {dict(sorted(crowd.reasons.items()))}")
    print(
        f"resident memory: {samples[0].resident:.1f} MiB at the first sample, "
        f"{samples[-1].resident:.1f} at the end; over the last half {grown:+.2f} MiB"
    )
    print(f"pages not given back: {leaked}")
    if args.plot:
        plot(samples, args.plot)
    return int(leaked > 0 or (not args.quick and grown > MOST_GROWTH))


if __name__ == "__main__":
    sys.exit(main())
