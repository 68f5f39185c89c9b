"""A batch driven by hand: every row as if its request were alone."""

from types import SimpleNamespace
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from engine_cases import any_model
from engine_driver import poison
from oracle import random_model
from paged_model import naive_attention
from paged_model import poison as poison_unwritten

from tiny_llm import load_kv_cache, save_kv_cache, stream_generate
from tiny_llm.cache import PagePool, TinyKvFullCache, create_kv_cache, fork, rewind
from tiny_llm.cache.batching import batching_cache
from tiny_llm.errors import OutOfPagesError, ParameterError
from tiny_llm.memory import KvShape

MODELS = ["llama_tied", "mistral_swa", "qwen3", "qwen2_mixed"]
VIEWS = pytest.mark.parametrize("views", [True, False], ids=["views", "gathered"])
DIM, HEADS, KV_HEADS = 8, 4, 2


def some_ids(n, seed=0):
    return np.random.default_rng(seed).integers(0, 97, n).tolist()


def poison_all(pool):
    """NaN into the whole pool, which nobody uses yet."""
    assert pool.pages_in_use == 0
    poison(pool)


class ByHand:
    """Slots over a pool, as the tutorial has them; NaN wherever nobody has written.

    ids: of each slot's request, all stored but the last one; None: idle.
    """

    def __init__(self, model, slots, views=None, page_size=16, tokens=640, **packing):
        self.model = any_model(model) if isinstance(model, str) else model
        self.pool = self.model.create_page_pool(
            tokens=tokens, page_size=page_size, **packing
        )
        poison_all(self.pool)
        self.views = views
        self.cache = batching_cache(self.pool, slots, views)
        self.ids = [None] * slots

    def prefill(self, ids, kind="paged", **options):
        """A request of its own that holds ids, and the token that follows them."""
        if kind == "paged" and "pool" not in options and "tokens" not in options:
            options["pool"] = self.pool
        cache = self.model.create_kv_cache(kind, **options)
        logits = self.model(mx.array([ids]), cache=cache, logits_to_keep=1)
        return cache, mx.argmax(logits[0, -1]).item()

    def join(self, slot, ids, kind="paged", **options):
        own, token = self.prefill(ids, kind, **options)
        for entry, layer in zip(self.cache, own, strict=True):
            entry.add_request(layer, slot)
        self.ids[slot] = [*ids, token]

    def leave(self, slot):
        for entry in self.cache:
            entry.remove_request(slot)
        self.ids[slot] = None

    def poison(self):
        """NaN into all slots without a token.

        (With views those of pages in use have it already, until the batch has cleared
        them: that is done once.)
        """
        if self.views is False:
            tables = filter(None, self.cache[0].batch.tables)
            poison_unwritten(self.pool, [SimpleNamespace(table=t) for t in tables])
        else:
            poison(self.pool)

    def step(self):
        """The next token of every request; returns logits [slots, V]."""
        self.poison()
        # (what an idle slot is given does not matter)
        tokens = [[3 if own is None else own[-1]] for own in self.ids]
        lengths = [7 if own is None else len(own) - 1 for own in self.ids]
        logits = self.model(mx.array(tokens), offset=lengths, cache=self.cache)[:, -1]
        for slot, own in enumerate(self.ids):
            if own is not None:
                own.append(mx.argmax(logits[slot]).item())
        return np.array(logits)

    def expected(self, slot):
        """The logits after which the newest token was chosen: a plain forward pass."""
        ids = mx.array([self.ids[slot][:-1]])
        return np.array(self.model(ids, logits_to_keep=1)[0, -1])

    def check(self, logits):
        for slot, own in enumerate(self.ids):
            if own is not None:
                assert np.abs(logits[slot] - self.expected(slot)).max() < 1e-4

    def run(self, steps):
        for _ in range(steps):
            self.check(self.step())


@VIEWS
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_are_as_if_alone_whoever_comes_and_goes(model, views, page_size):
    hand = ByHand(model, 5, views, page_size)
    hand.join(0, some_ids(3))
    hand.join(3, some_ids(41, 1))
    hand.run(3)
    hand.join(1, some_ids(12, 2))  # mid-decode, beside idle slots
    hand.run(14)
    hand.leave(0)
    hand.join(4, some_ids(70, 3))
    hand.run(3)
    hand.join(0, some_ids(1, 4))  # pages that another one left
    hand.join(2, some_ids(33, 5))
    hand.run(20)
    for slot in range(5):
        hand.leave(slot)
    assert hand.pool.pages_in_use == 0
    hand.pool.check()


