"""Apple's chips as the roofline model sees them: bandwidth, peak FLOP/s, memory.

Bandwidths and the largest memory are Apple's published figures (M1: computed from its
bus). FLOP/s are the float32 peak of the GPU; half precision is no faster on M1 to M4.
Apple published it for the M1; the others are computed: cores * 128 lanes * 2 (a fused
multiply-add) * clock. philipturner/metal-benchmarks has the lanes and the clocks of M1
and M2; later clocks are the highest that macOS's powermetrics lists, as the named
people reported. The M5's matrix units (Apple: over 4 times the M4's peak for AI, no
FLOP/s) make its peak unknown here. Nothing was measured for this table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .errors import ParameterError

GIB = 2**30  # memory is sold in GB of this size; bandwidth is given in 10^9 bytes/s
LANES = 128  # float32 operations that a GPU core starts in a cycle


@dataclass(frozen=True)
class Device:
    """A chip: bandwidth in bytes/s, float32 peak in FLOP/s (None: unknown), and the
    largest memory that it is sold with, in bytes. source: where the figures are from.
    """

    name: str
    bandwidth: float
    flops: float | None
    memory: int
    source: str

    @property
    def ridge(self) -> float | None:
        """FLOP/byte at which bandwidth and arithmetic take the same time."""
        return None if self.flops is None else self.flops / self.bandwidth


def peak_flops(cores: int, clock_mhz: int) -> float:
    """The float32 peak of a GPU in FLOP/s."""
    return cores * LANES * 2 * clock_mhz * 1e6


def find_device(name: str) -> Device:
    """The device of that name, in any case, with or without "Apple" before it.

    Raises ParameterError, listing the names.
    """
    wanted = " ".join(name.lower().split()).removeprefix("apple ")
    for device in DEVICES:
        if device.name.lower() == wanted:
            return device
    names = ", ".join(device.name for device in DEVICES)
    raise ParameterError(f"unknown device {name!r}; there are: {names}")


def _chip(
    name: str,
    cores: int,
    clock_mhz: int,
    gb_per_s: float,
    memory_gb: int,
    published: str,
    clock: str,
) -> Device:
    source = (
        f"bandwidth: {published}; FLOP/s computed: {cores} cores * {LANES} * 2 * "
        f"{clock_mhz} MHz (clock: {clock})"
    )
    flops = peak_flops(cores, clock_mhz)
    return Device(name, gb_per_s * 1e9, flops, memory_gb * GIB, source)


def _chips() -> Iterable[Device]:
    metal = "philipturner/metal-benchmarks"
    yield Device(
        "M1",
        68.3e9,
        2.6e12,
        16 * GIB,
        "bandwidth computed: 128 bits of LPDDR4X-4266; FLOP/s: Apple press release, "
        "2020-11-10",
    )
    release = "Apple press release, 2021-10-18"
    yield _chip("M1 Pro", 16, 1296, 200, 32, release, metal)
    yield _chip("M1 Max", 32, 1296, 400, 64, release, metal)
    release = "Apple press release, 2022-03-08"
    yield _chip("M1 Ultra", 64, 1296, 800, 128, release, metal)
    release = "Apple press release, 2022-06-06"
    yield _chip("M2", 10, 1398, 100, 24, release, metal)
    release = "Apple press release, 2023-01-17"
    yield _chip("M2 Pro", 19, 1398, 200, 32, release, metal)
    yield _chip("M2 Max", 38, 1398, 400, 96, release, metal)
    release = "Apple press release, 2023-06-05"
    yield _chip("M2 Ultra", 76, 1398, 800, 192, release, metal)
    specs = "Apple technical specifications, Mac models of 2023-10-30"
    m3 = "philipturner/applegpuinfo issue 4, an M3 Max"
    air = "philipturner/applegpuinfo issue 15, a MacBook Air"
    yield _chip("M3", 10, 1338, 100, 24, specs, air)
    yield _chip("M3 Pro", 18, 1380, 150, 36, specs, m3)
    yield _chip("M3 Max 30-core", 30, 1380, 300, 96, specs, m3)
    yield _chip("M3 Max 40-core", 40, 1380, 400, 128, specs, m3)
    specs = "Apple technical specifications, Mac Studio of 2025-03-05"
    yield _chip("M3 Ultra", 80, 1380, 819, 512, specs, m3 + "; it is two of them")
    m4 = "eclecticlight.co, 2025-01-22, an M4 Pro"
    release = "Apple press release, 2024-05-07"
    yield _chip("M4", 10, 1578, 120, 32, release, m4)
    release = "Apple press release, 2024-10-30"
    yield _chip("M4 Pro", 20, 1578, 273, 64, release, m4)
    specs = "Apple technical specifications, MacBook Pro of 2024-10-30"
    yield _chip("M4 Max 32-core", 32, 1578, 410, 36, specs, m4)
    yield _chip("M4 Max 40-core", 40, 1578, 546, 128, release, m4)
    source = "bandwidth: Apple press release, {}; FLOP/s unknown"
    yield Device("M5", 153e9, None, 32 * GIB, source.format("2025-10-15"))
    yield Device("M5 Pro", 307e9, None, 64 * GIB, source.format("2026-03-03"))
    yield Device("M5 Max 40-core", 614e9, None, 128 * GIB, source.format("2026-03-03"))


DEVICES: tuple[Device, ...] = tuple(_chips())
