"""What a KV cache is for: the same tokens, many times sooner.

naive    every step runs the model over the whole text again
cached   stream_generate: every step runs the new token alone
reset    a broken cache: emptied between the steps. The newest token, even at its right
         position, then sees no other token, and the text falls apart. (A naive loop has
         no cache to reset; it is what remains right, at its price.)
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import islice

from tiny_llm import load, stream_generate  # before mlx: a fast BLAS under it

import mlx.core as mx  # isort: skip
from tiny_llm.models import Decoder

PROMPT = "The history of the steam engine begins with"


def naive(model: Decoder, prompt: list[int]) -> Iterator[int]:
    """Greedy tokens without a cache: O(n) tokens are computed for each new one."""
    ids = list(prompt)
    while True:
        logits = model(mx.array([ids]), logits_to_keep=1)  # [1, 1, V]
        ids.append(int(mx.argmax(logits[0, -1]).item()))
        yield ids[-1]


def reset(model: Decoder, prompt: list[int]) -> Iterator[int]:
    """Greedy tokens with the cache lost after each step."""
    ids, position = list(prompt), 0
    while True:
        cache = model.create_kv_cache()
        logits = model(mx.array([ids]), offset=position, cache=cache, logits_to_keep=1)
        token = int(mx.argmax(logits[0, -1]).item())
        yield token
        position += len(ids)
        ids = [token]


def timed(tokens: Iterator[int], count: int) -> tuple[list[int], float]:
    """The first `count` tokens, and the seconds they took."""
    start = time.perf_counter()
    taken = list(islice(tokens, count))
    return taken, time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quick", action="store_true", help="short texts only")
    args = parser.parse_args(argv)
    lengths = (8, 16) if args.quick else (16, 48, 96)

    # In float32, since half precision rounds differently for different shapes; on the
    # CPU "auto" is float32 (and faster, because it also unpacks quantised weights).
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    model, tokenizer = load(args.model, dtype="float32" if on_gpu else "auto")
    prompt = tokenizer.encode(PROMPT)
    timed(stream_generate(model, prompt), 2)  # warm up

    print(f"{PROMPT!r}: {len(prompt)} tokens\n")
    print("new tokens    naive    cached   speed-up   same tokens")
    all_same = True
    for count in lengths:
        slow, slow_s = timed(naive(model, prompt), count)
        fast, fast_s = timed(stream_generate(model, prompt), count)
        all_same = all_same and slow == fast
        print(
            f"{count:10d} {slow_s:7.2f} s {fast_s:7.2f} s {slow_s / fast_s:8.1f} x"
            f"   {slow == fast}"
        )

    broken, _ = timed(reset(model, prompt), lengths[-1])
    agree = [a == b for a, b in zip(fast, broken, strict=True)]
    where = f"token {agree.index(False) + 1}" if False in agree else "none"
    print(
        f"\nWith the cache reset between steps, {sum(agree)} of {len(agree)} tokens "
        f"are right.\nFirst wrong: {where} (the first one still saw the prompt)."
    )
    print(f"  cached: {tokenizer.decode(fast)[:70]!r}")
    print(f"  reset:  {tokenizer.decode(broken)[:70]!r}")
    print(f"\nnaive and cached give the same tokens: {all_same}")
    return 0 if all_same else 1


if __name__ == "__main__":
    raise SystemExit(main())
