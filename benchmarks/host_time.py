"""The host's share of a decoding step: building its graph, from the call to mx.eval.

    pip install -e '.[bench]' && python benchmarks/host_time.py

A device waits for the host if that needs longer for a step than the device does.
Measured is greedy decoding of 1 and 8 requests as on a GPU, in this one process, in
turn, 8 steps each: mlx-lm (its model, cache, log-probabilities and argmax, as its own
generator calls them; BatchKVCache from 2 requests on), and our engine's launch of a
step (page tables, positions, model, sampling), built anew each time, and compiled. For
ours that is the path with our Metal kernels. Without Metal their launches are counted
and not run: a stand-in of one operation takes their place; what is computed then means
nothing.

Each step is built 5 times, and computed once. The first time comes right after the
computation of the step before, which on a CPU leaves nothing of the host's data and
code in the processor's caches ("cold"); the other times find them there ("warm"), as
where another device computes.

MLX's own fused operations (RMS norm, RoPE, attention) are put together from up to 20
plain ones on the CPU. Two tables: as they are here; and as on Metal one operation each,
by a stand-in, in both engines.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import tiny_llm  # before mlx: it preloads the BLAS  # isort: skip

import mlx.core as mx

from tiny_llm import Engine, SamplingParams
from tiny_llm.kernels import metal

Step = Callable[[], list[float]]  # runs one; the milliseconds of building it, 5 times
TIMES = 5
PROMPT = 8
BLOCK = 8  # steps of one engine before the next one's turn, as an engine decodes
QWEN3 = {  # of Qwen3-0.6B
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "attention_bias": False,
}


def smollm2(folder: Path) -> None:
    """The default model as a float32 Hugging Face folder."""
    from tiny_llm.gguf_file import GGUFFile
    from tiny_llm.hub import find_model

    file = GGUFFile(find_model("smollm2"))
    config = file.config(keep_quantized=False)
    (folder / "config.json").write_text(json.dumps(config))
    weights = file.weights(keep_quantized=False)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def qwen3(folder: Path, changes: dict[str, Any] | None = None) -> None:
    """Random weights in the shape of Qwen3-0.6B."""
    c = {**QWEN3, **(changes or {})}
    (folder / "config.json").write_text(json.dumps(c))
    hidden, inner, dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    weights = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for layer in range(c["num_hidden_layers"]):
        front = f"model.layers.{layer}."
        weights |= {
            f"{front}self_attn.q_proj.weight": (q, hidden),
            f"{front}self_attn.k_proj.weight": (kv, hidden),
            f"{front}self_attn.v_proj.weight": (kv, hidden),
            f"{front}self_attn.o_proj.weight": (hidden, q),
            f"{front}mlp.gate_proj.weight": (inner, hidden),
            f"{front}mlp.up_proj.weight": (inner, hidden),
            f"{front}mlp.down_proj.weight": (hidden, inner),
        }
    arrays = {
        name: (0.02 * mx.random.normal(shape, key=mx.random.key(i))).astype(mx.bfloat16)
        for i, (name, shape) in enumerate(weights.items())
    }
    ones = {"model.norm.weight": hidden}
    for layer in range(c["num_hidden_layers"]):
        front = f"model.layers.{layer}."
        ones |= {
            f"{front}input_layernorm.weight": hidden,
            f"{front}post_attention_layernorm.weight": hidden,
            f"{front}self_attn.q_norm.weight": dim,
            f"{front}self_attn.k_norm.weight": dim,
        }
    arrays |= {name: mx.ones(size, mx.bfloat16) for name, size in ones.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)


MODELS: dict[str, Callable[[Path], None]] = {
    "SmolLM2-135M": smollm2,
    "Qwen3-0.6B's shape": qwen3,
}


def peer(model: Any, batch: int) -> Step:
    """mlx-lm's step."""
    from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

    cache = make_prompt_cache(model)
    if batch > 1:
        cache = [BatchKVCache([0] * batch) for _ in cache]
    y = mx.full((batch, PROMPT), 5, dtype=mx.int32)
    model(y, cache=cache)
    mx.eval([entry.state for entry in cache])
    y = y[:, 0]

    def build() -> tuple[mx.array, mx.array]:
        logits = model(y[:, None], cache=cache)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return mx.argmax(logprobs, axis=-1), logprobs

    def step() -> list[float]:
        nonlocal y
        before, spent = [dict(vars(entry)) for entry in cache], []
        for _ in range(TIMES):
            for entry, was in zip(cache, before, strict=True):
                handles = {k: handle(v) for k, v in was.items()}
                vars(entry).update(handles)
            start = time.perf_counter()
            built = build()
            spent.append(1000 * (time.perf_counter() - start))
        y = built[0]
        mx.eval(built)
        return spent

    return step


def handle(value: Any) -> Any:
    """Of an array, another Python object: the first is not written to."""
    return mx.array(value) if isinstance(value, mx.array) else value


def ours(model: Any, batch: int, compiles: bool, steps: int) -> Step:
    """Our engine's step; only the launch is timed, not what schedules or reads it."""
    engine = Engine(
        model,
        max_batch=batch,
        kv_memory=batch * (steps + 256) * model.config.kv_shape(4).row_bytes()
        * len(model.layers),
        page_views=False,
        pipeline=False,
        compile_decode=compiles,
    )  # fmt: skip
    runner = engine._core.runner
    launch, spent = runner.launch, list[float]()

    def timed(*arguments: Any) -> Any:
        spent.clear()
        for turn in range(TIMES):
            rows = list(runner.pool.rows)
            start = time.perf_counter()
            launched = launch(*arguments)
            spent.append(1000 * (time.perf_counter() - start))
            if turn < TIMES - 1:
                launched.plan.undo()
                runner.pool.rows = rows
        return launched

    runner.launch = timed  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=steps + 96, ignore_eos=True)
    for number in range(batch):
        engine.submit([5 + number] * PROMPT, params)

    def step() -> list[float]:
        engine.step()
        return list(spent)

    for _ in range(16):  # the prompts; and until a step is worth compiling
        step()
    return step


