"""Rotary position embedding: the frequencies of every scaling variant.

The formulas are those of transformers' modeling_rope_utils, which checkpoints are
trained and published against: linear (kaiokendev), dynamic NTK (bloc97, emozilla), yarn
(Peng et al. 2023), llama3 (Llama 3.1), longrope (Ding et al. 2024).
"""

import math
from collections.abc import Callable, Sequence
from operator import index

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .config import ConfigReader
from .errors import ParameterError
from .kernels import Rotation, make_rotation

Frequencies = npt.NDArray[np.float32]
Offset = int | Sequence[int] | mx.array


class Rope:
    """The frequencies of one model, and the rotation of one forward pass.

    dims: rotated dimensions per head; scale: factor on rotated vectors (yarn,
    longrope); fixed_until: the total length from which on the frequencies are others
    (dynamic, longrope), or None if they never change; extends_to: the context that the
    scaling is for (yarn), whatever max_position_embeddings says.
    """

    def __init__(
        self,
        dims: int,
        frequencies: Callable[[int], Frequencies],
        scale: float = 1.0,
        fixed_until: int | None = None,
        extends_to: int = 0,
    ) -> None:
        """frequencies: total length in tokens -> radians per position, [dims / 2]."""
        self.dims = dims
        self.scale = scale
        self.fixed_until = fixed_until
        self.extends_to = extends_to
        self.frequencies = frequencies
        self._fixed = mx.array(frequencies(1))

    def rotation(self, offset: Offset, batch: int, length: int) -> Rotation:
        """The rotation of `length` tokens in each of `batch` rows from `offset` on.

        offset: one int, or one per row (list or int array [B]). Raises ParameterError.
        """
        if isinstance(offset, mx.array):
            rows = offset.reshape(-1).astype(mx.int32)
        else:
            values = list(offset) if isinstance(offset, Sequence) else [index(offset)]
            if any(value < 0 for value in values):
                raise ParameterError(f"offset {offset} is negative")
            rows = mx.array(values, dtype=mx.int32)
        if rows.shape[0] not in (1, batch):
            raise ParameterError(
                f"{rows.shape[0]} offsets for a batch of {batch}: give one int, or one "
                f"per row"
            )
        frequencies = self._fixed
        if self.fixed_until is not None:  # rows of different length differ
            ends: list[int] = (rows + length).tolist()  # type: ignore[assignment]
            if max(ends) > self.fixed_until:
                frequencies = mx.array(np.stack([self.frequencies(n) for n in ends]))
        return make_rotation(rows, length, frequencies, self.scale)


def make_rope(
    config: ConfigReader, head_dim: int, max_positions: int, *, partial: bool = False
) -> Rope:
    """The Rope of a config.json in the older (`rope_theta`, `rope_scaling`) or the
    transformers-5 layout (`rope_parameters`). partial: the family can rotate a part of
    each head.

    Raises UnsupportedModelError for a kind or a parameter that is not implemented.
    """
    theta = config.number("rope_theta", 10000.0)
    share = config.number("partial_rotary_factor", 1.0)
    original = config.integer("original_max_position_embeddings", max_positions)
    newer, older = config.raw("rope_parameters"), config.raw("rope_scaling")
    if newer and older and newer != older:
        config.fail("rope_scaling", older, f"also finds rope_parameters={newer!r}")
    scaling = config.inner("rope_parameters" if newer else "rope_scaling")
    if scaling is None:
        scaling = ConfigReader({}, config.where)
    theta = scaling.number("rope_theta", theta)
    share = scaling.number("partial_rotary_factor", share)
    if share != 1.0 and not partial:
        config.fail("partial_rotary_factor", share, "rotates whole heads here")
    dims = int(head_dim * share)
    if dims % 2 or not 0 < dims <= head_dim:
        config.fail("partial_rotary_factor", share, "needs an even part of each head")
    kind = scaling.string("rope_type", scaling.string("type", "default"))
    if kind not in _KINDS:
        names = ", ".join(sorted(_KINDS))
        scaling.fail("rope_type", kind, f"implements {names}")
    original = scaling.integer("original_max_position_embeddings", original)
    try:
        with np.errstate(all="ignore"):
            rope = _KINDS[kind](scaling, theta, dims, original, max_positions)
            ends = [rope.frequencies(1), rope.frequencies(8 * max_positions)]
    except (ArithmeticError, ValueError) as error:
        config.fail("rope_scaling", newer or older, f"cannot compute it ({error})")
    if not all(np.isfinite(f).all() and (f > 0).all() for f in ends):
        config.fail("rope_scaling", newer or older, "needs positive frequencies")
    scaling.finish(harmless=frozenset({"finetuned"}))
    return rope


