"""Which device runs the operations, and whether MLX can fuse element-wise chains."""

import functools
import logging
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

_log = logging.getLogger("tiny_llm")


def on_gpu() -> bool:
    """Whether operations run on Metal by default (else on MLX's CPU backend)."""
    return bool(mx.default_device() == mx.Device(mx.gpu))


@functools.cache
def can_fuse() -> bool:
    """Whether mx.compile turns an element-wise chain into one loop.

    Metal always does. The CPU backend calls `g++` when a chain first runs and keeps
    the result in the temporary folder. Without a `g++` it runs the operations one by
    one, which would make our own exponential slower than MLX's. Where it could not
    write there, it would raise in the middle of a step: then compiling is turned off.
    """
    if on_gpu():
        return True
    try:
        found = subprocess.run(["g++", "--version"], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    if found.returncode != 0:
        return False
    problem = _no_place_for_compiled_code()
    if problem is not None:
        _log.warning("element-wise chains are not fused: %s", problem)
        mx.disable_compile()
    return problem is None


def _no_place_for_compiled_code() -> str | None:
    """Why MLX cannot keep compiled code in its folder, or None."""
    # as std::filesystem::temp_directory_path looks for it
    names = (os.environ.get(v) for v in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))
    folder = Path(next((name for name in names if name), "/tmp"))
    if not folder.is_dir():
        return f"the temporary folder {folder} does not exist"
    place = folder / "mlx" / version("mlx") / "cpu"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{place} cannot be made ({error.strerror})"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} cannot be written; remove it, or set TMPDIR"
    return None
