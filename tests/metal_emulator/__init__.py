"""Runs ``mx.fast.metal_kernel`` sources on Linux, under a checker. See README.md."""

from .build import CompileError
from .kernel import (
    DEFAULT_ORDERS,
    CheckFailed,
    Kernel,
    metal_kernel,
    recording,
)
from .result import Result, Traffic
from .run import FORWARD, REVERSED, SHUFFLED
from .toolchain import ToolchainError, check_toolchain

__all__ = [
    "DEFAULT_ORDERS",
    "FORWARD",
    "REVERSED",
    "SHUFFLED",
    "CheckFailed",
    "CompileError",
    "Kernel",
    "Result",
    "ToolchainError",
    "Traffic",
    "check_toolchain",
    "metal_kernel",
    "recording",
]
