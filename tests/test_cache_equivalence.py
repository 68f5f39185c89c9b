"""The equivalence matrix: architectures x cache kinds x ways to run, one result.

What a layout must compute is the plain forward pass over the whole sequence, with the
`Reference` that says what its queries see where that is not everything.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from oracle import VARIANTS, goldens, model, naive_greedy, random_model
from reference_caches import Compared, Reference, bounded

from tiny_llm import load_kv_cache, save_kv_cache, stream_generate
from tiny_llm.cache import rewind

NEW = 24
# Random weights where heads are too small to be packed, and for mixed layers.
RANDOM = {
    "llama_wide": ("llama_tied", {"head_dim": 64}),
    "mistral_wide": ("mistral_swa", {"head_dim": 64}),
    "qwen2_mixed": (
        "qwen2",
        {
            "seed": 1,  # (with 0 two logits come too close)
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3_mixed": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"],
            "head_dim": 64,
        },
    ),
}


class Kind(NamedTuple):
    """How to make a cache, and what it must compute."""

    kind: str
    options: dict
    seen: object = None
    round_to: tuple | None = None

    def new(self, m):
        return m.create_kv_cache(self.kind, **self.options)

    def reference(self, m):
        windows = m.config.windows
        return [
            Reference(self.seen if window is None else None, self.round_to)
            for window in windows
        ]


KINDS = {
    "dense": Kind("dense", {}),
    "dense-reserve": Kind("dense", {"reserve": 100}),
    "rotating": Kind("rotating", {}),
    "rotating-20": Kind("rotating", {"window": 20}, bounded(20, 0)),
    "rotating-20-keep-3": Kind("rotating", {"window": 20, "keep": 3}, bounded(20, 3)),
    "paged-1": Kind("paged", {"tokens": 512, "page_size": 1}),
    "paged-16": Kind("paged", {"tokens": 512, "page_size": 16, "reserve": 40}),
    "quantized-8": Kind("quantized", {"group_size": 32}, None, (8, 32)),
    "quantized-4": Kind("quantized", {"bits": 4, "group_size": 32}, None, (4, 32)),
    "quantized-8-64": Kind("quantized", {"bits": 8}, None, (8, 64)),
    "rotating-8": Kind("rotating", {"bits": 8, "group_size": 32}, None, (8, 32)),
    "rotating-20-keep-3-4": Kind(
        "rotating",
        {"window": 20, "keep": 3, "bits": 4, "group_size": 32},
        bounded(20, 3),
        (4, 32),
    ),
    "paged-8": Kind(
        "paged",
        {"tokens": 512, "page_size": 16, "bits": 8, "group_size": 32},
        None,
        (8, 32),
    ),
    "paged-4": Kind("paged", {"tokens": 512, "page_size": 8, "bits": 4}, None, (4, 64)),
}


@cache
def any_model(name):
    if name in VARIANTS:
        return model(name)
    variant, changes = RANDOM[name]
    return random_model(variant, **changes)


def allowed(name, kind):
    """What create_kv_cache does not refuse; the refusals are tested by name."""
    m, options = any_model(name), KINDS[kind].options
    sliding = any(m.config.windows)
    full = not all(m.config.windows)
    if KINDS[kind].kind == "rotating":
        if "window" in options and not full:
            return False
        if "window" not in options and not sliding:
            return False
    group_size = KINDS[kind].round_to[1] if KINDS[kind].round_to else 1
    return m.config.head_dim % group_size == 0


ALL = [
    pytest.param(name, kind, id=f"{name}-{kind}")
    for name in [*VARIANTS, *RANDOM]
    for kind in KINDS
    if allowed(name, kind)
]
MATRIX = [param for param in ALL if KINDS[param.values[1]].round_to is None]
PACKED = [param for param in ALL if KINDS[param.values[1]].round_to is not None]


def prompt():
    return goldens("qwen3")[2].ids  # 70 tokens; its vocabulary is the smallest


@cache
def expected(name, kind):
    """Logits at every position of the prompt, and the greedy tokens after it."""
    m, ids = any_model(name), prompt()
    layout = KINDS[kind]
    logits = m(mx.array([ids]), cache=layout.reference(m))[0]
    greedy = naive_greedy(m, ids, NEW, lambda: layout.reference(m))
    return np.array(logits), greedy


def run(m, ids, cache, chunk, new=NEW):
    """Logits [L, V] of ids run in chunks, and the greedy tokens decoded after them."""
    parts = []
    for start in range(0, len(ids), chunk):
        part = mx.array([ids[start : start + chunk]])
        parts.append(m(part, offset=cache[0].offset, cache=cache)[0])
        mx.eval(parts[-1])
    tokens = [mx.argmax(parts[-1][-1]).item()]
    tokens += stream_generate(m, tokens, max_new_tokens=new - 1, cache=cache)
    return np.array(mx.concatenate(parts)), tokens


def agree(found, logits):
    """The likeliest tokens are those of the reference, but where it is undecided."""
    best = np.sort(logits, axis=-1)
    decided = best[:, -1] - best[:, -2] > 0.5
    assert decided.mean() > 0.25
    return (found.argmax(-1) == logits.argmax(-1))[decided].all()


def test_the_reference_without_a_layout_is_the_plain_forward_pass():
    for name in VARIANTS:
        for golden in goldens(name):
            logits, greedy = golden.logits, golden.greedy
            m = any_model(name)
            found = m(mx.array([golden.ids]), cache=KINDS["dense"].reference(m))[0]
            assert np.abs(np.array(found) - logits).max() <= 2e-4
            assert naive_greedy(m, golden.ids, NEW) == greedy


@pytest.mark.parametrize("chunk", [1, 7, 16, 70])
@pytest.mark.parametrize(("name", "kind"), MATRIX)
def test_however_the_prompt_is_cut_the_result_is_the_reference(name, kind, chunk):
    m = any_model(name)
    logits, greedy = expected(name, kind)
    found, tokens = run(m, prompt(), KINDS[kind].new(m), chunk)
    assert np.abs(found - logits).max() <= 2e-4
    assert tokens == greedy


@pytest.mark.parametrize(("name", "kind"), MATRIX)
def test_rewinding_and_going_on_changes_nothing(name, kind):
    m = any_model(name)
    _, greedy = expected(name, kind)
    cache = KINDS[kind].new(m)
    rewind_often(m, cache, prompt())
    tokens = list(stream_generate(m, prompt()[31:], max_new_tokens=NEW, cache=cache))
    assert tokens == greedy
    rewind(cache, len(prompt()) - 2)
    again = stream_generate(m, prompt()[-2:], max_new_tokens=NEW, cache=cache)
    assert list(again) == greedy
    rewind(cache, 0)
    again = stream_generate(m, prompt(), max_new_tokens=NEW, cache=cache)
    assert list(again) == greedy


def rewind_often(m, cache, ids):
    """Leaves ids[:31] in the cache, after detours."""
    list(stream_generate(m, ids[:40], max_new_tokens=0, cache=cache, prefill_chunk=9))
    for length in (40, 37, 31):
        list(stream_generate(m, [5, 6, 7, 8, 9], max_new_tokens=4, cache=cache))
        rewind(cache, length)
        assert {entry.offset for entry in cache} == {length}


@pytest.mark.parametrize("chunk", [1, 7, 16, 70])
@pytest.mark.parametrize(("name", "kind"), PACKED)
def test_packed_layouts_equal_attention_over_rounded_keys(name, kind, chunk):
    m, layout = any_model(name), KINDS[kind]
    pairs = zip(layout.new(m), layout.reference(m), strict=True)
    cache = [Compared(*pair) for pair in pairs]
    found, _ = run(m, prompt(), cache, chunk)
    rewind(cache, 50)
    run(m, prompt()[50:], cache, chunk)
    assert max(entry.worst for entry in cache) <= 1e-4
    assert agree(found, expected_packed(name, kind))


@cache
def expected_packed(name, kind):
    m = any_model(name)
    return np.array(m(mx.array([prompt()]), cache=KINDS[kind].reference(m))[0])


@pytest.mark.parametrize(("name", "kind"), PACKED)
def test_packed_layouts_rewind_and_go_on(name, kind):
    m, layout = any_model(name), KINDS[kind]
    pairs = zip(layout.new(m), layout.reference(m), strict=True)
    cache = [Compared(*pair) for pair in pairs]
    rewind_often(m, cache, prompt())
    found, _ = run(m, prompt()[31:], cache, 16)
    assert max(entry.worst for entry in cache) <= 1e-4
    assert agree(found, expected_packed(name, kind)[31:])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("variant", ["llama_wide", "mistral_wide", "qwen3_mixed"])
def test_packed_dense_rotating_and_paged_are_the_same(variant, bits):
    m = any_model(variant)
    results = {}
    for kind, options in (
        ("quantized", {}),
        ("paged", {"tokens": 200, "page_size": 4}),
        ("rotating", {}),
    ):
        if kind == "rotating" and not any(m.config.windows):
            continue
        cache = m.create_kv_cache(kind, bits=bits, **options)
        results[kind] = run(m, prompt(), cache, 16)
    dense, tokens = results.pop("quantized")
    for found, same_tokens in results.values():
        assert np.abs(found - dense).max() <= 1e-4
        assert same_tokens == tokens
    plain, _ = run(m, prompt(), m.create_kv_cache(), 16)
    assert np.abs(dense - plain).max() > 1e-3  # and packing is not for nothing


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Tokens after caches that were saved: in this process, and in another one."""
    folder = tmp_path_factory.mktemp("caches")
    here = {}
    for name, kind in (param.values for param in ALL):
        m, ids = any_model(name), prompt()[:60]
        cache = KINDS[kind].new(m)
        list(stream_generate(m, ids, max_new_tokens=0, cache=cache, prefill_chunk=16))
        save_kv_cache(folder / f"{name}@{kind}.kv", m, cache, ids)
        here[f"{name}@{kind}"] = the_rest(m, cache)
    command = f"import test_cache_equivalence as t; t.go_on({str(folder)!r})"
    found = subprocess.run(
        [sys.executable, "-c", command],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        check=True,
    )
    return here, json.loads(found.stdout)


