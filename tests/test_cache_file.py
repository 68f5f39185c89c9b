"""Saved caches: exact in another process, whole at every moment, refused by name."""

import hashlib
import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import saved_caches
from oracle import model, naive_greedy, random_model
from saved_caches import (
    CASES,
    LLAMA,
    LONG,
    MISTRAL,
    MIXED,
    NEW,
    PACKED,
    SHORT,
    model_of,
    prompt,
    rest,
)

import tiny_llm
from tiny_llm import load_kv_cache, save_kv_cache, stream_generate
from tiny_llm.cache import rewind
from tiny_llm.cache_file import inspect
from tiny_llm.errors import (
    CacheFileError,
    CorruptFileError,
    LoadError,
    OutOfPagesError,
    ParameterError,
)
from tiny_llm.models.identity import identity

PROGRAM = [sys.executable, saved_caches.__file__]


def filled(m, kind="dense", tokens=SHORT, **options):
    """A cache of the first tokens of the prompt."""
    cache = m.create_kv_cache(kind, **options)
    for _ in stream_generate(m, prompt(tokens), max_new_tokens=0, cache=cache):
        pass
    return cache


def beginning(tokens):
    """The part of the prompt that is cached before `rest`."""
    return prompt(tokens + 17)[:tokens]


@pytest.fixture
def saved(tmp_path):
    """The model of LLAMA, and the file of a dense cache of 20 tokens."""
    m, path = model(LLAMA), tmp_path / "saved.kv"
    save_kv_cache(path, m, filled(m, tokens=20), prompt(20), notes={"for": "tests"})
    return m, path


# --- exactness


