"""Speculative decoding by prompt lookup against plain decoding, in one process.

    python benchmarks/speculation.py

Greedy answers of SmolLM2-135M in float32 to the chat prompts of
speculation_prompts.json: code edits, extraction and quotes, which copy, and prose,
which does not. Each prompt is answered plainly and with PromptLookup(), in turn, round
after round; the first round is not counted. Timed is what comes after the first token.
A prompt's ratio is the median of its rounds' own ratios, a group's that of its prompts.
The tokens must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tiny_llm  # before mlx: it preloads the BLAS  # isort: skip

import mlx.core as mx

from tiny_llm import blas
from tiny_llm.speculation import Counts, PromptLookup

PROMPTS = Path(__file__).with_name("speculation_prompts.json")
PROSE = "prose"
BARS = {"copying": 1.4, PROSE: 0.97}


@dataclass
class Answer:
    """Of one prompt: seconds of each round, and what became of the guesses."""

    kind: str
    number: int
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    guessed: list[float] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    same: bool = True

    @property
    def ratio(self) -> float:
        """How many times as fast as plain decoding."""
        pairs = zip(self.plain, self.guessed, strict=True)
        return statistics.median(a / b for a, b in pairs)

    def speed(self, seconds: list[float]) -> float:
        """Tokens per second, the median of the rounds."""
        return (len(self.tokens) - 1) / statistics.median(seconds)


def timed(stream: Iterator[int]) -> tuple[list[int], float]:
    """The tokens, and the seconds from the first to the last."""
    tokens = [next(stream)]
    start = time.perf_counter()
    tokens += stream
    return tokens, time.perf_counter() - start


def measure(
    model: Any, tokenizer: Any, prompts: dict[str, list[str]], new: int, rounds: int
) -> list[Answer]:
    asked = [
        (Answer(kind, number, len(ids)), ids)
        for kind, texts in prompts.items()
        for number, text in enumerate(texts, start=1)
        for ids in [tokenizer.encode_chat([{"role": "user", "content": text}])]
    ]
    eos = tokenizer.eos_token_ids
    for turn in range(rounds + 1):
        for answer, ids in asked:
            lookup = PromptLookup()
            for name, speculation in (("plain", None), ("guessed", lookup)):
                tokens, seconds = timed(
                    tiny_llm.stream_generate(
                        model,
                        ids,
                        max_new_tokens=new,
                        eos_token_ids=eos,
                        speculation=speculation,
                    )
                )
                answer.same = answer.same and tokens == (answer.tokens or tokens)
                answer.tokens = tokens
                if turn:
                    getattr(answer, name).append(seconds)
            answer.counts = lookup.counts  # (of the last round: they depend on times)
    return [answer for answer, _ in asked]


def groups(answers: list[Answer]) -> dict[str, float]:
    """The ratio of each kind, and of all that copy."""
    of: dict[str, list[float]] = {}
    for answer in answers:
        of.setdefault(answer.kind, []).append(answer.ratio)
        if answer.kind != PROSE:
            of.setdefault("copying", []).append(answer.ratio)
    return {kind: statistics.median(ratios) for kind, ratios in of.items()}


def report(answers: list[Answer], where: str) -> str:
    lines = [
        where,
        "",
        "| prompt | tokens: prompt, new | plain tok/s | lookup tok/s | ratio "
        "| guesses right | tokens a pass | same tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for a in answers:
        counts = a.counts
        each = 1 + counts.accepted / counts.passes if counts.passes else 1.0
        lines.append(
            f"| {a.kind} {a.number} | {a.prompt_tokens}, {len(a.tokens)} "
            f"| {a.speed(a.plain):.1f} | {a.speed(a.guessed):.1f} | {a.ratio:.2f} "
            f"| {counts.accepted} of {counts.drafted} in {counts.passes} passes "
            f"| {each:.1f} | {'yes' if a.same else 'NO'} |"
        )
    lines.append("")
    for kind, ratio in groups(answers).items():
        bar = f" (the bar is {BARS[kind]})" if kind in BARS else ""
        lines.append(f"{kind}: {ratio:.2f} times plain decoding{bar}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE")
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line")
    parser.add_argument("--quick", action="store_true", help="short and inexact")
    args = parser.parse_args(arguments)
    prompts = json.loads(args.prompts.read_text("utf-8"))
    if args.quick:
        args.rounds, args.new_tokens = 1, 24
        prompts = {kind: texts[:1] for kind, texts in prompts.items()}
    if args.rounds < 1 or args.new_tokens < 2:
        parser.error("--rounds must be at least 1, --new-tokens at least 2")
    before = os.getloadavg()[0]
    model, tokenizer = tiny_llm.load(args.model)[:2]
    answers = measure(model, tokenizer, prompts, args.new_tokens, args.rounds)
    where = (
        f"{platform.machine()}, {os.cpu_count()} cores, "
        f"{blas.chosen().name or 'BLAS as it came'}, mlx {version('mlx')}, "
        f"{mx.default_device()}; "
        f"{Path(args.model).stem}, at most {args.new_tokens} new tokens, medians of "
        f"{args.rounds} rounds; load average {before:.2f} before and "
        f"{os.getloadavg()[0]:.2f} after"
    )
    print(report(answers, where))
    record = {
        "where": where,
        "ratios": groups(answers),
        "prompts": [{**asdict(a), "ratio": a.ratio} for a in answers],
    }
    for prompt in record["prompts"]:
        del prompt["tokens"]
    line = json.dumps(record)
    print(f"\n{line}")
    if args.json:
        with args.json.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    return 0 if all(a.same for a in answers) else 1


if __name__ == "__main__":
    sys.exit(main())
