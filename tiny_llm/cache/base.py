"""What every cache layout offers to a model, for one layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, SupportsIndex

import mlx.core as mx

from ..errors import ParameterError, whole_number
from ..kernels import attention
from .format import Rows

Mask = mx.array | str | None
Shape = tuple[int, int, int]


class Held(NamedTuple):
    """The tokens that a layer holds, as they are stored: nothing unused with them.

    keys, values: arrays [B, Hkv, held, ...], the newest last. offset: tokens appended
    so far; more than held where a window has passed.
    """

    keys: Rows
    values: Rows
    offset: int


class Layout(NamedTuple):
    """What kind of cache a layer has; None where the kind has no such thing."""

    kind: str
    window: int | None = None
    keep: int = 0
    bits: int | None = None
    group_size: int | None = None
    page_size: int | None = None


class KvCache(Protocol):
    """Keys and values of one layer: appended to, attended over, rewound.

    key, value: [B, Hkv, S, D]; q: [B, H, S, D].
    """

    @property
    def offset(self) -> int:
        """Tokens appended and not rewound: the position of the next one."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes allocated, those held in reserve included."""
        ...

    @property
    def state(self) -> list[mx.array]:
        """The arrays to evaluate when a step's outputs are not read."""
        ...

    @property
    def layout(self) -> Layout:
        """Kind and settings: two caches of the same can take each other's tokens."""
        ...

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Append k and v, then attend; as kernels.attention. Returns [B, H, S, D]."""
        ...

    def update_and_fetch(
        self,
        key: mx.array,
        value: mx.array,
        mask_length: int | None = None,
        mask: Mask = None,
    ) -> tuple[mx.array, mx.array, int, Mask]:
        """Append, and return (keys, values, how many, mask) to attend over.

        For people who bring their own attention. mask_length: the number of queries
        the mask is for. A layout that needs no mask of its own hands `mask` back; a
        windowed one puts its own in the place of None and "causal".
        """
        ...

    def check_rewind(self, n: int) -> None:
        """Raise ParameterError if the newest n tokens cannot be forgotten exactly."""
        ...

    def rewind(self, n: int) -> None:
        """Forget the newest n tokens: exactly, or ParameterError and nothing changed.

        What the last append stored can always be taken back, and so can everything.
        """
        ...

    def held(self) -> Held:
        """The tokens held, to be saved."""
        ...

    def restore(self, held: Held, head_dim: int) -> None:
        """Put back what a cache of the same kind held. Only on an empty cache."""
        ...


class NoCache:
    """Stands in where a model is called without a cache: nothing is kept."""

    offset = 0
    nbytes = 0
    layout = Layout("none")

    @property
    def state(self) -> list[mx.array]:
        """Nothing."""
        return []

    def attend(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Causal attention of the tokens at hand among themselves."""
        return attention(
            q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks
        )

    def update_and_fetch(
        self,
        key: mx.array,
        value: mx.array,
        mask_length: int | None = None,
        mask: Mask = None,
    ) -> tuple[mx.array, mx.array, int, Mask]:
        """What came in."""
        return key, value, key.shape[2], mask

    def check_rewind(self, n: int) -> None:
        """Nothing to forget."""

    def rewind(self, n: int) -> None:
        """Nothing to forget."""

    def held(self) -> Held:
        """Nothing."""
        return Held((), (), 0)

    def restore(self, held: Held, head_dim: int) -> None:
        """Nothing is kept."""


def check_pair(
    key: mx.array,
    value: mx.array,
    stored: tuple[Shape | None, Shape | None],
    q: mx.array | None = None,
    dtype: mx.Dtype | None = None,
) -> None:
    """Raise ParameterError unless key and value [B, Hkv, S, D] belong together.

    stored: (B, Hkv, D) of the keys and of the values that are stored, or None. q: their
    queries [B, H, S, D], if there are any. dtype: of what is stored.
    """
    # (each look at a shape costs time in every layer of every token)
    k, v = key.shape, value.shape
    if len(k) != 4 or len(v) != 4 or k[:3] != v[:3]:
        raise ParameterError(f"key {k} and value {v} must be [B, Hkv, S, D] alike")
    batch, heads, length, dim = k
    if length == 0:
        raise ParameterError("there are no tokens to append")
    for name, shape, held in (("key", k, stored[0]), ("value", v, stored[1])):
        if held is not None and (shape[0], shape[1], shape[3]) != held:
            raise ParameterError(
                f"{name} {shape} does not fit a cache of [{held[0]}, {held[1]}, S, "
                f"{held[2]}]"
            )
    if dtype is not None and not key.dtype == value.dtype == dtype:
        raise ParameterError(
            f"key of {key.dtype} and value of {value.dtype} do not fit a cache of "
            f"{dtype}"
        )
    if q is None:
        return
    asked = q.shape
    if (
        len(asked) != 4
        or (asked[0], asked[2], asked[3]) != (batch, length, dim)
        or asked[1] % heads
    ):
        raise ParameterError(
            f"queries {asked} do not fit keys {k}: [B, H, S, D] with H a multiple of "
            f"the keys' heads"
        )


def rewind(cache: Sequence[KvCache], length: int) -> None:
    """Rewind all layers to `length` tokens: every one of them, or none.

    Raises ParameterError, nothing changed, if a layer cannot.
    """
    length = whole_number("length", length, least=0)
    if any(isinstance(entry.offset, mx.array) for entry in cache):
        raise ParameterError(
            "the requests of a batch differ in length: rewind them one by one, "
            "[entry.request(slot) for entry in cache]"
        )
    for entry in cache:
        entry.check_rewind(entry.offset - length)
    for entry in cache:
        entry.rewind(entry.offset - length)


def refuse_mask(mask: Mask, mask_length: int | None, key: mx.array) -> None:
    """Raise ParameterError for a mask that a windowed layer cannot use."""
    if mask is not None and not (isinstance(mask, str) and mask == "causal"):
        raise ParameterError(
            "a cache with a window makes its own mask: pass None or 'causal'"
        )
    if key.ndim == 4 and mask_length not in (None, key.shape[2]):
        raise ParameterError(f"a mask for {mask_length} of {key.shape[2]} new tokens")


def refuse_rewind(n: int, offset: int) -> None:
    """Raise ParameterError unless n of offset tokens can be forgotten."""
    if not isinstance(n, SupportsIndex) or not 0 <= n <= offset:
        raise ParameterError(f"cannot rewind {n} tokens of a cache that holds {offset}")
