"""The decoder that Llama, Mistral and Qwen share: attention, SwiGLU, RMS norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..attention import Attention
from ..cache import (
    KvCache,
    NoCache,
    PagePool,
    create_kv_cache,
    create_page_pool,
)
from ..config import ConfigReader
from ..errors import ParameterError, whole_number
from ..kernels import Rotation
from ..layers import Embedding, Linear, RMSNorm, SwiGLU
from ..memory import KvShape
from ..rope import Offset, Rope, make_rope


@dataclass(frozen=True)
class DecoderConfig:
    """What a decoder computes. Sizes in elements, lengths in tokens.

    windows: per layer, how many of the newest keys a query sees (None: all).
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: Rope
    tied: bool
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def kv_shape(self, element_bytes: int) -> KvShape:
        """What a token leaves in the caches."""
        return KvShape(self.windows, self.kv_heads, self.head_dim, element_bytes)

    @property
    def context_length(self) -> int:
        """The longest sequence whose cached keys stay right, in tokens.

        Where the rotary frequencies change with the total length (dynamic, longrope),
        keys cached before the change would be wrong after it.
        """
        longest = max(self.max_positions, self.rope.extends_to)
        if self.rope.fixed_until is None:
            return longest
        return min(longest, self.rope.fixed_until)


