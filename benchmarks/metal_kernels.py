"""Our Metal kernels against what MLX's users do in their place, for anyone with a Mac.

    pip install -e . && python benchmarks/metal_kernels.py

prints Markdown to paste into an issue. Attention of few new tokens: ours reads pages
(or packed rows) where they lie; the others gather them, unpack them, and call
mx.fast.scaled_dot_product_attention or mx.quantized_matmul. New rows, laid out or
packed: ours against mx.concatenate and mx.quantize. First all ways are checked against
float64 (a wrong one is shown, not timed); then they take turns, round after round.

How it is timed: the graph of n calls is built, then evaluated at once, and the time of
the evaluation is divided by n; so the host's share hides as it does in a model. Each
call's output is the next call's queries, so that a launch waits for the one before, as
in a model from layer to layer. Each call reads another cache until --working-set MiB
have been read, so that the chip's own cache does not hold them.

--quick is for CI. --cpu runs a few small cases over the references, which tests this
script and nothing else. --roofline prints the computed tables of kernels/README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence

import tiny_llm  # before mlx: it preloads the BLAS  # isort: skip  # noqa: F401

import mlx.core as mx
from metal_cases import Case
from metal_report import (
    ATTENTION,
    ROWS,
    attention_line,
    device_of,
    gpu_cores,
    machine,
    rows_line,
)
from metal_roofline import MODELS, Heads, report, table
from metal_timing import Effort, measure
from metal_ways import problem, rows_problem

from tiny_llm.devices import Device, find_device
from tiny_llm.errors import ParameterError
from tiny_llm.kernels.metal import VARIABLE
from tiny_llm.memory import physical_memory

NO_METAL = "no Metal here: nothing to measure (--cpu runs this script over references)"
ON_CPU = "**References on the CPU, no Metal figure:** a test of the script, no more."
MANY = 256  # rows of a prompt's chunk, to be packed


def attention_cases(
    models: Sequence[Heads], batches: Sequence[int], contexts: Sequence[int]
) -> Iterable[Case]:
    """Pages, also of other rows, types and lengths; then dense packed rows."""
    middle = sorted(contexts)[len(contexts) // 2]
    for model in models:
        for bits in (None, 8, 4):
            for batch in batches:
                for context in contexts:
                    yield Case(model, batch, context, bits=bits)
                yield Case(model, batch, middle, rows=4, bits=bits)
        for batch in batches[:2]:
            yield Case(model, batch, middle, dtype=mx.float16)
        if batches[-1] > 1:
            for bits in (None, 8):
                yield Case(model, batches[-1], middle, bits=bits, ragged=True)
        for bits in (8, 4):
            for context in contexts:
                yield Case(model, batches[0], context, bits=bits, paged=False)


def run_attention(
    cases: Sequence[Case], effort: Effort, device: Device | None, checked: bool
) -> tuple[list[list[str]], list[str]]:
    """The lines of the table, and what was left out and why.

    checked: whether our kernels run, after their canary.
    """
    lines, left_out = [], []
    for number, case in enumerate(cases, 1):
        name = f"{case.model.name}, {case.numbers}, {case.batch} x {case.context}"
        progress(f"{number} of {len(cases)}: {name}")
        if case.bytes(effort.working_set) > effort.memory:
            left_out.append(f"{name} (memory)")
            continue
        try:
            found = problem(case, effort.working_set)
            outcomes = measure(found, effort)
            lines.append(attention_line(case, found, outcomes, device, checked))
            del found
        except RuntimeError as error:  # of MLX: some virtual machines cannot do it
            left_out.append(f"{name} ({' '.join(str(error).split())[:200]})")
        mx.clear_cache()
    progress("")
    return lines, left_out


def progress(text: str) -> None:
    """For people at a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def room() -> int:
    """Bytes that the arrays may take."""
    usable = mx.device_info().get("max_recommended_working_set_size", 0)
    return int(usable) * 3 // 4 or physical_memory() // 2


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, what in (
        ("--quick", "fewer and shorter cases, for CI"),
        ("--cpu", "small cases over the references: a test of this script"),
        ("--roofline", "print the computed tables only"),
    ):
        parser.add_argument(name, action="store_true", help=what)
    names = [model.name for model in MODELS]
    parser.add_argument("--device", help="the chip, e.g. 'M4 Max 40-core'")
    parser.add_argument("--models", nargs="+", choices=names)
    parser.add_argument("--batches", type=positive, nargs="+")
    parser.add_argument("--contexts", type=positive, nargs="+", help="tokens")
    parser.add_argument("--rounds", type=positive)
    parser.add_argument("--working-set", type=positive, help="MiB")
    args = parser.parse_args(arguments)
    if args.device is not None:
        try:
            args.device = find_device(args.device)
        except ParameterError as error:
            parser.error(str(error))
    usual: tuple[object, ...] = (names, [1, 8, 32], [512, 4096, 16384], 7, 512)
    if args.quick:
        usual = (names[:2], [1, 8], [512, 4096], 3, 64)
    if args.cpu:
        usual = (names[:1], [1, 3], [128], 2, 1)
    options = ("models", "batches", "contexts", "rounds", "working_set")
    for option, value in zip(options, usual, strict=True):
        if getattr(args, option) is None:
            setattr(args, option, value)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.roofline:
        print(report(), end="")
        return 0
    if args.cpu:
        mx.set_default_device(mx.Device(mx.cpu))
    elif not mx.metal.is_available():
        print(NO_METAL, file=sys.stderr)
        return 2
    os.environ[VARIABLE] = "reference" if args.cpu else "metal"
    before, cores = os.getloadavg()[0], gpu_cores()
    chip = str(mx.device_info().get("device_name", ""))
    device = args.device or device_of(chip, cores)
    models = [model for model in MODELS if model.name in args.models]
    working_set = args.working_set * 2**20
    effort = Effort(args.rounds, 1e-3 if args.cpu else 2e-2, working_set, room())
    if args.cpu:
        print(ON_CPU, end="\n\n")
    print(machine(device, cores, working_set), flush=True)

    checked = not args.cpu
    cases = list(attention_cases(models, args.batches, args.contexts))
    lines, left_out = run_attention(cases, effort, device, checked)
    new_rows = []
    for model in models:
        for bits in (None, 8, 4):
            for rows in [*args.batches, MANY]:
                found = rows_problem(model, rows, bits)
                told = found, measure(found, effort), device, checked
                new_rows.append(rows_line(model.name, bits, rows, *told))
    after = os.getloadavg()[0]
    print(
        f"Microseconds a call, medians of {args.rounds} rounds, ± half of their "
        "interquartile range; all ways in turn. In brackets: times ours. GB/s: of the "
        f"live cache; {args.working_set} MiB are read in turn. Errors of all ways, "
        "ours first: against float64, relative to the largest number. Load average "
        f"{before:.2f} before and {after:.2f} after.\n"
    )
    if before > (os.cpu_count() or 1) / 4:
        print("WARNING: other programs are at work; wait for them and try again.\n")
    print(table(ATTENTION, lines))
    print(
        "New rows, as pages hold them; GB/s: read and written; the calls do not wait "
        "for each other; errors of codes in their steps.\n"
    )
    print(table(ROWS, new_rows), end="")
    if left_out:
        print(f"\nLeft out: {'; '.join(left_out)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
