"""The commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .. import __version__
from .arguments import (
    MODEL_HELP,
    REVISION_HELP,
    add_chat_or_raw,
    add_command,
    add_generation,
    add_kv_bits,
    add_model,
    add_prefill_chunk,
    add_stop,
    add_system,
    add_thinking,
    positive,
    size,
)

DEFAULT_PROMPT = "Why is the sky blue?"
_NEED_TEMPERATURE = ("top_k", "top_p", "min_p", "seed")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed arguments; wrong usage is told on stderr and exits with status 2."""
    args, unknown = build_parser().parse_known_args(argv)
    parser: argparse.ArgumentParser = args.parser  # of the command: it shows its usage
    if "text" in args and args.text is None and len(unknown) == 1:
        lone = unknown[0]  # argparse looks for an optional TEXT right behind FILE only
        if lone == "-" or not lone.startswith("-"):
            args.text, unknown = lone, []
    if unknown:
        parser.error(f"unknown arguments: {' '.join(unknown)}")
    # (a line of a batch may have a temperature of its own)
    if args.command != "batch" and 0 <= getattr(args, "temperature", 1) < 1e-4:
        idle = [name for name in _NEED_TEMPERATURE if getattr(args, name) is not None]
        if idle:
            option = "--" + idle[0].replace("_", "-")
            parser.error(
                f"{option} has no effect at temperature 0; add --temperature 1"
            )
    if "raw" in args and args.raw and args.system is not None:
        parser.error("--system has no effect with --raw")
    if "think" in args and getattr(args, "raw", False) and args.think is not None:
        option = "--think" if args.think else "--no-think"
        parser.error(f"{option} has no effect with --raw")
    if args.command == "info" and args.model is None and args.revision is not None:
        parser.error("--revision has no effect without MODEL")
    if args.command == "batch" and args.o == "-" and args.force:
        parser.error("--force has no effect without -o FILE")
    if args.command == "cache" and args.action == "make":
        _check_make(args)
    return args


def _check_make(args: argparse.Namespace) -> None:
    """Refuse what `cache make` would have to ignore."""
    if args.text is None and args.system is None:
        args.parser.error("TEXT or --system is needed: there is nothing to compute")
    for option, kinds in (
        ("kv_bits", ("quantized", "rotating", "paged")),
        ("window", ("rotating",)),
        ("keep", ("rotating",)),
    ):
        if getattr(args, option) is not None and args.kind not in kinds:
            name = "--" + option.replace("_", "-")
            args.parser.error(
                f"{name} has no effect with --kind {args.kind}, only with "
                f"--kind {' or '.join(kinds)}"
            )
    if args.keep is not None and args.window is None:
        args.parser.error("--keep has no effect without --window")


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
    generate = add_command(
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
    add_model(generate)
    add_chat_or_raw(generate, "the prompt is")
    add_system(generate)
    add_thinking(generate)
    add_generation(generate, new_tokens=256)
    add_stop(generate)
    add_kv_bits(generate)
    add_prefill_chunk(generate)
    batch = add_command(
        commands,
        "batch",
        "FILE [options]",
        "answer a file of prompts, many at the same time",
        "Answer a file of prompts, many at the same time. Each line of FILE is a JSON "
        'object, {"prompt": "..."} or {"messages": [...]}, and may have an "id" and '
        'settings of its own: "max_tokens", "temperature", "top_p", "seed", "stop", '
        '"json_schema" and others (docs/decoding.md). A line that '
        "cannot be answered gets an error, and the others go on. After it was stopped, "
        "the same command goes on behind the answers that are there.",
    )
    _add_batch(batch)
    chat = add_command(
        commands,
        "chat",
        "[options]",
        "talk to a model",
        "Talk to a model. Each turn computes only what is new. /help lists what can be "
        "typed; Ctrl-C stops an answer.",
    )
    add_model(chat)
    add_system(chat)
    add_thinking(chat)
    add_generation(chat, new_tokens=1024)
    add_kv_bits(chat)
    add_prefill_chunk(chat)
    info = add_command(
        commands,
        "info",
        "[MODEL] [options]",
        "show what a model is and what this machine has",
        "Show a model's architecture and size, and what this machine computes with. "
        "Without MODEL: the machine alone.",
    )
    info.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    info.add_argument("--revision", help=REVISION_HELP)
    info.add_argument("--json", action="store_true", help="write JSON")
    plan = add_command(
        commands,
        "plan",
        "MODEL [options]",
        "compute what fits into a memory, and how fast it could be",
        "Compute the memory that a model and its KV caches take, what fits into which "
        "Mac, and how fast it could be at best, by the roofline model. Nothing is "
        "measured, and of a repository only config.json is fetched.",
    )
    _add_plan(plan)
    cache = add_command(
        commands,
        "cache",
        "COMMAND [options]",
        "keep a computed prompt in a file, and go on from it",
        "Keep what a model computed for the beginning of a prompt in a file, so that "
        "prompts which begin so need not compute it again.",
    )
    _add_cache(cache)
    return parser


def _add_batch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help='the prompts; "-" reads standard input')
    add(
        "-o",
        metavar="FILE",
        default="-",
        help='the answers, a line each in the order of the prompts; "-" (the default) '
        "writes standard output, where nothing can be gone on with",
    )
    add(
        "--force",
        action="store_true",
        help="answer all lines anew, whatever the file of answers holds",
    )
    add_model(parser)
    add_chat_or_raw(parser, "each prompt is")
    add_system(parser)
    add_generation(parser, new_tokens=256)
    add(
        "--max-batch",
        type=positive,
        default=32,
        metavar="N",
        help="prompts at the same time (default: %(default)s)",
    )
    add(
        "--kv-memory",
        type=size,
        metavar="SIZE",
        help="the most that all keys and values may take, such as 2GB (default: 512 "
        "tokens for each of --max-batch, in at most a quarter of the memory)",
    )
    add_kv_bits(parser)
    add(
        "--no-prefix-cache",
        action="store_true",
        help="compute anew what prompts have in common",
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="smollm2, a Hugging Face repository (owner/name), a folder, a .gguf file, "
        "or a config.json",
    )
    add("--revision", help=REVISION_HELP)
    add(
        "--context",
        type=positive,
        metavar="N",
        help="tokens per conversation (default: 2048, or the model's context if that "
        "is less)",
    )
    add(
        "--batch",
        type=positive,
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
        type=size,
        metavar="SIZE",
        help="the most that weights and caches may take, such as 24GB (1 GB is 2^30 "
        "bytes here, as memory is sold)",
    )
    add("--device", metavar="NAME", help='an Apple chip, such as "M4 Pro"')
    add("--json", action="store_true", help="write JSON, with the sources of figures")


