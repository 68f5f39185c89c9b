"""Goes on from saved caches, or saves them again and again; a program of its own.

python saved_caches.py go-on FOLDER      the tokens after each FOLDER/*.kv, as JSON
python saved_caches.py keep-saving FILE  until it is killed
"""

import itertools
import json
import random
import sys
from pathlib import Path

from oracle import model, random_model

from tiny_llm import load_kv_cache, save_kv_cache, stream_generate

LLAMA, MISTRAL = "llama_tied", "mistral_swa"
MIXED = "qwen3_mixed"  # a sliding layer (window 9) and one with full attention
PACKED = "llama_packed"  # heads of 64 numbers
NEW = 16
SHORT, LONG = 3, 150  # tokens, of which LONG is beyond all windows and what they keep
WINDOW = {"window": 20}
KEEP = {"window": 20, "keep": 4}
PAGES = {"tokens": 400, "page_size": 16}
CASES = {
    "dense": (LLAMA, "dense", {}),
    "dense-windows": (MISTRAL, "dense", {}),
    "quantized-8": (PACKED, "quantized", {}),
    "quantized-4": (PACKED, "quantized", {"bits": 4, "group_size": 32}),
    "rotating": (MISTRAL, "rotating", {}),
    "rotating-mixed": (MIXED, "rotating", {}),
    "rotating-mixed-4": (MIXED, "rotating", {"bits": 4}),
    "rotating-window": (LLAMA, "rotating", WINDOW),
    "rotating-keep": (LLAMA, "rotating", KEEP),
    "rotating-keep-8": (PACKED, "rotating", {**KEEP, "bits": 8}),
    "rotating-mixed-keep": (MIXED, "rotating", KEEP),
    "paged": (LLAMA, "paged", PAGES),
    "paged-windows": (MISTRAL, "paged", PAGES),
    "paged-mixed": (MIXED, "paged", PAGES),
    "paged-mixed-8": (MIXED, "paged", {**PAGES, "bits": 8}),
}


def model_of(name):
    if name == MIXED:
        return random_model(
            "qwen3",
            use_sliding_window=True,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention"],
            head_dim=64,
        )
    if name == PACKED:
        return random_model(LLAMA, head_dim=64)
    return model(name)


def prompt(tokens):
    return random.Random(tokens).choices(range(5, 300), k=tokens)


def rest(m, cache, tokens):
    """The greedy tokens after 17 more of the prompt of which `tokens` are cached."""
    more = prompt(tokens + 17)[tokens:]
    return list(stream_generate(m, more, max_new_tokens=NEW, cache=cache))


def go_on(folder):
    found = {}
    for file in sorted(folder.glob("*.kv")):
        name, tokens = file.stem.split("@")
        m = model_of(CASES[name][0])
        found[file.stem] = rest(m, load_kv_cache(file, m).cache, int(tokens))
    print(json.dumps(found))


def keep_saving(path):
    """Two caches in turn, of different sizes."""
    m = model_of(LLAMA)
    caches = []
    for tokens in (20, 500):
        cache = m.create_kv_cache()
        ids = prompt(tokens)
        list(stream_generate(m, ids, max_new_tokens=0, cache=cache))
        caches.append((cache, ids))
    for count, (cache, ids) in enumerate(itertools.cycle(caches)):
        save_kv_cache(path, m, cache, ids)
        if count == 1:
            print("both are saved", flush=True)


if __name__ == "__main__":
    {"go-on": go_on, "keep-saving": keep_saving}[sys.argv[1]](Path(sys.argv[2]))
