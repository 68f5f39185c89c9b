"""What `tiny-llm info` says about this machine."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from .. import __version__, blas, default_model
from ..kernels import can_fuse, on_gpu
from ..models import supported


def machine_facts() -> dict[str, Any]:
    """The facts, in the order to show them."""
    facts: dict[str, Any] = {
        "tiny_llm": __version__,
        "mlx": version("mlx"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {_cpus()} CPUs",
        "device": _device(),
    }
    if not on_gpu():
        facts["blas"] = _blas()
        facts["fusion"] = _fusion()
    facts["architectures"] = supported()
    facts["default_model"] = _default_model()
    return facts


def _cpus() -> int:
    """Those this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _device() -> str:
    name = mx.device_info().get("device_name", "unknown")
    return f"Metal, {name}" if on_gpu() else f"CPU, {name}"


def _blas() -> str:
    """Its name and speed, by a timed product; if it is slow, what helps."""
    speed = blas.gflops()
    if sys.platform == "darwin":
        return f"Accelerate, {speed:.0f} GFLOP/s"
    advice = blas.advice()
    if advice is not None:
        return advice
    chosen = blas.chosen()
    if chosen.name is None:
        return f"MLX's own, {speed:.0f} GFLOP/s ({chosen.why_not})"
    return f"{chosen.name}, {speed:.0f} GFLOP/s"


def _fusion() -> str:
    if can_fuse():
        return "element-wise chains are compiled"
    return "none: element-wise chains are slow; install g++"


def _default_model() -> str:
    chosen = os.environ.get(default_model.PATH_VARIABLE)
    if chosen:
        return f"{default_model.NAME}, {chosen}"
    path = default_model.cache_folder() / default_model.FILE_NAME
    if path.is_file() and path.stat().st_size == default_model.SIZE:
        return f"{default_model.NAME}, {path}"
    megabytes = default_model.SIZE // 10**6
    return f"{default_model.NAME}, not fetched yet ({megabytes} MB, at its first use)"
