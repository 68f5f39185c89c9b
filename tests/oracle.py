"""The reference data in tests/data: tiny checkpoints and what they must compute."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

import tiny_llm

DATA = Path(__file__).parent / "data"
VARIANTS = (
    "llama_tied",
    "llama_llama3rope_bias",
    "llama_yarn",
    "mistral_swa",
    "qwen2",
    "qwen3",
)


class Golden(NamedTuple):
    """One prompt of a variant: its logits [L, V] and the 24 greedy tokens after it."""

    ids: list[int]
    logits: np.ndarray
    greedy: list[int]
    last_logits: np.ndarray


@cache
def model(variant):
    return tiny_llm.load_model(DATA / variant)


@cache
def goldens(variant):
    arrays = np.load(DATA / variant / "golden.npz")
    return [
        Golden(
            arrays[f"p{i}_ids"].tolist(),
            arrays[f"p{i}_logits"],
            arrays[f"p{i}_greedy"].tolist(),
            arrays[f"p{i}_last_logits"],
        )
        for i in range(3)
    ]


@cache
def smollm2_cases():
    return json.loads((DATA / "smollm2" / "goldens.json").read_text())["cases"]


def naive_greedy(model, ids, n):
    """The oracle of the exactness contract: the whole sequence anew at each step."""
    import mlx.core as mx

    ids = list(ids)
    for _ in range(n):
        logits = model(mx.array([ids]), logits_to_keep=1)
        ids.append(mx.argmax(logits[0, -1]).item())
    return ids[len(ids) - n :]
