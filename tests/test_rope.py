import json

import mlx.core as mx
import numpy as np
import pytest
from oracle import DATA

from tiny_llm.config import ConfigReader
from tiny_llm.errors import ParameterError, UnsupportedModelError
from tiny_llm.kernels import rotate
from tiny_llm.models import build
from tiny_llm.rope import make_rope

CASES = json.loads((DATA / "rope.json").read_text())["cases"]


def rope(scaling, theta=10000.0, dim=64, positions=2048, layout="older", name=None):
    if layout == "older":
        values = {"rope_theta": theta, "rope_scaling": scaling}
    else:
        values = {"rope_parameters": {"rope_theta": theta, **scaling}}
    return make_rope(ConfigReader(values, "test"), dim, positions)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['name']}-{c['length']}")
@pytest.mark.parametrize("layout", ["older", "newer"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_frequencies_and_scale_equal_those_of_transformers(case, layout, name):
    scaling = dict(case["scaling"])
    scaling[name] = scaling.pop("rope_type")
    made = rope(
        scaling,
        case["rope_theta"],
        case["head_dim"],
        case["max_position_embeddings"],
        layout,
    )
    np.testing.assert_allclose(
        made.frequencies(case["length"]), case["frequencies"], rtol=1e-6
    )
    assert made.scale == pytest.approx(case["scale"], rel=1e-6)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "spiral", "factor": 2.0}, "spiral.*yarn"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0}, "factor is 0"),
        ({"rope_type": "linear", "factor": "8"}, "factor is '8'"),
        ({"rope_type": "default", "factor": 2.0}, "does not implement factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
        ({"rope_type": "yarn", "factor": 4.0, "mystery": 1}, "mystery=1"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "short_factor"),
        ({"full_attention": {"rope_theta": 1.0}}, "full_attention"),
        ({"rope_type": "linear", "factor": 10**400}, "factor"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e308}, "beta_fast"),
        ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "rope_scaling"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 32,
                "long_factor": [1.0] * 32,
                "original_max_position_embeddings": 1,
            },
            "rope_scaling",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(scaling, words):
    with pytest.raises(UnsupportedModelError, match=words):
        rope(scaling)


def turned(x, positions, frequencies):
    """The formula, pair by pair, in float64."""
    x = np.array(x, dtype=np.float64)
    angles = positions[:, None, :, None] * np.asarray(frequencies, dtype=np.float64)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    out[..., 1::2] = even * np.sin(angles) + odd * np.cos(angles)
    return out


@pytest.mark.parametrize("offset", [0, 7, [3, 100]])
@pytest.mark.parametrize("length", [1, 5])
def test_rotation_is_the_formula_with_one_offset_per_row(offset, length):
    made = rope({"rope_type": "linear", "factor": 2.0}, dim=16)
    x = mx.random.normal((2, 3, length, 16))
    starts = np.array(offset if isinstance(offset, list) else [offset] * 2)
    positions = starts[:, None] + np.arange(length)
    out = rotate(x, made.rotation(offset, 2, length))
    expected = turned(x, positions, made.frequencies(1))
    assert np.abs(np.array(out) - expected).max() < 1e-4


@pytest.mark.parametrize(("length", "way"), [(3, "table"), (5, "waves")])
def test_each_way_and_mlx_rope_agree(monkeypatch, length, way):
    # the Metal path calls mx.fast.rope, which runs on the CPU too
    from tiny_llm.kernels import rotary

    made = rope({"rope_type": "yarn", "factor": 4.0}, dim=16)
    x = mx.random.normal((2, 3, length, 16))
    rotation = made.rotation([3, 9], 2, length)
    if rotary.can_fuse():
        assert getattr(rotation, way) is not None
    by_us = rotate(x, rotation)
    monkeypatch.setattr(rotary, "on_gpu", lambda: True)
    rotation = made.rotation([3, 9], 2, length)
    assert rotation.table is rotation.waves is None
    assert mx.abs(rotate(x, rotation) - by_us).max() < 1e-5
    one, two = made.rotation(4, 2, length), made.rotation([4, 4], 2, length)
    assert mx.abs(rotate(x, one) - rotate(x, two)).max() == 0


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("length", [1, 40])
def test_half_precision_is_rotated_in_float32(dtype, length):
    made = rope({"rope_type": "default"}, dim=16)
    x = mx.random.normal((1, 3, length, 16)).astype(dtype)
    out = rotate(x, made.rotation(1000, 1, length))
    full = rotate(x.astype(mx.float32), made.rotation(1000, 1, length))
    assert out.dtype == dtype
    assert mx.array_equal(out, full.astype(dtype))


