"""The attention layer: project and rotate, let the cache attend, project back."""

import mlx.core as mx
import mlx.nn as nn

from .cache import KvCache
from .kernels import Rotation, rotate
from .layers import FusedLinear, Linear, RMSNorm


class Attention(nn.Module):
    """Grouped-query attention with rotary positions (Ainslie et al. 2023).

    window: a query sees at most so many of the newest keys, itself included. qk_norm:
    RMS norm of each query and key head before rotation (Qwen 3).
    """

    def __init__(
        self,
        dims: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        rotary_dims: int,
        window: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.window = window
        self.scale = head_dim**-0.5
        self.qkv_proj = FusedLinear(
            dims,
            {
                "q_proj": heads * head_dim,
                "k_proj": kv_heads * head_dim,
                "v_proj": kv_heads * head_dim,
            },
            qkv_bias,
            rotary=("q_proj", "k_proj"),
            head_dim=head_dim,
            rotary_dims=rotary_dims,
        )
        self.o_proj = Linear(heads * head_dim, dims, out_bias)
        self.qk_norm = qk_norm
        if qk_norm:
            self.q_norm = RMSNorm(head_dim, norm_eps, rotary_dims)
            self.k_norm = RMSNorm(head_dim, norm_eps, rotary_dims)

    def __call__(
        self, x: mx.array, residual: mx.array, rotation: Rotation, cache: KvCache
    ) -> mx.array:
        """x, residual: [B, L, E] -> residual + attention(x); appends to the cache.

        Or [B, E], one token each.
        """
        batch, dim = x.shape[0], self.head_dim
        heads, rotated = self.heads, self.heads + self.kv_heads
        qkv = self.qkv_proj(x)
        if x.ndim == 2:
            qkv = qkv.reshape(batch, -1, 1, dim)
        else:
            qkv = qkv.reshape(batch, x.shape[1], -1, dim).swapaxes(1, 2)
        # [B, H + 2 Hkv, L, D]
        if self.qk_norm:
            q = rotate(self.q_norm(qkv[:, :heads]), rotation)
            k = rotate(self.k_norm(qkv[:, heads:rotated]), rotation)
        else:
            qk = rotate(qkv[:, :rotated], rotation)
            q, k = qk[:, :heads], qk[:, heads:]
        v = qkv[:, rotated:]
        out = cache.attend(q, k, v, scale=self.scale, window=self.window)
        if x.ndim > 2:
            out = out.swapaxes(1, 2)
        return self.o_proj(out.reshape(*x.shape[:-1], -1), residual)
