"""Which lanes are read together: valid groups, and the cheapest there are."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiny_llm.cache import lanes as lanes_module
from tiny_llm.cache.lanes import Lane, group_lanes

CHECKED = settings(max_examples=300, deadline=None, derandomize=True)


@st.composite
def some_lanes(draw, most=12):
    """Lanes that do not overlap, in any order; some see runs before their own."""
    unit = draw(st.sampled_from([1, 16, 100]))
    count = draw(st.integers(0, most))
    starts = draw(st.lists(st.integers(0, 40), min_size=count, unique=True))[:count]
    befores = st.sampled_from([(), (), ((5000, 5010),), ((5000, 5010), (6000, 6002))])
    drawn = []
    for row, start in enumerate(draw(st.permutations(starts))):
        following = min((other for other in starts if other > start), default=41)
        room = draw(st.integers(1, following - start)) * unit
        length = draw(st.integers(1, room) | st.just(min(room, 20)))
        drawn.append(Lane(row, draw(befores), start * unit, length, room))
    return drawn


def valid(group):
    """Whether one strided view can read a group, sorted by its starts."""
    starts = [lane.start for lane in group]
    longest = max(lane.length for lane in group)
    distances = {b - a for a, b in pairwise(starts)}
    return (
        len(distances) <= 1
        and all(distance > 0 for distance in distances)
        and all(lane.room >= longest for lane in group)
        and len({lane.before for lane in group}) == 1
    )


def cost(groups):
    product = lanes_module._PRODUCT
    return sum(product + len(g) * max(lane.length for lane in g) for g in groups)


def cuts(items):
    """Every way to cut a list into pieces."""
    if not items:
        yield []
    for stop in range(1, len(items) + 1):
        for rest in cuts(items[stop:]):
            yield [items[:stop], *rest]


def by_start(group):
    return sorted(group, key=lambda lane: lane.start)


@CHECKED
@given(some_lanes())
def test_every_lane_is_in_one_group_that_a_view_can_read(lanes):
    groups = group_lanes(lanes)
    rows = sorted(lane.row for group in groups for lane in group)
    assert rows == list(range(len(lanes)))
    assert {lane for group in groups for lane in group} == set(lanes)
    assert all(valid(group) for group in groups)


@CHECKED
@given(some_lanes())
def test_groups_never_cost_more_than_a_product_for_each_lane(lanes):
    groups = group_lanes(lanes)
    assert cost(groups) <= cost([[lane] for lane in lanes])
    assert len(groups) <= len(lanes)


@CHECKED
@given(some_lanes(most=7))
def test_groups_are_the_cheapest_of_neighbours_by_length(lanes):
    best = 0
    for before in {lane.before for lane in lanes}:
        family = [lane for lane in lanes if lane.before == before]
        family.sort(key=lambda lane: (lane.length, lane.start))
        possible = [
            groups for groups in cuts(family) if all(valid(by_start(g)) for g in groups)
        ]
        best += min(cost(groups) for groups in possible)
    assert cost(group_lanes(lanes)) == best


@CHECKED
@given(
    st.integers(1, 64),
    st.integers(1, 7).map(lambda pages: 16 * pages),
    st.integers(0, 500),
    st.data(),
)
def test_equal_reserves_in_a_row_are_one_group(count, reserve, first, data):
    # (lengths less than 7 apart: reading a lane's end in vain costs less than a
    # product, however many they are)
    length = data.draw(st.integers(1, reserve))
    lengths = st.integers(max(1, length - 6), length)
    lanes = [
        Lane(row, (), first + row * reserve, data.draw(lengths), reserve)
        for row in range(count)
    ]
    (group,) = group_lanes(lanes)
    assert group == lanes


def test_what_lanes_see_before_their_own_keeps_them_apart():
    shared, other = ((0, 64),), ((0, 64), (640, 704))
    lanes = [
        Lane(row, before, 1000 + 100 * row, 10, 100)
        for row, before in enumerate([(), shared, (), other, shared, other])
    ]
    groups = group_lanes(lanes)
    assert sorted([lane.row for lane in group] for group in groups) == [
        [0, 2],
        [1, 4],
        [3, 5],
    ]


def test_three_lanes_at_uneven_distances_are_no_view():
    lanes = [Lane(row, (), start, 10, 50) for row, start in enumerate([0, 100, 150])]
    assert len(group_lanes(lanes)) == 2  # any two are one


def test_a_lane_without_room_for_the_longest_is_read_by_itself():
    rooms = [10, 100, 99]
    lanes = [Lane(i, (), 100 * i, 10 + 50 * (i > 0), rooms[i]) for i in range(3)]
    groups = group_lanes(lanes)
    assert sorted([lane.row for lane in group] for group in groups) == [[0], [1, 2]]


@pytest.mark.parametrize("count", [64, 65, 200])
def test_so_many_lanes_are_read_at_once_and_no_more(count):
    lanes = [Lane(row, (), 100 * row, 50, 100) for row in range(count)]
    groups = group_lanes(lanes)
    assert max(map(len, groups)) <= 64
    assert len(groups) == -(-count // 64)
