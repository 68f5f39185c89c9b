"""`tiny-llm cache`: the beginning of a prompt, computed once and kept in a file."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from ..cache import rewind
from ..cache_facts import CacheFacts
from ..cache_file import SavedCache, inspect, load_kv_cache, save_kv_cache
from ..conversation import common_beginning
from ..errors import CacheFileError, ParameterError, PromptError
from ..generation import stream_generate
from ..models import Decoder
from ..progress import Progress, progress_bar
from ..tensor_file import check_replaceable
from ..text import TextStream, encode_prompt, stream_text
from ..tokenizer import Tokenizer
from . import INTERRUPTED
from .arguments import DEFAULT_MODEL
from .options import (
    as_messages,
    check_text,
    is_chat,
    load_from,
    read_stdin,
    sampler_of,
    stops_of,
)
from .output import show, statistics

_MODEL_OPTIONS = ("model", "revision", "dtype", "quantize")
# How a text may go on: its last token may be another one then.
_CONTINUATIONS = ("x", " x")


def run(args: Namespace) -> int:
    """Run the command of the command; returns the exit status."""
    return {"make": _make, "use": _use, "show": _show}[args.action](args)


def _make(args: Namespace) -> int:
    path = Path(args.file)
    _check_target(path, args.force)
    text = _text_of(args.text or "", "TEXT")
    system = args.system and check_text(args.system, "--system")
    model, tokenizer = load_from(args)
    notes = {"text": text, "mode": "chat" if is_chat(args, tokenizer) else "raw"}
    if system is not None:
        notes["system"] = system
    for name in _MODEL_OPTIONS:
        if getattr(args, name) is not None:
            notes[name] = getattr(args, name)
    if args.model != DEFAULT_MODEL and Path(args.model).expanduser().exists():
        notes["model"] = str(Path(args.model).expanduser().absolute())
    ids = _beginning(tokenizer, notes)
    cache = model.create_kv_cache(args.kind, **_options(args, model, len(ids)))
    with progress_bar("Reading the text") as progress:
        for _ in stream_generate(
            model,
            ids,
            max_new_tokens=0,
            cache=cache,
            prefill_chunk=args.prefill_chunk,
            progress=progress,
        ):
            pass
    save_kv_cache(path, model, cache, ids, notes=notes)
    facts = inspect(path)
    print(f"{path}: {facts.tokens:,} tokens, {facts.bytes:,} bytes, {_layout(facts)}")
    return 0


def _use(args: Namespace) -> int:
    sampler, stops = sampler_of(args), stops_of(args)
    facts = inspect(args.file)
    if facts.notes.get("mode") not in ("chat", "raw") or "text" not in facts.notes:
        raise CacheFileError(
            f"{args.file} holds tokens but no text to go on from: it was not made by "
            f"`tiny-llm cache make`; load_kv_cache() reads it"
        )
    prompt = _text_of(args.prompt, "the prompt").removesuffix(
        "\n" if args.prompt == "-" else ""
    )
    model, tokenizer = load_from(_with_defaults(args, facts.notes))
    ids = _encode(tokenizer, facts.notes, prompt)
    saved = _load(args, facts, model, max(len(ids), facts.tokens) + args.max_new_tokens)
    reused = _reuse(saved, ids, args.file)

    def start(progress: Progress) -> TextStream:
        return stream_text(
            model,
            tokenizer,
            ids[reused:],
            max_new_tokens=args.max_new_tokens,
            sampler=sampler,
            stop=stops,
            cache=saved.cache,
            prefill_chunk=args.prefill_chunk,
            progress=progress,
        )

    shown = show(start)
    print(
        f"\nreused       {reused:6d} tokens, of {facts.tokens} in the file\n"
        f"{statistics(shown)}",
        file=sys.stderr,
    )
    return INTERRUPTED if shown.interrupted else 0


def _show(args: Namespace) -> int:
    facts = inspect(args.file)
    if args.json:
        print(json.dumps(facts._asdict(), indent=2, ensure_ascii=False))
        return 0
    lines: dict[str, Any] = {
        "format version": facts.version,
        "model": facts.notes.get("model", "(not noted)"),
        "architecture": facts.model.get("model_type"),
    }
    for name in ("layers", "heads", "kv_heads", "head_dim"):
        lines[name.replace("_", " ").replace("kv", "KV")] = facts.model.get(name)
    lines["fingerprint"] = str(facts.model.get("fingerprint"))[:16]
    lines["cache"] = _layout(facts)
    lines["dtype"] = facts.dtype
    lines["tokens"] = f"{facts.tokens:,}"
    lines["bytes"] = f"{facts.bytes:,}"
    for name in ("mode", "system", "text"):
        if name in facts.notes:
            value = facts.notes[name]
            lines[name] = value if len(value) <= 60 else f"{value[:60]}..."
            if name != "mode":
                lines[name] = json.dumps(lines[name], ensure_ascii=False)
    print("\n".join(f"{name:<20}{value}" for name, value in lines.items()))
    return 0


def _check_target(path: Path, force: bool) -> None:
    """Refuse, before the work, what could not be written after it."""
    if path.is_dir():
        raise CacheFileError(f"{path} is a folder; the name of a file is needed")
    if path.exists() and not force:
        raise CacheFileError(f"{path} exists already; --force replaces it")
    check_replaceable(path)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise CacheFileError(f"{path} cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise CacheFileError(f"{path} cannot be written: {folder} is read-only for you")


def _text_of(argument: str, what: str) -> str:
    return read_stdin() if argument == "-" else check_text(argument, what)


def _with_defaults(args: Namespace, notes: dict[str, str]) -> Namespace:
    """The model options given, and those with which the file was made for the rest."""
    chosen = {name: getattr(args, name) for name in _MODEL_OPTIONS}
    noted = {name: notes[name] for name in _MODEL_OPTIONS if name in notes}
    if args.model is not None:  # a revision is of one repository
        noted.pop("revision", None)
    given = {name: value for name, value in chosen.items() if value is not None}
    defaults = {"model": DEFAULT_MODEL, "dtype": "auto"}
    return Namespace(**{**chosen, **defaults, **noted, **given})


def _encode(tokenizer: Tokenizer, notes: dict[str, str], more: str) -> list[int]:
    """The ids of the whole prompt: the noted text and what follows it."""
    text = notes["text"] + more
    if notes["mode"] == "raw":
        return encode_prompt(tokenizer, text)
    return encode_prompt(tokenizer, as_messages(text, notes.get("system")))


def _beginning(tokenizer: Tokenizer, notes: dict[str, str]) -> list[int]:
    """The ids with which the text begins however it goes on."""
    first, *others = (_encode(tokenizer, notes, more) for more in _CONTINUATIONS)
    for other in others:
        first = first[: common_beginning(first, other)]
    if not first:
        raise PromptError(
            "the text is too short: none of its tokens is sure to stay when it goes on"
        )
    return first


def _options(args: Namespace, model: Decoder, tokens: int) -> dict[str, Any]:
    """Of create_kv_cache, for so many tokens."""
    given = {"bits": args.kv_bits, "window": args.window, "keep": args.keep}
    options = {name: n for name, n in given.items() if n is not None}
    if args.kind == "paged":
        return {"pool": _pool(model, tokens, args.prefill_chunk, options)}
    return {"reserve": min(tokens, model.config.context_length), **options}


def _pool(model: Decoder, tokens: int, chunk: int, options: dict[str, int]) -> Any:
    """The pages of one request. What is beyond the context is refused later."""
    tokens = min(tokens, model.config.context_length + 1)
    return model.create_page_pool(
        tokens=tokens, max_requests=1, max_append=chunk, **options
    )


def _load(
    args: Namespace, facts: CacheFacts, model: Decoder, tokens: int
) -> SavedCache:
    """The cache, with room for so many tokens."""
    pool = None
    if facts.kind == "paged":
        pool = _pool(model, tokens, args.prefill_chunk, facts.options)
    reserve = tokens - facts.tokens
    return load_kv_cache(args.file, model, pool=pool, reserve=reserve)


def _reuse(saved: SavedCache, ids: list[int], file: str) -> int:
    """Rewind the cache to what it has in common with the prompt; how many tokens."""
    reused = min(common_beginning(saved.token_ids, ids), len(ids) - 1)
    why = "" if reused else "the prompt begins otherwise"
    try:
        rewind(saved.cache, reused)
    except ParameterError as error:
        reused, why = 0, str(error)
        rewind(saved.cache, 0)
    if why:
        print(f"(nothing of {file} can be reused: {why})", file=sys.stderr)
    return reused


def _layout(facts: CacheFacts) -> str:
    settings = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in facts.options.items())
    return f"{facts.kind} ({settings})" if settings else facts.kind
