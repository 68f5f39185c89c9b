"""What the kernels load of keys and values: each byte once.

In the emulator's count a load that several lanes of a SIMD group make together is one
(`merged`, see its README); there is no cache in it. The least is what the rows see,
scales and biases included.
"""

from functools import partial
from math import ceil

import mlx.core as mx
import pytest
from emulator_tools import needs_emulator
from kernel_cases import Case, dense, no_canaries, on_metal, paged  # noqa: F401
from metal_emulator import DEFAULT_ORDERS, metal_kernel, recording

from tiny_llm.kernels import cached

pytestmark = [
    needs_emulator,
    pytest.mark.usefixtures("on_metal", "no_canaries", "one_order"),
]

NUMBERS, INT8, INT4 = (0, 0), (8, 32), (4, 32)
BAR = 1.05

each_packing = pytest.mark.parametrize("packing", [NUMBERS, INT8, INT4], ids=str)
each_group = pytest.mark.parametrize("group", [1, 4, 8])


@pytest.fixture
def one_order(on_metal, monkeypatch):  # noqa: F811
    """The threads' order changes nothing in what is loaded."""

    def build(*arguments, **options):
        return partial(metal_kernel(*arguments, **options), orders=DEFAULT_ORDERS[:1])

    monkeypatch.setattr(mx.fast, "metal_kernel", build)


def traffic(problem, **changed):
    """Bytes of keys and values loaded by one call, as parts of the least."""
    with recording() as runs:
        problem.attend(**changed)
    names = {"pages", "words", "scales", "biases"}
    loaded = 0
    for name, result in runs:
        assert name.startswith("tiny_llm_")
        parts = {n: t for n, t in result.traffic.items() if n.split("_")[-1] in names}
        assert bool(parts) == name.startswith("tiny_llm_cached_attention")
        loaded += sum(t.merged for t in parts.values())
    return loaded / problem.case.live_bytes()


def shape_of(case):
    rows = cached.rounded(max(case.rows))
    size = (case.dim, *case.packing, case.page, case.group, rows)
    return cached.Shape(case.type, *size, False, False)


def within_the_bar(found, times=1):
    assert times <= found <= times * BAR


CONTEXTS = (33, 100, 1, 64)
DECODED = [
    (dim, group, packing)
    for dim in (64, 80, 96, 128, 256)
    for group in (1, 4, 8)
    for packing in (NUMBERS, INT8, INT4)
    if dim != 80 or packing == NUMBERS  # (80 numbers make no groups)
]


@pytest.mark.parametrize(("dim", "group", "packing"), DECODED, ids=str)
def test_decoding_reads_the_pages_once(dim, group, packing):
    case = Case("float16", dim, packing, group=group, contexts=CONTEXTS)
    within_the_bar(traffic(paged(case)))