def the_rest(m, cache):
    return list(stream_generate(m, prompt()[60:], max_new_tokens=NEW, cache=cache))


def go_on(folder):
    """The other process."""
    found = {}
    for path in sorted(Path(folder).iterdir()):
        m = any_model(path.stem.split("@")[0])
        found[path.stem] = the_rest(m, load_kv_cache(path, m).cache)
    print(json.dumps(found))


@pytest.mark.parametrize(("name", "kind"), ALL)
def test_saved_and_loaded_in_another_process_it_goes_on(elsewhere, name, kind):
    here, there = elsewhere
    assert there[f"{name}@{kind}"] == here[f"{name}@{kind}"]
    if KINDS[kind].round_to is None:
        assert there[f"{name}@{kind}"] == expected(name, kind)[1]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
@pytest.mark.parametrize("kind", ["dense", "rotating", "paged"])
def test_a_window_of_16_sees_16_keys(kind, chunk):
    m = random_model("mistral_swa", sliding_window=16)
    ids = [(7 * i) % 97 for i in range(100)]
    expected = np.array(m(mx.array([ids]), cache=[Reference() for _ in m.layers])[0])
    cache = m.create_kv_cache(kind, **({"tokens": 200} if kind == "paged" else {}))
    found, tokens = run(m, ids, cache, chunk)
    assert np.abs(found - expected).max() <= 2e-4  # also says that none is NaN
    assert tokens == naive_greedy(m, ids, NEW)
    # a token that the last query of two layers cannot reach changes nothing, one that
    # it can does
    for position, changes in ((100 - 2 * 15 - 2, False), (100 - 2 * 15 - 1, True)):
        touched = [*ids]
        touched[position] = 98
        logits = np.array(m(mx.array([touched]), logits_to_keep=1)[0, -1])
        assert (np.abs(logits - expected[-1]).max() > 2e-5) == changes
