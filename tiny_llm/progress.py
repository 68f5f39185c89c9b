"""Progress bars on standard error, for whatever takes more than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]

_PATIENCE = 1.0  # seconds without a bar


@contextmanager
def progress_bar(title: str) -> Iterator[Progress]:
    """A function (done, of how many) that draws a bar when the work takes long.

    Nothing is drawn unless standard error is a terminal, nor in the first second.
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    start = time.monotonic()
    bar: _Bar | None = None

    def update(done: int, total: int) -> None:
        nonlocal bar
        if bar is None and time.monotonic() - start > _PATIENCE and done < total:
            bar = _Bar(title)
        if bar is not None:
            bar.show(done, total)

    try:
        yield update
    finally:
        if bar is not None:
            bar.close()


class _Bar:
    """A rich progress bar; rich is imported only when one is drawn."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(title, total=None)
        self._bar.start()

    def show(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        self._bar.stop()