@VIEWS
@pytest.mark.parametrize("model", MODELS)
def test_neighbours_do_not_change_the_first_logits(model, views):
    alone, together = (ByHand(model, n, views) for n in (1, 3))
    alone.join(0, some_ids(3))
    together.join(1, some_ids(3))
    together.join(0, some_ids(12, 1))
    one, all_three = alone.step()[0], together.step()
    assert np.abs(all_three[1] - one).max() < 1e-4
    together.check(all_three)


@VIEWS
def test_very_different_lengths_share_a_window(views):
    model = random_model("mistral_swa", sliding_window=16)
    hand = ByHand(model, 3, views, page_size=4)
    hand.join(0, some_ids(5))
    hand.join(1, some_ids(40, 1))
    hand.run(8)
    hand.join(2, some_ids(23, 2))
    hand.run(100)  # (pages behind the window go back on the way)
    assert hand.cache[0].request(1).table.dropped[0] > 0


@VIEWS
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("bits", [8, 4])
def test_packed_pages_with_grouped_queries(batch, bits, views):
    # 9 query heads over 3 KV heads: a batch of 3 must not be taken for the KV heads
    shape = KvShape((None,), 3, 64, 4)
    pool = PagePool(shape, mx.float32, tokens=128, page_size=8, bits=bits)
    poison_all(pool)
    (entry,) = batching_cache(pool, batch, views)
    stored = []
    for slot in range(batch):
        cache = create_kv_cache("paged", shape, mx.float32, {"pool": pool})
        k, v = (mx.random.normal((1, 3, 5 + 8 * slot, 64)) for _ in "kv")
        cache[0].update_and_fetch(k, v)
        entry.add_request(cache[0], slot)
        stored.append((k, v))
    for _ in range(10):
        q = mx.random.normal((batch, 9, 1, 64))
        k, v = (mx.random.normal((batch, 3, 1, 64)) for _ in "kv")
        before = [np.array(x) for x in (q, k, v)]
        out = entry.attend(q, k, v, scale=0.125)
        assert all(np.array_equal(a, b) for a, b in zip(before, (q, k, v), strict=True))
        for slot in range(batch):
            own = slice(slot, slot + 1)
            stored[slot] = tuple(
                mx.concatenate([old, new[own]], axis=2)
                for old, new in zip(stored[slot], (k, v), strict=True)
            )
            rounded = [
                pool.format.decode(pool.format.encode(x))[0] for x in stored[slot]
            ]
            expected = naive_attention(q[slot], *rounded, 0.125)
            assert np.abs(np.array(out[slot]) - expected).max() < 1e-4
            exact = naive_attention(q[slot], *(x[0] for x in stored[slot]), 0.125)
            error = np.abs(expected - exact).max()
            assert 1e-4 < error < (0.05 if bits == 8 else 0.8)  # packed it is


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("model", "kind", "options", "packing"),
    [
        ("llama_tied", "dense", {}, {}),
        ("mistral_swa", "dense", {"reserve": 100}, {}),
        ("qwen2_mixed", "dense", {}, {}),
        ("qwen3", "paged", {"tokens": 200, "page_size": 8}, {}),
        ("qwen2_mixed", "paged", {"tokens": 200, "page_size": 8}, {}),
        ("mistral_swa", "rotating", {}, {}),
        ("qwen2_mixed", "rotating", {}, {}),
        ("llama_wide", "quantized", {"bits": 8}, {"bits": 8}),
        ("llama_wide", "quantized", {"bits": 4}, {"bits": 4}),
        ("qwen3", "quantized", {"group_size": 32}, {"bits": 8, "group_size": 32}),
        ("mistral_wide", "rotating", {"bits": 8}, {"bits": 8}),
        ("qwen2_wide", "rotating", {"bits": 4}, {"bits": 4}),
    ],
)
def test_requests_of_every_kind_join(model, kind, options, packing, page_size):
    hand = ByHand(model, 3, page_size=page_size, **packing)
    hand.join(1, some_ids(9))
    for slot, length in ((2, 30), (0, 150)):
        own, token = hand.prefill(some_ids(length, slot), kind, **options)
        for entry, layer in zip(hand.cache, own, strict=True):
            found = layer.held()
            entry.add_request(layer, slot)
            taken = entry.request(slot).held()
            assert taken.offset == found.offset == length
            there, here = (*found.keys, *found.values), (*taken.keys, *taken.values)
            for old, new in zip(there, here, strict=True):
                count = min(old.shape[2], new.shape[2])
                assert mx.array_equal(old[:, :, -count:], new[:, :, -count:])
        del own  # what was copied is its own
        hand.ids[slot] = [*some_ids(length, slot), token]
    if packing:  # the same stored numbers: as the request by itself goes on
        own, token = hand.prefill(some_ids(150), kind, **options)
        logits = hand.model(mx.array([[token]]), 150, own)[0, -1]
        assert np.abs(hand.step()[0] - np.array(logits)).max() < 1e-3
    else:
        hand.run(20)


