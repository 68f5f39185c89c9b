"""Options that several commands have, and the types of their values."""

from __future__ import annotations

import argparse
import re

DEFAULT_MODEL = "smollm2"
MODEL_HELP = (
    "smollm2, a Hugging Face repository (owner/name, or owner/name:file.gguf), a "
    "folder, or a .gguf file"
)
REVISION_HELP = "branch, tag or commit of the Hugging Face repository"
Commands = argparse._SubParsersAction  # argparse has no public name for it


def add_command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    usage: str,
    summary: str,
    description: str,
) -> argparse.ArgumentParser:
    """A command's parser. name: of a command in a command, both: "cache make"."""
    parser = commands.add_parser(
        name.rpartition(" ")[2],
        prog=f"tiny-llm {name}",
        usage=f"tiny-llm {name} {usage}",
        help=summary,
        description=description,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    return parser


def add_model(parser: argparse.ArgumentParser, *, of_file: bool = False) -> None:
    """Which model, and how to load it. of_file: a saved cache tells what to do."""
    parser.add_argument(
        "--model",
        default=None if of_file else DEFAULT_MODEL,
        help=f"{MODEL_HELP} (default: {'as FILE says' if of_file else '%(default)s'})",
    )
    parser.add_argument("--revision", help=REVISION_HELP)
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "float16", "bfloat16"],
        default=None if of_file else "auto",
        help="how to compute (auto: as stored on Metal, float32 on the CPU)",
    )
    parser.add_argument(
        "--quantize",
        choices=["4bit", "8bit"],
        help="quantise the weights when they are loaded",
    )


def add_chat_or_raw(parser: argparse.ArgumentParser, what: str) -> None:
    """Whether a text is a chat message. what: its name in the help."""
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--chat",
        action="store_true",
        help=f"{what} a chat message (the default if the model has a chat template)",
    )
    kind.add_argument(
        "--raw", action="store_true", help=f"{what} a text to be continued"
    )


def add_system(parser: argparse.ArgumentParser) -> None:
    """The system message."""
    parser.add_argument(
        "--system", metavar="TEXT", help="the system message of the chat"
    )


def add_generation(parser: argparse.ArgumentParser, new_tokens: int) -> None:
    """How long the answer may be, and how its tokens are chosen."""
    add = parser.add_argument
    add(
        "--max-new-tokens",
        type=positive,
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


def add_stop(parser: argparse.ArgumentParser) -> None:
    """Texts that end the answer."""
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer before TEXT; may be given several times",
    )


def add_thinking(parser: argparse.ArgumentParser) -> None:
    """Whether a thinking model thinks first."""
    kind = parser.add_mutually_exclusive_group()
    for option, value, what in (
        ("--think", True, "have the model think before it answers"),
        ("--no-think", False, "have it answer at once"),
    ):
        kind.add_argument(
            option,
            dest="think",
            action="store_const",
            const=value,
            help=f"{what} (if its chat template lets you choose)",
        )


def add_kv_bits(parser: argparse.ArgumentParser) -> None:
    """Whether the KV cache is packed."""
    parser.add_argument(
        "--kv-bits",
        type=int,
        choices=[8, 4],
        help="pack the KV cache: less memory, a little less exact",
    )


def add_prefill_chunk(parser: argparse.ArgumentParser) -> None:
    """How much of a prompt is computed at once."""
    parser.add_argument(
        "--prefill-chunk",
        type=positive,
        default=512,
        metavar="N",
        help="prompt tokens per forward pass (default: %(default)s)",
    )


def positive(text: str) -> int:
    """A whole number from 1 on."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return value


def size(text: str) -> int:
    """Bytes of a size such as 24GB, 1.5 GiB or 512M."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(?:i?B)?", text, re.IGNORECASE)
    count = 0
    if found:
        count = int(float(found[1]) * 1024 ** ("KMGT".index(found[2].upper()) + 1))
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 24GB")
    return count
