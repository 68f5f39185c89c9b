"""`tiny-llm generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from argparse import Namespace

from ..errors import ParameterError, PromptError
from ..progress import Progress
from ..text import Messages, TextStream, stream_text
from ..tokenizer import Tokenizer
from . import INTERRUPTED
from .options import check_text, load_from, sampler_of
from .output import show, statistics
from .parser import DEFAULT_PROMPT


def run(args: Namespace) -> int:
    """Write the answer to stdout and the statistics to stderr."""
    sampler = sampler_of(args)  # before the model: it fails in no time
    text = _read_prompt(args.prompt)
    model, tokenizer = load_from(args)
    prompt = _as_asked(text, args, tokenizer)

    def start(progress: Progress) -> TextStream:
        return stream_text(
            model,
            tokenizer,
            prompt,
            max_new_tokens=args.max_new_tokens,
            sampler=sampler,
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
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text: {error}") from error
    return text.removesuffix("\n")  # `echo` ends every text with one


def _as_asked(text: str, args: Namespace, tokenizer: Tokenizer) -> str | Messages:
    """The prompt as text to continue, or as the messages of a chat."""
    if args.raw or not (args.chat or tokenizer.has_chat_template):
        if args.system is not None:
            raise ParameterError(
                f"--system needs a chat, but {args.model!r} has no chat template"
            )
        return text
    messages = [{"role": "user", "content": text}]
    if args.system is not None:
        messages.insert(
            0, {"role": "system", "content": check_text(args.system, "--system")}
        )
    return messages
