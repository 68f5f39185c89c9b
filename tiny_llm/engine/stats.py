"""Where an engine stands, in numbers."""

from __future__ import annotations

from typing import NamedTuple

from .core import Core


class Stats(NamedTuple):
    """Where an engine stands, and what it has done.

    pages_in_use: of `pages`, held by requests; cached_pages: held by nobody, and kept
    to be found again; kv_bytes: allocated for pages. steps, rows, preemptions: so far;
    prompt_tokens: of the requests begun so far, and cached_tokens of them were found.
    """

    waiting: int
    running: int
    pages: int
    pages_in_use: int
    cached_pages: int
    kv_bytes: int
    steps: int
    rows: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int


def stats_of(core: Core, waiting: int) -> Stats:
    """The numbers of a core; waiting: besides, on their way to it."""
    pool, running = core.memory.pool, core.scheduler.running
    unfinished = [*running, *core.scheduler.waiting]
    return Stats(
        waiting=len(core.scheduler.waiting) + waiting,
        running=len(running),
        pages=sum(allocator.count for allocator in pool.allocators),
        pages_in_use=pool.pages_in_use,
        cached_pages=sum(len(allocator.cached) for allocator in pool.allocators),
        kv_bytes=pool.nbytes,
        steps=core.steps,
        rows=core.rows,
        preemptions=core.preemptions + sum(r.preemptions for r in unfinished),
        prompt_tokens=core.prompt_tokens,
        cached_tokens=core.cached_tokens,
    )
