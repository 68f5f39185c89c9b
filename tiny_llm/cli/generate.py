"""`tiny-llm generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from argparse import Namespace

from ..progress import Progress
from ..text import Messages, TextStream, stream_text
from . import INTERRUPTED
from .options import (
    as_messages,
    check_text,
    is_chat,
    load_from,
    packed_cache,
    read_stdin,
    sampler_of,
    stops_of,
    template_options_of,
)
from .output import show, statistics
from .parser import DEFAULT_PROMPT


def run(args: Namespace) -> int:
    """Write the answer to stdout and the statistics to stderr."""
    # before the model: they fail in no time
    sampler, stops = sampler_of(args), stops_of(args)
    text = _read_prompt(args.prompt)
    model, tokenizer = load_from(args)
    template_options = template_options_of(args, tokenizer)
    prompt: str | Messages = text
    if is_chat(args, tokenizer):
        system = args.system and check_text(args.system, "--system")
        prompt = as_messages(text, system)

    def start(progress: Progress) -> TextStream:
        return stream_text(
            model,
            tokenizer,
            prompt,
            max_new_tokens=args.max_new_tokens,
            sampler=sampler,
            stop=stops,
            template_options=template_options,
            cache=None if args.kv_bits is None else packed_cache(args, model),
            prefill_chunk=args.prefill_chunk,
            progress=progress,
        )

    shown = show(start)
    print(f"\n{statistics(shown)}", file=sys.stderr)
    return INTERRUPTED if shown.interrupted else 0


def _read_prompt(prompt: str | None) -> str:
    if prompt is None:
        print(f"(no prompt given: {DEFAULT_PROMPT!r})", file=sys.stderr)
        return DEFAULT_PROMPT
    if prompt != "-":
        return check_text(prompt, "the prompt")
    return read_stdin().removesuffix("\n")  # `echo` ends every text with one