def test_where_chains_cannot_be_fused_many_tokens_are_rotated_alike(monkeypatch):
    from tiny_llm.kernels import rotary

    made = rope({"rope_type": "default"}, dim=16)
    x = mx.random.normal((1, 3, 40, 16))
    out = rotate(x, made.rotation(7, 1, 40))
    monkeypatch.setattr(rotary, "can_fuse", lambda: False)
    plain = made.rotation(7, 1, 40)
    assert plain.waves is None
    assert mx.abs(rotate(x, plain) - out).max() < 1e-5


def test_part_of_a_head_may_be_rotated(monkeypatch):
    from tiny_llm.kernels import rotary

    values = {"rope_theta": 100.0, "partial_rotary_factor": 0.5}
    made = make_rope(ConfigReader(values, "test"), 16, 64, partial=True)
    assert made.dims == 8
    x = mx.random.normal((1, 1, 4, 16))
    out = rotate(x, made.rotation(3, 1, 4))
    assert mx.array_equal(out[..., 8:], x[..., 8:])
    expected = turned(x[..., :8], np.arange(3, 7)[None], made.frequencies(1))
    assert np.abs(np.array(out[..., :8]) - expected).max() < 1e-5
    monkeypatch.setattr(rotary, "on_gpu", lambda: True)
    assert mx.abs(rotate(x, made.rotation(3, 1, 4)) - out).max() < 1e-5


def test_dynamic_frequencies_are_each_row_s_own():
    made = rope({"rope_type": "dynamic", "factor": 2.0}, dim=16, positions=32)
    x = mx.random.normal((2, 1, 4, 16))
    both = rotate(x, made.rotation([0, 60], 2, 4))
    for row, offset in enumerate((0, 60)):
        expected = turned(
            x[row : row + 1],
            np.arange(offset, offset + 4)[None],
            made.frequencies(offset + 4),
        )
        assert np.abs(np.array(both[row : row + 1]) - expected).max() < 1e-4


def test_the_context_ends_where_cached_keys_would_become_wrong():
    config = json.loads((DATA / "llama_tied" / "config.json").read_text())
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config["rope_scaling"] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        **factors,
    }
    assert build(ConfigReader(config, "test")).config.context_length == 64
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    assert build(ConfigReader(config, "test")).config.context_length == 512


def test_a_bad_number_of_offsets_is_refused():
    made = rope({"rope_type": "default"})
    with pytest.raises(ParameterError, match="2 offsets for a batch of 3"):
        made.rotation([1, 2], 3, 1)


def test_both_layouts_at_once_must_agree():
    linear = {"rope_type": "linear", "factor": 4.0}
    for newer in ({}, None, linear):
        values = {"rope_scaling": linear, "rope_parameters": newer}
        made = make_rope(ConfigReader(values, "test"), 16, 64)
        assert made.frequencies(1)[0] == 0.25
    values = {"rope_scaling": linear, "rope_parameters": {"rope_theta": 5.0}}
    with pytest.raises(UnsupportedModelError, match="also finds rope_parameters"):
        make_rope(ConfigReader(values, "test"), 16, 64)


def test_yarn_extends_the_context_whatever_max_position_embeddings_says():
    config = json.loads((DATA / "llama_yarn" / "config.json").read_text())
    assert build(ConfigReader(config, "test")).config.context_length == 512
    config["max_position_embeddings"] = 32
    assert build(ConfigReader(config, "test")).config.context_length == 128
