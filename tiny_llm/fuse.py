"""From a checkpoint's weights to the model's: the one place where they are rearranged.

- q, k and v become one matrix, gate and up another (FusedLinear.parts).
- The rows of rotated heads are reordered from the Hugging Face layout, which pairs
  dimension i with i + D/2, to neighbouring pairs (kernels/rotary.py). Queries and keys
  move alike, so their products stay.
- Packed matrices stay packed if all parts are packed alike, else they are dequantised.
- Every weight the model needs must be there in the right shape, and none may be left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .errors import UnsupportedModelError, WeightsError
from .layers import FusedLinear, Linear, RMSNorm
from .models import Decoder

_PACKINGS = {(size, bits) for size in (32, 64, 128) for bits in (2, 3, 4, 5, 6, 8)}


class _Matrix(NamedTuple):
    """A matrix as stored, dense or packed, and its bias."""

    weight: mx.array
    bias: mx.array | None
    scales: mx.array | None = None
    biases: mx.array | None = None
    packing: tuple[int, int] | None = None  # group size, bits

    def dense(self, dtype: mx.Dtype) -> _Matrix:
        """The same, dequantised to dtype."""
        if self.packing is None or self.scales is None or self.biases is None:
            return self
        group_size, bits = self.packing
        weight = mx.dequantize(
            self.weight,
            self.scales.astype(dtype),
            self.biases.astype(dtype),
            group_size=group_size,
            bits=bits,
        )
        return _Matrix(weight, self.bias)

    def arranged(self, order: mx.array | None) -> _Matrix:
        """The same with its rows (outputs) in another order."""
        if order is None:
            return self
        arrays = (self.weight, self.bias, self.scales, self.biases)
        weight, bias, scales, biases = (a if a is None else a[order] for a in arrays)
        assert weight is not None
        return _Matrix(weight, bias, scales, biases, self.packing)


class Checkpoint:
    """A checkpoint's weights, each to be taken once."""

    def __init__(
        self,
        weights: Mapping[str, mx.array],
        quantization: Mapping[str, Any] | None,
        where: str,
    ) -> None:
        """quantization: as in an MLX config.json; where: the name in messages."""
        self.left = dict(weights)
        self.quantization = quantization
        self.where = where

    def take(self, name: str, shape: tuple[int, ...]) -> mx.array:
        """The array of that name and shape. Raises WeightsError."""
        array = self.take_if_there(name, shape)
        if array is None:
            raise WeightsError(f"{self.where}: the weight {name} is missing")
        return array

    def take_if_there(self, name: str, shape: tuple[int, ...]) -> mx.array | None:
        """As take, but None if there is no such array."""
        array = self.left.pop(name, None)
        if array is not None and array.shape != shape:
            raise WeightsError(
                f"{self.where}: the weight {name} has shape {list(array.shape)}, but "
                f"the configuration asks for {list(shape)}"
            )
        if array is not None and not mx.issubdtype(array.dtype, mx.floating):
            raise WeightsError(
                f"{self.where}: the weight {name} is of type {array.dtype}; a "
                f"floating-point type is needed"
            )
        return array

    def matrix(self, name: str, outputs: int, inputs: int, has_bias: bool) -> _Matrix:
        """The matrix [outputs, inputs] called name.weight, packed or not, and its bias.

        Raises WeightsError.
        """
        bias = self.take(f"{name}.bias", (outputs,)) if has_bias else None
        if f"{name}.scales" not in self.left:
            return _Matrix(self.take(f"{name}.weight", (outputs, inputs)), bias)
        group_size, bits = self._packing(name)
        if inputs % group_size or inputs * bits % 32:
            raise WeightsError(
                f"{self.where}: {name} has {inputs} inputs, which do not divide into "
                f"groups of {group_size} at {bits} bits"
            )
        groups = (outputs, inputs // group_size)
        packed = (outputs, inputs * bits // 32)
        weight = self.left.pop(f"{name}.weight", None)
        if weight is None or weight.shape != packed or weight.dtype != mx.uint32:
            found = "missing" if weight is None else f"{weight.dtype} {weight.shape}"
            raise WeightsError(
                f"{self.where}: the packed weight {name}.weight is {found}; uint32 "
                f"{packed} is needed ({bits} bits, groups of {group_size})"
            )
        scales = self.take(f"{name}.scales", groups)
        biases = self.take(f"{name}.biases", groups)
        return _Matrix(weight, bias, scales, biases, (group_size, bits))

    def _packing(self, name: str) -> tuple[int, int]:
        """Group size and bits of a matrix: its own entry, else the general one."""
        general = self.quantization
        if general is None:
            raise WeightsError(
                f"{self.where}: {name} has scales, but config.json has no "
                f"`quantization`"
            )
        own = general.get(name)
        if own is False:
            raise WeightsError(
                f"{self.where}: {name} has scales, but `quantization` says it has none"
            )
        entry = {**general, **own} if isinstance(own, Mapping) else general
        return int(entry["group_size"]), int(entry["bits"])


def check_quantization(entry: Any, where: str) -> None:
    """Refuse what we don't implement of an MLX config.json's `quantization`.

    entry: {"group_size", "bits", "mode"} and, by module, overrides of the same form or
    false (not quantised) or true; or None. Raises UnsupportedModelError.
    """
    if entry is None:
        return
    if not isinstance(entry, Mapping):
        raise UnsupportedModelError(
            f"{where}: quantization is {entry!r}; an object is needed there"
        )
    for name, value in {**entry, "quantization": entry}.items():
        if (
            value is None
            or isinstance(value, bool)
            or name in ("group_size", "bits", "mode")
        ):
            continue
        merged = {**entry, **value} if isinstance(value, Mapping) else {"mode": value}
        mode, size = merged.get("mode", "affine"), merged.get("group_size")
        bits = merged.get("bits")
        whole = isinstance(size, int) and isinstance(bits, int)
        if mode != "affine" or not whole or (size, bits) not in _PACKINGS:
            raise UnsupportedModelError(
                f"{where}: quantization of {name} is mode={mode!r}, "
                f"group_size={size!r}, bits={bits!r}; tiny_llm implements affine "
                f"groups of 32, 64 or 128 at 2, 3, 4, 5, 6 or 8 bits"
            )


def fill(
    model: Decoder,
    checkpoint: Checkpoint,
    *,
    dtype: mx.Dtype | None,
    dequantise: bool,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Put a checkpoint's weights into the model, which is changed.

    dtype: of all floating-point weights; None: that of the embedding. dequantise: turn
    packed matrices into dense ones. progress: called with (modules done, of how many).
    Raises WeightsError.
    """
    if dtype is None:
        first = _name("embed_tokens")
        stored = checkpoint.left.get(f"{first}.scales")
        if stored is None:
            stored = checkpoint.left.get(f"{first}.weight")
        is_float = stored is not None and mx.issubdtype(stored.dtype, mx.floating)
        dtype = stored.dtype if stored is not None and is_float else mx.float32
    modules = list(_modules(model))
    for done, (path, module) in enumerate(modules):
        if isinstance(module, RMSNorm):
            weight = checkpoint.take(f"{_name(path)}.weight", (module.dims,))
            if module.rotary_dims:
                weight = weight[_pairs(module.dims, module.dims, module.rotary_dims)]
            module.weight = weight.astype(dtype)
        else:
            _fill_linear(path, module, checkpoint, dtype, dequantise)
        # At once, so that no more than one module lies twice in memory.
        mx.eval(module.parameters())
        if progress is not None:
            progress(done + 1, len(modules))
    _refuse_unused(model, checkpoint)


def _fill_linear(
    path: str, module: Linear, checkpoint: Checkpoint, dtype: mx.Dtype, dense: bool
) -> None:
    if isinstance(module, FusedLinear):
        stem = path.rpartition(".")[0]
        matrices = []
        for part, outputs in module.parts.items():
            matrix = checkpoint.matrix(
                _name(f"{stem}.{part}"), outputs, module.inputs, module.has_bias
            )
            order = None
            if part in module.rotary:
                order = _pairs(outputs, module.head_dim, module.rotary_dims)
            matrices.append(matrix.arranged(order))
    else:
        name = _name(path)
        matrices = [
            checkpoint.matrix(name, module.outputs, module.inputs, module.has_bias)
        ]
    if dense or len({m.packing for m in matrices}) > 1:
        matrices = [m.dense(dtype) for m in matrices]
    module.packing = matrices[0].packing
    module.weight = _join([m.weight for m in matrices])
    if module.packing is None:
        module.weight = module.weight.astype(dtype)
    else:
        module.scales = _join([m.scales for m in matrices]).astype(dtype)
        module.biases = _join([m.biases for m in matrices]).astype(dtype)
    if module.has_bias:
        module.bias = _join([m.bias for m in matrices]).astype(dtype)


def _join(arrays: list[mx.array | None] | list[mx.array]) -> mx.array:
    present = [a for a in arrays if a is not None]
    return present[0] if len(present) == 1 else mx.concatenate(present, axis=0)


def _pairs(outputs: int, head_dim: int, rotary_dims: int) -> mx.array:
    """The order that puts dimension i and i + rotary_dims / 2 of each head together."""
    head = np.arange(head_dim)
    half = rotary_dims // 2
    head[0:rotary_dims:2] = np.arange(half)
    head[1:rotary_dims:2] = np.arange(half, rotary_dims)
    starts = np.arange(0, outputs, head_dim)
    return mx.array((starts[:, None] + head).reshape(-1).astype(np.int32))


def _modules(model: Decoder) -> Iterator[tuple[str, Linear | RMSNorm]]:
    modules: list[tuple[str, nn.Module]] = model.named_modules()
    for path, module in sorted(modules, key=lambda item: item[0]):
        if isinstance(module, (Linear, RMSNorm)):
            yield path, module


def _name(path: str) -> str:
    """A module's name in checkpoints."""
    return path if path == "lm_head" else f"model.{path}"


def _refuse_unused(model: Decoder, checkpoint: Checkpoint) -> None:
    unused = [
        name
        for name in checkpoint.left
        # recomputed from the configuration; written by old checkpoints
        if not name.endswith("rotary_emb.inv_freq")
        # a copy of the embedding, written although the two are tied
        and not (model.config.tied and name.startswith("lm_head."))
    ]
    if unused:
        shown = ", ".join(sorted(unused)[:5])
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        raise WeightsError(
            f"{checkpoint.where}: the model does not use the weight {shown}{more}; the "
            f"configuration does not belong to these weights, or describes a variant "
            f"that tiny_llm does not implement"
        )
