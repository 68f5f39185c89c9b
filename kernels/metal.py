"""Which kernels run on Metal: built once, checked once; the setting that decides."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Hashable
from importlib.resources import files
from typing import Any

import mlx.core as mx

from tiny_llm.errors import KernelError, ParameterError

from .runtime import on_gpu

VARIABLE = "TINY_LLM_KERNELS"
SETTINGS = ("auto", "metal", "reference")
_log = logging.getLogger("tiny_llm")
_verdicts: dict[Hashable, str | None] = {}  # of the canaries: what is wrong
_warned = False


def setting() -> str:
    """The environment's TINY_LLM_KERNELS: auto (unless set), metal or reference.

    metal: our kernels, and a KernelError where they cannot run; reference: MLX's own
    operations, which also do what there is no kernel for; auto: our kernels on a GPU on
    which they give the right numbers. Raises ParameterError.
    """
    found = os.environ.get(VARIABLE) or "auto"
    if found not in SETTINGS:
        raise ParameterError(
            f"{VARIABLE}={found!r}: it may be {', '.join(SETTINGS[:-1])} or "
            f"{SETTINGS[-1]}"
        )
    return found


def reads_pages() -> bool:
    """Whether attention reads pages through their table: on a GPU, or where kernels are
    asked for. On the CPU it reads them where they lie, in views."""
    return setting() == "metal" or on_gpu()


def runs_on_metal(variant: Hashable, canary: Callable[[], str | None]) -> bool:
    """Whether a kernel is to be used here, else its reference.

    variant: what the canary's verdict is good for. canary: runs the kernel on a small
    problem and says what is wrong with the outcome. Raises KernelError where kernels
    are asked for and cannot be had.
    """
    asked = setting()
    if asked == "reference" or (asked == "auto" and not on_gpu()):
        return False
    if variant not in _verdicts:
        try:
            _verdicts[variant] = canary()
        except (RuntimeError, ValueError) as error:  # no Metal, or it refuses
            _verdicts[variant] = str(error)
    problem = _verdicts[variant]
    if problem is None:
        return True
    if asked == "metal":
        raise KernelError(
            f"{VARIABLE}=metal, but the kernel cannot be used here: {problem}"
        )
    _warn(problem)
    return False


def forget() -> None:
    """Build and check all kernels anew."""
    global _warned
    _verdicts.clear()
    kernel.cache_clear()
    _warned = False


@functools.cache
def kernel(
    source: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    defined: tuple[tuple[str, int], ...] = (),
) -> Callable[..., list[mx.array]]:
    """The kernel of a .metal file, with what is defined before it.

    MLX keeps one source for each name, so a variant has a name of its own. And it
    passes inputs of fewer than 8 elements in another way, which makes another source:
    an input of ours always has fewer, or always more.
    """
    folder = files(__package__)
    header = "".join(f"#define {name} {value}\n" for name, value in defined)
    header += (folder / "attend.h").read_text(encoding="utf-8")
    built: Any = mx.fast.metal_kernel(
        name="_".join(["tiny_llm", source, *(str(value) for _, value in defined)]),
        input_names=list(inputs),
        output_names=list(outputs),
        source=(folder / f"{source}.metal").read_text(encoding="utf-8"),
        header=header,
        ensure_row_contiguous=False,
    )
    return built  # type: ignore[no-any-return]


def _warn(problem: str) -> None:
    global _warned
    if not _warned:
        _log.warning(
            "MLX's own operations are used in place of our Metal kernels: %s (%s=metal "
            "makes this an error, =reference silences it)",
            problem,
            VARIABLE,
        )
    _warned = True
