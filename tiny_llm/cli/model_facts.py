"""What `tiny-llm info` says about a model: read from its files and from the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import TokenizerError
from ..gguf_file import GGUFFile
from ..json_files import read_json
from ..layers import Linear, RMSNorm
from ..loader import load_model, load_tokenizer
from ..models import Decoder
from .model_size import count_parameters, layers_of


def model_facts(name: str, path: Path) -> dict[str, Any]:
    """The facts, in the order to show them. Raises as `load` does."""
    metadata: Mapping[str, Any] = {}
    if path.is_dir():
        settings = read_json(path / "config.json")
    else:
        file = GGUFFile(path)
        metadata, settings = file.metadata, file.config()
    model = load_model(path)
    config = model.config
    dtype = model.kv_dtype()
    per_token = config.layers * config.kv_shape(dtype.size).row_bytes()
    facts: dict[str, Any] = {"model": name, "path": str(path)}
    if metadata.get("general.name"):
        facts["name"] = metadata["general.name"]
    if metadata.get("general.license"):
        facts["licence"] = metadata["general.license"]
    facts |= {
        "architecture": config.model_type,
        "parameters": count_parameters(model),
        "stored_as": _stored_as(settings, metadata),
        "computed_in": _computed_in(model, dtype),
        "weight_bytes": sum(
            array.nbytes for module in layers_of(model) for array in _arrays_of(module)
        ),
        "layers": config.layers,
        "hidden_size": config.hidden_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "tied_embeddings": config.tied,
        "context": config.context_length,
        "sliding_windows": _windows(config.windows),
        "rope_scaling": _rope_scaling(settings),
        "kv_bytes_per_token": per_token,
    }
    return facts | _tokenizer_facts(path)


def _arrays_of(module: Linear | RMSNorm) -> list[mx.array]:
    return [value for value in module.values() if isinstance(value, mx.array)]


def _stored_as(settings: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    quantization = settings.get("quantization")
    if metadata:
        from gguf.constants import LlamaFileType

        try:
            kind = LlamaFileType(metadata["general.file_type"]).name
        except (KeyError, ValueError):
            return "GGUF"
        return "GGUF " + kind.replace("MOSTLY_", "").replace("ALL_", "")
    if isinstance(quantization, Mapping):
        bits, size = quantization.get("bits"), quantization.get("group_size")
        return f"safetensors, {bits} bits in groups of {size}"
    dtype = settings.get("dtype") or settings.get("torch_dtype")
    return f"safetensors, {dtype}" if dtype else "safetensors"


def _computed_in(model: Decoder, dtype: mx.Dtype) -> str:
    name = str(dtype).removeprefix("mlx.core.")
    packings = Counter(
        module.packing for module in layers_of(model) if isinstance(module, Linear)
    )
    packed = [
        f"{bits} bits in groups of {size}"
        for size, bits in sorted(key for key in packings if key is not None)
    ]
    return ", ".join([name, *packed])


def _windows(windows: tuple[int | None, ...]) -> str | None:
    counts = Counter(window for window in windows if window is not None)
    if not counts:
        return None
    total = len(windows)
    return ", ".join(
        f"{window} tokens in {count} of {total} layers"
        for window, count in sorted(counts.items())
    )


def _rope_scaling(settings: Mapping[str, Any]) -> str | None:
    scaling = settings.get("rope_parameters") or settings.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return None
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    factor = scaling.get("factor")
    return f"{kind}, factor {factor:g}" if factor is not None else str(kind)


def _tokenizer_facts(path: Path) -> dict[str, Any]:
    try:
        tokenizer = load_tokenizer(path)
    except TokenizerError as error:
        return {"tokenizer": f"cannot be used: {error}"}
    return {
        "tokenizer": f"{tokenizer.vocab_size} tokens",
        "bos": tokenizer.bos_token_id,
        "eos": sorted(tokenizer.eos_token_ids),
        "chat_template": tokenizer.has_chat_template,
    }
