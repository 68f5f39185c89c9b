"""From parsed arguments to a model, a sampler and a prompt, alike in all commands."""

from __future__ import annotations

import sys
from argparse import Namespace

from ..cache import KvCache
from ..errors import ParameterError, PromptError
from ..loader import Loaded, load
from ..models import Decoder
from ..sampling import Sampler, make_sampler
from ..stop_strings import checked_stops
from ..text import Messages
from ..tokenizer import Tokenizer

# What chat templates call the switch: Qwen3, SmolLM3 and GLM-4.5; DeepSeek-V3.1 and
# Granite 3.2. (docs.vllm.ai, "Reasoning Outputs")
_THINKING = ("enable_thinking", "thinking")


def sampler_of(args: Namespace) -> Sampler:
    """The sampler that the options describe. Raises ParameterError."""
    return make_sampler(
        args.temperature,
        top_k=0 if args.top_k is None else args.top_k,
        top_p=1.0 if args.top_p is None else args.top_p,
        min_p=0.0 if args.min_p is None else args.min_p,
        seed=args.seed,
    )


def load_from(args: Namespace) -> Loaded:
    """The model and tokenizer that the options name. Raises as loader.load."""
    return load(
        args.model,
        revision=args.revision,
        dtype=args.dtype,
        quantize=args.quantize,
    )


def packed_cache(args: Namespace, model: Decoder) -> list[KvCache]:
    """An empty cache of --kv-bits; layers with a window hold that alone."""
    kind = "rotating" if any(model.config.windows) else "quantized"
    return model.create_kv_cache(kind, bits=args.kv_bits)


def stops_of(args: Namespace) -> tuple[str, ...]:
    """The texts of --stop. Raises ParameterError or PromptError."""
    return checked_stops([check_text(stop, "--stop") for stop in args.stop], "--stop")


def template_options_of(args: Namespace, tokenizer: Tokenizer) -> dict[str, bool]:
    """What --think and --no-think tell the chat template.

    Raises ParameterError for a template that does not let one choose.
    """
    if args.think is None:
        return {}
    for name in _THINKING:
        if name in tokenizer.template_variables:
            return {name: args.think}
    option = "--think" if args.think else "--no-think"
    why = "it has no chat template"
    if tokenizer.has_chat_template:
        why = f"its chat template has no variable {' or '.join(_THINKING)}"
    raise ParameterError(f"{option} has no effect with {args.model!r}: {why}")


def check_text(text: str, what: str) -> str:
    """The text, if it is one: bytes that are not UTF-8 arrive as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"{what} is not UTF-8 text: {error.reason}") from error
    return text


def read_stdin() -> str:
    """All of standard input. Raises PromptError if it is not UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"standard input is not UTF-8 text: {error}") from error


def is_chat(args: Namespace, tokenizer: Tokenizer) -> bool:
    """Whether the prompt is a chat message, not a text to continue.

    Raises ParameterError for a system message without a chat.
    """
    chat: bool = not args.raw and (args.chat or tokenizer.has_chat_template)
    if not chat and args.system is not None:
        raise ParameterError(
            f"--system needs a chat, but {args.model!r} has no chat template"
        )
    return chat


def as_messages(text: str, system: str | None) -> Messages:
    """A user's message, after the system's if there is one."""
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return messages