def _base_frequencies(theta: float, dims: int) -> npt.NDArray[np.float64]:
    return 1.0 / theta ** (np.arange(0, dims, 2) / dims)


def _constant(dims: int, values: npt.NDArray[np.float64], scale: float = 1.0) -> Rope:
    frequencies = values.astype(np.float32)
    return Rope(dims, lambda length: frequencies, scale)


def _default(
    params: ConfigReader, theta: float, dims: int, original: int, longest: int
) -> Rope:
    return _constant(dims, _base_frequencies(theta, dims))


def _linear(
    params: ConfigReader, theta: float, dims: int, original: int, longest: int
) -> Rope:
    return _constant(dims, _base_frequencies(theta, dims) / params.number("factor"))


def _factors(
    params: ConfigReader, theta: float, dims: int, original: int, longest: int
) -> Rope:
    """Divisors of each frequency, as GGUF files carry them (`rope_freqs.weight`)."""
    divisors = np.array(params.numbers("factors", dims // 2))
    return _constant(dims, _base_frequencies(theta, dims) / divisors)


def _dynamic(
    params: ConfigReader, theta: float, dims: int, original: int, longest: int
) -> Rope:
    factor = params.number("factor")

    def frequencies(length: int) -> Frequencies:
        stretch = factor * max(length, longest) / longest - (factor - 1)
        base = theta * stretch ** (dims / (dims - 2))
        stretched: Frequencies = _base_frequencies(base, dims).astype(np.float32)
        return stretched

    return Rope(dims, frequencies, fixed_until=longest)


def _llama3(
    params: ConfigReader, theta: float, dims: int, original: int, longest: int
) -> Rope:
    factor = params.number("factor")
    low = params.number("low_freq_factor")
    high = params.number("high_freq_factor")
    plain = _base_frequencies(theta, dims)
    # turns within the original context: few (slow) are stretched, many are kept
    turns = original * plain / (2 * math.pi)
    kept = (
        np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else turns > low
    )
    return _constant(dims, plain / factor * (1 - kept) + plain * kept)


def _yarn_scale(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(
    params: ConfigReader, theta: float, dims: int, original: int, longest: int
) -> Rope:
    factor = params.number("factor", longest / original)
    fast = params.number("beta_fast", 32.0)
    slow = params.number("beta_slow", 1.0)
    weight, weight_all = params.raw("mscale"), params.raw("mscale_all_dim")
    if weight and weight_all:
        weight, weight_all = params.number("mscale"), params.number("mscale_all_dim")
        scale = _yarn_scale(factor, weight) / _yarn_scale(factor, weight_all)
    else:
        scale = _yarn_scale(factor)
    scale = params.number("attention_factor", scale)

    def dimension(turns: float) -> float:
        """The (real) index of the pair that turns so often in the original context."""
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if params.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    stretched = np.clip((np.arange(dims // 2) - low) / (high - low), 0.0, 1.0)
    plain = _base_frequencies(theta, dims)
    rope = _constant(
        dims, plain / factor * stretched + plain * (1 - stretched), float(scale)
    )
    rope.extends_to = int(original * factor)
    return rope


def _longrope(
    params: ConfigReader, theta: float, dims: int, original: int, longest: int
) -> Rope:
    factor = params.number("factor", longest / original)
    scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    scale = params.number("attention_factor", scale)
    plain = _base_frequencies(theta, dims)
    short = plain / np.array(params.numbers("short_factor", dims // 2))
    long = plain / np.array(params.numbers("long_factor", dims // 2))

    def frequencies(length: int) -> Frequencies:
        chosen: Frequencies = (long if length > original else short).astype(np.float32)
        return chosen

    return Rope(dims, frequencies, scale, fixed_until=original)


_KINDS: dict[str, Callable[[ConfigReader, float, int, int, int], Rope]] = {
    "default": _default,
    "linear": _linear,
    "factors": _factors,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
