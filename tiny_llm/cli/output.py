"""What generate and chat show: the text as it comes, then how fast it came."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple, TextIO

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

    What a model thinks before it answers is dim at a terminal; where stdout is none,
    it gets the answer only, and stderr the reasoning. Ctrl-C ends the stream. The last
    line is always ended.
    """
    with ExitStack() as bar:
        stream = start(bar.enter_context(progress_bar("Reading the prompt")))
        interrupted, thinking = False, False
        aside = sys.stdout if sys.stdout.isatty() else sys.stderr
        try:
            for part in stream.parts():
                bar.close()
                if part.reasoning != thinking:
                    thinking = part.reasoning
                    print(_border(thinking, aside), end="", file=aside)
                if thinking:
                    print(dim(part.text, aside), end="", flush=True, file=aside)
                else:
                    print(part.text, end="", flush=True)
        except KeyboardInterrupt:
            interrupted = True
    if thinking and aside is not sys.stdout:
        print(file=aside)
    print(flush=True)
    return Shown(stream.result, interrupted)


def dim(text: str, stream: TextIO) -> str:
    """The text in dim letters, if the stream is a terminal that has them."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain or not stream.isatty() else f"\x1b[2m{text}\x1b[0m"


def _border(thinking: bool, aside: TextIO) -> str:
    """What comes before the reasoning or the answer: words, where none is dim."""
    marked = dim("", aside) == ""
    if thinking:
        return "(thinking)\n" if marked else ""
    if aside is not sys.stdout:  # the answer is shown elsewhere
        return "\n"
    return "\n\n(answer)\n" if marked else "\n\n"


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
