"""What a run of a kernel yields, read from what the runtime wrote."""

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from .buffers import Buffer
from .toolchain import addr2line


@dataclass(frozen=True)
class Traffic:
    """Bytes that a kernel moved to and from one buffer, counted at each access.

    There is no cache in this: a byte loaded twice by a thread counts twice, unless
    clang -O1 kept it in a register. ``merged`` counts an address once when several
    lanes of a SIMD group load it in the same instruction, as in a broadcast; lanes
    are matched by instruction and by how often they executed it since the SIMD
    group's last barrier or SIMD function. ``distinct`` is what a perfect cache would
    load or store.
    """

    size: int
    loaded: int
    merged: int
    stored: int
    distinct: int


@dataclass
class Result:
    """The outcome of a kernel in all orders.

    Outputs (as NumPy arrays, bfloat16 widened to float32) and traffic are those of the
    first order; an output is None if the run broke off. Traffic is empty in mode
    ``fast``.
    """

    outputs: list[np.ndarray | None]
    reports: list[str] = field(default_factory=list)
    traffic: dict[str, Traffic] = field(default_factory=dict)

    @property
    def kinds(self) -> set[str]:
        """The kinds of the reports: ``race``, ``out-of-bounds``, ..."""
        return {report.split(":")[0] for report in self.reports}


def read_result(raw: bytes, outputs: Sequence[Buffer], executable: Path) -> Result:
    """The result that the executable left (see runtime/main.cpp), perhaps in part."""
    head, end, numbers = raw.partition(b"\noutput\n")
    lines = [line.split("|") for line in head.decode().splitlines()]
    result = Result([None] * len(outputs))
    result.reports = _reports(
        [fields[1:] for fields in lines if fields[0] == "report"], executable
    )
    for tag, *fields in lines:
        if tag == "traffic":
            result.traffic[fields[0]] = Traffic(*map(int, fields[1:]))
    if end:
        result.outputs = []
        offset = 0
        for b in outputs:
            result.outputs.append(_array(numbers[offset : offset + b.size], b))
            offset += b.size
    return result


def _array(raw: bytes, b: Buffer) -> np.ndarray:
    if b.dtype == mx.bfloat16:
        wide = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(b.shape)
    # A copy, as NumPy lets nobody write to bytes.
    return np.frombuffer(raw, _numpy_dtype(b.dtype)).reshape(b.shape).copy()


def _numpy_dtype(dtype: mx.Dtype | None) -> np.dtype:
    name = str(dtype).rpartition(".")[2]
    return np.dtype("bool" if name == "bool_" else name)


def _reports(rows: Sequence[Sequence[str]], executable: Path) -> list[str]:
    """The runtime's reports with addresses turned into source lines."""
    lines = _source_lines(executable, {pc for row in rows for pc in row[1:3]} - {"0"})
    reports = []
    for kind, pc, other, message in rows:
        where = lines.get(pc, "")
        if other != "0":
            where += f" vs {lines.get(other, '')}"
        reports.append(f"{kind}: {where}: {message}" if where else f"{kind}: {message}")
    return reports


def _source_lines(executable: Path, pcs: set[str]) -> dict[str, str]:
    """``body:LINE`` or ``header:LINE`` for each return address (in hex)."""
    if not pcs:
        return {}
    calls = [f"0x{int(pc, 16) - 1:x}" for pc in pcs]
    command = [addr2line(), "-i", "-a", "-e", executable, *calls]
    found: dict[str, str] = {}
    pc = ""
    for line in subprocess.run(command, capture_output=True, text=True).stdout.split():
        if line.startswith("0x"):
            pc = f"{int(line, 16) + 1:x}"
        elif m := re.search(r"(?:body|header):\d+", line):
            found.setdefault(pc, m[0])
    return found
