"""The roofline model: how fast a device could run a decoder at best.

A step that does `flops` operations and moves `bytes` bytes takes at least

    max(flops / peak FLOP/s, bytes / bandwidth)          seconds

(Williams, Waterman, Patterson: Roofline, Communications of the ACM 52(4), 2009). Its
arithmetic intensity is flops / bytes: below the device's ridge point, which is peak /
bandwidth, the bandwidth limits, above it the arithmetic. No measurement enters, and
real steps take longer: launches, norms, sampling and activations are not counted.

Per token a matrix of N numbers costs 2 N FLOPs, and attention of H heads of D numbers
over S keys 4 H D S a layer: 2 for the scores, 2 for the weighted values (Hoffmann et
al. 2022, Training Compute-Optimal Large Language Models, appendix F; biases, norms and
the softmax are left out). A layer with a window W sees min(S, W) keys. The embedding is
looked up, not multiplied; where it is also the output head, the head reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .devices import Device
from .errors import whole_number
from .memory import KvShape


@dataclass(frozen=True)
class DecoderCost:
    """What the roofline needs to know of a decoder.

    matmul_parameters: numbers in the matrices of all layers; head_parameters: in the
    output head; heads: query heads; kv: of its caches; read_bytes: of the weights that
    a step reads (layers and head, as packed as they are); kv_bits, group_size: how the
    caches are packed (None: not).
    """

    matmul_parameters: int
    head_parameters: int
    heads: int
    kv: KvShape
    read_bytes: int
    kv_bits: int | None = None
    group_size: int | None = None


@dataclass(frozen=True)
class Work:
    """What a step does: operations, and bytes to and from memory."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOP/byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Bound:
    """The least time of a step, and what it is limited by."""

    seconds: float
    limit: str  # "bandwidth" or "compute"


def decode_work(cost: DecoderCost, *, batch: int, context: int) -> Work:
    """One new token for each of `batch` requests whose queries see `context` keys.

    The new token's key is among them. Weights are read once, every key and value that
    a query sees is read, and those of the new tokens are written. Raises
    ParameterError.
    """
    batch = whole_number("batch", batch, least=1)
    context = whole_number("context", context, least=1)
    seen = sum(_seen(context, window) for window in cost.kv.windows)
    parameters = cost.matmul_parameters + cost.head_parameters
    attention = 4 * cost.heads * cost.kv.head_dim * seen
    row = cost.kv.row_bytes(cost.kv_bits, cost.group_size)
    return Work(
        flops=batch * (2 * parameters + attention),
        bytes=cost.read_bytes + batch * row * (seen + len(cost.kv.windows)),
    )


def prefill_work(cost: DecoderCost, *, tokens: int) -> Work:
    """A prompt of `tokens` tokens in one forward pass, up to the first new token.

    Causal: token i sees i keys, so attention costs half of the full square; the head
    is computed for the last position only. Weights are read once; keys and values are
    written once and read once. Raises ParameterError.
    """
    tokens = whole_number("tokens", tokens, least=1)
    pairs = sum(_pairs(tokens, window) for window in cost.kv.windows)
    attention = 4 * cost.heads * cost.kv.head_dim * pairs
    row = cost.kv.row_bytes(cost.kv_bits, cost.group_size)
    return Work(
        flops=2 * (cost.matmul_parameters * tokens + cost.head_parameters) + attention,
        bytes=cost.read_bytes + 2 * tokens * row * len(cost.kv.windows),
    )


def bound(work: Work, device: Device) -> Bound:
    """The roofline time; by bandwidth alone where the device's peak is unknown."""
    moving = work.bytes / device.bandwidth
    computing = 0.0 if device.flops is None else work.flops / device.flops
    if computing > moving:
        return Bound(computing, "compute")
    return Bound(moving, "bandwidth")


def _seen(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _pairs(tokens: int, window: int | None) -> int:
    """Sum of min(i, window) for i = 1 .. tokens."""
    full = _seen(tokens, window)
    return full * (full + 1) // 2 + (tokens - full) * full