@pytest.fixture(scope="module")
def in_another_process(tmp_path_factory):
    """What all kinds yield when they go on here, and in a process that loads them."""
    folder, expected = tmp_path_factory.mktemp("saved"), {}
    for name, (variant, kind, options) in CASES.items():
        for tokens in (SHORT, LONG):
            m = model_of(variant)
            cache, ids = m.create_kv_cache(kind, **options), beginning(tokens)
            list(stream_generate(m, ids, max_new_tokens=0, cache=cache))
            save_kv_cache(folder / f"{name}@{tokens}.kv", m, cache, ids)
            expected[f"{name}@{tokens}"] = rest(m, cache, tokens)
    done = subprocess.run(
        [*PROGRAM, "go-on", str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return expected, json.loads(done.stdout), folder


@pytest.mark.parametrize("tokens", [SHORT, LONG])
@pytest.mark.parametrize("name", CASES)
def test_it_goes_on_in_another_process_as_if_never_saved(
    in_another_process, name, tokens
):
    expected, found, _ = in_another_process
    assert len(expected[f"{name}@{tokens}"]) == NEW
    assert found[f"{name}@{tokens}"] == expected[f"{name}@{tokens}"]


@pytest.mark.parametrize("tokens", [SHORT, LONG])
@pytest.mark.parametrize("name", ["dense", "rotating-mixed", "paged-mixed"])
def test_it_goes_on_as_the_uncached_forward_pass(in_another_process, name, tokens):
    m = model_of(CASES[name][0])
    expected = naive_greedy(m, prompt(tokens + 17), NEW)
    assert in_another_process[1][f"{name}@{tokens}"] == expected


@pytest.mark.parametrize("name", CASES)
def test_only_the_tokens_held_are_in_the_file(in_another_process, name):
    variant, kind, options = CASES[name]
    config = model_of(variant).config
    bits = options.get("bits", 8 if kind == "quantized" else None)
    row = config.kv_shape(4).row_bytes(bits, options.get("group_size"))
    for tokens in (SHORT, LONG):
        rows = 0
        for own in config.windows:
            window = own if own is not None else options.get("window")
            keep = 0 if own is not None else options.get("keep", 0)
            if window is None or name == "dense-windows":
                rows += tokens
            else:
                # 64 more than the window, and whole pages
                held = min(tokens, keep + window - 1 + 64)
                surplus = tokens - held
                rows += tokens - surplus // options.get("page_size", 1) * options.get(
                    "page_size", 1
                )
        path = in_another_process[2] / f"{name}@{tokens}.kv"
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        assert path.stat().st_size - header == rows * row + 4 * tokens
        assert header < 4096


def test_half_precision_comes_back_bit_for_bit(tmp_path):
    for dtype in ("bfloat16", "float16"):
        m = tiny_llm.load_model(model_path(LLAMA), dtype=dtype)
        cache = filled(m, tokens=40)
        save_kv_cache(tmp_path / "x", m, cache, prompt(40))
        loaded = load_kv_cache(tmp_path / "x", m).cache
        for old, new in zip(cache, loaded, strict=True):
            for a, b in zip(old.held()[:2], new.held()[:2], strict=True):
                assert b[0].dtype == getattr(mx, dtype)
                assert mx.array_equal(a[0], b[0])
        assert inspect(tmp_path / "x").dtype == dtype


def model_path(variant):
    return Path(__file__).parent / "data" / variant


def test_a_loaded_cache_can_be_saved_rewound_and_saved_again(tmp_path):
    m, path = model(MISTRAL), tmp_path / "x"
    save_kv_cache(path, m, filled(m, "rotating", LONG), prompt(LONG))
    loaded = load_kv_cache(path, m)
    rewind(loaded.cache, LONG - 64)
    save_kv_cache(path, m, loaded.cache, prompt(LONG)[:-64])
    again = load_kv_cache(path, m)
    assert again.token_ids == prompt(LONG)[:-64]
    more = [7, 8]
    tokens = list(stream_generate(m, more, max_new_tokens=8, cache=again.cache))
    assert tokens == naive_greedy(m, [*prompt(LONG)[:-64], *more], 8)


def test_saving_leaves_the_cache_as_it_is(tmp_path):
    m = model(LLAMA)
    cache = filled(m, tokens=20)
    before = [entry.nbytes for entry in cache]
    save_kv_cache(tmp_path / "x", m, cache, prompt(20))
    assert [entry.nbytes for entry in cache] == before
    tokens = list(stream_generate(m, [7], max_new_tokens=8, cache=cache))
    assert tokens == naive_greedy(m, [*prompt(20), 7], 8)


def test_notes_and_ids_come_back(tmp_path):
    m = model(LLAMA)
    notes = {"text": "Grüße \U0001f44b\n\0", "": "\udcff", "long": "x" * 100_000}
    save_kv_cache(tmp_path / "x", m, filled(m), mx.array(prompt(SHORT)), notes=notes)
    loaded = load_kv_cache(tmp_path / "x", m)
    assert (loaded.token_ids, loaded.notes) == (prompt(SHORT), notes)


def test_reserve_is_room_for_new_tokens(saved):
    m, path = saved
    token = 2 * 2 * 16 * 4
    for reserve, capacity in ((None, 512), (0, 256), (300, 512), (10**9, 768)):
        (first, *_) = load_kv_cache(path, m, reserve=reserve).cache
        assert first.nbytes == capacity * token  # (a context of 512, and one more)


def test_the_file_is_a_safetensors_file(saved):
    from safetensors.numpy import load_file

    m, path = saved
    tensors = load_file(path)
    assert sorted(tensors) == [
        "layers.0.keys",
        "layers.0.values",
        "layers.1.keys",
        "layers.1.values",
        "token_ids",
    ]
    assert tensors["token_ids"].tolist() == prompt(20)
    keys = filled(m, tokens=20)[1].held().keys[0]
    assert np.array_equal(tensors["layers.1.keys"], np.array(keys))


def test_inspect_tells_what_a_file_is_without_a_model(saved):
    m, path = saved
    facts = inspect(path)
    assert facts.model == identity(m)
    assert facts.model["layers"] == 2
    assert facts[2:6] == ("dense", {}, "float32", 20)
    assert facts.bytes == path.stat().st_size
    assert facts.notes == {"for": "tests"}
    save_kv_cache(
        path, m, filled(m, "rotating", window=9, keep=2), prompt(SHORT), notes=None
    )
    assert inspect(path)[2:4] == ("rotating", {"window": 9, "keep": 2})


# --- a pool


def test_paged_caches_load_into_a_shared_pool_and_give_their_pages_back(tmp_path):
    m, path = model_of(MIXED), tmp_path / "x"
    source = m.create_page_pool(tokens=1024, page_size=16)
    save_kv_cache(path, m, filled(m, "paged", 70, pool=source), prompt(70))
    pool = m.create_page_pool(tokens=256, page_size=16)
    first, second = (load_kv_cache(path, m, pool=pool).cache for _ in range(2))
    in_use = pool.pages_in_use
    assert in_use == 2 * 2 * 5  # two caches, two groups of layers, 70 tokens
    for cache in (first, second):
        tokens = list(stream_generate(m, [7], max_new_tokens=9, cache=cache))
        assert tokens == naive_greedy(m, [*prompt(70), 7], 9)
    pool.check()
    del first, second, cache
    assert pool.pages_in_use == 0


def test_a_pool_without_room_is_as_before(tmp_path):
    m, path = model_of(MIXED), tmp_path / "x"
    pool = m.create_page_pool(tokens=96, page_size=16)
    cache = filled(m, "paged", 70, pool=pool)
    save_kv_cache(path, m, cache, prompt(70))
    in_use = pool.pages_in_use
    with pytest.raises(OutOfPagesError, match="5 more pages") as caught:
        load_kv_cache(path, m, pool=pool)
    assert pool.pages_in_use == in_use
    pool.check()
    del caught
    tokens = list(stream_generate(m, [7], max_new_tokens=9, cache=cache))
    assert tokens == naive_greedy(m, [*prompt(70), 7], 9)


def test_the_second_group_without_room_gives_back_the_first(tmp_path):
    m, path = model_of(MIXED), tmp_path / "x"
    pool = m.create_page_pool(tokens=160, page_size=16)
    save_kv_cache(path, m, filled(m, "paged", 70, pool=pool), prompt(70))
    pool.allocators[0].allocate(6)  # (of the layer that is restored last)
    free = [allocator.free for allocator in pool.allocators]
    assert free == [4, 10]
    with pytest.raises(OutOfPagesError, match="full attention") as caught:
        load_kv_cache(path, m, pool=pool)
    assert len(caught.traceback) > 1  # (the error holds on to the cache)
    assert [allocator.free for allocator in pool.allocators] == free
    pool.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 8}, "pages with.*'page_size': 8"),
        ({"page_size": 16, "bits": 8, "group_size": 32}, "'bits': 8"),
    ],
    ids=["page size", "bits"],
)
def test_a_pool_of_other_pages_is_refused(tmp_path, options, message):
    m, path = model_of(PACKED), tmp_path / "x"
    cache = filled(m, "paged", tokens=SHORT, pool=m.create_page_pool(**saved_pages()))
    save_kv_cache(path, m, cache, prompt(SHORT))
    with pytest.raises(CacheFileError, match=message):
        load_kv_cache(path, m, pool=m.create_page_pool(tokens=64, **options))


