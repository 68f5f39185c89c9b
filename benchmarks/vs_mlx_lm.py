"""Prefill and decode of one request, tiny_llm against mlx-lm.

Both run float32 SmolLM2-135M in this one process, on the same BLAS, in turn, round
after round; each as its own generator runs it (mlx-lm: generate_step). Then both run
in processes of their own, in turn, mlx-lm on the BLAS that pip gives it (--no-stock
leaves that out). Printed are medians over the rounds, and ratios.

    pip install -e '.[bench]' && python benchmarks/vs_mlx_lm.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import tiny_llm  # before mlx: it preloads the BLAS  # isort: skip

import mlx.core as mx
import numpy as np


class Speed(NamedTuple):
    """Tokens per second; the new tokens, to compare."""

    prefill: float
    decode: float
    tokens: list[int]


def time_stream(stream: Iterator[int], prompt_length: int) -> Speed:
    start = time.perf_counter()
    tokens = [next(stream)]
    first = time.perf_counter()
    tokens.extend(stream)
    end = time.perf_counter()
    return Speed(
        prompt_length / (first - start), (len(tokens) - 1) / (end - first), tokens
    )


def export(folder: Path) -> None:
    """Write the default model as a float32 Hugging Face folder, which both load."""
    from tiny_llm.gguf_file import GGUFFile
    from tiny_llm.hub import find_model

    file = GGUFFile(find_model("smollm2"))
    config = file.config(keep_quantized=False)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        file.weights(keep_quantized=False),
        metadata={"format": "mlx"},
    )


def ours(folder: Path) -> Callable[[list[int], int], Iterator[int]]:
    model = tiny_llm.load_model(folder)
    return lambda prompt, n: tiny_llm.stream_generate(model, prompt, max_new_tokens=n)


def mlx_lm(folder: Path) -> Callable[[list[int], int], Iterator[int]]:
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return lambda prompt, n: (
        int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=n)
    )


ENGINES = {"tiny_llm": ours, "mlx-lm": mlx_lm}


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(0).integers(100, 49000, length).tolist()


def measure(
    engines: dict[str, Callable[[list[int], int], Iterator[int]]],
    lengths: list[int],
    new_tokens: int,
    rounds: int,
) -> dict[str, dict[int, Speed]]:
    """Medians; the engines take turns, and one unmeasured round comes first."""
    runs: dict[str, dict[int, list[Speed]]] = {
        name: {n: [] for n in lengths} for name in engines
    }
    for turn in range(rounds + 1):
        for length in lengths:
            for name, engine in engines.items():
                stream = engine(prompt_of(length), new_tokens)
                speed = time_stream(stream, length)
                if turn:
                    runs[name][length].append(speed)
    return {
        name: {
            n: Speed(
                statistics.median(s.prefill for s in speeds),
                statistics.median(s.decode for s in speeds),
                speeds[0].tokens,
            )
            for n, speeds in by_length.items()
        }
        for name, by_length in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 512, 2000])
    parser.add_argument("--no-stock", action="store_true")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        name, folder = args.alone
        engine = ENGINES[name](Path(folder))
        result = measure({name: engine}, args.lengths, args.new_tokens, 1)[name]
        print(json.dumps({n: [s.prefill, s.decode] for n, s in result.items()}))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export(folder)
        load_before = os.getloadavg()[0]
        result = measure(
            {name: make(folder) for name, make in ENGINES.items()},
            args.lengths,
            args.new_tokens,
            args.rounds,
        )
        print_table(result, args)
        print(f"load average before and after: {load_before:.2f}", os.getloadavg()[0])
        if not args.no_stock:
            print_stock(folder, args)


def print_table(result: dict[str, dict[int, Speed]], args: argparse.Namespace) -> None:
    from importlib.metadata import version

    from tiny_llm import blas

    print(
        f"{platform.machine()}, {os.cpu_count()} cores, "
        f"{blas.chosen().name or 'BLAS as it came'} at {blas.gflops():.0f} GFLOP/s, "
        f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}; float32 SmolLM2-135M, "
        f"{args.new_tokens} new tokens, medians of {args.rounds} rounds"
    )
    print("prompt    tokens/s    tiny_llm   mlx-lm   ratio   same tokens")
    for n, mine in result["tiny_llm"].items():
        peer = result["mlx-lm"][n]
        same = mine.tokens == peer.tokens
        for what in ("prefill", "decode"):
            a, b = getattr(mine, what), getattr(peer, what)
            print(f"{n:6d}    {what:8s} {a:11.1f} {b:8.1f} {a / b:7.2f}   {same}")


def print_stock(folder: Path, args: argparse.Namespace) -> None:
    """Each in its own process; mlx-lm on the BLAS that its wheel brings."""
    length = 128
    runs: dict[str, list[list[float]]] = {name: [] for name in ENGINES}
    for _ in range(args.rounds):
        for name, speeds in runs.items():
            command = [sys.executable, __file__, "--alone", name, str(folder)]
            command += ["--lengths", str(length), "--new-tokens", str(args.new_tokens)]
            done = subprocess.run(
                command,
                env={**os.environ, "TINY_LLM_BLAS": "off" if name == "mlx-lm" else ""},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            speeds.append(json.loads(done.stdout.splitlines()[-1])[str(length)])
    print(f"against mlx-lm as pip installs it, prompt of {length}, own processes:")
    for column, what in enumerate(("prefill", "decode")):
        a, b = (statistics.median(r[column] for r in runs[name]) for name in ENGINES)
        print(f"          {what:8s} {a:11.1f} {b:8.1f} {a / b:7.2f}")


if __name__ == "__main__":
    main()
