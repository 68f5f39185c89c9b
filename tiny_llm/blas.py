"""A fast BLAS under MLX's CPU backend on Linux.

MLX's Linux wheel links reference BLAS: 2 to 4 GFLOP/s. A library that is loaded with
global symbol visibility before `mlx.core` is first imported takes its place (200
GFLOP/s on two cores). That is why `import tiny_llm` calls `preload` before anything
else, and the only reason for work at import time. On macOS nothing is done.

TINY_LLM_BLAS=off leaves MLX alone, TINY_LLM_BLAS=/path/to/lib.so takes that library.
"""

import ctypes
import functools
import os
import platform
import site
import sys
import time
from pathlib import Path
from typing import NamedTuple

from .errors import ParameterError

# Below this a float32 GEMM of 384^3 runs on reference BLAS.
_FAST_GFLOPS = 12.0
_OPENBLAS = ("libopenblas.so.0", "libopenblas.so")


class Blas(NamedTuple):
    """The outcome of `preload`: which library was put in place, and if none, why."""

    name: str | None
    path: str | None
    why_not: str
    failed: bool = False  # the user's own choice could not be loaded


_chosen = Blas(None, None, "nothing was preloaded")


def preload() -> None:
    """Load the fastest BLAS found, unless mlx.core was imported already.

    Raises nothing: an import should not fail. See `require`.
    """
    global _chosen
    if not sys.platform.startswith("linux"):
        _chosen = Blas(None, None, "this platform needs none")
        return
    wish = os.environ.get("TINY_LLM_BLAS", "")
    if wish.lower() in ("off", "0", "none"):
        _chosen = Blas(None, None, "TINY_LLM_BLAS=off")
    elif "mlx.core" in sys.modules:
        _chosen = Blas(
            None, None, "mlx.core was imported first; import tiny_llm before it"
        )
    elif wish:
        _chosen = _load_wish(wish)
    else:
        _chosen = _load_mkl() or _load_openblas() or Blas(None, None, _how_to_get_one())


def chosen() -> Blas:
    """What `preload` did."""
    return _chosen


def require() -> None:
    """Raise ParameterError if TINY_LLM_BLAS names a library that was not loaded."""
    if _chosen.failed:
        raise ParameterError(
            f"{_chosen.why_not}. Give the path of a shared library, or `off`"
        )


def gflops() -> float:
    """10^9 float32 operations a second in a 384^3 matrix product of MLX, now."""
    import mlx.core as mx

    n = 384
    a = mx.full((n, n), 0.5, dtype=mx.float32)
    mx.eval(a @ a)  # the first call loads the processor's kernels
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(a @ a)
        best = max(best, 2 * n**3 / (time.perf_counter() - start) / 1e9)
    return best


@functools.cache
def advice() -> str | None:
    """One line for the user if MLX's CPU backend runs on slow BLAS, else None."""
    if not sys.platform.startswith("linux") or _chosen.why_not == "TINY_LLM_BLAS=off":
        return None
    measured = gflops()
    if measured >= _FAST_GFLOPS:
        return None
    reason = _chosen.why_not or f"{_chosen.name} is loaded but does not seem to be used"
    return f"MLX runs on a slow BLAS ({measured:.1f} GFLOP/s): {reason}"


def _load_wish(wish: str) -> Blas:
    path = Path(wish)
    try:
        if path.name.startswith("libmkl_rt"):
            _prepare_mkl(path.parent)
        ctypes.CDLL(wish, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        why = f"TINY_LLM_BLAS={wish}: cannot be loaded ({error})"
        return Blas(None, None, why, failed=True)
    return Blas(path.name, wish, "")


def _load_mkl() -> Blas | None:
    prefixes = [sys.prefix, sys.base_prefix, site.getuserbase()]
    for folder in dict.fromkeys(Path(p) / "lib" for p in prefixes):
        for path in sorted(folder.glob("libmkl_rt.so*"), reverse=True):
            try:
                _prepare_mkl(folder)
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError:  # a broken or partial installation: try the next
                continue
            return Blas("MKL", str(path), "")
    return None


def _prepare_mkl(folder: Path) -> None:
    """Put TBB in place, which MKL's TBB layer needs; without it MKL aborts the process.

    (MKL's OpenMP layer stalls when the cores are shared.) Raises OSError.
    """
    if os.environ.get("MKL_THREADING_LAYER", "TBB").upper() != "TBB":
        return  # the user's own choice
    near = folder / "libtbb.so.12"
    ctypes.CDLL(str(near) if near.exists() else "libtbb.so.12", mode=ctypes.RTLD_GLOBAL)
    os.environ["MKL_THREADING_LAYER"] = "TBB"


def _load_openblas() -> Blas | None:
    for name in _OPENBLAS:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return Blas("OpenBLAS", name, "")
    return None


def _how_to_get_one() -> str:
    if platform.machine() == "x86_64":
        return "no other was found; `pip install mkl tbb` brings one"
    return "no other was found; install OpenBLAS (Debian: apt install libopenblas0)"


def keep_freed_memory() -> None:
    """Ask glibc not to hand freed memory back at once (Linux; elsewhere nothing).

    MLX's CPU backend allocates each result anew. Above 32 MB glibc maps and unmaps
    fresh pages every time, and the page faults made a 2,048-token prompt's attention
    twice, its SwiGLU four times as slow.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; musl has none
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD
