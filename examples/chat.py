"""A chat whose turns share one cache: each turn computes only what is new.

`Conversation` renders all messages again in every turn, keeps the cache as far as the
token ids agree, and rewinds the rest. Type your own messages at a terminal (an empty
line ends it); with --quick, or from a pipe, the messages are written down here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from tiny_llm import Conversation, load

SCRIPT = (
    "My name is Ada and I like steam engines.",
    "What is my name?",
    "And what do I like?",
)


def typed() -> Iterator[str]:
    """Lines from the terminal, until an empty one."""
    print("Type a message; an empty line ends the chat.\n")
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if not line:
            return
        yield line


def scripted() -> Iterator[str]:
    """The messages above, shown as if they were typed."""
    for line in SCRIPT:
        print(f"> {line}")
        yield line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quick", action="store_true", help="scripted, short answers")
    args = parser.parse_args(argv)
    interactive = sys.stdin.isatty() and not args.quick

    conversation = Conversation(*load(args.model), system="Answer in one sentence.")
    total_reused = 0
    for message in typed() if interactive else scripted():
        stream = conversation.ask(message, max_new_tokens=16 if args.quick else 256)
        for piece in stream:
            print(piece, end="", flush=True)
        new, reused = stream.result.prompt_tokens, conversation.reused
        total_reused += reused
        print(
            f"\n  [the prompt has {reused + new} tokens: {reused} were in the cache, "
            f"{new} are new]\n"
        )
    print(f"{total_reused} prompt tokens were not computed again")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
