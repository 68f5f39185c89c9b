"""What attention over a cache costs at least, computed: no measurement enters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tiny_llm.devices import DEVICES, Device
from tiny_llm.memory import KvShape
from tiny_llm.roofline import Bound, Work, bound

# Bytes of K and V that a step of our kernels loads / bytes of the live cache, as the
# emulator counts them (tests/test_kernels_traffic.py asserts at most 1.05).
TRAFFIC = 1.0
GROUP_SIZE = 64
KINDS = {"bf16": None, "int8": 8, "int4": 4}  # -> bits
CONTEXTS, BATCHES = (4096, 16384), (1, 8)


class Heads(NamedTuple):
    """Of a model: what attention sees; parameters that a step reads, head included."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    dim: int
    parameters: int


SMOLLM2 = Heads("SmolLM2-135M", 30, 9, 3, 64, 134_479_872)
QWEN3 = Heads("Qwen3-0.6B", 28, 16, 8, 128, 595_984_384)
LLAMA3 = Heads("Llama-3-8B", 32, 32, 8, 128, 7_504_658_432)
MODELS = (SMOLLM2, QWEN3, LLAMA3)


def row_bytes(model: Heads, bits: int | None, element_bytes: int = 2) -> int:
    """K and V of one token in one layer, scales and biases included."""
    shape = KvShape((None,), model.kv_heads, model.dim, element_bytes)
    return shape.row_bytes(bits, GROUP_SIZE if bits else None)


def attention_work(
    model: Heads,
    tokens: int,
    rows: int = 1,
    bits: int | None = None,
    element_bytes: int = 2,
) -> Work:
    """One layer's: `tokens` cached in all, read once; each meets `rows` queries."""
    read = round(TRAFFIC * tokens * row_bytes(model, bits, element_bytes))
    return Work(4 * model.heads * model.dim * tokens * rows, read)


def least_time(
    model: Heads, context: int, batch: int, bits: int | None, device: Device
) -> Bound:
    """A step's, for all layers."""
    layer = attention_work(model, context * batch, bits=bits)
    return bound(Work(model.layers * layer.flops, model.layers * layer.bytes), device)


def chips() -> Iterable[tuple[str, Device]]:
    """M1 to M4, those of one bandwidth together, and one of them."""
    known = [d for d in DEVICES if d.name[:2] in ("M1", "M2", "M3", "M4")]
    for bandwidth in sorted({d.bandwidth for d in known}):
        alike = [d for d in known if d.bandwidth == bandwidth]
        yield ", ".join(d.name for d in alike), alike[0]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown, numbers to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def figure(x: float) -> str:
    """Three digits that count, and no exponent unless it is tiny."""
    return f"{x:,.0f}" if x >= 99.95 else f"{x:#.3g}"


def step_table(model: Heads) -> str:
    """Milliseconds of a step's K/V reads, for each chip."""
    cases = [(c, b, kind) for c in CONTEXTS for b in BATCHES for kind in KINDS]
    head = ["ms a step", "GB/s"]
    head += [f"{c:,} x {b}, {kind}" for c, b, kind in cases]
    megabytes = ["MB read", ""]
    for context, batch, kind in cases:
        work = attention_work(model, context * batch, bits=KINDS[kind])
        megabytes.append(figure(model.layers * work.bytes / 1e6))
    rows = [megabytes]
    for names, device in chips():
        cells = [names, f"{device.bandwidth / 1e9:g}"]
        for context, batch, kind in cases:
            least = least_time(model, context, batch, KINDS[kind], device)
            cells.append(figure(least.seconds * 1e3))
        rows.append(cells)
    return table(head, rows)


def rotation_table(context: int = 4096) -> str:
    """What rotating q and k while k is written would save, one token a step, bf16."""
    rows = []
    for model in (SMOLLM2, QWEN3):
        # q and k need not be written once and read once more
        saved = model.layers * 2 * (model.heads + model.kv_heads) * model.dim * 2
        cache = model.layers * context * row_bytes(model, None)
        weights = 2 * model.parameters
        cells = [saved, cache, weights]
        share = f"{saved / (cache + weights):.3%}"
        rows.append([model.name, *(f"{x:,}" for x in cells), share])
    head = ["bytes a step", "saved", f"K/V read at {context:,}", "weights read"]
    return table([*head, "saved of the step"], rows)


def report() -> str:
    """Markdown, for kernels/README.md."""
    parts = [
        "**Computed, not measured.** Bytes of the live cache "
        f"({TRAFFIC:.2f} times: what the emulator counts) / published bandwidth "
        "(`tiny_llm/devices.py`): the least that reading K and V takes in a step, all "
        "layers. Context x requests, one row each; int8 and int4 in groups of "
        f"{GROUP_SIZE}, scales and biases included. "
        "The arithmetic takes less on every one of these chips.",
        "",
    ]
    for model in MODELS:
        shape = f"{model.layers} layers, {model.heads} query heads, "
        shape += f"{model.kv_heads} KV heads of {model.dim}"
        parts += [f"{model.name} ({shape}):", "", step_table(model)]
    parts += [
        "Rotating q and k in the launch that writes k, **computed**: one token a step, "
        "bf16. (One launch a layer is saved besides.)",
        "",
        rotation_table(),
    ]
    return "\n".join(parts)
