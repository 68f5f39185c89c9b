"""The scheduler's memory: a pool of pages, and what can be found again in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import memory
from ..cache import PagePool, PageTable
from ..cache.prefix import PrefixIndex
from ..errors import OutOfPagesError, ParameterError, whole_number
from ..memory import kv_cache_bytes, page_count, physical_memory
from ..models import Decoder
from .request import Request

_TOKENS_EACH = 512  # of KV memory for each request, unless told otherwise
# Bytes allocated in a step beside which others decode: some 10 to 30 ms on a CPU. All
# that a long prompt needs would stop their streams for a second.
_AT_ONCE = 16 << 20


class KvMemory:
    """Pages for requests. With prefix_cache, full pages are shared and found again."""

    def __init__(self, pool: PagePool, prefix_cache: bool) -> None:
        self.pool = pool
        self.index: PrefixIndex | None = None
        if prefix_cache:
            self.index = PrefixIndex(pool.allocators, pool.page_size, pool.windows)

    def refuse(self, request: Request) -> None:
        """Raise OutOfPagesError for a request that the empty pool has no room for."""
        size, append = self.pool.page_size, self.pool.max_append
        for group, window in enumerate(self.pool.windows):
            needed = page_count(request.most, size, window, append)
            total = self.pool.allocators[group].count
            if needed > total:
                raise OutOfPagesError(
                    f"a prompt of {len(request.prompt)} tokens with up to "
                    f"{request.limit} more needs {needed} pages of {size} tokens, but "
                    f"the engine's kv_memory ({self.pool.most_bytes} bytes) holds "
                    f"{total}: shorten one of them, or give the engine more memory"
                )

    def open(self, request: Request, reserve: int) -> bool:
        """Pages for a request that has none, those of known tokens among them.

        reserve: tokens whose pages are taken at once, side by side. Sets table,
        computed, and once what was cached. False: too few pages, nothing changed.
        """
        table = self._shared(request, reserve)
        found, reason = 0, None
        try:
            if table is not None:
                found = table.length
            else:
                table = PageTable(self.pool, reserve)
                if request.wants_prompt_logprobs:
                    reason = "the logits of its prompt are asked for"
                elif self.index is not None:
                    tokens = request.prompt + request.output
                    match = self.index.match(request.digests, tokens)
                    found, reason = match.tokens, match.reason
                    table.adopt(match.held, found)
            table.prepare(found, found + 1, back=False)
            request.table, request.computed, request.stored = table, found, found
        except OutOfPagesError:
            assert table is not None
            table.free()
            return False
        except BaseException:  # Ctrl-C: whoever keeps the traceback keeps the table
            if table is not None:
                table.free()
            raise
        if not request.begun:
            request.cached_tokens, request.cache_miss_reason = found, reason
        return True

    def _shared(self, request: Request, reserve: int) -> PageTable | None:
        """The pages of its leader's prompt, but for the last token: all shared."""
        leader, known = request.leader, len(request.prompt) - 1
        if leader is None or leader.table is None or request.output:
            return None
        if leader.stored < known or not known or request.wants_prompt_logprobs:
            return None
        table: PageTable = leader.table.fork(reserve)
        try:
            table.rewind_all(table.length - known)
        except ParameterError:  # a window has passed its end
            table.free()
            return None
        return table

    def ready(self, request: Request, coming: int, patient: bool) -> bool:
        """Whether there is memory for the pages taken by `open`; allocate it.

        coming: tokens of requests behind it, whose memory is allocated with its own.
        patient: allocate a part only, the rest at the next calls. False: so it was.
        """
        ahead = -(-coming // self.pool.page_size)
        limit = _AT_ONCE if patient else None
        return bool(request.table.back(ahead=ahead, limit=limit))

    def keeps(self, rows: int) -> bool:
        """Whether what `rows` tokens see is still there once the next are prepared."""
        windowed = any(window is not None for window in self.pool.windows)
        return rows <= memory.SLACK or not windowed

    def grow(self, request: Request, stop: int) -> bool:
        """Make its tokens up to `stop` writable. False: too few pages, as before."""
        try:
            request.table.prepare(request.computed, stop)
        except OutOfPagesError:
            return False
        return True

    def close(self, request: Request) -> None:
        """Take all its pages back; what is in the index can still be found."""
        if request.table is not None:
            request.table.free()
            request.table = None
        request.stored = 0

    def store(
        self, request: Request, start: int, count: int, drafts: Sequence[int] = ()
    ) -> None:
        """Tokens were computed: make the full pages findable that they filled.

        drafts: the last of these tokens, where they are not in its output yet.
        """
        if request.table is not None:
            request.stored = start + count
        if self.index is None or request.table is None:
            return
        size = self.pool.page_size
        blocks = range(start // size, (start + count) // size)
        if not blocks:
            return
        tokens = request.prompt + request.output + list(drafts)
        for block in blocks:
            pages = []
            for dropped, held in request.table.held:
                place = block - dropped
                pages.append(held[place] if 0 <= place < len(held) else None)
            self.index.add(request.digests, tokens, block, pages)

    def forget(self, request: Request) -> None:
        """Its pages may hold nonsense: none of them is to be found again."""
        if self.index is not None and request.table is not None:
            self.index.drop([held.pages for held in request.table.held])

    def renew(self) -> None:
        """Begin with empty pages; nothing is to be found again."""
        if self.index is not None:
            self.index.drop([range(a.count) for a in self.pool.allocators])
        self.pool.renew()

    def check(self) -> None:
        """Raise AssertionError unless all books agree."""
        self.pool.check()
        if self.index is not None:
            self.index.check()
        for table in self.pool.tables:
            table.check()


def default_kv_memory(
    model: Decoder, max_batch: int, page_size: int, packing: Mapping[str, Any]
) -> int:
    """Bytes of KV memory where nobody says: see Engine."""
    shape = model.config.kv_shape(model.kv_dtype().size)
    page_size = whole_number("page_size", page_size, least=1)
    tokens = max(max_batch * _TOKENS_EACH, model.config.context_length)
    wanted = kv_cache_bytes(
        shape, "paged", tokens=tokens, page_size=page_size, max_append=tokens, **packing
    )
    return min(wanted, physical_memory() // 4)
