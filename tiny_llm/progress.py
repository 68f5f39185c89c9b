"""Progress bars on standard error, for whatever takes more than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

Progress = Callable[[int, int], None]

_PATIENCE = 1.0  # seconds without a bar


class ProgressBar(Protocol):
    """Draws how much is done, of how many (None: not known); a note stands beside."""

    def __call__(self, done: int, total: int | None, note: str = "") -> None:
        """Draw that from now on."""


@contextmanager
def progress_bar(title: str) -> Iterator[ProgressBar]:
    """A function (done, of how many) that draws a bar when the work takes long.

    Nothing is drawn unless standard error is a terminal, nor in the first second.
    """
    if not sys.stderr.isatty():
        yield lambda done, total, note="": None
        return
    start = time.monotonic()
    bar: _Bar | None = None

    def update(done: int, total: int | None, note: str = "") -> None:
        nonlocal bar
        late = time.monotonic() - start > _PATIENCE
        if bar is None and late and (total is None or done < total):
            bar = _Bar(title, done)
        if bar is not None:
            bar.show(done, total, note)

    try:
        yield update
    finally:
        if bar is not None:
            bar.close()


class _Bar:
    """A rich progress bar; rich is imported only when one is drawn."""

    def __init__(self, title: str, done: int) -> None:
        from rich.console import Console
        from rich.progress import Progress as RichProgress
        from rich.progress import TextColumn

        self._bar = RichProgress(
            *RichProgress.get_default_columns(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(title, total=None, completed=done, note="")
        self._bar.start()

    def show(self, done: int, total: int | None, note: str) -> None:
        self._bar.update(self._task, completed=done, total=total, note=note)

    def close(self) -> None:
        self._bar.stop()
