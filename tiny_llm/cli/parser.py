"""The options of every command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from .. import __version__

DEFAULT_MODEL = "smollm2"
DEFAULT_PROMPT = "Why is the sky blue?"

_MODEL_HELP = (
    "smollm2, a Hugging Face repository (owner/name, or owner/name:file.gguf), a "
    "folder, or a .gguf file"
)
_REVISION_HELP = "branch, tag or commit of the Hugging Face repository"
_NEED_TEMPERATURE = ("top_k", "top_p", "min_p", "seed")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed arguments; wrong usage is told on stderr and exits with status 2."""
    args, unknown = build_parser().parse_known_args(argv)
    parser: argparse.ArgumentParser = args.parser  # of the command: it shows its usage
    if unknown:
        parser.error(f"unknown arguments: {' '.join(unknown)}")
    if args.command in ("generate", "chat") and 0 <= args.temperature < 1e-4:
        idle = [name for name in _NEED_TEMPERATURE if getattr(args, name) is not None]
        if idle:
            option = "--" + idle[0].replace("_", "-")
            parser.error(
                f"{option} has no effect at temperature 0; add --temperature 1"
            )
    if args.command == "generate" and args.raw and args.system is not None:
        parser.error("--system has no effect with --raw")
    if args.command == "info" and args.model is None and args.revision is not None:
        parser.error("--revision has no effect without MODEL")
    return args


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands.

    The usage lines are our own and no short option takes a value, so that the help
    reads the same in every version of Python.
    """
    parser = argparse.ArgumentParser(
        prog="tiny-llm",
        usage="tiny-llm COMMAND [options]",
        description="Run large language models with MLX.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"tiny-llm {__version__}"
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    generate = _command(
        commands,
        "generate",
        "[PROMPT] [options]",
        "write an answer to a prompt, or continue a text",
        "Write an answer to a prompt piece by piece, then how fast it was.",
    )
    generate.add_argument(
        "prompt",
        nargs="?",
        default=None,
        metavar="PROMPT",
        help=f'the prompt; "-" reads standard input (default: "{DEFAULT_PROMPT}")',
    )
    _add_model(generate)
    kind = generate.add_mutually_exclusive_group()
    kind.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a chat message (the default if the model has a chat "
        "template)",
    )
    kind.add_argument(
        "--raw",
        action="store_true",
        help="the prompt is a text to be continued",
    )
    _add_generation(generate, new_tokens=256)
    chat = _command(
        commands,
        "chat",
        "[options]",
        "talk to a model",
        "Talk to a model. Each turn computes only what is new. /help lists what can be "
        "typed; Ctrl-C stops an answer.",
    )
    _add_model(chat)
    _add_generation(chat, new_tokens=1024)
    info = _command(
        commands,
        "info",
        "[MODEL] [options]",
        "show what a model is and what this machine has",
        "Show a model's architecture and size, and what this machine computes with. "
        "Without MODEL: the machine alone.",
    )
    info.add_argument("model", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    info.add_argument("--revision", help=_REVISION_HELP)
    info.add_argument("--json", action="store_true", help="write JSON")
    plan = _command(
        commands,
        "plan",
        "MODEL [options]",
        "compute what fits into a memory, and how fast it could be",
        "Compute the memory that a model and its KV caches take, what fits into which "
        "Mac, and how fast it could be at best, by the roofline model. Nothing is "
        "measured, and of a repository only config.json is fetched.",
    )
    _add_plan(plan)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    usage: str,
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        prog=f"tiny-llm {name}",
        usage=f"tiny-llm {name} {usage}",
        help=summary,
        description=description,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"{_MODEL_HELP} (default: %(default)s)",
    )
    parser.add_argument("--revision", help=_REVISION_HELP)
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "float16", "bfloat16"],
        default="auto",
        help="how to compute (auto: as stored on Metal, float32 on the CPU)",
    )
    parser.add_argument(
        "--quantize",
        choices=["4bit", "8bit"],
        help="quantise the weights when they are loaded",
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="smollm2, a Hugging Face repository (owner/name), a folder, a .gguf file, "
        "or a config.json",
    )
    add("--revision", help=_REVISION_HELP)
    add(
        "--context",
        type=_positive,
        metavar="N",
        help="tokens per conversation (default: 2048, or the model's context if that "
        "is less)",
    )
    add(
        "--batch",
        type=_positive,
        default=1,
        metavar="N",
        help="conversations at the same time (default: %(default)s)",
    )
    add(
        "--kv-bits",
        choices=["16", "8", "4", "all"],
        default="all",
        help="bits per cached number (default: %(default)s)",
    )
    add(
        "--weight-bits",
        type=int,
        choices=[16, 8, 4],
        help="bits per weight (default: as stored)",
    )
    add(
        "--memory",
        type=_size,
        metavar="SIZE",
        help="the most that weights and caches may take, such as 24GB (1 GB is 2^30 "
        "bytes here, as memory is sold)",
    )
    add("--device", metavar="NAME", help='an Apple chip, such as "M4 Pro"')
    add("--json", action="store_true", help="write JSON, with the sources of figures")


def _add_generation(parser: argparse.ArgumentParser, new_tokens: int) -> None:
    add = parser.add_argument
    add("--system", metavar="TEXT", help="the system message of the chat")
    add(
        "--max-new-tokens",
        type=_positive,
        default=new_tokens,
        metavar="N",
        help="longest answer, in tokens (default: %(default)s)",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0: always the likeliest token (the default); 1: as the model has it",
    )
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the likeliest tokens that have the probability P together",
    )
    add(
        "--min-p",
        type=float,
        metavar="P",
        help="sample from the tokens at least P times as likely as the likeliest",
    )
    add("--seed", type=int, metavar="N", help="sample the same text each time")
    add(
        "--prefill-chunk",
        type=_positive,
        default=512,
        metavar="N",
        help="prompt tokens per forward pass (default: %(default)s)",
    )


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return value


def _size(text: str) -> int:
    """Bytes of a size such as 24GB, 1.5 GiB or 512M."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(?:i?B)?", text, re.IGNORECASE)
    size = 0
    if found:
        size = int(float(found[1]) * 1024 ** ("KMGT".index(found[2].upper()) + 1))
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 24GB")
    return size