def read_config(
    config: ConfigReader,
    *,
    windows: tuple[int | None, ...] | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    max_positions: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderConfig:
    """The keys that all decoders share; the arguments are the family's own.

    kv_heads, head_dim, max_positions: the family's defaults where the file is silent
    (None: as many as heads; hidden_size / heads; required). Raises
    UnsupportedModelError.
    """
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", most=1 << 16)
    kv = config.integer("num_key_value_heads", kv_heads or heads)
    if heads % kv:
        config.fail("num_key_value_heads", kv, f"needs a divisor of the {heads} heads")
    if head_dim is None and "head_dim" not in config and hidden % heads:
        config.fail("num_attention_heads", heads, f"needs a divisor of {hidden}")
    dim = config.integer("head_dim", head_dim or max(hidden // heads, 1), most=1 << 16)
    layers = config.integer("num_hidden_layers", most=4096)
    config.choice("hidden_act", "silu", of=("silu", "swish"))
    config.choice("pretraining_tp", 1, of=(1,))
    config.choice("is_causal", True, of=(True,))
    positions = config.integer("max_position_embeddings", max_positions)
    read = DecoderConfig(
        model_type=config.string("model_type"),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv,
        head_dim=dim,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        max_positions=positions,
        rope=make_rope(config, dim, positions),
        tied=config.boolean("tie_word_embeddings", False),
        windows=windows or (None,) * layers,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )
    config.finish()
    return read


def read_windows(
    config: ConfigReader, default: Sequence[str], window: int | None
) -> tuple[int | None, ...]:
    """`layer_types` (or the family's default for each layer) as windows.

    Raises UnsupportedModelError for a type that is not implemented.
    """
    types = config.strings("layer_types") or list(default)
    if len(types) != len(default):
        config.fail(
            "layer_types", types, f"needs one for each of {len(default)} layers"
        )
    kinds: dict[str, int | None] = {"full_attention": None}
    if window is not None:
        kinds["sliding_attention"] = window
    for kind in types:
        if kind not in kinds:
            names = ", ".join(kinds)
            config.fail("layer_types", kind, f"implements {names} with these settings")
    return tuple(kinds[kind] for kind in types)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = Attention(
            c.hidden_size,
            c.heads,
            c.kv_heads,
            c.head_dim,
            rotary_dims=c.rope.dims,
            window=c.windows[index],
            qkv_bias=c.qkv_bias,
            out_bias=c.out_bias,
            qk_norm=c.qk_norm,
            norm_eps=c.norm_eps,
        )
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = SwiGLU(c.hidden_size, c.intermediate_size, c.mlp_bias)

    def __call__(
        self,
        x: mx.array,
        rotation: Rotation,
        cache: KvCache,
        rows: mx.array | None = None,
    ) -> mx.array:
        """x: [B, L, E] or [B, E] -> the same shape; appends to the layer's cache.

        rows: int [n], the only ones that are wanted after attention: [n, ..., E].
        """
        x = self.self_attn(self.input_layernorm(x), x, rotation, cache)
        if rows is not None:
            x = x[rows]
        return self.mlp(self.post_attention_layernorm(x), x)


class Decoder(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Block(config, index) for index in range(config.layers)]
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tied:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def __call__(
        self,
        input_ids: mx.array,
        offset: Offset = 0,
        cache: Sequence[KvCache] | None = None,
        logits_to_keep: int | mx.array | None = None,
        rows_to_keep: mx.array | None = None,
    ) -> mx.array:
        """Logits [B or kept, L or kept, V] of input_ids [B, L] (int32).

        The ids must be within the vocabulary: they may be lazy, so nobody checks.

        offset: the absolute position of input_ids[b, 0], one int or one per row; with
        a cache, the number of tokens it holds. cache: one entry per layer, which is
        appended to, or None. logits_to_keep: project only the last n positions (0:
        none), or those of an index array. rows_to_keep: the same for rows, by an index
        array int [n]. Raises ParameterError.
        """
        if input_ids.ndim != 2:
            raise ParameterError(
                f"input_ids must be [batch, tokens], got shape {input_ids.shape}"
            )
        caches = [NoCache()] * len(self.layers) if cache is None else cache
        if len(caches) != len(self.layers):
            raise ParameterError(
                f"a cache of {len(caches)} entries for {len(self.layers)} layers: use "
                f"model.create_kv_cache()"
            )
        batch, length = input_ids.shape
        rotation = self.config.rope.rotation(offset, batch, length)
        x = self.embed_tokens.look_up(input_ids)
        if length == 1:
            # One matrix: addmm of [B, 1, E] would be B products of one row (32 rows:
            # 155 against 102 ms for all of SmolLM2 on two cores), in more operations.
            x = x.squeeze(1)
        last = len(caches) - 1
        for index, (layer, entry) in enumerate(zip(self.layers, caches, strict=True)):
            x = layer(x, rotation, entry, rows_to_keep if index == last else None)
        if length == 1:
            x = x[:, None]
        x = self.norm(_keep(x, logits_to_keep))
        return self.embed_tokens(x) if self.config.tied else self.lm_head(x)

    def create_kv_cache(self, kind: str = "dense", **options: Any) -> list[KvCache]:
        """One cache entry per layer, of a kind with its options:

        "dense": everything, whatever the windows; reserve= tokens to make room for.
        "quantized": as dense, packed; bits=8 (or 4), group_size=64 or 32, reserve=.
        "rotating": layers with a sliding window hold that, others everything; window=
        bounds those too (their output changes beyond it), but for the first keep=
        tokens; bits=, group_size=, reserve=.
        "paged": pool= of create_page_pool, or a pool of its own with its options;
        reserve= tokens side by side. One request per cache.
        "batching": slots= requests side by side, in pages as "paged" has them.

        Raises ParameterError for an unknown kind or option, and for what the model's
        layers do not allow, naming them.
        """
        reserve = whole_number("reserve", options.get("reserve", 0), least=0)
        if reserve > self.config.context_length + 1:
            raise ParameterError(
                f"reserve is {reserve}, but the model's context is "
                f"{self.config.context_length} tokens"
            )
        dtype = self.kv_dtype()
        return create_kv_cache(kind, self.config.kv_shape(dtype.size), dtype, options)

    def create_page_pool(self, **options: Any) -> PagePool:
        """The pages that many requests share; the options are PagePool's.

        pool = model.create_page_pool(tokens=8192, page_size=64), then
        model.create_kv_cache("paged", pool=pool) for each request.
        """
        dtype = self.kv_dtype()
        return create_page_pool(self.config.kv_shape(dtype.size), dtype, options)

    def kv_dtype(self) -> mx.Dtype:
        """The dtype of keys and values: found by building, not running, a layer."""
        probe = _Probe()
        x = self.embed_tokens.look_up(mx.array([[0]]))
        self.layers[0](x, self.config.rope.rotation(0, 1, 1), probe)
        return probe.dtype


class _Probe(NoCache):
    """Notes the dtype of the keys that come by."""

    dtype = mx.float32

    def attend(self, q: mx.array, k: mx.array, v: mx.array, **_: Any) -> mx.array:
        """The queries, in the place of what attention would return."""
        self.dtype = k.dtype
        return q


def _keep(x: mx.array, wanted: int | mx.array | None) -> mx.array:
    """The positions of x [B, L, E] that are to be projected."""
    if wanted is None:
        return x
    if isinstance(wanted, mx.array):
        return x[:, wanted]
    if wanted < 0:
        raise ParameterError(f"logits_to_keep must not be negative, got {wanted}")
    return x[:, max(x.shape[1] - wanted, 0) :]
