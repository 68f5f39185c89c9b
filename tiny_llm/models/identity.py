"""Which model it is: what the keys and values in a cache depend on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..rope import Rope
from .decoder import Decoder

_SAMPLES = 64  # elements read of each weight
_GOLDEN = (5**0.5 - 1) / 2


def identity(model: Decoder) -> dict[str, Any]:
    """The model's shape in words and numbers, and a `fingerprint` of all of it.

    The fingerprint is a SHA-256 over the configuration, the rotary frequencies, and
    the name, dtype, shape and 64 elements of every weight, spread over its rows and
    columns: another checkpoint, merge, dtype or quantisation has another one. It takes
    milliseconds, because it does not read the weights as a whole; a change of a few
    single elements can therefore escape it.
    """
    config = model.config
    settings = {key: value for key, value in vars(config).items() if key != "rope"}
    settings["rope"] = _rope(config.rope, config.max_positions)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    weights: list[tuple[str, mx.array]] = sorted(tree_flatten(model.parameters()))
    samples = [_sample(array) for _, array in weights]
    mx.eval(samples)
    for (name, array), sample in zip(weights, samples, strict=True):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.array(sample.view(mx.uint8)).tobytes())
    return {
        "model_type": config.model_type,
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "fingerprint": digest.hexdigest(),
    }


def _rope(rope: Rope, longest: int) -> list[Any]:
    """Six digits of each frequency: the rest may differ between machines."""
    lengths = (1, 8 * longest)  # some change when a text gets long
    frequencies = [[f"{f:.6g}" for f in rope.frequencies(n)] for n in lengths]
    return [rope.dims, f"{rope.scale:.6g}", rope.fixed_until, frequencies]


def _sample(array: mx.array) -> mx.array:
    """Some elements, [n], lazily. Multiples of the golden ratio hit every column."""
    count = min(_SAMPLES, array.size)
    places = (np.arange(1, count + 1) * _GOLDEN % 1 * array.size).astype(np.int64)
    if count == array.size:
        places = np.arange(count)
    by_axis = np.unravel_index(places, array.shape)
    return array[tuple(mx.array(axis.astype(np.int32)) for axis in by_axis)]
