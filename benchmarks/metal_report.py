"""What metal_kernels.py says of the machine, and the lines of its tables."""

from __future__ import annotations

import platform
import subprocess
from datetime import date
from importlib.metadata import version

import mlx.core as mx
from metal_cases import Case
from metal_roofline import figure
from metal_timing import Outcome, copy_bandwidth, least_launch
from metal_ways import OURS, SPLITS, Problem

from tiny_llm import __version__
from tiny_llm.devices import Device, find_device
from tiny_llm.errors import ParameterError
from tiny_llm.memory import physical_memory
from tiny_llm.roofline import bound

ATTENTION = [
    *("heads", "numbers", "requests", "context", "rows"),
    *("ours, µs", "GB/s", "of bandwidth", "roofline, µs"),
    *("(gather,) (dequantize,) sdpa", "quantized_matmul, or sdpa of one run"),
    *("splits", "splits 1", "splits 16", "canary", "errors"),
]
ROWS = [
    *("heads", "numbers", "new rows", "ours, µs", "GB/s", "of bandwidth"),
    *("roofline, µs", "concatenate (+ mx.quantize)", "canary", "errors"),
]


def gpu_cores() -> int | None:
    """As macOS's I/O registry has it; None elsewhere."""
    command = ["ioreg", "-rc", "AGXAccelerator", "-d", "1"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_cores(found.stdout)


def read_cores(registry: str) -> int | None:
    """The number after "gpu-core-count" =."""
    for line in registry.splitlines():
        name, _, value = line.partition("=")
        if name.strip(' "|') == "gpu-core-count" and value.strip().isdigit():
            return int(value)
    return None


def device_of(chip: str, cores: int | None) -> Device | None:
    """The chip as devices.py knows it; where it knows two, the one with its cores."""
    for name in (chip, f"{chip} {cores}-core"):
        try:
            return find_device(name)
        except ParameterError:
            continue
    return None


def machine(device: Device | None, cores: int | None, working_set: int) -> str:
    """Where this was measured, and what a launch and the memory can do there."""
    chip = mx.device_info().get("device_name", "unknown chip")
    system = platform.mac_ver()[0]
    system = f"macOS {system}" if system else platform.system()
    known = "Bandwidth unknown (--device says which chip: see tiny_llm/devices.py)"
    if device is not None:
        known = f"{device.name}: {device.bandwidth / 1e9:g} GB/s as published"
    copied = copy_bandwidth(min(working_set, 2**28)) / 1e9
    return (
        f"{chip}{f', {cores} GPU cores' if cores else ''}, "
        f"{physical_memory() / 2**30:.0f} GiB, {system}, "
        f"Python {platform.python_version()}, mlx {version('mlx')}, "
        f"tiny_llm {__version__}, {date.today()}. {known}; adding 1 to a large array "
        f"moves {copied:.0f} GB/s; the least launch (1 is added to one number) takes "
        f"{least_launch() * 1e6:.1f} µs."
    )


def cell(outcome: Outcome | None, ours: Outcome | None = None) -> str:
    """Microseconds and spread; the others' also as a multiple of ours."""
    if outcome is None:
        return "-"
    if outcome.problem is not None:
        return outcome.problem.replace("|", "/")
    text = f"{figure(outcome.median * 1e6)} ±{outcome.spread / 2:.0%}"
    if ours is not None and ours.problem is None:
        text += f" ({outcome.median / ours.median:.2f}x)"
    return text


def rates(found: Problem, ours: Outcome, device: Device | None) -> list[str]:
    """GB/s, part of the bandwidth, and the roofline's microseconds."""
    least = "-" if device is None else figure(bound(found.work, device).seconds * 1e6)
    if ours.problem is not None:
        return ["-", "-", least]
    reached = found.work.bytes / ours.median
    part = "-" if device is None else f"{reached / device.bandwidth:.0%}"
    return [figure(reached / 1e9), part, least]


def verdicts(outcomes: dict[str, Outcome], checked: bool) -> list[str]:
    """The canary's (where it finds a fault, our kernel is refused), and all errors."""
    canary = "not run"
    if checked:
        canary = "fault" if outcomes[OURS].error is None else "right"
    shown = (outcome.error for outcome in outcomes.values())
    return [canary, " ".join("-" if e is None else f"{e:.0e}" for e in shown)]


def attention_line(
    case: Case,
    found: Problem,
    outcomes: dict[str, Outcome],
    device: Device | None,
    checked: bool,
) -> list[str]:
    """checked: whether our kernels ran, after their canary."""
    ours = outcomes[OURS]
    splits = [outcomes.get(name) for name in SPLITS]
    theirs = [o for name, o in outcomes.items() if name not in (OURS, *SPLITS)]
    context = f"{case.context:,}"
    if case.ragged:
        context = f"{min(case.lengths):,} to {context}"
    return [
        case.model.name,
        case.numbers + ("" if case.paged else ", dense"),
        str(case.batch),
        context,
        str(case.rows),
        cell(ours),
        *rates(found, ours, device),
        *(cell(outcome, ours) for outcome in [*theirs, None][:2]),
        str(found.splits),
        *(cell(outcome, ours) for outcome in splits),
        *verdicts(outcomes, checked),
    ]


def rows_line(
    name: str,
    bits: int | None,
    rows: int,
    found: Problem,
    outcomes: dict[str, Outcome],
    device: Device | None,
    checked: bool,
) -> list[str]:
    """The same of new rows."""
    ours, theirs = outcomes.values()
    return [
        name,
        f"{bits} bits, bfloat16" if bits else "bfloat16",
        str(rows),
        cell(ours),
        *rates(found, ours, device),
        cell(theirs, ours),
        *verdicts(outcomes, checked),
    ]
