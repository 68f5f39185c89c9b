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


def naive_greedy(model, ids, n, create_cache=None):
    """The oracle of the exactness contract: the whole sequence anew at each step.

    create_cache: () -> a cache that stands for what a layout computes, new each time.
    """
    import mlx.core as mx

    ids = list(ids)
    for _ in range(n):
        cache = create_cache and create_cache()
        logits = model(mx.array([ids]), cache=cache, logits_to_keep=1)[0, -1]
        best, second = mx.sort(logits)[-2:][::-1].tolist()
        assert best - second > 1e-3, "no test of equality: the two best are too close"
        ids.append(mx.argmax(logits).item())
    return ids[len(ids) - n :]


def random_model(variant, seed=0, **changes):
    """A model of a variant's config.json with some keys changed, and random weights."""
    import mlx.core as mx

    from tiny_llm.config import ConfigReader
    from tiny_llm.json_files import read_json
    from tiny_llm.layers import Linear, RMSNorm
    from tiny_llm.models import build

    config = {**read_json(DATA / variant / "config.json"), **changes}
    model = build(ConfigReader(config, "random model"))
    draw = iter(mx.random.split(mx.random.key(seed), 1000))
    for _, module in model.named_modules():
        if isinstance(module, RMSNorm):
            module.weight = mx.random.uniform(0.5, 1.5, (module.dims,), key=next(draw))
        elif isinstance(module, Linear):
            shape = (module.outputs, module.inputs)
            scale = 2.0 * module.inputs**-0.5
            module.weight = scale * mx.random.normal(shape, key=next(draw))
            if module.has_bias:
                module.bias = 0.5 * mx.random.normal(shape[:1], key=next(draw))
    return model
