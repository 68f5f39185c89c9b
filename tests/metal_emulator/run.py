"""Runs a compiled kernel on buffers, in one or several orders."""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .buffers import Buffer
from .host import run_kept, run_once
from .memory_file import MemoryFile, memory_file
from .result import Result, read_result

FORWARD, REVERSED, SHUFFLED = 0, 1, 2
Order = tuple[int, int]
"""In which order threads and groups run, and the seed for SHUFFLED."""


def execute(
    executable: Path,
    buffers: Sequence[Buffer],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    mode: str,
    orders: Sequence[Order],
    timeout: float,
) -> Result:
    """Runs a kernel once for each order and compares the outputs.

    timeout: seconds of processor time for each order.
    """
    with memory_file() as job:
        job.write(_job(buffers, grid, threadgroup))

        def run(order: Order) -> Result:
            return _execute_once(executable, job, buffers, mode, order, timeout)

        if len(orders) == 1:
            return run(orders[0])
        with ThreadPoolExecutor(min(len(orders), os.cpu_count() or 1)) as pool:
            first, *others = pool.map(run, orders)
    for order, other in zip(orders[1:], others, strict=True):
        first.reports += [r for r in other.reports if r not in first.reports]
        first.reports += _differences(first, other, buffers, order)
    return first


def _job(
    buffers: Sequence[Buffer], grid: Sequence[int], threadgroup: Sequence[int]
) -> Iterator[bytes | memoryview]:
    """The parts of a job (see runtime/main.cpp).

    Each buffer's bytes end, to 16 bytes, at the end of a page; 0xff around them.
    """
    page = os.sysconf("SC_PAGESIZE")
    head = " ".join(map(str, [*grid, *threadgroup, len(buffers)])) + "\n"
    head += "".join(b.describe() for b in buffers)
    yield head.encode()
    yield b"\n" * (-len(head) % page)
    for b in buffers:
        if b.data is not None:
            gap = -b.size % page if b.size else page
            yield b"\xff" * (gap // 16 * 16)
            yield b.data
            yield b"\xff" * (gap % 16)


def _differences(
    first: Result, other: Result, buffers: Sequence[Buffer], order: Order
) -> list[str]:
    names = [b.name for b in buffers if b.is_output]
    return [
        f"order-dependent: output {name} is different in order {order}"
        for name, a, b in zip(names, first.outputs, other.outputs, strict=True)
        if a is not None and b is not None and a.tobytes() != b.tobytes()
    ]


def _execute_once(
    executable: Path,
    job: MemoryFile,
    buffers: Sequence[Buffer],
    mode: str,
    order: Order,
    timeout: float,
) -> Result:
    with memory_file() as results:
        results.clear()
        run = run_kept if mode == "fast" else run_once
        status = run(executable, job.path, results.path, mode, *order, timeout)
        raw = results.read()
    result = read_result(raw, [b for b in buffers if b.is_output], executable)
    if status == -signal.SIGPROF:
        result.reports.append(f"hang: no end after {timeout} s in order {order}")
    elif status not in (0, 2):
        result.reports.append(f"exit: code {status}")
    return result
