"""Operations that have a best way on each device, behind one function each.

Models and caches call these and never ask which device they are on.
"""

from .attention import attention, causal_mask
from .elementwise import exp_below, rms_norm, swiglu
from .linear import Packed, linear
from .rotary import Rotation, make_rotation, rotate
from .runtime import can_fuse, on_gpu

__all__ = [
    "Packed",
    "Rotation",
    "attention",
    "can_fuse",
    "causal_mask",
    "exp_below",
    "linear",
    "make_rotation",
    "on_gpu",
    "rms_norm",
    "rotate",
    "swiglu",
]
