"""Masks of tokens on the device equal a loop over the bits."""

import mlx.core as mx
import numpy as np
import pytest

from tiny_llm.errors import ParameterError
from tiny_llm.token_masks import apply_masks, pack


def by_loop(logits, rows, masks):
    out = np.array(logits.astype(mx.float32))
    for row, mask in zip(rows, masks, strict=True):
        for token in range(out.shape[1]):
            if not int(mask[token // 32]) >> (token % 32) & 1:
                out[row, token] = -np.inf
    return out


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 100, 407])
@pytest.mark.parametrize(
    ("count", "rows"),
    [(1, [0]), (3, [0, 1, 2]), (4, [2]), (4, [3, 0]), (5, [1, 2, 3, 4])],
)
def test_masked_logits_equal_a_loop(dtype, width, count, rows):
    rng = np.random.default_rng(width)
    logits = mx.array(rng.normal(size=(count, width)).astype(np.float32)).astype(dtype)
    logits[0, 0] = mx.inf
    before = np.array(logits.astype(mx.float32))
    words = -(-width // 32)
    masks = rng.integers(0, 2**32, (len(rows), words), dtype=np.uint32)
    found = apply_masks(logits, rows, masks)
    assert found.dtype == dtype
    expected = by_loop(logits, rows, masks)
    assert np.array_equal(np.array(found.astype(mx.float32)), expected)
    # rows may be an array, and the logits are left as they were
    again = apply_masks(logits, mx.array(rows), masks)
    assert np.array_equal(np.array(again.astype(mx.float32)), expected)
    assert np.array_equal(np.array(logits.astype(mx.float32)), before)


def test_without_masks_nothing_changes():
    logits = mx.ones((2, 40))
    found = apply_masks(logits, [], np.zeros((0, 2), np.uint32))
    assert found.tolist() == logits.tolist()


def test_packed_bits_are_the_ids():
    mask = pack([0, 31, 32, 63, 64], 70)
    assert mask.dtype == np.uint32
    assert mask.tolist() == [0x80000001, 0x80000001, 1]
    assert pack([], 1).tolist() == [0]


@pytest.mark.parametrize(
    "masks",
    [
        np.zeros((1, 1), np.uint32),
        np.zeros((2, 2), np.uint32),
        np.zeros((1, 2), np.int32),
    ],
)
def test_masks_of_another_shape_are_refused(masks):
    with pytest.raises(ParameterError, match=r"1 rows of 40 logits need uint32 .1, 2"):
        apply_masks(mx.zeros((3, 40)), [1], masks)