def saved_pages():
    return {"tokens": 64, "page_size": 16}


def test_a_pool_of_another_model_or_for_another_kind_is_refused(saved, tmp_path):
    m, path = saved
    pool = m.create_page_pool(**saved_pages())
    with pytest.raises(CacheFileError, match="holds a dense cache, but a paged one"):
        load_kv_cache(path, m, pool=pool)
    save_kv_cache(path, m, filled(m, "paged", pool=pool), prompt(SHORT))
    other = model_of(PACKED).create_page_pool(**saved_pages())
    with pytest.raises(ParameterError, match="the pool is for"):
        load_kv_cache(path, m, pool=other)
    with pytest.raises(ParameterError, match="a PagePool is needed"):
        load_kv_cache(path, m, pool=3)


# --- what a model is


def test_a_model_loaded_twice_is_the_same():
    again = tiny_llm.load_model(model_path(LLAMA))
    assert identity(again) == identity(model(LLAMA))
    assert identity(again)["fingerprint"] != identity(model(MISTRAL))["fingerprint"]


@pytest.mark.parametrize("quantize", [None, "4bit"])
def test_a_merge_into_any_single_matrix_changes_the_fingerprint(quantize):
    def packed():
        m = random_model(LLAMA, hidden_size=64)
        if quantize:
            from tiny_llm.quantize import quantize as pack

            pack(m, 4)
        return m

    m = packed()
    own = identity(m)["fingerprint"]
    changed = {own}
    paths = [
        path
        for path, module in m.named_modules()
        if getattr(module, "inputs", None) and path
    ]
    assert len(paths) == 2 * 4 + 1
    for path in paths:
        module = dict(m.named_modules())[path]
        old = module.scales if quantize else module.weight
        low_rank = mx.random.normal((old.shape[0], 1)) @ mx.random.normal(
            (1, old.shape[1])
        )
        new = old + 1e-3 * low_rank
        setattr(module, "scales" if quantize else "weight", new)
        changed.add(identity(m)["fingerprint"])
        setattr(module, "scales" if quantize else "weight", old)
    assert len(changed) == 1 + len(paths)
    assert identity(m)["fingerprint"] == own


