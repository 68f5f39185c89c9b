"""Which requests' keys can be read together, as one view. Numbers only, no arrays.

A lane is what one request sees in the neighbouring pages that it writes to. Lanes that
lie at equal distances are one strided view [B, Hkv, S, D] of the pool: any two do, and
requests that were admitted one after the other with equal reserves do so too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# What another product costs beside its tokens: about as much as so many tokens more
# (two cores: 80 us a layer; 0.17 us a token of SmolLM2).
_PRODUCT = 450
_MOST = 64  # lanes read together


class Lane(NamedTuple):
    """One request's keys, as slots of the pool.

    row: of the step. before: runs of slots that it sees before its own, in order.
    start: its first own slot; length: own tokens seen; room: own slots that may be
    read, the request's or nobody's.
    """

    row: int
    before: tuple[tuple[int, int], ...]
    start: int
    length: int
    room: int


def group_lanes(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """Lanes in groups that are read together, each in ascending order of its starts.

    All of a group see the same runs before, start at equal distances, and have room for
    the longest of them. The groups are the cheapest among those of neighbours by
    length, as _PRODUCT prices them.
    """
    families: dict[tuple[tuple[int, int], ...], list[Lane]] = {}
    for lane in lanes:
        families.setdefault(lane.before, []).append(lane)
    groups: list[list[Lane]] = []
    for family in families.values():
        family.sort(key=lambda lane: (lane.length, lane.start))
        groups += _cheapest(family)
    return groups


def _cheapest(lanes: list[Lane]) -> list[list[Lane]]:
    """Cut lanes, ascending in length, where the sum of the costs is least."""
    costs = [0.0] + [float("inf")] * len(lanes)
    cuts = [0] * (len(lanes) + 1)
    for stop in range(1, len(lanes) + 1):
        longest = lanes[stop - 1].length
        low = high = lanes[stop - 1].start
        for first in range(stop - 1, max(stop - 1 - _MOST, -1), -1):
            lane = lanes[first]
            if lane.room < longest:
                break  # nor does any group fit that reaches further
            low, high = min(low, lane.start), max(high, lane.start)
            count = stop - first
            cost = costs[first] + _PRODUCT + count * longest
            if cost < costs[stop] and (
                count <= 2 or _evenly(lanes, first, stop, low, high)
            ):
                costs[stop], cuts[stop] = cost, first
    groups = []
    stop = len(lanes)
    while stop:
        groups.append(sorted(lanes[cuts[stop] : stop], key=lambda lane: lane.start))
        stop = cuts[stop]
    return groups[::-1]


def _evenly(lanes: list[Lane], first: int, stop: int, low: int, high: int) -> bool:
    """Whether the starts are low, low + d, .. high for some d."""
    distance, rest = divmod(high - low, stop - first - 1)
    if rest or not distance:
        return False
    starts = sorted(lane.start for lane in lanes[first:stop])
    return starts == list(range(low, high + 1, distance))
