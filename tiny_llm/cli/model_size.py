"""How many numbers a model has and how many bytes they take, without its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import UnsupportedModelError
from ..layers import Linear, RMSNorm
from ..models import Decoder

# A matrix's name in checkpoints and its inputs -> (group size, bits), or None: dense.
Packing = Callable[[str, int], "tuple[int, int] | None"]


class WeightSizes(NamedTuple):
    """Bytes of all weights, and of those that a step reads: no look-up table."""

    all: int
    read: int


class MatrixSizes(NamedTuple):
    """Numbers in the matrices of the layers, and in the output head."""

    layers: int
    head: int


def layers_of(model: Decoder) -> list[Linear | RMSNorm]:
    """Every module with weights of its own."""
    return [module for _, module in _named_layers(model)]


def count_parameters(model: Decoder) -> int:
    """The numbers that training set: packed or not, a tied matrix once."""
    count = 0
    for module in layers_of(model):
        if isinstance(module, RMSNorm):
            count += module.dims
        else:
            count += module.outputs * (module.inputs + module.has_bias)
    return count


def count_matrices(model: Decoder) -> MatrixSizes:
    """The numbers that a token is multiplied with. The look-up multiplies nothing."""
    head = model.config.vocab_size * model.config.hidden_size
    layers = sum(
        module.inputs * module.outputs
        for path, module in _named_layers(model)
        if isinstance(module, Linear) and path not in ("embed_tokens", "lm_head")
    )
    return MatrixSizes(layers, head)


def weight_sizes(model: Decoder, element_bytes: int, packing: Packing) -> WeightSizes:
    """element_bytes: of a number that is not packed, scales and biases included."""
    total = looked_up = 0
    for path, module in _named_layers(model):
        if isinstance(module, RMSNorm):
            size = module.dims * element_bytes
        else:
            size = module.outputs * module.has_bias * element_bytes
            for name, outputs in _matrices(path, module):
                packed = packing(name, module.inputs)
                size += _matrix_bytes(outputs, module.inputs, element_bytes, packed)
        total += size
        if path == "embed_tokens" and not model.config.tied:
            looked_up = size
    return WeightSizes(total, total - looked_up)


def stored_packing(quantization: Mapping[str, Any] | None) -> Packing:
    """As the `quantization` of an MLX config.json says, checked beforehand."""

    def packing(name: str, inputs: int) -> tuple[int, int] | None:
        own = None if quantization is None else quantization.get(name)
        if quantization is None or own is False:
            return None
        entry = {**quantization, **own} if isinstance(own, Mapping) else quantization
        return int(entry["group_size"]), int(entry["bits"])

    return packing


def uniform_packing(bits: int) -> Packing:
    """As quantize.py packs to 8 or 4 bits; 16: dense. Raises UnsupportedModelError."""

    def packing(name: str, inputs: int) -> tuple[int, int] | None:
        if bits == 16:
            return None
        if inputs % 32:
            raise UnsupportedModelError(
                f"{name} has {inputs} inputs, which do not divide into groups of 32; "
                f"{bits}-bit weights are not possible"
            )
        return (64 if inputs % 64 == 0 else 32), bits

    return packing


def _named_layers(model: Decoder) -> Iterator[tuple[str, Linear | RMSNorm]]:
    for path, module in sorted(model.named_modules(), key=lambda item: item[0]):
        if isinstance(module, (Linear, RMSNorm)):
            yield path, module


def _matrices(path: str, module: Linear) -> list[tuple[str, int]]:
    """The name in checkpoints and the outputs of each matrix of a module."""
    if not module.parts:
        name = path if path == "lm_head" else f"model.{path}"
        return [(name, module.outputs)]
    stem = path.rpartition(".")[0]
    return [(f"model.{stem}.{part}", n) for part, n in module.parts.items()]


def _matrix_bytes(
    outputs: int, inputs: int, element_bytes: int, packed: tuple[int, int] | None
) -> int:
    if packed is None:
        return outputs * inputs * element_bytes
    group_size, bits = packed
    scales = 2 * outputs * (inputs // group_size)  # and as many biases
    return outputs * inputs * bits // 8 + scales * element_bytes