def test_a_change_of_some_rows_and_columns_changes_the_fingerprint():
    m = random_model(LLAMA)
    own, weight = identity(m)["fingerprint"], m.layers[1].mlp.down_proj.weight
    for rows in (slice(0, 32), slice(32, 64)):
        for columns in (slice(0, 48), slice(48, 96)):
            changed = mx.array(weight)
            changed[rows, columns] = changed[rows, columns] * 1.001
            m.layers[1].mlp.down_proj.weight = changed
            assert identity(m)["fingerprint"] != own


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 20000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rms_norm_eps": 1e-6},
        {"max_position_embeddings": 256},
    ],
    ids=str,
)
def test_a_setting_changes_the_fingerprint(change):
    plain, changed = random_model(LLAMA), random_model(LLAMA, **change)
    a, b = identity(plain), identity(changed)
    assert a.pop("fingerprint") != b.pop("fingerprint")
    assert a == b


# --- refusals


def test_a_file_of_another_model_is_refused_and_says_whose_it_is(saved):
    _, path = saved
    with pytest.raises(CacheFileError, match=r"is for a llama model.*is a mistral mod"):
        load_kv_cache(path, model(MISTRAL))
    other = random_model(LLAMA)
    with pytest.raises(CacheFileError, match="other weights"):
        load_kv_cache(path, other)
    half = tiny_llm.load_model(model_path(LLAMA), dtype="float16")
    with pytest.raises(CacheFileError, match=r"float32.*float16: load it as float32"):
        load_kv_cache(path, half)


def test_a_file_of_another_kind_is_refused(saved):
    m, path = saved
    assert load_kv_cache(path, m, kind="dense").token_ids == prompt(20)
    with pytest.raises(CacheFileError, match="holds a dense cache, but a paged one"):
        load_kv_cache(path, m, kind="paged")


