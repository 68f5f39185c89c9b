"""`tiny-llm plan`: what fits into a memory, and how fast it could be, computed."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from ..devices import GIB
from .plan_facts import plan_facts

Facts = dict[str, Any]
_PLAN_NAMES = ["fits", "batch", "context", "ms/step", "tokens/s", "limit", "prompt s"]


def run(args: Namespace) -> int:
    """Write the plan to stdout, as tables or as JSON."""
    facts = plan_facts(args)
    if args.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        devices = _one_device if args.device is not None else _all_devices
        print("\n\n".join([_head(facts), _kv(facts), devices(facts)]))
    return 0


def _head(facts: Facts) -> str:
    weights, batch = facts["weights"], facts["batch"]
    plural = "" if batch == 1 else "s"
    return "\n".join(
        [
            f"{facts['model']} ({facts['architecture']})",
            f"{facts['parameters']:,} parameters, {_size(weights['bytes'])} "
            f"({weights['stored_as']})",
            f"{batch:,} conversation{plural} of {facts['context']:,} tokens; all "
            f"figures are computed, none is measured",
        ]
    )


def _kv(facts: Facts) -> str:
    layouts = list(facts["kv"][0]["bytes"])
    names = ["KV bits", "per token", *layouts, "with weights", "decode", "prompt"]
    rows = [
        [
            str(kv["bits"]),
            _size(kv["bytes_per_token"]),
            *(_size(kv["bytes"][layout]) for layout in layouts),
            _size(kv["bytes_with_weights"]),
            f"{kv['decode_intensity']:,.3g}",
            f"{kv['prefill_intensity']:,.0f}",
        ]
        for kv in facts["kv"]
    ]
    lines = ["KV caches, and the FLOP/byte of a decode step and of reading one prompt"]
    lines += _table(names, rows)
    if facts["not_packed"]:
        lines.append(f"no 8 or 4 bits: {facts['not_packed']}")
    return "\n".join(lines)


def _all_devices(facts: Facts) -> str:
    bits = facts["kv"][0]["bits"]
    within = "3/4 of each chip's largest memory"
    if facts["memory"] is not None:
        within = f"at most {_size(facts['memory'])}"
    rows = [
        [
            device["name"],
            f"{device['memory_for_plan'] / GIB:,.4g}",
            *_plan_cells(device["plans"][0]),
        ]
        for device in facts["devices"]
    ]
    lines = [
        f"Weights and paged {bits}-bit caches in {within}, times at best",
        *_table(["chip", "GiB", *_PLAN_NAMES], rows),
        *_legend(facts),
    ]
    if len(facts["kv"]) > 1:
        lines.append(
            "--kv-bits or --device NAME shows smaller caches, --json everything"
        )
    return "\n".join(lines)


def _one_device(facts: Facts) -> str:
    (device,) = facts["devices"]
    rows = [[str(plan["kv_bits"]), *_plan_cells(plan)] for plan in device["plans"]]
    speed = f"{device['name']}: {device['bandwidth'] / 1e9:,.4g} GB/s"
    if device["flops"] is not None:
        speed += (
            f", {device['flops'] / 1e12:,.3g} TFLOP/s in float32; ridge point "
            f"{device['ridge']:,.3g} FLOP/byte"
        )
    return "\n".join(
        [
            speed,
            device["source"],
            f"Weights and paged caches in {_size(device['memory_for_plan'])}, times at "
            f"best",
            *_table(["KV bits", *_PLAN_NAMES], rows),
            *_legend(facts),
        ]
    )


def _plan_cells(plan: Facts) -> list[str]:
    cells = [
        "yes" if plan["fits"] else "no",
        f"{plan['largest_batch']:,}",
        f"{plan['largest_context']:,}",
    ]
    if not plan["fits"]:
        return [*cells, *"----"]
    prompt = plan["prefill_seconds"]
    return [
        *cells,
        _number(plan["decode_seconds"] * 1e3),
        _number(plan["decode_tokens_per_second"]),
        plan["decode_limit"],
        "-" if prompt is None else _number(prompt),
    ]


def _legend(facts: Facts) -> list[str]:
    return [
        f"batch: the most conversations of {facts['context']:,} tokens; context: the "
        f"most tokens for {facts['batch']:,}",
        "ms/step: a token for each conversation; prompt s: to read one conversation",
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _size(size: int) -> str:
    """Bytes in the unit that suits: KiB, MiB or GiB."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 1024:,.4g} KiB"


def _table(names: list[str], rows: list[list[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    cells = [names, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    lines = []
    for row in cells:
        right = zip(row[1:], widths[1:], strict=True)
        columns = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in right)]
        lines.append("  ".join(columns))
    return lines