def _add_cache(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="action", required=True
    )
    make = add_command(
        commands,
        "cache make",
        "FILE [TEXT] [options]",
        "compute the beginning of a prompt and save it",
        "Compute the beginning of a prompt and save its KV cache in FILE.",
    )
    make.add_argument("file", metavar="FILE", help="the file to write")
    make.add_argument(
        "text",
        nargs="?",
        metavar="TEXT",
        help='how the prompt begins; "-" reads standard input, all of it, its last '
        "newline too (default: with the system message alone)",
    )
    add_model(make)
    add_chat_or_raw(make, "TEXT begins")
    add_system(make)
    add = make.add_argument
    add(
        "--kind",
        choices=["dense", "quantized", "rotating", "paged"],
        default="dense",
        help="how the cache is laid out (default: %(default)s)",
    )
    add(
        "--kv-bits",
        type=int,
        choices=[8, 4],
        help="bits per cached number (default: as computed; quantized: 8)",
    )
    add(
        "--window",
        type=positive,
        metavar="N",
        help="rotating: full-attention layers see the newest N tokens only",
    )
    add(
        "--keep",
        type=positive,
        metavar="N",
        help="rotating with --window: and the first N tokens",
    )
    add_prefill_chunk(make)
    add("--force", action="store_true", help="replace FILE if it exists")
    use = add_command(
        commands,
        "cache use",
        "FILE PROMPT [options]",
        "answer a prompt that begins as saved",
        "Answer the saved text followed by PROMPT, as `tiny-llm generate` would answer "
        "both together, computing only what is new.",
    )
    use.add_argument("file", metavar="FILE", help="a file of `tiny-llm cache make`")
    use.add_argument(
        "prompt",
        metavar="PROMPT",
        help='what follows the saved text; "-" reads standard input',
    )
    add_model(use, of_file=True)
    add_generation(use, new_tokens=256)
    add_stop(use)
    add_prefill_chunk(use)
    show = add_command(
        commands,
        "cache show",
        "FILE [options]",
        "show what a file holds",
        "Show which model a saved cache is for, and what it holds.",
    )
    show.add_argument("file", metavar="FILE", help="a saved cache")
    show.add_argument("--json", action="store_true", help="write JSON")
