"""What generate and chat show: the text as it comes, then how fast it came."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import mlx.core as mx

from ..kernels import on_gpu
from ..progress import Progress, progress_bar
from ..result import Result
from ..text import TextStream


class Shown(NamedTuple):
    """A stream's result, and whether Ctrl-C ended it."""

    result: Result
    interrupted: bool


def show(start: Callable[[Progress], TextStream]) -> Shown:
    """Start a stream, given the progress of its prompt, and write it to stdout.

    Ctrl-C ends it. The last line is always ended.
    """
    with ExitStack() as bar:
        stream = start(bar.enter_context(progress_bar("Reading the prompt")))
        interrupted = False
        try:
            for piece in stream:
                bar.close()
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            interrupted = True
    print(flush=True)
    return Shown(stream.result, interrupted)


def statistics(shown: Shown) -> str:
    """Four lines: prompt, new tokens, peak memory, why it ended."""
    result = shown.result
    new = len(result.token_ids)
    lines = [f"prompt       {result.prompt_tokens:6d} tokens"]
    if new:
        lines[0] += (
            f"  {result.prompt_tokens_per_second:8.1f} tokens/s"
            f"   first token after {result.prompt_seconds:.2f} s"
        )
    lines.append(f"generated    {new:6d} tokens")
    if new > 1:
        lines[1] += f"  {result.decode_tokens_per_second:8.1f} tokens/s"
    lines.append(f"peak memory  {peak_memory() / 1e6:6.0f} MB")
    reason = "interrupted" if shown.interrupted else result.finish_reason
    lines.append(f"finish       {reason:>6}")
    return "\n".join(lines)


def peak_memory() -> int:
    """The most memory used so far, in bytes: MLX's on Metal, else the process's."""
    if on_gpu():
        return int(mx.get_peak_memory())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
