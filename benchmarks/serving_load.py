"""Many requests at once: tiny_llm's Engine, mlx-lm, llama.cpp, and one at a time.

The same seeded traces are played to each engine in turn, round after round, each run in
a process of its own (its peak memory is its own): float32 SmolLM2-135M on the same BLAS
and with the same malloc settings, greedily, never ending early, so that all write as
many tokens. llama.cpp runs the 4-bit file from which the float32 weights are unpacked:
another class. How each peer is used: serving_peers.py. Printed are medians over the
rounds, as Markdown; --plot draws them. A round of everything takes some 40 minutes on
two cores.

    pip install -e '.[bench]' && python benchmarks/serving_load.py --plot serving.png
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import tiny_llm  # before mlx: it preloads the BLAS  # isort: skip

import mlx.core as mx
from serving_peers import ENGINES
from serving_plot import plot
from serving_report import FLOOR, OTHER_CLASS, Run, Runs, record, report_trace, summary
from serving_traces import TRACES, Load, arrivals, metrics, warm_up

from tiny_llm.hub import find_model


def resident(field: str) -> float:
    """MiB of this process: VmRSS now, or VmHWM at most (elsewhere than Linux: both)."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith(field)) / 1024
    except OSError:
        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return found / (2**20 if sys.platform == "darwin" else 1024)


def play_alone(args: argparse.Namespace) -> None:
    """In a process of its own: load, warm up, play, and print one line of JSON."""
    engine, name = args.alone
    trace = arrivals(name, args.vocabulary, quick=args.quick, answers=args.new_tokens)
    tiny_llm.blas.keep_freed_memory()  # as loading a model of ours does
    play = ENGINES[engine](args.model, trace)
    loaded, peak_loading = resident("VmRSS"), resident("VmHWM")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM from here on
    play(Load(warm_up(args.vocabulary)))
    load = Load(trace)
    play(load)
    peak = resident("VmHWM")
    found = metrics(trace, load.arrived, load.times)
    found |= {"peak": max(peak, peak_loading), "beyond_model": peak - loaded}
    print("\n" + json.dumps([found, load.tokens]))


def run_alone(engine: str, trace: str, model: Path, args: argparse.Namespace) -> Run:
    """Raises RuntimeError with the end of what it said."""
    command = [sys.executable, __file__, "--alone", engine, trace]
    command += ["--model", str(model), "--vocabulary", str(args.vocabulary)]
    command += ["--new-tokens", str(args.new_tokens)] + ["--quick"] * args.quick
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise RuntimeError(said[-1])
    return Run(*json.loads(done.stdout.splitlines()[-1]))


def measure(models: dict[str, Path], args: argparse.Namespace) -> Runs:
    """The engines take turns; one that fails is reported and not tried again.

    Each run's numbers are added to the JSON lines at once: an hour's are not lost.
    """
    runs: Runs = {trace: {name: [] for name in models} for trace in args.traces}
    for trace in args.traces:
        failed = set()
        for turn in range(args.rounds):
            for name in [name for name in models if name not in failed]:
                try:
                    run = run_alone(name, trace, models[name], args)
                except RuntimeError as error:
                    failed.add(name)
                    runs[trace][name].clear()
                    print(f"{name} failed in trace {trace}: {error}", file=sys.stderr)
                    continue
                runs[trace][name].append(run)
                if args.json:
                    with args.json.open("a", encoding="utf-8") as lines:
                        lines.write(record(trace, name, turn, run) + "\n")
                seconds = run.metrics["makespan"]
                note = f"{trace}, round {turn + 1}, {name}: {seconds:.1f} s"
                print(note, file=sys.stderr, flush=True)
    return runs


def report(runs: Runs, args: argparse.Namespace, load: tuple[float, float]) -> str:
    """Markdown: where and how it was measured, then trace by trace."""
    blas = tiny_llm.blas
    packages = [("mlx", "mlx"), ("mlx-lm", "mlx-lm"), ("xllamacpp", "xllamacpp")]
    head = (
        f"{platform.machine()}, {os.cpu_count()} cores, {mx.default_device()}, "
        f"{blas.chosen().name or 'BLAS as it came'} at {blas.gflops():.0f} GFLOP/s, "
        f"{', '.join(f'{n} {version(p)}' for n, p in packages)}, {date.today()}; load "
        f"average {load[0]:.2f} before and {load[1]:.2f} after. Medians of "
        f"{args.rounds} rounds in turn, each run in a process of its own."
        f"{sizes(args)}\n\n"
        "Tokens per second of the makespan: new ones, prompts' (those found in a cache "
        "count too), both; the ratio of two engines is the same for all three. First, "
        "whole: seconds from arrival to the first token and to the last. Gaps between "
        "the tokens of a stream, ms. Peak: resident memory of the process, libraries "
        "and weights included; beyond model: what came after loading. Same tokens: "
        f"requests that got the tokens of `{FLOOR}` (near ties may fall otherwise).\n"
    )
    return head + "\n" + "\n".join(report_trace(n, runs[n]) for n in runs)


def sizes(args: argparse.Namespace) -> str:
    """A warning where the traces are not those that their titles tell."""
    found = " --quick: a quarter of the requests, lengths / 8." if args.quick else ""
    if args.new_tokens != 1:
        found += f" Answers are {args.new_tokens:g} times as long."
    return found


def version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def export(folder: Path) -> None:
    """The float32 weights, written by another process: this one stays small."""
    code = "import sys, pathlib, vs_mlx_lm as v; v.export(pathlib.Path(sys.argv[1]))"
    here = str(Path(__file__).parent)
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=here, check=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names, engines = list(TRACES), list(ENGINES)
    add = parser.add_argument
    add("--traces", nargs="+", choices=names, default=names)
    add("--engines", nargs="+", choices=engines, default=engines)
    add("--rounds", type=int, default=3)
    add(
        "--new-tokens", type=float, default=1.0, metavar="FACTOR", help="scales answers"
    )
    add("--quick", action="store_true", help="few, short requests: does it run?")
    add("--model", type=Path, help="a folder instead (not for llama.cpp)")
    add("--plot", type=Path, metavar="FILE", help="draw a .png or .svg")
    add("--json", type=Path, metavar="FILE", help="add JSON lines to it")
    add("--alone", nargs=2, help=argparse.SUPPRESS)
    add("--vocabulary", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.new_tokens <= 0:
        parser.error("--rounds must be at least 1, --new-tokens more than 0")
    if args.model and not args.alone and OTHER_CLASS in args.engines:
        parser.error(f"--model cannot be run by {OTHER_CLASS}: name other --engines")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.alone:
        play_alone(args)
        return 0
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = args.model
        if folder is None:
            folder = Path(name)
            export(folder)
        models = dict.fromkeys(args.engines, folder)
        if OTHER_CLASS in models:
            models[OTHER_CLASS] = find_model("smollm2")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        args.vocabulary = config["vocab_size"]
        runs = measure(models, args)
    print(report(runs, args, (before, os.getloadavg()[0])))
    failed = any(not rounds for found in runs.values() for rounds in found.values())
    if args.plot:
        try:
            plot(summary(runs), args.engines, args.plot)
        except ImportError:
            print("\nno plot: it needs matplotlib, pip install -e '.[plot]'")
            return 1
        print(f"\nplotted: {args.plot}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
