"""Operations that have a best way on each device, behind one function each.

Models and caches call these and never ask which device they are on.
"""

from .attention import attention, causal_mask, check_attention
from .batched import batched_attention
from .cached import MOST_ROWS
from .dense_quantized import dense_quantized_attention
from .elementwise import exp_below, rms_norm, swiglu
from .kv_rows import kv_rows
from .linear import Packed, linear
from .metal import reads_pages
from .paged import paged_attention
from .quantize_kv import quantize_kv
from .quantized import (
    PackedRows,
    dequantize_rows,
    quantize_rows,
    quantized_attention,
)
from .rotary import Rotation, make_rotation, rotate
from .runtime import can_fuse, on_gpu

__all__ = [
    "MOST_ROWS",
    "Packed",
    "PackedRows",
    "Rotation",
    "attention",
    "batched_attention",
    "can_fuse",
    "causal_mask",
    "check_attention",
    "dense_quantized_attention",
    "dequantize_rows",
    "exp_below",
    "kv_rows",
    "linear",
    "make_rotation",
    "on_gpu",
    "paged_attention",
    "quantize_kv",
    "quantize_rows",
    "quantized_attention",
    "reads_pages",
    "rms_norm",
    "rotate",
    "swiglu",
]
