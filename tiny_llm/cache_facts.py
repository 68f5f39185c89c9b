"""What a saved cache says about itself, and whether that is what is needed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import CacheFileError, CorruptFileError, ParameterError
from .models import Decoder
from .models.identity import identity
from .tensor_file import TensorFile

FORMAT, VERSION = "tiny_llm KV cache", 1


class CacheFacts(NamedTuple):
    """The metadata of a file. dtype: of keys and values before any packing.

    model: see models/identity.py. options: those of create_kv_cache. bytes: of the
    whole file.
    """

    version: int
    model: dict[str, Any]
    kind: str
    options: dict[str, int]
    dtype: str
    tokens: int
    bytes: int
    notes: dict[str, str]


def make_metadata(
    model: Decoder,
    kind: str,
    options: Mapping[str, int],
    tokens: int,
    notes: Mapping[str, str],
) -> dict[str, str]:
    """The metadata to save. Raises ParameterError for notes that are no texts."""
    about = {
        "kind": kind,
        "options": dict(options),
        "dtype": _dtype(model),
        "tokens": tokens,
    }
    return {
        "format": FORMAT,
        "version": str(VERSION),
        "cache": json.dumps(about),
        "model": json.dumps(identity(model)),
        "notes": json.dumps(_checked_notes(notes)),
    }


def read_facts(file: TensorFile) -> CacheFacts:
    """The metadata. Raises CacheFileError or CorruptFileError."""
    if file.metadata.get("format") != FORMAT:
        raise CacheFileError(f"{file.path} is no cache that tiny_llm saved")
    version = file.metadata.get("version")
    if version != str(VERSION):
        raise CacheFileError(
            f"{file.path} has version {version!r} of the format, but this tiny_llm "
            f"reads version {VERSION}: save the cache anew, or update tiny_llm"
        )
    file.check_header()
    try:
        about, model, notes = (
            json.loads(file.metadata[name]) for name in ("cache", "model", "notes")
        )
        return CacheFacts(
            VERSION,
            {**model},
            str(about["kind"]),
            {name: _small(value) for name, value in about["options"].items()},
            str(about["dtype"]),
            _small(about["tokens"]),
            file.size,
            _checked_notes(notes),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptFileError(
            f"{file.path} has metadata that cannot be used: {error!r}"
        ) from error


def _small(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(f"{value!r} is no number of tokens or bits")
    return value


def check_model(file: TensorFile, facts: CacheFacts, model: Decoder) -> None:
    """Raise CacheFileError unless the file is of this very model."""
    own = identity(model)
    other = {**facts.model, "fingerprint": own["fingerprint"]}
    if other != own:
        raise CacheFileError(
            f"{file.path} is for {_described(facts.model)}, but the model is "
            f"{_described(own)}"
        )
    if facts.dtype != _dtype(model):
        raise CacheFileError(
            f"{file.path} holds keys of {facts.dtype}, but the model computes in "
            f"{_dtype(model)}: load it as {facts.dtype} (dtype)"
        )
    if facts.model != own:
        raise CacheFileError(
            f"{file.path} is for {_described(facts.model)} with other weights, another "
            f"quantisation or other settings (such as RoPE) than those of the model"
        )
    if facts.tokens > model.config.context_length:
        raise CorruptFileError(
            f"{file.path} has {facts.tokens} tokens, but the model's context is "
            f"{model.config.context_length} tokens"
        )


def check_kind(file: TensorFile, facts: CacheFacts, kind: str | None) -> None:
    """Raise CacheFileError unless the file's cache is of the kind asked for."""
    if kind not in (None, facts.kind):
        raise CacheFileError(
            f"{file.path} holds a {facts.kind} cache, but a {kind} one is asked for"
        )


def _described(model: Mapping[str, Any]) -> str:
    """A model in the words of an error message."""
    sizes = ("layers", "hidden_size", "heads", "kv_heads", "head_dim", "vocab_size")
    listed = ", ".join(f"{name} {model.get(name)}" for name in sizes)
    return f"a {model.get('model_type')} model ({listed})"


def _checked_notes(notes: Mapping[str, str]) -> dict[str, str]:
    found = dict(notes) if isinstance(notes, Mapping) else {None: None}
    if not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise ParameterError(f"notes is {notes!r:.60}; a dict of strings is needed")
    return found


def _dtype(model: Decoder) -> str:
    return str(model.kv_dtype()).removeprefix("mlx.core.")
