"""The command line: `tiny-llm generate`, `batch`, `chat`, `info`, `plan`, `cache`.

Nothing slow is imported here: each command's module imports what it needs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO

from ..errors import TinyLLMError
from .parser import parse

INTERRUPTED = 130  # 128 + SIGINT, as shells count
_CLOSED_PIPE = 141  # 128 + SIGPIPE
_DEBUG = "TINY_LLM_DEBUG"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0: done; 1: a TinyLLMError, told in one line (TINY_LLM_DEBUG=1: with its traceback);
    2: wrong usage (raised as SystemExit by argparse); 130: Ctrl-C; 141: the reader of
    our output went away.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character
            stream.reconfigure(errors="replace")
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        _discard(sys.stderr)
        return _CLOSED_PIPE


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = parse(argv)
        command = import_module(f".{args.command}", __name__)
        return int(command.run(args))
    except KeyboardInterrupt:
        print("tiny-llm: interrupted", file=sys.stderr)
        return INTERRUPTED
    except TinyLLMError as error:
        if os.environ.get(_DEBUG, "0") not in ("", "0"):
            raise
        print(f"tiny-llm: error: {error}", file=sys.stderr)
        return 1


def _discard(stream: TextIO) -> None:
    """Send what is still buffered nowhere, or the interpreter complains at its end."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