def test_a_paged_request_of_the_pool_is_taken_as_it_is():
    hand = ByHand("qwen2_mixed", 2)
    own, _ = hand.prefill(some_ids(37))
    pages, arrays = own[0].table.pages, [rows[0] for rows in hand.pool.rows]
    for entry, layer in zip(hand.cache, own, strict=True):
        entry.add_request(layer, 1)
        assert entry.request(1).table is own[0].table
    assert own[0].table.pages == pages
    assert [rows[0] for rows in hand.pool.rows] == arrays  # nothing was written
    assert hand.pool.pages_in_use == sum(map(len, pages))


def test_forks_share_pages_until_they_write():
    hand = ByHand("llama_tied", 3, page_size=8)
    hand.join(0, some_ids(21))
    hand.run(2)
    for slot in (1, 2):
        own = [entry.request(0) for entry in hand.cache]
        for entry, layer in zip(hand.cache, fork(own), strict=True):
            entry.add_request(layer, slot)
        hand.ids[slot] = [*hand.ids[0][:-1], 40 + slot]
    assert hand.pool.pages_in_use == 3
    page = hand.pool.nbytes // 2 // (640 // 8)  # of a layer
    assert hand.cache[0].nbytes == 3 * page
    hand.run(10)
    assert len({tuple(own) for own in hand.ids}) == 3
    assert hand.cache[0].nbytes == (2 + 3 * 3) * page


@VIEWS
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [2, 5, 20])
def test_rows_take_several_tokens_and_give_them_back(model, views, count):
    hand = ByHand(model, 4, views, page_size=4)
    hand.join(0, some_ids(3))
    hand.join(2, some_ids(45, 1))
    hand.join(3, some_ids(17, 2))
    hand.run(2)
    more = {slot: some_ids(count, 10 + slot) for slot in range(4)}
    hand.poison()
    stored = hand.cache[0].offset
    logits = hand.model(mx.array(list(more.values())), stored, hand.cache)
    for slot in (0, 2, 3):
        ids = hand.ids[slot][:-1] + more[slot]
        expected = hand.model(mx.array([ids]), logits_to_keep=count)[0]
        assert mx.abs(logits[slot] - expected).max() < 1e-4
    assert mx.array_equal(
        hand.cache[-1].offset, stored + mx.array([1, 0, 1, 1]) * count
    )
    for entry in hand.cache:  # all of them, ...
        entry.rewind(count)
    assert mx.array_equal(hand.cache[0].offset, stored)
    hand.run(3)
    for entry in hand.cache:  # ... or one alone
        entry.request(2).rewind(2)
    hand.ids[2] = [*hand.ids[2][:-3], 96]
    hand.run(12)


def test_an_offset_handed_out_stays_what_it_was():
    hand = ByHand("llama_tied", 3)
    hand.join(0, some_ids(5))
    hand.join(2, some_ids(9))
    offset = hand.cache[0].offset
    assert offset.dtype == mx.int32
    assert offset.tolist() == [5, 0, 9]
    hand.step()
    assert hand.cache[0].offset.tolist() == [6, 0, 10]
    hand.leave(0)
    hand.step()
    assert hand.cache[0].offset.tolist() == [0, 0, 11]
    assert offset.tolist() == [5, 0, 9]


