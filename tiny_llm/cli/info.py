"""`tiny-llm info`: what a model is, and what this machine computes with."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import Any

from ..hub import find_model
from .machine import machine_facts
from .model_facts import model_facts

Facts = dict[str, Any]

_LABELS = {
    "tiny_llm": "tiny_llm",
    "mlx": "MLX",
    "blas": "BLAS",
    "kv_heads": "KV heads",
    "kv_bytes_per_token": "KV bytes per token",
    "rope_scaling": "RoPE scaling",
    "bos": "BOS id",
    "eos": "EOS ids",
}


def run(args: Namespace) -> int:
    """Write the facts to stdout, as text or as JSON."""
    facts: Facts = {}
    if args.model is not None:
        path = find_model(args.model, revision=args.revision)
        facts["model"] = model_facts(args.model, path)
    facts["machine"] = machine_facts()
    if args.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        print("\n\n".join(_text(group) for group in facts.values()))
    return 0


def _text(facts: Facts) -> str:
    """One line per fact: its name and its value, in two columns."""
    lines = []
    for name, value in facts.items():
        label = _LABELS.get(name) or name.replace("_", " ")
        if name in ("kv_bytes_per_token", "weight_bytes", "parameters"):
            shown = f"{value:,}"
        else:
            shown = _shown(value)
        lines.append(f"{label:<20}{shown}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    return str(value)
