"""`tiny-llm chat`: turns of a conversation, at a terminal or from a pipe."""

from __future__ import annotations

import contextlib
import re
import sys
from argparse import Namespace
from collections.abc import Callable

from ..conversation import Conversation
from ..errors import ChatTemplateError, PromptError, TinyLLMError
from ..progress import Progress
from ..text import TextStream
from . import INTERRUPTED
from .options import (
    check_text,
    load_from,
    packed_cache,
    sampler_of,
    template_options_of,
)
from .output import Shown, dim, show

_HELP = """\
/reset   forget the conversation
/exit    leave (also Ctrl-D)
/help    this
A line that ends in \\ goes on in the next one. Ctrl-C stops an answer."""


def run(args: Namespace) -> int:
    """Answer lines until their end; 1 if a piped line could not be answered."""
    sampler = sampler_of(args)
    system = args.system and check_text(args.system, "--system")
    model, tokenizer = load_from(args)
    if not tokenizer.has_chat_template:
        raise ChatTemplateError(
            f"{args.model!r} has no chat template, so it cannot chat; "
            "`tiny-llm generate` continues a text with it"
        )
    conversation = Conversation(
        model,
        tokenizer,
        system=system,
        template_options=template_options_of(args, tokenizer),
        create_cache=args.kv_bits and (lambda: packed_cache(args, model)),
    )

    def answer(line: str) -> None:
        def start(progress: Progress) -> TextStream:
            return conversation.ask(
                line,
                max_new_tokens=args.max_new_tokens,
                sampler=sampler,
                prefill_chunk=args.prefill_chunk,
                progress=progress,
            )

        shown = show(start)
        _tell(_summary(shown, conversation.reused, args.max_new_tokens))

    return _Loop(conversation, answer=answer).run()


class _Loop:
    """Reads lines and acts on them."""

    def __init__(
        self, conversation: Conversation, answer: Callable[[str], None]
    ) -> None:
        self.conversation, self.answer = conversation, answer
        self.at_terminal = sys.stdin.isatty()
        self.failed = False

    def run(self) -> int:
        if self.at_terminal:
            with contextlib.suppress(ImportError):  # line editing for input()
                import readline  # noqa: F401
            print("Type a message; /help lists the commands.", file=sys.stderr)
        hinted = False
        while True:
            try:
                line = self._read()
            except EOFError:
                if self.at_terminal:
                    print(file=sys.stderr)
                return int(self.failed)
            except KeyboardInterrupt:
                if hinted or not self.at_terminal:
                    print(file=sys.stderr)
                    return INTERRUPTED
                hinted = True
                print("\n(Ctrl-C again, Ctrl-D or /exit leaves)", file=sys.stderr)
                continue
            except PromptError as error:
                self._report(error)
                continue
            hinted = False
            if line.strip() in ("/exit", "/quit"):
                return int(self.failed)
            self._act(line)

    def _act(self, line: str) -> None:
        command = line.strip()
        if command == "/reset":
            self.conversation.reset()
            print("(forgotten)", file=sys.stderr)
        elif command == "/help":
            print(_HELP, file=sys.stderr)
        elif re.fullmatch(r"/[a-z]+", command):
            print(f"(no command {command}; /help lists them)", file=sys.stderr)
        elif command:
            try:
                self.answer(line)
            except TinyLLMError as error:
                self._report(error)  # the conversation is as it was
            except KeyboardInterrupt:  # before the first step of the model
                print("(stopped)", file=sys.stderr)

    def _report(self, error: TinyLLMError) -> None:
        self.failed = not self.at_terminal
        hint = " (/reset does)" if "start a new one" in str(error) else ""
        print(f"tiny-llm: error: {error}{hint}", file=sys.stderr)

    def _read(self) -> str:
        """One message: a line, and those after it while they end in a backslash."""
        lines = [self._line("> ")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line("| "))
            except EOFError:
                break
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        try:
            if self.at_terminal and sys.stdout.isatty():
                return check_text(input(prompt), "the message")
            if self.at_terminal:  # stdout is a file: it gets the answers only
                print(prompt, end="", file=sys.stderr, flush=True)
            return check_text(input(), "the message")
        except UnicodeDecodeError as error:
            raise PromptError(f"the message is not UTF-8 text: {error}") from error


def _summary(shown: Shown, reused: int, limit: int) -> str:
    result = shown.result
    new = len(result.token_ids)
    parts = [f"{new} tokens"]
    if new > 1:
        parts.append(f"{result.decode_tokens_per_second:.1f} tokens/s")
    parts.append(f"prompt {reused + result.prompt_tokens}, of it {reused} reused")
    if shown.interrupted:
        parts.append("stopped")
    elif result.finish_reason == "length":
        parts.append("--max-new-tokens reached" if new >= limit else "context full")
    return ", ".join(parts)


def _tell(line: str) -> None:
    """A remark on stderr, dim, if somebody is there to read it."""
    if sys.stderr.isatty():
        print(dim(line, sys.stderr), file=sys.stderr)