@pytest.mark.parametrize(
    ("dim", "group", "packing"),
    [x for x in DECODED if x[1] == 1 or x[0] in (64, 256)],
    ids=str,
)
def test_eight_rows_read_the_pages_once_for_each_chunk(dim, group, packing):
    """One chunk for 8 queries of a KV head, and 8 for the most: 64 of 256 numbers."""
    case = Case(
        "float16", dim, packing, group=group, contexts=(100, 33), rows=(8, 8)
    )  # fmt: skip
    chunks = shape_of(case).chunks
    each = cached.deal(dim, packing[0]).each
    assert chunks == ceil(group * 8 / max(48 // each, min(group, 96 // each)))
    assert chunks == 1 if each * group * 8 <= 48 else chunks > 1
    found = traffic(paged(case))
    # (rows of an earlier chunk do not see the newest keys)
    assert (1 if chunks == 1 else 0.9 * chunks) <= found <= chunks * BAR


@pytest.mark.parametrize(("group", "rows"), [(3, 4), (4, 2), (1, 8), (24, 1)])
def test_few_queries_are_one_chunk(group, rows):
    """As many as 12 of 64 or 128 numbers: 4 rows of 3 query heads; 24 of one row."""
    for dim in (64, 128):
        case = Case("float16", dim, group=group, contexts=(100, 33), rows=(rows, 1))
        within_the_bar(traffic(paged(case)))


@each_packing
@pytest.mark.parametrize("splits", [4, 16])
def test_splits_read_no_more(splits, packing):
    case = Case("float16", 64, packing, group=4, contexts=(300, 40, 1, 77))
    within_the_bar(traffic(paged(case), splits=splits))


@each_packing
@pytest.mark.parametrize("window", [1, 20, 64])
def test_a_window_reads_what_it_shows(window, packing):
    case = Case(
        "float16", 64, packing, group=4, contexts=(300, 40, 90, 17),
        rows=(1, 1, 1, 1), window=window, dropped=True,
    )  # fmt: skip
    within_the_bar(traffic(paged(case)))


@each_packing
def test_rows_of_a_window_read_what_one_of_them_sees(packing):
    case = Case(
        "float16", 64, packing, group=1, contexts=(300, 40), rows=(4, 3),
        window=20,
    )  # fmt: skip
    within_the_bar(traffic(paged(case)))


@each_packing
@pytest.mark.parametrize(("dim", "group"), [(64, 8), (128, 4), (256, 8)])
def test_chunks_of_a_window_read_what_their_own_rows_see(dim, group, packing):
    """Not what other chunks' rows see: to the byte."""
    case = Case(
        "float16", dim, packing, group=group, contexts=(300, 40), rows=(8, 5),
        window=20,
    )  # fmt: skip
    shape = shape_of(case)
    chunks, tokens = shape.chunks, 0
    each = ceil(shape.queries / chunks)
    assert chunks > 1
    for rows in case.rows:
        for begin in range(0, rows * group, each):
            newest = (min(begin + each, rows * group) - 1) // group
            tokens += newest - begin // group + 20
    least = tokens / sum(len(case.seen(s)) for s in range(2))
    assert traffic(paged(case)) == least
    assert least < 0.9 * chunks


def test_requests_without_rows_read_nothing():
    case = Case(contexts=(300, 40, 0), rows=(0, 1, 0))
    within_the_bar(traffic(paged(case)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@each_packing
def test_other_types_read_no_more(packing, dtype):
    case = Case(dtype, 128, packing, group=4, contexts=CONTEXTS)
    within_the_bar(traffic(paged(case)))


@pytest.mark.parametrize("packing", [INT8, INT4], ids=str)
@pytest.mark.parametrize(
    ("dim", "group"), [(64, 1), (64, 4), (64, 8), (96, 8), (128, 4), (256, 8)]
)
def test_decoding_reads_a_dense_cache_once(dim, group, packing):
    case = Case(
        "float16", dim, packing, group=group, contexts=(70, 70), rows=(1, 1)
    )  # fmt: skip
    problem = dense(case)
    within_the_bar(traffic(problem))
    if group == 4:
        within_the_bar(traffic(problem, splits=8))


@pytest.mark.parametrize("bits", [8, 4])
def test_groups_of_64_are_read_once(bits):
    case = Case("float16", 128, (bits, 64), group=4, contexts=CONTEXTS)
    within_the_bar(traffic(paged(case)))


def test_what_is_counted_is_what_is_there():
    """A case by hand: 10 tokens, 2 KV heads, keys and values of 64 halves."""
    problem = paged(Case("float16", 64, group=1, contexts=(10,), rows=(1,)))
    assert problem.case.live_bytes() == 10 * 2 * 2 * 64 * 2
    packed = Case("float16", 64, (4, 32), group=1, contexts=(10,), rows=(1,))
    assert packed.live_bytes() == 10 * 2 * 2 * (32 + 2 * 2 * 2)
    assert packed.type == mx.float16
