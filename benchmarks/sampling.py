"""What choosing tokens costs: decoding steps of 32 requests, by how they choose.

    pip install -e . && python benchmarks/sampling.py

For each way an engine decodes 32 requests of SmolLM2 (float32) whose prompts are 100
tokens each of this repository's README. The engines take 8 steps each in turn, in this
one process; greedy is the one that they are compared with. "sampling" is the time in
sample_rows and what it computes, with the logits there already, as a share of that
way's whole step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import tiny_llm  # before mlx: it preloads the BLAS  # isort: skip

import mlx.core as mx

from tiny_llm import Engine, SamplingParams
from tiny_llm.engine import runner

BLOCK = 8
README = Path(__file__).parent.parent / "README.md"
FILTERS: dict[str, Any] = {
    **{"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
    **{"typical_p": 0.95, "top_n_sigma": 3.0, "xtc_probability": 0.5},
}
PENALTIES: dict[str, Any] = {
    **{"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    **{"dry_multiplier": 0.8, "logit_bias": {5: 1.0}, "min_tokens": 5},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "penalties": PENALTIES,
    "all filters": FILTERS,
    "filters and penalties": {**FILTERS, **PENALTIES},
    "logprobs": {"logprobs": True, "top_logprobs": 5},
}


class Way:
    """An engine whose requests choose in one way."""

    def __init__(
        self, model: Any, name: str, prompts: list[list[int]], tokens: int
    ) -> None:
        self.name, batch = name, len(prompts)
        self.engine = Engine(model, max_batch=batch, kv_memory=1 << 30)
        self.steps: list[float] = []
        self.sampling: list[float] = []
        for i, ids in enumerate(prompts):
            seed = {"seed": i} if "temperature" in WAYS[name] else {}
            params = SamplingParams(
                max_tokens=tokens, ignore_eos=True, **seed, **WAYS[name]
            )
            self.engine.submit(ids, params)
        while self.engine.stats.running < batch or not self._decoding():
            self.engine.step()
        self.engine.step()

    def _decoding(self) -> bool:
        running = self.engine._core.scheduler.running
        return all(request.decoding for request in running)

    def run(self) -> None:
        """A block of steps."""
        for _ in range(BLOCK):
            start = time.perf_counter()
            self.engine.step()
            self.steps.append(time.perf_counter() - start)

    def run_watched(self) -> None:
        """A block of steps in which sampling is timed."""
        for _ in range(BLOCK):
            with watched(self.sampling):
                self.engine.step()


@contextmanager
def watched(times: list[float]) -> Iterator[None]:
    """Time sample_rows apart from the model."""
    real = runner.sample_rows

    def timed(logits: mx.array, *rest: Any, **options: Any) -> Any:
        mx.eval(logits)
        start = time.perf_counter()
        sampled = real(logits, *rest, **options)
        mx.eval(sampled.arrays())
        times.append(time.perf_counter() - start)
        return sampled

    with mock.patch.object(runner, "sample_rows", timed):
        yield


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    args = parser.parse_args(arguments)
    rounds = 1 if args.quick else args.rounds
    model, tokenizer = tiny_llm.load(args.model)
    text = tokenizer.encode(README.read_text(encoding="utf-8"))
    prompts = [text[i * 100 : (i + 1) * 100] for i in range(args.batch)]
    tokens = (2 * rounds + 2) * BLOCK + 8
    with ExitStack() as stack:
        ways = []
        for name in WAYS:
            ways.append(Way(model, name, prompts, tokens))
            stack.callback(ways[-1].engine.close)
        for _ in range(rounds):
            for way in ways:
                way.run()
            for way in ways:
                way.run_watched()
    plain = statistics.median(ways[0].steps)
    load = os.getloadavg()[0]
    print(f"{args.batch} requests, {rounds} rounds, load {load:.1f}; ms, medians")
    print(f"{'':24s}{'step':>9s}{'/ greedy':>10s}{'sampling':>10s}{'share':>8s}")
    for way in ways:
        step = statistics.median(way.steps)
        sampling = statistics.median(way.sampling)
        line = f"{way.name:24s}{1000 * step:9.1f}{step / plain:10.3f}"
        print(f"{line}{1000 * sampling:10.2f}{sampling / step:8.1%}")
        record = {"way": way.name, "step": step, "sampling": sampling, "load": load}
        print(json.dumps(record), file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