def test_where_one_request_is_needed_a_batch_is_refused_by_name(tmp_path):
    hand = ByHand("llama_tied", 2)
    hand.join(1, some_ids(5))
    m, cache = hand.model, hand.cache
    refused("request by request", save_kv_cache, tmp_path / "kv", m, cache, some_ids(5))
    refused("one by one", rewind, cache, 3)
    refused("create_kv_cache", stream_generate, m, [1], cache=cache)
    one = [entry.request(1) for entry in cache]
    rewind(one, 3)
    save_kv_cache(tmp_path / "kv", m, one, some_ids(3))
    assert load_kv_cache(tmp_path / "kv", m).cache[0].offset == 3


def test_a_model_makes_the_cache_with_its_own_pool_or_another():
    m = any_model("qwen2_mixed")
    cache = m.create_kv_cache("batching", slots=3, tokens=64, page_size=8)
    assert [entry.offset.tolist() for entry in cache] == [[0, 0, 0]] * 2
    assert cache[0].layout.kind == "batching"
    assert (cache[0].layout.page_size, cache[1].layout.window) == (8, 12)
    assert cache[0].nbytes == 0
    pool = m.create_page_pool(tokens=64)
    assert m.create_kv_cache("batching", slots=3, pool=pool)[1].pool is pool
    create = m.create_kv_cache
    refused("needs slots=", create, "batching", tokens=64)
    refused("slots must be .* at least 1, got 0", create, "batching", slots=0, tokens=9)
    refused("no option 'reserve'", create, "batching", slots=1, tokens=9, reserve=1)
    refused("pool=", create, "batching", slots=1)
    refused(
        "tokens= is the pool's own", create, "batching", slots=1, pool=pool, tokens=1
    )


# By layers, with keys that tell where they belong.


def new_pool(windows=(None,), tokens=128, page_size=4, **options):
    shape = KvShape(windows, KV_HEADS, DIM, 4)
    pool = PagePool(shape, mx.float32, tokens=tokens, page_size=page_size, **options)
    poison_all(pool)
    return pool


def paged(pool, n=3):
    """A request of n random tokens in a pool, and what it holds."""
    cache = create_kv_cache("paged", pool.shape, mx.float32, {"pool": pool})
    held = []
    for entry in cache:
        k, v = (mx.random.normal((1, KV_HEADS, n, DIM)) for _ in "kv")
        entry.update_and_fetch(k, v)
        held.append((k, v))
    return cache, held


def batch_of(pool, slots, lengths, views=True):
    """A batch with requests of so many tokens (None: idle), and what they hold."""
    cache, held = batching_cache(pool, slots, views), []
    for slot, length in enumerate(lengths):
        own, rows = (None, None) if length is None else paged(pool, length)
        held.append(rows)
        for entry, layer in zip(cache, own or (), strict=False):
            entry.add_request(layer, slot)
    return cache, held


def new_rows(slots, n=1):
    q = mx.random.normal((slots, HEADS, n, DIM))
    return q, *(mx.random.normal((slots, KV_HEADS, n, DIM)) for _ in "kv")


@VIEWS
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("count", [1, 3])
def test_update_and_fetch_serves_ones_own_attention(window, count, views):
    cache, held = batch_of(new_pool((window,)), 4, [9, None, 2, 15], views)
    for step in range(4):
        q, k, v = new_rows(4, count)
        keys, values, length, mask = cache[0].update_and_fetch(
            k, v, count, ["causal", None][step % 2]
        )
        assert keys.shape == values.shape == (4, KV_HEADS, length, DIM)
        assert mask.shape == (4, 1, count, length)
        assert mask.dtype == mx.bool_
        out = mx.fast.scaled_dot_product_attention(
            q, keys, values, scale=0.3, mask=mask
        )
        assert not mx.isnan(out).any()  # of idle slots neither
        for slot in (0, 2, 3):
            old = held[slot][0]
            own = slice(slot, slot + 1)
            held[slot][0] = k_, v_ = tuple(
                mx.concatenate([a, b[own]], axis=2)
                for a, b in zip(old, (k, v), strict=True)
            )
            expected = naive_attention(q[slot], k_[0], v_[0], 0.3, window)
            assert np.abs(np.array(out[slot]) - expected).max() < 1e-5
            seen = min(length, k_.shape[2])
            if window is None:
                assert mx.array_equal(keys[slot, :, -seen:], k_[0])
                assert mx.array_equal(values[slot, :, -seen:], v_[0])
                assert not mask[slot, :, :, : length - seen].any()


