"""Quantise a loaded model's matrices to MLX's affine groups."""

import mlx.core as mx

from .errors import ParameterError, UnsupportedModelError
from .layers import Linear
from .models import Decoder

_BITS = {"4bit": 4, "8bit": 8}
_GROUP_SIZES = (64, 32)


def bits_of(name: str) -> int:
    """4 or 8 for "4bit" or "8bit". Raises ParameterError."""
    if name not in tuple(_BITS):
        names = " or ".join(repr(n) for n in _BITS)
        raise ParameterError(f"quantize is {name!r}; {names} is needed, or None")
    return _BITS[name]


def quantize(model: Decoder, bits: int, *, keep_dense: bool = False) -> None:
    """Quantise every matrix of the model, embedding and head included, in place.

    The model is dense before. Groups of 64 where the inputs divide by 64, else of 32.
    keep_dense: round the weights all the same but keep them dense, for devices on
    which packed products are slow. Raises UnsupportedModelError, naming the matrix
    that cannot be quantised.
    """
    for path, module in model.named_modules():
        if not isinstance(module, Linear):
            continue
        fitting = [size for size in _GROUP_SIZES if module.inputs % size == 0]
        if not fitting:
            raise UnsupportedModelError(
                f"{path} has {module.inputs} inputs, which do not divide into groups "
                f"of 32; load the model without quantize="
            )
        size, dtype = fitting[0], module.weight.dtype
        weight, scales, biases = mx.quantize(module.weight, group_size=size, bits=bits)
        if keep_dense:
            module.weight = mx.dequantize(
                weight, scales, biases, group_size=size, bits=bits
            ).astype(dtype)
        else:
            module.weight, module.scales, module.biases = weight, scales, biases
            module.packing = (size, bits)
        mx.eval(module.parameters())
