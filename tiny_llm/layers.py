"""The parameterised blocks that every architecture is made of.

Each weight has the name that checkpoints give it. Where the engine keeps several
matrices as one, `FusedLinear.parts` names them; fuse.py puts them together.
"""

from collections.abc import Mapping
from types import MappingProxyType

import mlx.core as mx
import mlx.nn as nn

from . import kernels


class Linear(nn.Module):
    """y = x W^T [+ b] [+ residual]; W is dense or packed (MLX's affine groups).

    weight: [outputs, inputs], or packed uint32 [outputs, inputs * bits / 32] with
    scales and biases [outputs, inputs / group_size]; bias: [outputs].
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.inputs, self.outputs, self.has_bias = inputs, outputs, bias
        self.parts: Mapping[str, int] = MappingProxyType({})
        self.packing: tuple[int, int] | None = None  # group size, bits
        self.weight = mx.zeros((0,))
        if bias:
            self.bias = mx.zeros((0,))

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """x: [..., inputs]; residual: [..., outputs] -> [..., outputs]."""
        packed = None
        if self.packing is not None:
            packed = kernels.Packed(self.scales, self.biases, *self.packing)
        bias = self.bias if self.has_bias else None
        return kernels.linear(x, self.weight, bias, residual, packed)


class FusedLinear(Linear):
    """Several Linears of the same input as one; the outputs follow each other.

    parts: checkpoint name -> outputs, e.g. {"q_proj": 576, "k_proj": 192}.
    rotary: the names whose outputs are heads that will be rotated, `head_dim` each, of
    which the first `rotary_dims` are turned.
    """

    def __init__(
        self,
        inputs: int,
        parts: Mapping[str, int],
        bias: bool = False,
        *,
        rotary: tuple[str, ...] = (),
        head_dim: int = 0,
        rotary_dims: int = 0,
    ) -> None:
        super().__init__(inputs, sum(parts.values()), bias)
        self.parts = MappingProxyType(dict(parts))
        self.rotary, self.head_dim, self.rotary_dims = rotary, head_dim, rotary_dims


class Embedding(Linear):
    """A table of vectors, which may serve as the output head too.

    weight: [vocabulary, dims], dense or packed.
    """

    def __init__(self, vocabulary: int, dims: int) -> None:
        super().__init__(dims, vocabulary)

    def look_up(self, ids: mx.array) -> mx.array:
        """ids: int [...] -> [..., dims]."""
        rows = self.weight[ids]
        if self.packing is None:
            return rows
        group_size, bits = self.packing
        return mx.dequantize(
            rows, self.scales[ids], self.biases[ids], group_size=group_size, bits=bits
        )


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang, Sennrich 2019). weight: [dims].

    rotary_dims: as FusedLinear's, for a norm inside a head that will be rotated.
    """

    def __init__(self, dims: int, eps: float, rotary_dims: int = 0) -> None:
        super().__init__()
        self.dims, self.eps, self.rotary_dims = dims, eps, rotary_dims
        self.weight = mx.zeros((0,))

    def __call__(self, x: mx.array) -> mx.array:
        """x: [..., dims] -> the same shape."""
        return kernels.rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    """The gated MLP: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, dims: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = FusedLinear(
            dims, {"gate_proj": hidden, "up_proj": hidden}, bias
        )
        self.down_proj = Linear(hidden, dims, bias)

    def __call__(self, x: mx.array, residual: mx.array) -> mx.array:
        """x, residual: [..., dims] -> residual + mlp(x)."""
        gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(kernels.swiglu(gate, up), residual)
