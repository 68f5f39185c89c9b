"""When huggingface_hub draws its progress bars."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def progress_bars(show: bool = True) -> Iterator[None]:
    """The Hub's own progress bars, but only where somebody sees them move."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if (show and sys.stderr.isatty()) or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