def forge(path, edit=None, data=None):
    """Change the header (and the data), with right checksums."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    metadata = header["__metadata__"]
    if edit is not None:
        edit(header, metadata)
    if data is not None:
        body = data(body)
    metadata["data_sha256"] = hashlib.sha256(body).hexdigest()
    metadata.pop("header_sha256", None)
    text = json.dumps(header, sort_keys=True).encode()
    metadata["header_sha256"] = hashlib.sha256(text).hexdigest()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def about(**changes):
    """An edit of the JSON about the cache."""

    def edit(header, metadata):
        metadata["cache"] = json.dumps({**json.loads(metadata["cache"]), **changes})

    return edit


def entry(name, **changes):
    def edit(header, metadata):
        header[name].update(changes)

    return edit


def drop(name):
    return lambda header, metadata: header.pop(name)


def meta(**changes):
    return lambda header, metadata: metadata.update(changes)


KEYS = "layers.0.keys"
FORGED = {
    "unchanged": (None, None),
    "newer version": (meta(version="2"), (CacheFileError, "version '2'.*reads ver")),
    "no version": (
        lambda h, m: m.pop("version"),
        (CacheFileError, "version None"),
    ),
    "not ours": (meta(format="pt"), (CacheFileError, "no cache that tiny_llm saved")),
    "a length that is not the ids'": (
        about(tokens=19),
        (CorruptFileError, "contradicts itself"),
    ),
    "beyond the context": (about(tokens=513), (CorruptFileError, "context is 512")),
    "tokens no number": (about(tokens="20"), (CorruptFileError, "no number")),
    "negative tokens": (about(tokens=-1), (CorruptFileError, "no number")),
    "no kind": (about(kind="x"), (CorruptFileError, "unknown cache kind")),
    "another kind": (about(kind="quantized"), (CorruptFileError, "cannot be packed")),
    "an option too many": (
        about(options={"bits": 8}),
        (CorruptFileError, "no option 'bits'"),
    ),
    "a page of no size": (
        about(kind="paged", options={"page_size": 0}),
        (CorruptFileError, "page_size must be"),
    ),
    "a huge option": (
        about(kind="paged", options={"page_size": 1 << 40}),
        (CorruptFileError, "no number"),
    ),
    "huge pages": (
        about(kind="paged", options={"page_size": (1 << 31) - 1}),
        (CorruptFileError, "pages of 2147483647 tokens"),
    ),
    "options no object": (about(options=[]), (CorruptFileError, "cannot be used")),
    "cache no JSON": (meta(cache="{"), (CorruptFileError, "cannot be used")),
    "model no object": (meta(model="[]"), (CorruptFileError, "cannot be used")),
    "notes no texts": (meta(notes='{"a": 1}'), (CorruptFileError, "cannot be used")),
    "metadata no texts": (meta(cache=7), (CorruptFileError, "cannot be used")),
    "a tensor less": (drop("token_ids"), (CorruptFileError, "bytes")),
    "a tensor of ours less": (drop(KEYS), (CorruptFileError, KEYS[:8])),
    "dtype": (entry(KEYS, dtype="I32"), (CorruptFileError, "is I32")),
    "unknown dtype": (entry(KEYS, dtype="F64"), (CorruptFileError, "entry of tensor")),
    "shape": (entry(KEYS, shape=[1, 2, 16, 20]), (CorruptFileError, "16 of 20 tok")),
    "heads": (entry(KEYS, shape=[1, 4, 20, 8]), (CorruptFileError, "keys is F32")),
    "dims": (entry(KEYS, shape=[2, 20, 16]), (CorruptFileError, "has no keys")),
    "empty": (
        entry(KEYS, shape=[1, 0, 20, 16], data_offsets=[0, 0]),
        (CorruptFileError, "entry of tensor"),
    ),
    "negative": (
        entry(KEYS, shape=[-1, -2, 20, 16]),
        (CorruptFileError, "entry of tensor"),
    ),
    "shape no list": (entry(KEYS, shape=7), (CorruptFileError, "entry of tensor")),
    "offsets": (
        entry(KEYS, data_offsets=[4, 2564]),
        (CorruptFileError, "entry of tensor"),
    ),
    "one more key": (entry(KEYS, x=1), (CorruptFileError, "entry of tensor")),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_file_that_contradicts_itself_is_refused(saved, name):
    m, path = saved
    edit, refused = FORGED[name]
    forge(path, edit)
    if refused is None:
        assert load_kv_cache(path, m).token_ids == prompt(20)
        return
    error, message = refused
    with pytest.raises(error, match=message) as caught:
        load_kv_cache(path, m)
    assert str(path) in str(caught.value)


def test_token_ids_outside_the_vocabulary_are_refused(saved):
    m, path = saved
    for token in (-1, m.config.vocab_size):
        replaced = int(token).to_bytes(4, "little", signed=True)
        forge(path, data=lambda body, ids=replaced: body[:-4] + ids)
        with pytest.raises(CorruptFileError, match="not in the vocabulary of 384"):
            load_kv_cache(path, m)


def test_windowed_pages_that_do_not_fit_are_refused(tmp_path):
    m, path = model(MISTRAL), tmp_path / "x"
    cache = filled(m, "paged", 20, pool=m.create_page_pool(**saved_pages()))
    save_kv_cache(path, m, cache, prompt(20))

    def lose_a_row(header, metadata):
        start = 0
        for name, spec in header.items():
            if name == "__metadata__":
                continue
            if "layers" in name:
                spec["shape"][2] = 19
            size = 4 * np.prod(spec["shape"])
            spec["data_offsets"] = [start, start := start + int(size)]

    forge(path, lose_a_row, data=lambda body: body[4 * 2 * 2 * 2 * 16 :])
    with pytest.raises(CorruptFileError, match="19 tokens, which are not whole pages"):
        load_kv_cache(path, m)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 500, -1])
def test_a_truncated_file_is_refused(saved, size):
    m, path = saved
    content = path.read_bytes()
    path.write_bytes(content[:size])
    for read in (inspect, lambda p: load_kv_cache(p, m)):
        with pytest.raises(CorruptFileError, match=re.escape(str(path))):
            read(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 100, b"\xff" * 100, b"{}" * 50, os.urandom(5000)],
    ids=["empty", "zeros", "ones", "text", "random"],
)
def test_garbage_is_refused(tmp_path, content):
    path = tmp_path / "garbage"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match=re.escape(str(path))):
        load_kv_cache(path, model(LLAMA))


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'"x"',
        b"{}",
        b'{"__metadata__": []}',
        b'{"__metadata__": {"format": "tiny_llm KV cache", "version": "1"}}',
        b"[" * 50_000 + b"]" * 50_000,
        b'{"__metadata__": {"format": "tiny_llm KV cache", "version": "1"}, "a": '
        + b"[" * 900
        + b"]" * 900
        + b"}",
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
    ids=range(8),
)
def test_a_strange_header_is_refused(tmp_path, header):
    path = tmp_path / "strange"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CorruptFileError, match=re.escape(str(path))):
        load_kv_cache(path, model(LLAMA))


def test_what_is_no_file_is_refused(tmp_path):
    m = model(LLAMA)
    with pytest.raises(CorruptFileError, match="missing"):
        load_kv_cache(tmp_path / "nothing", m)
    with pytest.raises(CorruptFileError, match="directory"):
        load_kv_cache(tmp_path, m)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptFileError, match="pipe"):
        load_kv_cache(tmp_path / "pipe", m)
    with pytest.raises(CacheFileError, match="not a regular file"):
        save_kv_cache(tmp_path / "pipe", m, filled(m), prompt(SHORT))
    with pytest.raises(
        CacheFileError, match=r"no cache that tiny_llm saved|no metadata"
    ):
        load_kv_cache(model_path(LLAMA) / "model.safetensors", m)


def test_damage_anywhere_is_found_or_harmless(tmp_path):
    m, path = model_of(PACKED), tmp_path / "x"
    cache = filled(m, "quantized", 6)
    save_kv_cache(path, m, cache, prompt(6), notes={"a": "b"})
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    expected = [np.array(a) for e in cache for rows in e.held()[:2] for a in rows]
    refused = same = 0
    for seed in range(600):
        rng = random.Random(seed)
        data = bytearray(whole)
        at = rng.randrange(len(data) if seed % 3 == 0 else header)
        match seed % 5:
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                del data[at : at + rng.randint(1, 40)]
            case 3:
                source = rng.randrange(len(data))
                data[at:at] = data[source : source + rng.randint(1, 40)]
            case 4:
                digits = [i for i in range(header) if chr(data[i]).isdigit()]
                data[rng.choice(digits)] = ord(rng.choice("0123456789"))
        path.write_bytes(data)
        try:
            loaded = load_kv_cache(path, m)
        except LoadError as error:
            refused += str(path) in str(error)
            continue
        found = [np.array(a) for e in loaded.cache for r in e.held()[:2] for a in r]
        assert all(map(np.array_equal, expected, found)), seed
        assert loaded[1:] == (prompt(6), {"a": "b"}), seed
        same += 1
    assert refused > 500
    assert same + refused == 600


def test_a_single_flipped_bit_of_the_data_is_found(saved):
    m, path = saved
    content = bytearray(path.read_bytes())
    content[-2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptFileError, match="its data are not as they were written"):
        load_kv_cache(path, m)


def test_a_single_other_letter_in_the_notes_is_found(saved):
    m, path = saved
    path.write_bytes(path.read_bytes().replace(b"tests", b"texts"))
    for read in (inspect, lambda p: load_kv_cache(p, m)):
        with pytest.raises(CorruptFileError, match="header is not as it was written"):
            read(path)


def test_a_file_cut_short_while_it_is_read_is_an_error_not_a_crash(saved, monkeypatch):
    from tiny_llm.tensor_file import TensorFile

    m, path = saved
    check = TensorFile.check_data

    def then_cut(self):
        check(self)
        os.truncate(self.path, self.size - 3000)

    monkeypatch.setattr(TensorFile, "check_data", then_cut)
    with pytest.raises(CorruptFileError, match="cut short while"):
        load_kv_cache(path, m)


# --- arguments


def test_what_does_not_belong_together_is_not_saved(tmp_path):
    m, path = model(LLAMA), tmp_path / "x"
    cache = filled(m, tokens=20)
    for arguments, message in (
        ((cache, prompt(19)), "19 token ids for a cache of 20"),
        ((cache, prompt(21)), "21 token ids for a cache of 20"),
        ((cache, [-1] * 20), "token_ids is"),
        ((cache, [384] * 20), "vocabulary of 384"),
        ((cache, [0.5] * 20), "token_ids is"),
        ((cache, "x" * 20), "token_ids is"),
        ((cache, None), "token_ids is"),
        ((cache[:1], prompt(20)), "1 entries, but the model 2 layers"),
        (([1, 2], prompt(20)), "create_kv_cache"),
        ((m.create_kv_cache(), [1]), "cache is empty"),
        (([cache[0], filled(m)[1]], prompt(20)), "layers hold \\[3, 20\\]"),
        ((filled(model_of(PACKED), tokens=20), prompt(20)), "not one of this model's"),
        (([cache[0], filled(m, "rotating", 20, window=30)[1]], prompt(20)), "kinds"),
    ):
        with pytest.raises(ParameterError, match=message):
            save_kv_cache(path, m, *arguments)
    for notes in ({"a": 1}, {1: "a"}, "text", ["a"]):
        with pytest.raises(ParameterError, match="notes is"):
            save_kv_cache(path, m, cache, prompt(20), notes=notes)
    save_kv_cache(path, m, cache, prompt(20))
    with pytest.raises(ParameterError, match="reserve must be"):
        load_kv_cache(path, m, reserve=-1)
    assert os.listdir(tmp_path) == ["x"]


def test_several_sequences_at_once_are_not_saved(tmp_path):
    m = model(LLAMA)
    cache = m.create_kv_cache()
    m(mx.array([prompt(5), prompt(5)]), cache=cache)
    with pytest.raises(ParameterError, match=r"\[2, 2, 5, 16\]"):
        save_kv_cache(tmp_path / "x", m, cache, prompt(5))


# --- written whole or not at all


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path):
    m, path = model(LLAMA), tmp_path / "saved.kv"
    lengths, rng = set(), random.Random(0)
    for _ in range(6):
        process = subprocess.Popen(
            [*PROGRAM, "keep-saving", str(path)], stdout=subprocess.PIPE
        )
        try:
            assert process.stdout.readline() == b"both are saved\n"
            time.sleep(rng.uniform(0, 0.05))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(60)
            process.stdout.close()
        ids = load_kv_cache(path, m).token_ids
        lengths.add(len(ids))
        assert ids == prompt(len(ids))
    assert lengths <= {20, 500}


@pytest.mark.parametrize("call", ["os.fsync", "os.replace", "numpy.ascontiguousarray"])
@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    saved, monkeypatch, call, error
):
    m, path = saved
    old = path.read_bytes()

    def fail(*arguments):
        raise error

    cache = filled(m)
    monkeypatch.setattr(call, fail)
    expected = CacheFileError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        save_kv_cache(path, m, cache, prompt(SHORT))
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path):
    m, path = model(LLAMA), tmp_path / "x"
    old = os.umask(0o027)
    try:
        save_kv_cache(path, m, filled(m), prompt(SHORT))
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_symlink_stays_one(saved, tmp_path):
    m, path = saved
    link = tmp_path / "link"
    link.symlink_to(path.name)
    save_kv_cache(link, m, filled(m), prompt(SHORT))
    assert link.is_symlink()
    assert load_kv_cache(path, m).token_ids == prompt(SHORT)


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    m = model(LLAMA)
    cache = filled(m)
    long = tmp_path / ("x" * 240)
    save_kv_cache(long, m, cache, prompt(SHORT))  # the temporary name is shorter
    for path in (tmp_path / "no" / "x", tmp_path / ("x" * 300), tmp_path):
        with pytest.raises(CacheFileError, match=re.escape(str(path))):
            save_kv_cache(path, m, cache, prompt(SHORT))
    with pytest.raises(CacheFileError, match="is no path"):
        save_kv_cache("a\0b", m, cache, prompt(SHORT))
    assert os.listdir(tmp_path) == [long.name]


def test_a_private_file_stays_private_and_a_read_only_one_stays(saved):
    m, path = saved
    cache = m.create_kv_cache()
    m(mx.array([[1, 2, 3]]), cache=cache)
    path.chmod(0o600)
    save_kv_cache(path, m, cache, [1, 2, 3])
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o400)
    before = path.read_bytes()
    with pytest.raises(CacheFileError, match="exists and is read-only"):
        save_kv_cache(path, m, cache, [1, 2, 3])
    assert path.read_bytes() == before