@VIEWS
def test_sinks_and_softcaps_reach_every_row(views):
    cache, held = batch_of(new_pool(), 3, [9, 5, 2], views)
    q, k, v = new_rows(3)
    options = {"scale": 0.3, "softcap": 1.5, "sinks": mx.array([0.5, -1.0, 2.0, 0.0])}
    out = cache[0].attend(q, k, v, **options)
    for slot in range(3):
        own, dense = slice(slot, slot + 1), TinyKvFullCache()
        dense.update_and_fetch(*held[slot][0])
        expected = dense.attend(q[own], k[own], v[own], **options)
        assert mx.abs(out[own] - expected).max() < 1e-5


def test_no_request_is_no_row():
    cache = batching_cache(new_pool(), 2)
    q, k, v = new_rows(2)
    assert not cache[0].attend(q, k, v, scale=1.0).any()
    keys, _, length, mask = cache[0].update_and_fetch(k, v)
    assert (keys.shape[2], length, mask.all().item()) == (1, 1, True)
    assert cache[0].offset.tolist() == [0, 0]


def refused(match, call, *arguments, books=None, **options):
    """That a call is refused, and leaves the pool's books as they were."""
    allocators = () if books is None else books.allocators
    before = [list(allocator.references) for allocator in allocators]
    with pytest.raises(ParameterError, match=match):
        call(*arguments, **options)
    assert [list(allocator.references) for allocator in allocators] == before


def test_what_does_not_fit_a_slot_is_refused_by_name():
    pool = new_pool((None, 6))
    cache, _ = batch_of(pool, 3, [9, None, 2])
    first, second = cache
    other, _ = paged(pool)
    refused("slot 0 is in use", first.add_request, other[0], 0, books=pool)
    refused("layer 1 of a request for layer 0", first.add_request, other[1], 1)
    refused("slot 3 of 3", first.add_request, other[0], 3)
    refused("slot", first.add_request, other[0], -1)
    refused("slot 3 of 3", second.remove_request, 3)
    refused("slot 1 is idle", first.request, 1)
    dense = TinyKvFullCache()
    refused("no tokens", first.add_request, dense, 1, books=pool)
    dense.update_and_fetch(*new_rows(1, 4)[1:])
    refused("slot 2 is in use", first.add_request, dense, 2, books=pool)
    refused("request by request", first.held)
    refused("add_request", first.restore, dense.held(), DIM)
    mine = first.request(0)
    refused("slot 0", first.add_request, mine, 1, books=pool)  # in two slots at once
    first.remove_request(1)  # idle already: fine


def test_requests_of_another_form_are_refused():
    pool = new_pool()
    (entry,) = batching_cache(pool, 2)
    shapes = {
        "rows of a batch": (2, KV_HEADS, 5, DIM),
        "other heads": (1, 1, 5, DIM),
        "another size": (1, KV_HEADS, 5, 2 * DIM),
    }
    for shape in shapes.values():
        dense = TinyKvFullCache()
        dense.update_and_fetch(mx.ones(shape), mx.ones(shape))
        refused("holds", entry.add_request, dense, 0, books=pool)
    dense = TinyKvFullCache()
    half = mx.ones((1, KV_HEADS, 5, DIM), dtype=mx.float16)
    dense.update_and_fetch(half, half)
    refused("float16", entry.add_request, dense, 0, books=pool)
    refused("slot 0 is idle", entry.request, 0)


def test_another_packing_is_refused():
    shape = KvShape((None,), 2, 64, 4)
    rows = [mx.random.normal((1, 2, 5, 64)) for _ in "kv"]

    def of(kind, **options):
        (entry,) = create_kv_cache(kind, shape, mx.float32, options)
        entry.update_and_fetch(*rows)
        return entry

    kinds = {
        None: of("dense"),
        8: of("quantized", bits=8),
        4: of("quantized", bits=4),
        32: of("quantized", bits=8, group_size=32),
        "paged": of("paged", tokens=64, bits=4),
    }
    for bits, mine in ((None, {None}), (8, {8}), (4, {4, "paged"})):
        pool = PagePool(shape, mx.float32, tokens=64, page_size=4, bits=bits)
        for name, request in kinds.items():
            (entry,) = batching_cache(pool, 1)
            if name in mine:
                entry.add_request(request, 0)
                assert entry.offset.tolist() == [5]
                continue
            refused(
                f"the pool with bits={bits}", entry.add_request, request, 0, books=pool
            )


