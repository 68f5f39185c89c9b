"""One decode step by hand: append one key and value to a cache, attend, compare.

No model is needed: the keys, values and queries are random. The step's output must
equal the last row of attention computed over the whole sequence at once, because causal
attention never changes what earlier tokens have computed. That is why caching is exact.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tiny_llm import TinyKvFullCache  # first: it puts a fast BLAS under MLX

import mlx.core as mx  # isort: skip

BATCH, HEADS, KV_HEADS, HEAD_DIM = 1, 8, 2, 64
SCALE = HEAD_DIM**-0.5


def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Causal attention, written out. q: [B, H, L, D]; k, v: [B, Hkv, S, D]."""
    groups = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, groups, axis=1), mx.repeat(v, groups, axis=1)  # [B, H, S, D]
    scores = SCALE * (q @ k.swapaxes(-1, -2))  # [B, H, L, S]
    length, context = scores.shape[-2:]
    positions = mx.arange(context - length, context)[:, None]  # of the queries
    scores = mx.where(mx.arange(context) <= positions, scores, -mx.inf)
    weights = mx.softmax(scores, axis=-1)
    return weights @ v  # [B, H, L, D]: the weighted sum of the values


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="ignored: no model is needed")
    parser.add_argument("--quick", action="store_true", help="a shorter sequence")
    args = parser.parse_args(argv)
    context = 40 if args.quick else 1000

    mx.random.seed(0)
    q = mx.random.normal((BATCH, HEADS, context + 1, HEAD_DIM))
    k = mx.random.normal((BATCH, KV_HEADS, context + 1, HEAD_DIM))
    v = mx.random.normal((BATCH, KV_HEADS, context + 1, HEAD_DIM))
    print(f"{HEADS} query heads share {KV_HEADS} KV heads of {HEAD_DIM} dimensions\n")

    print(f"1. Prefill: {context} keys and values go into the cache.")
    cache = TinyKvFullCache()
    cache.update_and_fetch(k[:, :, :context], v[:, :, :context])
    mx.eval(cache.state)
    print(f"   It holds {cache.offset} tokens in {cache.nbytes:,} bytes.\n")

    print("2. One step: append the new token's key and value, attend with its query.")
    newest = slice(context, context + 1)
    keys, values, stored, _ = cache.update_and_fetch(k[:, :, newest], v[:, :, newest])
    step = attend(q[:, :, newest], keys, values)
    print(f"   It holds {stored} tokens; one query row was computed.\n")

    print("3. The same token in attention over the whole sequence, without a cache:")
    whole = attend(q, k, v)[:, :, newest]
    by_hand = mx.abs(step - whole).max().item()
    print(f"   largest difference {by_hand:.1e}\n")

    print("4. cache.attend appends and attends in one call; models use that:")
    cache.rewind(1)
    called = cache.attend(
        q[:, :, newest], k[:, :, newest], v[:, :, newest], scale=SCALE
    )
    by_call = mx.abs(called - whole).max().item()
    print(f"   largest difference {by_call:.1e}\n")

    print(
        "Positions: a model rotates q and k (RoPE) by their absolute position before\n"
        "they come here, so the new token must be rotated by cache.offset, not by 0.\n"
        "Stored keys are never rotated again: only distances matter to the scores."
    )
    equal = max(by_hand, by_call) < 1e-5
    print(f"\nthe step equals full attention: {equal}")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