class Launches:
    """In the place of mx.fast.metal_kernel: counts, and builds one operation."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, **_: Any) -> Callable[..., list[mx.array]]:
        """A kernel, which makes its outputs of zeros."""

        def launch(
            *, inputs: list[mx.array], output_shapes: Any, output_dtypes: Any, **_: Any
        ) -> list[mx.array]:
            self.count += 1
            pairs = zip(output_shapes, output_dtypes, strict=True)
            blank = [zeros(tuple(shape), dtype) for shape, dtype in pairs]
            return mx.depends(blank, inputs)

        return launch


@functools.cache
def zeros(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Made once, so that a stand-in is one operation."""
    made = mx.zeros(shape, dtype)
    mx.eval(made)
    return made


@contextmanager
def as_on_a_gpu(launches: Launches, one_operation: bool) -> Iterator[None]:
    """Our code takes the path of a GPU; see the two tables above."""
    with ExitStack() as stack:
        if not mx.metal.is_available():
            ours = [m for name, m in sys.modules.items() if name.startswith("tiny_llm")]
            for module in ours:
                for asked in ("on_gpu", "runs_on_metal"):
                    if hasattr(module, asked):
                        stack.enter_context(mock.patch.object(module, asked, _yes))
            stack.enter_context(mock.patch.object(mx.fast, "metal_kernel", launches))
        metal.forget()
        stack.callback(metal.forget)
        if one_operation:
            for name, stand_in in STAND_INS.items():
                stack.enter_context(mock.patch.object(mx.fast, name, stand_in))
        yield


def _yes(*_: Any) -> bool:
    return True


def _rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    # (zeros: numbers that nobody normalises would soon be none)
    return mx.depends([zeros(x.shape, x.dtype)], [x, weight])[0]


def _rope(x: mx.array, dims: int, *, offset: Any, freqs: Any = None, **_: Any) -> Any:
    others = [other for other in (offset, freqs) if isinstance(other, mx.array)]
    return mx.depends([x], others)[0]


def _attention(q: mx.array, k: mx.array, v: mx.array, **_: Any) -> mx.array:
    return mx.depends([q], [k, v])[0]


STAND_INS = {
    "rms_norm": _rms_norm,
    "rope": _rope,
    "scaled_dot_product_attention": _attention,
}


def measure(
    model: Any, other: Any, batch: int, steps: int, one_operation: bool
) -> tuple[dict[str, tuple[float, float]], int]:
    """Medians in ms, cold and warm, by engine; our launches in a step that is built."""
    launches = Launches()
    with as_on_a_gpu(launches, one_operation):
        runs = {
            "mlx-lm": peer(other, batch),
            "built": ours(model, batch, False, steps),
            "compiled": ours(model, batch, True, steps),
        }
        before = launches.count
        runs["built"]()
        count = (launches.count - before) // TIMES
        times: dict[str, list[list[float]]] = {name: [] for name in runs}
        for _ in range(0, steps, BLOCK):
            for name, step in runs.items():
                times[name] += [step() for _ in range(BLOCK)]
    medians = {
        name: (
            statistics.median(first for first, *_ in spent),
            statistics.median(x for _, *rest in spent for x in rest),
        )
        for name, spent in times.items()
    }
    return medians, count


def rows(maker: Callable[[Path], None], name: str, steps: int) -> dict[bool, list[str]]:
    """The lines of both tables for a model."""
    from mlx_lm.utils import load_model

    with tempfile.TemporaryDirectory() as folder:
        maker(Path(folder))
        model = tiny_llm.load_model(folder)
        other, _ = load_model(Path(folder))
        other.apply(lambda x: x.astype(mx.float32))
        mx.eval(other.parameters())
    found: dict[bool, list[str]] = {False: [], True: []}
    for batch in (1, 8):
        for one_operation, lines in found.items():
            spent, count = measure(model, other, batch, steps, one_operation)
            for place, caches in enumerate(("cold", "warm")):
                theirs, built, compiled = (each[place] for each in spent.values())
                lines.append(
                    f"| {name} | {batch} | {caches} | {theirs:.2f} | {built:.2f} | "
                    f"{built / theirs:.2f} | {compiled:.2f} | {compiled / theirs:.2f} "
                    f"| {count or 'not counted'} |"
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps")
    args = parser.parse_args()
    makers = {name: MODELS[name] for name in args.models}
    steps = BLOCK if args.quick else args.steps
    if args.quick:
        small = {"vocab_size": 512, "num_hidden_layers": 2, "intermediate_size": 256}
        makers = {"tiny": lambda folder: qwen3(folder, small)}
    where = "Metal" if mx.metal.is_available() else "no Metal: launches are not run"
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, "
        f"Python {platform.python_version()}, mlx {version('mlx')}, "
        f"mlx-lm {version('mlx-lm')}; {where}; medians of {steps} steps, ms"
    )
    found = [rows(maker, name, steps) for name, maker in makers.items()]
    for one_operation, title in (
        (False, "MLX's fused operations as this device has them"),
        (True, "MLX's fused operations as one operation each, in both engines"),
    ):
        print(
            f"\n{title}\n\n| model | batch | caches | mlx-lm | built | ratio | ", end=""
        )
        print("compiled | ratio | launches |\n|---|---|---|---|---|---|---|---|---|")
        print("\n".join(line for lines in found for line in lines[one_operation]))
    print(f"\nload afterwards {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()