def test_a_request_that_lacks_what_the_layer_sees_is_refused():
    shape = KvShape((None,), KV_HEADS, DIM, 4)
    rows = new_rows(1, 200)[1:]
    (short,) = create_kv_cache("rotating", shape, mx.float32, {"window": 10})
    for _ in range(3):
        short.update_and_fetch(*rows)
    (full,) = batching_cache(new_pool(tokens=512), 1)
    refused("holds only .* of 600 tokens, .* needs 600", full.add_request, short, 0)
    (wide,) = batching_cache(new_pool((300,), tokens=512), 1)
    refused("holds only .* of 600 tokens, .* needs 299", wide.add_request, short, 0)
    (fits,) = batching_cache(new_pool((10,), tokens=512), 1)
    fits.add_request(short, 0)
    (kept,) = create_kv_cache("rotating", shape, mx.float32, {"window": 10, "keep": 2})
    kept.update_and_fetch(*rows)
    (entry,) = batching_cache(new_pool((10,), tokens=512), 1)
    refused("holds", entry.add_request, kept, 0)


def test_rows_of_another_form_are_refused():
    pool = new_pool((None, 6))
    cache, _ = batch_of(pool, 3, [9, None, 2])
    full, windowed = cache
    q, k, v = new_rows(3)
    attend = full.attend
    refused("does not fit", attend, q[:2], k[:2], v[:2], scale=1.0, books=pool)
    refused("does not fit", attend, q, k[:, :1], v[:, :1], scale=1.0, books=pool)
    refused("float16", attend, q, k, v.astype(mx.float16), scale=1.0, books=pool)
    refused("mask", full.update_and_fetch, k, v, mask=mx.ones((1, 1)), books=pool)
    refused("window", windowed.attend, q, k, v, scale=1.0, window=5, books=pool)
    refused("window", windowed.attend, q, k, v, scale=1.0, books=pool)
    assert full.offset.tolist() == [9, 0, 2]


def test_layers_of_a_step_take_the_same_tokens():
    cache, _ = batch_of(new_pool((None, None)), 2, [9, 2])
    cache[0].update_and_fetch(*new_rows(2, 1)[1:])
    refused("1", cache[1].update_and_fetch, *new_rows(2, 2)[1:])
    cache[1].update_and_fetch(*new_rows(2, 1)[1:])
    assert cache[1].offset.tolist() == [10, 3]


def test_rewinding_too_far_is_refused_for_all():
    cache, _ = batch_of(new_pool(), 3, [9, None, 2])
    refused("2", cache[0].rewind, 3)
    assert cache[0].offset.tolist() == [9, 0, 2]
    cache[0].rewind(2)
    assert cache[0].offset.tolist() == [7, 0, 0]


def test_a_rotating_request_is_not_rewound_beyond_what_it_brought():
    # its tokens begin within a page of 64
    shape = KvShape((10,), KV_HEADS, DIM, 4)
    (own,) = create_kv_cache("rotating", shape, mx.float32, {})
    for _ in range(3):
        own.update_and_fetch(*new_rows(1, 200)[1:])
    held = own.held()
    pool = new_pool((10,), tokens=512, page_size=64)
    (entry,) = batching_cache(pool, 1)
    entry.add_request(own, 0)
    first = 600 - held.keys[0].shape[2]
    assert first % 64
    assert not mx.isnan(entry.request(0).held().keys[0]).any()
    refused("rewind", entry.rewind, 600 - first - 8)
    entry.rewind(600 - first - 9)
    keys, _, _, _ = entry.update_and_fetch(*new_rows(1)[1:])
    assert mx.array_equal(keys[:, :, :9], held.keys[0][:, :, :9])
    entry.rewind(first + 10)
    keys, _, length, _ = entry.update_and_fetch(*new_rows(1, 3)[1:])
    assert length == 3


