"""Random sequences of everything a paged cache can do, against plain lists."""

import gc
from typing import NamedTuple
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from paged_model import (
    HEADS,
    KV_HEADS,
    Request,
    Rows,
    naive_attention,
    pages_of_its_own,
    poison,
    short_of_pages,
)

from tiny_llm import memory
from tiny_llm.cache import PagePool, fork, rewind
from tiny_llm.cache import table as table_module
from tiny_llm.errors import OutOfPagesError, ParameterError
from tiny_llm.memory import KvShape, page_count


class Variant(NamedTuple):
    windows: tuple
    page_size: int
    bits: int | None = None
    tokens: int = 288
    slack: int = memory.SLACK  # fewer find faults that it would cover up


VARIANTS = {
    "full_1": Variant((None, None), 1, tokens=64),
    "full_4": Variant((None, None), 4, tokens=120),
    "full_16": Variant((None,), 16, tokens=160),
    "windowed_1": Variant((3, 3), 1, tokens=60, slack=2),
    "windowed_4": Variant((6, 6), 4, tokens=120, slack=5),
    "windowed_16": Variant((20,), 16, tokens=320),
    "mixed_4": Variant((7, None, 7), 4, tokens=160, slack=3),
    "mixed_16": Variant((None, 16, 30), 16, tokens=400),
    "packed_8": Variant((None, None), 4, bits=8, tokens=160),
    "packed_4": Variant((None, 9), 16, bits=4, slack=0),
}
SETTINGS = settings(
    max_examples=20,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

PICK = st.integers(0, 11)  # of the requests alive, modulo how many
NONE = st.just(0)
FEW = st.sampled_from([1, 1, 1, 2, 3, 5])
MANY = st.sampled_from([1, 4, 15, 16, 17, 40, 70])
SOME = st.booleans()


class PagedMachine(RuleBasedStateMachine):
    """Several requests over one pool; each step compares all that they hold."""

    def __init__(self, variant):
        super().__init__()
        windows, page_size, bits, tokens, _ = variant
        self.dim = 8 if bits is None else 32
        shape = KvShape(windows, KV_HEADS, self.dim, 4)
        packing = {} if bits is None else {"bits": bits, "group_size": 32}
        self.pool = PagePool(
            shape, mx.float32, tokens=tokens, page_size=page_size, **packing
        )
        self.layers = len(windows)
        self.rows = Rows(self.dim)
        self.alive = []
        self.pending = []  # lazy outputs beside what they must be
        poison(self.pool, [])
        self.new(0, 5)

    def pick(self, number, even=True):
        """One of the requests whose layers are (not) alike."""
        fitting = [r for r in self.alive if r.even == even]
        if not fitting and even:
            self.new(0, 5)
            fitting = self.alive[-1:]
        return fitting[number % len(fitting)] if fitting else None

    def some_are_uneven(self):
        return not all(request.even for request in self.alive)

    def as_stored(self, rows):
        fmt = self.pool.format
        return np.array(fmt.decode(fmt.encode(mx.array(rows))))

    def append(self, request, layer, rows, fetch):
        """One layer's turn of a step: through either of the two ways to read."""
        entry, length = request.cache[layer], rows.shape[2]
        k, v = mx.array(rows[0])[None], mx.array(rows[1])[None]
        q = np.random.default_rng(length).standard_normal((HEADS, length, self.dim))
        q = q.astype(np.float32)
        if fetch:
            keys, values, n, mask = entry.update_and_fetch(k, v, length, "causal")
            assert keys.shape[2] == values.shape[2] == n
            if mask is None:
                assert length == 1
            out = mx.fast.scaled_dot_product_attention(
                mx.array(q)[None], keys, values, scale=0.3, mask=mask
            )
        else:
            out = entry.attend(mx.array(q)[None], k, v, scale=0.3, window=entry.window)
        request.add(layer, self.as_stored(rows))
        stored = request.stored[layer]
        expected = naive_attention(q, stored[0], stored[1], 0.3, entry.window)
        self.pending.append((out, expected))

    def settle_pending(self):
        for out, expected in self.pending:
            assert np.abs(np.array(out[0]) - expected).max() < 1e-4
        self.pending = []

    def refused(self, request, stop, call):
        """Whether `call` was refused for want of pages, which must be true then."""
        start = min(request.lengths)
        short = short_of_pages(request, self.alive, start, stop)
        table = request.table
        before = table.pages, table.dropped
        lengths = list(table.lengths)
        try:
            call()
        except OutOfPagesError:
            assert short, "refused, but there are pages enough"
            assert (table.pages, table.dropped) == before
            assert table.lengths == lengths
            return True
        assert not short, "more pages than there are"
        return False

    @precondition(lambda self: len(self.alive) < 5)
    @rule(reserve=st.sampled_from([0, 10, 48]), n=NONE | FEW | MANY)
    def new(self, reserve, n):
        self.alive.append(Request.empty(self.pool, self.dim, reserve))
        self.go_on(self.alive[-1], n)

    @rule(number=PICK, n=FEW | MANY, fetch=SOME, lazily=SOME)
    def append_to_all_layers(self, number, n, fetch, lazily):
        self.go_on(self.pick(number), n, fetch, lazily)

    @rule(number=PICK, times=st.integers(2, 12))
    def decode(self, number, times):
        request = self.pick(number)
        for _ in range(times):
            self.go_on(request, 1)

    def go_on(self, request, n, fetch=False, lazily=False):
        """Append n tokens, if there are pages for them."""
        start = request.lengths[0]
        if n == 0:
            return
        rows = self.rows.make(start, n, self.layers)
        own = pages_of_its_own(request, self.alive)
        if self.refused(
            request, start + n, lambda: self.append(request, 0, rows[0], fetch)
        ):
            return
        for layer in range(1, self.layers):
            self.append(request, layer, rows[layer], fetch)
        assert pages_of_its_own(request, self.alive) >= {
            (group, place, page)
            for group, place, page in own  # nothing is copied that nobody shares
            if place >= request.table.dropped[group]
        }
        request.appended = n
        request.settled = max(request.settled, start - table_module.SLACK)
        if not lazily:
            self.settle_pending()

    @precondition(lambda self: self.layers > 1)
    @rule(number=PICK, n=FEW | MANY, layers=st.integers(1, 2))
    def append_to_some_layers(self, number, n, layers):
        """A step that is interrupted between two layers."""
        request = self.pick(number)
        start, layers = request.lengths[0], min(layers, self.layers - 1)
        rows = self.rows.make(start, n, self.layers)
        if self.refused(
            request, start + n, lambda: self.append(request, 0, rows[0], False)
        ):
            return
        for layer in range(1, layers):
            self.append(request, layer, rows[layer], False)
        request.waiting = rows
        request.appended = n
        request.settled = max(request.settled, start - table_module.SLACK)

    @precondition(lambda self: self.some_are_uneven())
    @rule(number=PICK, forked=SOME)
    def append_to_the_layers_left(self, number, forked):
        request = self.pick(number, even=False)
        if len(request.waiting) == 0:
            return
        if forked:  # the pages that were ready are shared then, and copied
            self.fork_of(request)
        start, stop = min(request.lengths), max(request.lengths)
        behind = [i for i, length in enumerate(request.lengths) if length == start]
        rows = request.waiting

        def append():
            self.append(request, behind[0], rows[behind[0]], False)

        # (a fork since then may have made pages shared, which must be copied now)
        if self.refused(request, stop, append):
            return
        for layer in behind[1:]:
            self.append(request, layer, rows[layer], False)
        request.waiting = []

    @precondition(lambda self: self.some_are_uneven())
    @rule(number=PICK)
    def rewind_to_the_layer_that_is_behind(self, number):
        request = self.pick(number, even=False)
        self.rewind_to(request, min(request.lengths), self.layers)
        assert request.even

    def rewind_to(self, request, length, layers):
        """The first `layers` of them, as if interrupted then."""
        if layers == self.layers:
            rewind(request.cache, length)
        else:
            for entry in request.cache:
                entry.check_rewind(entry.offset - length)
            for entry in request.cache[:layers]:
                entry.rewind(entry.offset - length)
        for layer in range(layers):
            request.cut(layer, length)
        request.waiting = []
        if length == 0 and request.even:
            request.settled = 0

    @rule(
        number=PICK,
        n=st.sampled_from([1, 2, 4, 8, 8, 12, 16, 30, 70, 10**6]),
        layers=st.sampled_from([1, 2, 9, 9]),
        more=NONE | FEW,
    )
    def rewind_exactly_or_not_at_all(self, number, n, layers, more):
        request = self.pick(number)
        left = max(request.lengths[0] - n, 0)
        try:
            self.rewind_to(request, left, min(layers, self.layers))
        except ParameterError:  # (what is held is compared after each step)
            assert 0 < left < request.settled
        if request.even:
            self.go_on(request, more)

    @rule(number=PICK, n=st.integers(1, 3))
    def rewind_too_much(self, number, n):
        request = self.pick(number)
        for wrong in (request.lengths[0] + n, -n):
            with pytest.raises(ParameterError, match=r"cannot rewind"):
                request.cache[0].rewind(wrong)

    @precondition(lambda self: len(self.alive) < 5)
    @rule(number=PICK, even=SOME, n=NONE | FEW, more=NONE | FEW)
    def fork(self, number, even, n, more):
        request = self.pick(number, even)
        if request is None:
            return
        other = self.fork_of(request)
        if even:
            self.go_on(request, n)
            self.go_on(other, more)

    def fork_of(self, request):
        before = self.pool.pages_in_use
        other = Request(
            fork(request.cache),
            list(request.stored),
            request.settled,
            request.appended,
            request.waiting,
        )
        self.alive.append(other)
        assert self.pool.pages_in_use == before
        return other

    @rule(number=PICK, into=PICK)
    def save_and_load(self, number, into):
        """Into another request, which may have been in use before."""
        request, other = self.pick(number), self.pick(into)
        if request is other:
            return
        self.rewind_to(other, 0, self.layers)
        try:
            for layer, entry in enumerate(request.cache):
                other.cache[layer].restore(entry.held(), self.dim)
                other.stored[layer] = request.stored[layer]
        except OutOfPagesError:
            assert other.table.lengths == other.lengths
            if any(other.lengths):
                self.rewind_to(other, 0, self.layers)
            return
        other.settled, other.appended = request.settled, request.appended

    @rule(number=PICK, even=SOME)
    def free(self, number, even):
        request = self.pick(number, even)
        if request is None:
            return
        request.table.free()
        request.stored = Request.empty(self.pool, self.dim).stored
        request.settled, request.waiting = 0, []
        assert request.table.pages == [() for _ in self.pool.windows]

    @rule(number=PICK, even=SOME, following=PICK, n=FEW)
    def drop(self, number, even, following, n):
        """The garbage collector frees what nobody has freed; another goes on."""
        request = self.pick(number, even)
        if request is not None:
            self.alive = [other for other in self.alive if other is not request]
            del request
            self.go_on(self.pick(following), n)

    @invariant()
    def the_books_agree(self):
        self.pool.check()
        size = self.pool.page_size
        for group, allocator in enumerate(self.pool.allocators):
            held = [0] * allocator.count
            for request in self.alive:
                for page in request.table.pages[group]:
                    held[page] += 1
            assert allocator.references == held
        total = sum(a.count for a in self.pool.allocators)
        assert 0 <= self.pool.pages_in_use <= total
        for request in self.alive:
            request.table.check()
            assert request.table.lengths == request.lengths
            for group, window in enumerate(self.pool.windows):
                if window is None:
                    continue
                tokens = max(request.lengths)
                most = page_count(tokens, size, window, request.appended)
                assert len(request.table.pages[group]) <= most

    @invariant()
    def everybody_holds_what_was_stored(self):
        for request in self.alive:
            request.check_contents()
        poison(self.pool, self.alive)

    def teardown(self):
        self.settle_pending()
        for request in self.alive[::2]:
            request.table.free()
        request, self.alive = None, []
        gc.collect()
        assert self.pool.pages_in_use == 0
        self.pool.check()


def drive(name, how=SETTINGS):
    variant = VARIANTS[name]
    with (
        mock.patch.object(memory, "SLACK", variant.slack),
        mock.patch.object(table_module, "SLACK", variant.slack),
    ):
        run_state_machine_as_test(lambda: PagedMachine(variant), settings=how)


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize("name", VARIANTS)
def test_whatever_happens_paged_requests_hold_and_see_what_lists_would(name):
    drive(name)
