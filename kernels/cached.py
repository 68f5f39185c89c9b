"""The launch of cached_attention: how queries, keys and numbers are dealt out.

The rules, for D numbers a head and n queries of a KV head (its query heads times the
new tokens of a sequence):

- a lane holds at least 4 numbers of a key, and as few as that allows; a key is read by
  so many neighbouring lanes at once;
- a threadgroup takes all n queries while their numbers fit into registers, so that each
  key is read once: 48 numbers a lane (and as many sums; an M1 has 128 registers), else
  the queries are cut into chunks, which read the keys again; but those of one token
  stay together up to 96;
- the keys are split over threadgroups until there are 128 of these (an M4 Max has 40
  cores), but not below 256 keys each, nor into more than 16.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from tiny_llm.errors import ParameterError

from .metal import kernel

SIMDS = 4  # SIMD groups of a threadgroup
MOST_ROWS = 8  # new tokens of a sequence that the kernels take
MOST_SPLITS = 16
MOST_TOKENS = 2**31 - 1  # windows that are larger see all
_REGISTERS, _OF_ONE_ROW = 48, 96
_THREADGROUPS = 128
_KEYS = 256
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)


class Layout(NamedTuple):
    """How a row of numbers or codes is dealt to lanes: see attend.h."""

    lanes: int
    piece: int
    each: int  # numbers of a lane


class Shape(NamedTuple):
    """What a launch is made for; its variant of the kernel depends on this alone.

    bits, group_size: 0 for rows of numbers. page: tokens of a page, 0 for dense rows.
    group: query heads of a KV head; rows: of a sequence, rounded up to a power of two.
    split, sinks: whether there are any.
    """

    dtype: mx.Dtype
    dim: int
    bits: int
    group_size: int
    page: int
    group: int
    rows: int
    split: bool
    sinks: bool

    @property
    def queries(self) -> int:
        """Of a KV head."""
        return self.group * self.rows

    @property
    def chunks(self) -> int:
        """Into how many its queries are cut."""
        layout = deal(self.dim, self.bits)
        assert layout is not None
        most = max(
            1,
            _REGISTERS // layout.each,
            min(self.group, _OF_ONE_ROW // layout.each),
        )
        return -(-self.queries // most)


@functools.cache
def deal(dim: int, bits: int) -> Layout | None:
    """How rows of `dim` numbers are dealt to lanes; None if the kernel cannot."""
    if dim % 16 or not 16 <= dim <= 256 or bits not in (0, 8, 4):
        return None
    if not bits:
        lanes = max(n for n in (1, 2, 4, 8, 16, 32) if dim % n == 0 and dim // n >= 4)
        return Layout(lanes, dim // lanes, dim // lanes)
    layout = Layout(1, 0, 0)
    for piece in (32 // bits, 4):  # words; halves, where words leave too much to a lane
        lanes = max(n for n in (1, 2, 4, 8, 16, 32) if dim // piece % n == 0)
        layout = Layout(lanes, piece, dim // lanes)
        if layout.each <= 8:
            break
    return layout


def supports(dtype: mx.Dtype, dim: int, bits: int = 0) -> bool:
    """Whether there is a kernel for such rows."""
    return dtype in _DTYPES and deal(dim, bits) is not None


def check_splits(splits: int | None) -> None:
    """Raise ParameterError for a number of splits that there is not."""
    if splits is not None and not 1 <= splits <= MOST_SPLITS:
        raise ParameterError(f"splits is {splits}; it may be 1 to {MOST_SPLITS}")


def check_packing(bits: int, group_size: int, dim: int) -> None:
    """Raise ParameterError unless rows of dim numbers can be packed so."""
    if bits not in (4, 8) or group_size not in (32, 64) or dim % group_size:
        raise ParameterError(
            f"{bits} bits and groups of {group_size} for rows of {dim}: it takes 4 or "
            "8 bits, and groups of 32 or 64 that divide the row"
        )


def rounded(rows: int) -> int:
    """To a power of two: few variants come up."""
    return 1 << (rows - 1).bit_length()


def splits_for(threadgroups: int, longest: int) -> int:
    """Into how many parts `longest` keys are split, a power of two."""
    parts = -(-_THREADGROUPS // max(threadgroups, 1))
    wanted = min(MOST_SPLITS, longest // _KEYS, parts)
    return 1 << (max(wanted, 1).bit_length() - 1)


def launch(
    shape: Shape,
    q: mx.array,
    named: Sequence[tuple[str, mx.array]],
    *,
    kv_heads: int,
    sequences: int,
    scale: float,
    softcap: float | None,
    window: int | None,
    splits: int,
    sinks: mx.array | None,
    extra: tuple[int, ...] = (),
) -> mx.array:
    """Run the kernel: attention of q, in q's shape. named: inputs, as the source says.

    extra: the numbers after Hkv.
    """
    chunks, template = _constants(shape)
    inputs = [q, *(_of_eight(x) for _, x in named), _floats(scale, softcap or 0.0)]
    limit = min(window or 0, MOST_TOKENS)
    counts = (limit, chunks, splits, kv_heads)
    if extra:  # (dense rows: the context is among them and changes with each step)
        inputs.append(mx.array((*counts, *extra), dtype=mx.int32))
    else:
        inputs.append(_ints(*counts))
    names = ("q", *(name for name, _ in named), "settings", "numbers")
    if sinks is not None and not shape.split:
        names, inputs = (*names, "sinks"), [*inputs, _sinks(sinks)]
    defined = (
        ("KV_BITS", shape.bits),
        ("PAGED", int(shape.page > 0)),
        ("SPLIT", int(shape.split)),
        ("SINKS", int(shape.sinks)),
    )
    outputs = ("parts", "softmax") if shape.split else ("out",)
    count = q.size // shape.dim
    found = kernel("cached_attention", names, outputs, defined)(
        inputs=inputs,
        template=template,
        grid=(32 * SIMDS, kv_heads * chunks, sequences * splits),
        threadgroup=(32 * SIMDS, 1, 1),
        output_shapes=[(count, splits, shape.dim), (count, splits, 2)]
        if shape.split
        else [q.shape],
        output_dtypes=[mx.float32, mx.float32] if shape.split else [q.dtype],
    )
    if not shape.split:
        return found[0]
    return _merge(found[0], found[1], q, sinks)


@functools.cache
def _constants(shape: Shape) -> tuple[int, list[tuple[str, Any]]]:
    """How many chunks of queries, and the template parameters of the source."""
    layout, chunks = deal(shape.dim, shape.bits), shape.chunks
    assert layout is not None
    return chunks, [
        ("T", shape.dtype),
        ("D", shape.dim),
        ("LANES", layout.lanes),
        ("PIECE", layout.piece),
        ("Q", -(-shape.queries // chunks)),
        ("SIMDS", SIMDS),
        ("GROUP", shape.group_size or shape.dim),
        ("PAGE", shape.page or 1),
    ]


def _merge(
    parts: mx.array, softmax: mx.array, q: mx.array, sinks: mx.array | None
) -> mx.array:
    """parts [A, splits, D] and softmax [A, splits, 2] as attention, in q's shape."""
    count, _, dim = parts.shape
    inputs = [parts, _of_eight(softmax)]
    names: tuple[str, ...] = ("parts", "softmax")
    if sinks is not None:
        inputs += [_ints(q.shape[1], q.shape[2]), _sinks(sinks)]
        names += ("heads", "sinks")
    merged = kernel("merge_splits", names, ("out",), (("SINKS", int(len(names) > 2)),))
    return merged(
        inputs=inputs,
        template=[("T", q.dtype)],
        grid=(dim, count, 1),
        threadgroup=(min(dim, 256), 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[q.dtype],
    )[0]


def _sinks(sinks: mx.array) -> mx.array:
    return _of_eight(sinks.astype(mx.float32)[None])[0]


def _of_eight(x: mx.array) -> mx.array:
    """With more of axis -2, or of the last, if it has fewer than 8 elements.

    (Few packed rows of one head: see metal.kernel.)
    """
    if x.size >= 8:
        return x
    axis = x.ndim - 2 if x.ndim > 2 else x.ndim - 1
    return mx.pad(x, [(0, 8 if i == axis else 0) for i in range(x.ndim)])


@functools.lru_cache(maxsize=256)
def _floats(*values: float) -> mx.array:
    """Settings that do not change from step to step, made once."""
    return mx.array(values, dtype=mx.float32)


@functools.lru_cache(maxsize=256)
def _ints(*values: int) -> mx.array:
    """As _floats."""
    return mx.array(values, dtype=mx.int32)