def test_without_pages_nothing_changes_and_the_others_go_on():
    pool = new_pool(tokens=24)  # 6 pages of 4
    cache, held = batch_of(pool, 3, [8, 8, 6])
    before = [list(a.references) for a in pool.allocators]
    q, k, v = new_rows(3)
    with pytest.raises(OutOfPagesError, match="of the pool's 6 pages"):
        cache[0].attend(q, k, v, scale=0.3)
    assert cache[0].offset.tolist() == [8, 8, 6]
    assert [list(a.references) for a in pool.allocators] == before
    cache[0].remove_request(1)
    with pytest.raises(OutOfPagesError, match="of the pool's 6 pages"):
        cache[0].add_request(dense_of(9), 1)
    out = cache[0].attend(q, k, v, scale=0.3)
    assert cache[0].offset.tolist() == [9, 0, 7]
    for slot in (0, 2):
        pairs = zip(
            held[slot][0], (k[slot : slot + 1], v[slot : slot + 1]), strict=True
        )
        own = [mx.concatenate(pair, axis=2)[0] for pair in pairs]
        expected = naive_attention(q[slot], *own, 0.3)
        assert np.abs(np.array(out[slot]) - expected).max() < 1e-5


def dense_of(n):
    dense = TinyKvFullCache()
    dense.update_and_fetch(*new_rows(1, n)[1:])
    return dense


def test_a_step_that_was_cut_off_is_told_and_can_be_taken_back():
    pool = new_pool((None, None))
    cache, held = batch_of(pool, 3, [8, 3, 5])
    cache[0].attend(*new_rows(3), scale=0.3)  # ... and the second layer never came
    refused("cut off", cache[0].attend, *new_rows(3), scale=0.3, books=pool)
    cache[0].rewind(1)
    q, k, v = new_rows(3)
    for layer, entry in enumerate(cache):
        out = entry.attend(q, k, v, scale=0.3)
        for slot in range(3):
            own = slice(slot, slot + 1)
            pairs = zip(held[slot][layer], (k[own], v[own]), strict=True)
            rows = [mx.concatenate(pair, axis=2)[0] for pair in pairs]
            expected = naive_attention(q[slot], *rows, 0.3)
            assert np.abs(np.array(out[slot]) - expected).max() < 1e-5


# Memory.


@VIEWS
@pytest.mark.parametrize("bits", [None, 8])
def test_a_step_copies_no_array_of_the_pool(views, bits):
    shape = KvShape((None, 50), 3, 64, 4)
    tokens = 8192 if bits is None else 32768  # (unpacked while they are read)
    pool = PagePool(shape, mx.float32, tokens=tokens, page_size=16, bits=bits)
    cache = batching_cache(pool, 4, views)
    for slot in range(3):
        own = create_kv_cache("paged", shape, mx.float32, {"pool": pool})
        for entry, layer in zip(cache, own, strict=True):
            layer.update_and_fetch(
                *(mx.random.normal((1, 3, 40 + 20 * slot, 64)) for _ in "kv")
            )
            mx.eval(layer.state)
            entry.add_request(layer, slot)
    smallest = min(sum(a.nbytes for a in rows) for rows in pool.rows)
    recycled = mx.set_cache_limit(0)
    try:
        peaks, active = [], []
        for _ in range(40):
            q = mx.random.normal((4, 9, 1, 64))
            k, v = (mx.random.normal((4, 3, 1, 64)) for _ in "kv")
            mx.eval(q, k, v)
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            for entry in cache:
                out = entry.attend(q, k, v, scale=0.1, window=entry.window)
                mx.eval(out, entry.state)
            del out
            peaks.append(mx.get_peak_memory() - before)
            active.append(mx.get_active_memory() - before)
    finally:
        mx.set_cache_limit(recycled)
    assert max(peaks) < smallest / 8
    assert max(active[5:]) <= 4096


# Failures on the way.


def test_slots_that_were_to_be_cleared_are_cleared_after_a_failure():
    # the shorter request's free slots are read with the longer one's, and masked
    pool = new_pool((None, None), tokens=64, page_size=16)
    cache, held = batch_of(pool, 2, [8, 3])
    q, k, v = new_rows(2)
    cache[0].attend(q, k, v, scale=0.3)
    broken = mock.patch.object(PagePool, "clear", side_effect=KeyboardInterrupt)
    with broken, pytest.raises(KeyboardInterrupt):
        cache[1].attend(q, k, v, scale=0.3)
    cache[0].rewind(1)
    for layer, entry in enumerate(cache):
        out = entry.attend(q, k, v, scale=0.3)
        for slot in range(2):
            own = slice(slot, slot + 1)
            pairs = zip(held[slot][layer], (k[own], v[own]), strict=True)
            rows = [mx.concatenate(pair, axis=2)[0] for pair in pairs]
            expected = naive_attention(q[slot], *rows, 0.3)
            assert np.abs(np.array(out[slot]) - expected).max() < 1e-5
