"""A model in one GGUF file: its metadata, its config, and its weights as MLX arrays.

Tensors are taken from a memory map one at a time, so a model is never in memory
twice. `mx.load` also reads GGUF, and the tests hold ours against it; we don't use it
because it turns BF16 and K-quants into float16, fails as a whole on one tensor type
that it doesn't know, and is C code without bounds checks.
"""

import mmap
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .errors import CorruptFileError, UnsupportedModelError
from .files import file_size
from .gguf_config import ROPE_FACTORS, GGUFConfig, Place
from .gguf_header import TensorInfo, read_header

_Bytes = npt.NDArray[np.uint8]
GROUP_SIZE = 32  # the block of Q4_0, Q4_1 and Q8_0, and MLX's group
_PACKED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_CHUNK_ELEMENTS = 2**24  # dequantised at once: bounds the temporaries


class GGUFFile:
    """The GGUF file at `path`, opened and checked.

    Raises CorruptFileError or UnsupportedModelError naming the file, see
    gguf_header.read_header.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if file_size(self.path) == 0:
            raise CorruptFileError(f"{self.path} is empty")
        try:
            with self.path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CorruptFileError(f"{self.path} cannot be read: {error}") from error
        self._header = read_header(self.path, self._data)

    @property
    def metadata(self) -> dict[str, Any]:
        """Every metadata entry as plain Python values; arrays are lists."""
        return self._header.metadata

    @property
    def tensor_names(self) -> list[str]:
        """The tensors' names as the file has them, in the file's order."""
        return list(self._header.tensors)

    def config(self, *, keep_quantized: bool = True) -> dict[str, Any]:
        """What a Hugging Face config.json of this model would say.

        `rope_scaling` is None, {"rope_type": "linear", ...}, {"rope_type": "yarn",
        ...}, or {"rope_type": "factors", "factors": [head_dim / 2 numbers]}, by which
        the inverse frequencies are divided (Llama 3's scaling, worked out by the
        converter). With `keep_quantized`, "quantization" describes the packed modules
        of `weights(keep_quantized=True)` in MLX's layout; it is absent if there are
        none. Modules in the file that are not packed are listed as false.

        Raises UnsupportedModelError (architecture, setting), CorruptFileError (a value
        that cannot be) and WeightsError (tensors do not fit the metadata).
        """
        described = GGUFConfig(self.path, self._header)
        places = described.places()
        config = described.values
        scaling = config["rope_scaling"]
        if scaling is not None and scaling["rope_type"] == "factors":
            factors = self._floats(self._header.tensors[ROPE_FACTORS])
            if not (np.isfinite(factors).all() and (factors > 0).all()):
                raise CorruptFileError(f"{self.path}: {ROPE_FACTORS} is not positive")
            scaling["factors"] = factors.tolist()
        if keep_quantized:
            quantization = self._quantization(places)
            if quantization:
                config["quantization"] = quantization
        return config

    def weights(self, *, keep_quantized: bool) -> dict[str, mx.array]:
        """The model's tensors under their Hugging Face names.

        `keep_quantized=False`: everything as float32, bit for bit what the gguf
        package's dequantisation gives. `keep_quantized=True`: Q4_0, Q4_1 and Q8_0
        matrices as MLX's triple `weight` (uint32), `scales` and `biases` (float16,
        groups of 32); F32, F16 and BF16 as stored; other types as float16.

        Rows of q and k that llama.cpp interleaved (its llama architecture) are put
        back in Hugging Face's order. Raises as `config` does.
        """
        weights: dict[str, mx.array] = {}
        for name, place in GGUFConfig(self.path, self._header).places().items():
            info = self._header.tensors[name]
            if keep_quantized and _is_packed(info):
                module = place.name.removesuffix("weight")
                rows = _in_order(self._rows(info), place.heads)
                packed, scales, biases = _pack(rows, info.type_name)
                weights[module + "weight"] = mx.array(packed)
                weights[module + "scales"] = mx.array(scales)
                weights[module + "biases"] = mx.array(biases)
            elif keep_quantized:
                weights[place.name] = self._as_stored(info, place)
            else:
                values = _in_order(self._floats(info), place.heads)
                weights[place.name] = mx.array(values)
        return weights

    def _rows(self, info: TensorInfo) -> _Bytes:
        """The tensor's bytes, [..., bytes per row], a view of the file."""
        flat = np.frombuffer(
            self._data, dtype=np.uint8, count=info.nbytes, offset=info.start
        )
        count = 1
        for n in info.shape[:-1]:
            count *= n
        return flat.reshape(*info.shape[:-1], info.nbytes // count)

    def _floats(self, info: TensorInfo) -> npt.NDArray[np.float32]:
        """The tensor as float32 in its own shape and order."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        raw = self._rows(info)
        if info.type_name == "F32":
            return raw.view(np.float32)
        rows = raw.reshape(-1, raw.shape[-1])
        result = np.empty((len(rows), info.shape[-1]), dtype=np.float32)
        step = max(_CHUNK_ELEMENTS // info.shape[-1], 1)
        kind = GGMLQuantizationType(info.type)
        # Damaged blocks may hold infinite scales; that is no reason to warn.
        with np.errstate(all="ignore"):
            for start in range(0, len(rows), step):
                try:
                    part = dequantize(rows[start : start + step], kind)
                except NotImplementedError:
                    raise UnsupportedModelError(
                        f"{self.path}: the tensor {info.name!r} has the type "
                        f"{info.type_name}, which the gguf package cannot dequantise"
                    ) from None
                result[start : start + step] = part
        return result.reshape(info.shape)

    def _as_stored(self, info: TensorInfo, place: Place) -> mx.array:
        if info.type_name == "BF16":  # numpy has no bfloat16
            halves = self._rows(info).view(np.uint16)
            return mx.array(_in_order(halves, place.heads)).view(mx.bfloat16)
        if info.type_name == "F16":
            return mx.array(_in_order(self._rows(info).view(np.float16), place.heads))
        values = _in_order(self._floats(info), place.heads)
        if info.type_name == "F32":
            return mx.array(values)
        with np.errstate(over="ignore"):
            return mx.array(values.astype(np.float16))

    def _quantization(self, places: dict[str, Place]) -> dict[str, Any]:
        bits: dict[str, int] = {}
        for name, place in places.items():
            info = self._header.tensors[name]
            if len(info.shape) == 2:
                module = place.name.removesuffix(".weight")
                bits[module] = _PACKED_BITS.get(info.type_name, 0)
        packed = [b for b in bits.values() if b]
        if not packed:
            return {}
        usual = max(sorted(set(packed)), key=packed.count)
        result: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": usual}
        for module, b in bits.items():
            if b == 0:
                result[module] = False
            elif b != usual:
                result[module] = {"group_size": GROUP_SIZE, "bits": b}
        return result


def _is_packed(info: TensorInfo) -> bool:
    return len(info.shape) == 2 and info.type_name in _PACKED_BITS


def _in_order(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Undo llama.cpp's interleaving of each head's rows; heads 0: nothing to undo.

    Its rotary embedding turns neighbours (2i, 2i + 1), Hugging Face's turns
    (i, i + D/2): row 2i + h of a head is Hugging Face's row i + h · D/2
    (convert_hf_to_gguf.py, LlamaModel.permute). Whole rows move, so this works on any
    type's bytes.
    """
    if heads == 0:
        return rows
    split = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    ordered: npt.NDArray[Any] = split.swapaxes(1, 2).reshape(rows.shape)
    return ordered


def _pack(
    rows: _Bytes, type_name: str
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """GGUF blocks [N, bytes] as MLX's (weight, scales, biases): w = q · scale + bias.

    Q4_0: d · (q - 8), Q4_1: d · q + m, Q8_0: d · (int8 + 128) - 128 · d. The factors
    are powers of two, so the biases are exact. A GGUF block keeps elements i and
    i + 16 in one byte; MLX keeps neighbours there, the first in the low half.
    """
    header = 4 if type_name == "Q4_1" else 2
    blocks = rows.reshape(len(rows), -1, header + (32 if type_name == "Q8_0" else 16))
    halves = np.ascontiguousarray(blocks[..., :header]).view(np.float16)
    scales = halves[..., 0]
    quants = blocks[..., header:]
    with np.errstate(all="ignore"):
        if type_name == "Q8_0":
            biases = scales * np.float16(-128)
            packed = quants ^ np.uint8(0x80)
        else:
            biases = halves[..., 1] if type_name == "Q4_1" else scales * np.float16(-8)
            low, high = quants & 0x0F, quants >> 4
            packed = np.empty_like(quants)
            packed[..., :8] = low[..., ::2] | low[..., 1::2] << 4
            packed[..., 8:] = high[..., ::2] | high[..., 1::2] << 4
    return packed.reshape(len(rows), -1).view(np.uint32), scales, biases
