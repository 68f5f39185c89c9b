"""Many prompts at once: a live table of who waits, who is read, and who answers.

One `Engine` takes a step for all of them at a time: a token for each that answers, and
beside that as much of the next prompts as fits. The system message that they share is
computed once. Ctrl-C ends it. Where standard output is no terminal, a line is written
for each answer.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tiny_llm import Engine, SamplingParams, Tokenizer, load
from tiny_llm.engine import Handle

SYSTEM = (
    "You are a patient teacher of children. Answer in one or two short and simple "
    "sentences, with an example from everyday life where there is one."
)
PROMPTS = (
    "Why is the sky blue?",
    "What is a prime number?",
    "Who was Ada Lovelace?",
    "How do birds find their way?",
    "What is the capital of Peru?",
    "Why do leaves fall?",
    "What does a comma do?",
    "How far away is the moon?",
    "What is bread made of?",
    "Why does ice float?",
    "Name three rivers of Africa.",
    "What is a verb?",
    "How does a bicycle stay up?",
    "What is the root of 81?",
    "Why do cats purr?",
    "What was the Silk Road?",
)


class Table:
    """A table at a terminal, drawn anew ten times a second."""

    def __init__(self, handles: dict[str, Handle], tokenizer: Tokenizer) -> None:
        from rich.live import Live

        self.handles, self.tokenizer = handles, tokenizer
        self.live = Live(auto_refresh=False)
        self.drawn = 0.0

    def __enter__(self) -> Table:
        self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.draw()
        self.live.stop()

    def show(self) -> None:
        """Draw it, if that was not just done."""
        if time.perf_counter() - self.drawn > 0.1:
            self.draw()

    def draw(self) -> None:
        """Draw every request's row."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1))
        room = max(12, self.live.console.width - 73)
        for title, width in (("prompt", 28), ("state", 31), ("the last words", room)):
            table.add_column(title, width=width, no_wrap=True)
        for prompt, handle in self.handles.items():
            # (Text: what a model writes is no markup)
            words = last_words(handle, self.tokenizer, room - 1)
            table.add_row(Text(prompt), state(handle), Text(words))
        self.live.update(table, refresh=True)
        self.drawn = time.perf_counter()


class Lines:
    """A line for each answer, in the order in which they are done."""

    def __init__(self, handles: dict[str, Handle], tokenizer: Tokenizer) -> None:
        self.left, self.tokenizer = dict(handles), tokenizer

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def show(self) -> None:
        """Write the answers that are new."""
        for prompt, handle in list(self.left.items()):
            if handle.state == "done":
                words = last_words(handle, self.tokenizer)
                print(f"{prompt}  [{state(handle)}]  {words}", flush=True)
                del self.left[prompt]


def state(handle: Handle) -> str:
    """Where a request stands, in a few words."""
    match handle.state:
        case "prefilling":
            return f"prefilling {handle.prefilled} of {handle.prompt_tokens}"
        case "decoding":
            return f"decoding, {len(handle.token_ids)} tokens"
        case "done":
            result = handle.result()
            return (
                f"{result.finish_reason} after {result.total_seconds:.1f} s, "
                f"{result.cached_tokens} cached"
            )
        case waiting:
            return waiting


def last_words(handle: Handle, tokenizer: Tokenizer, most: int = 40) -> str:
    """The end of what was answered so far, on one line."""
    text = " ".join(tokenizer.decode(handle.token_ids).split())
    return text if len(text) <= most else f"…{text[-most:]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quick", action="store_true", help="short answers")
    args = parser.parse_args(argv)
    params = SamplingParams(max_tokens=12 if args.quick else 80)

    model, tokenizer = load(args.model)
    # Pages smaller than usual, since the message that all share is so short: what is
    # found again are whole pages.
    with Engine(model, tokenizer, max_batch=8, page_size=16) as engine:
        start = time.perf_counter()
        handles = {}
        for prompt in PROMPTS:
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": prompt},
            ]
            handles[prompt] = engine.submit(messages, params)

        view = Table if sys.stdout.isatty() else Lines
        status = 0
        try:
            with view(handles, tokenizer) as shown:
                while engine.step():
                    shown.show()
        except KeyboardInterrupt:
            status = 130
            print("(stopped)")
        seconds = time.perf_counter() - start
        done = [h.result() for h in handles.values() if h.state == "done"]
        stats = engine.stats

    tokens = sum(len(handle.token_ids) for handle in handles.values())
    print(
        f"{len(done)} answers, {tokens} tokens in {seconds:.1f} s: "
        f"{tokens / seconds:.1f} tokens/s; {stats.cached_tokens} of "
        f"{stats.prompt_tokens} prompt tokens were cached; {stats.steps} steps of "
        f"{stats.rows / max(stats.steps, 1):.1f} rows"
    )
    failed = any(result.finish_reason == "error" for result in done)
    return status or int(failed or len(done) < len(PROMPTS))


if __name__ == "__main__":
    raise SystemExit(main())
