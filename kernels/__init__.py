"""Operations that have a best way on each device, behind one function each.

Models and caches call these and never ask which device they are on.
"""

from .attention import attention, causal_mask
from .batched import batched_attention
from .elementwise import exp_below, rms_norm, swiglu
from .linear import Packed, linear
from .quantized import (
    PackedRows,
    dequantize_rows,
    quantize_rows,
    quantized_attention,
)
from .rotary import Rotation, make_rotation, rotate
from .runtime import can_fuse, on_gpu

__all__ = [
    "Packed",
    "PackedRows",
    "Rotation",
    "attention",
    "batched_attention",
    "can_fuse",
    "causal_mask",
    "dequantize_rows",
    "exp_below",
    "linear",
    "make_rotation",
    "on_gpu",
    "quantize_rows",
    "quantized_attention",
    "rms_norm",
    "rotate",
    "swiglu",
]
