"""Which device runs the operations, and whether MLX can fuse element-wise chains."""

import functools
import subprocess
import sys

import mlx.core as mx


def on_gpu() -> bool:
    """Whether operations run on Metal by default (else on MLX's CPU backend)."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


@functools.cache
def can_fuse() -> bool:
    """Whether mx.compile turns an element-wise chain into one loop.

    Metal always does. The CPU backend calls `g++` when a chain first runs and keeps
    the result in the temporary folder; without a `g++` it runs the chain's operations
    one by one, which would make our own exponential slower than MLX's.
    """
    if on_gpu():
        return True
    if sys.platform == "win32":
        return False
    try:
        found = subprocess.run(["g++", "--version"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0
