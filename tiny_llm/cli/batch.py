"""`tiny-llm batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, BinaryIO

from ..engine import Engine, Handle, SamplingParams
from ..errors import ParameterError, TinyLLMError
from ..models.identity import identity
from ..progress import ProgressBar, progress_bar
from . import INTERRUPTED
from .batch_answers import Answers, error_of, line_of, opened
from .batch_lines import (
    Line,
    Settings,
    fields_of,
    id_of,
    key_of,
    numbered,
    params_of,
    prompt_of,
)
from .options import check_text, is_chat, load_from

_STEP_TOKENS = 512  # rows of a step at most, as the engine has it
_IN_FLIGHT = 4  # times max_batch: requests that the engine has at the same time
_UNWRITTEN = 256  # times max_batch: lines that wait for one before them


def run(args: Namespace) -> int:
    """Answer what is not answered yet; 1 if a line could not be, 130 on Ctrl-C."""
    params = _params(args)  # before the model: it fails in no time
    system = args.system and check_text(args.system, "--system")
    with ExitStack() as stack:
        source = stack.enter_context(_input(args.file))
        answers = stack.enter_context(opened(args.o, source))
        model, tokenizer = load_from(args)
        settings = Settings(is_chat(args, tokenizer), system, params)
        depends = [identity(model)["fingerprint"], args.kv_bits, settings.chat, system]
        key = partial(key_of, json.dumps([*depends, asdict(params)]))
        engine = Engine(
            model,
            tokenizer,
            max_batch=args.max_batch,
            max_step_tokens=max(_STEP_TOKENS, args.max_batch),
            kv_memory=args.kv_memory,
            kv_bits=args.kv_bits,
            prefix_cache=not args.no_prefix_cache,
        )
        stack.enter_context(engine)
        total = _count(source)
        lines = numbered(source)
        kept = answers.resume(lines, key, force=args.force)
        if kept.answers:
            wrong = f", {kept.errors} of them by an error" if kept.errors else ""
            print(
                f"({kept.answers} lines are answered already{wrong})", file=sys.stderr
            )
        batch = _Batch(engine, args.max_batch, settings, key, answers)
        interrupted = False
        try:
            with _bar(args.o) as bar:
                for speed in batch.run(lines):
                    done = kept.answers + batch.written
                    bar(done, total, f"{done} answers, {speed}")
        except KeyboardInterrupt:
            interrupted = True
    print(batch.summary(), file=sys.stderr)
    if interrupted:
        print("tiny-llm: interrupted", file=sys.stderr)
        return INTERRUPTED
    return int(kept.errors + batch.errors > 0)


@dataclass
class _Slot:
    """A line that was read. known: its number, and its id; text: what to write."""

    known: dict[str, Any]
    key: str
    handle: Handle | None = None
    text: str | None = None


class _Batch:
    """Lines on their way through the engine, and what came of them."""

    def __init__(
        self,
        engine: Engine,
        max_batch: int,
        settings: Settings,
        key: Callable[[Line], str],
        answers: Answers,
    ) -> None:
        self.engine, self.max_batch = engine, max_batch
        self.settings, self.key, self.answers = settings, key, answers
        self.written = self.errors = 0
        self._tokens = self._prompt_tokens = self._cached_tokens = 0
        self._start = time.perf_counter()
        self._unwritten: deque[_Slot] = deque()  # in the order of the lines
        self._running: list[_Slot] = []

    def run(self, lines: Iterator[Line]) -> Iterator[str]:
        """Answer the lines; yields after each step how fast it goes."""
        more = True
        while more or self._running:
            more = more and self._read(lines)
            self.engine.step()
            self._collect()
            self._write()
            yield f"{self._rate():.0f} tokens/s"

    def summary(self) -> str:
        """One line: how many, how fast."""
        good = self.written - self.errors
        counts = f"{good} answer{'s' * (good != 1)}"
        if self.errors:
            counts += f" and {self.errors} error{'s' * (self.errors != 1)}"
        seconds = time.perf_counter() - self._start
        return (
            f"{counts}, {self._tokens} tokens in {seconds:.1f} s: {self._rate():.1f} "
            f"tokens/s; {self._cached_tokens} of {self._prompt_tokens} prompt tokens "
            f"were cached"
        )

    def _rate(self) -> float:
        seconds = time.perf_counter() - self._start
        coming = sum(len(s.handle.token_ids) for s in self._running if s.handle)
        return (self._tokens + coming) / max(seconds, 1e-9)

    def _read(self, lines: Iterator[Line]) -> bool:
        """Submit lines while there is room for them; False after the last one."""
        while (
            len(self._running) < _IN_FLIGHT * self.max_batch
            and len(self._unwritten) < _UNWRITTEN * self.max_batch
        ):
            line = next(lines, None)
            if line is None:
                return False
            self._submit(line)
        return True

    def _submit(self, line: Line) -> None:
        slot = _Slot({"line": line.number}, self.key(line))
        self._unwritten.append(slot)
        try:
            fields = fields_of(line)
            slot.known |= id_of(fields)
            prompt = prompt_of(fields, self.settings)
            params = params_of(fields, self.settings)
            slot.handle = self.engine.submit(prompt, params)
            self._running.append(slot)
        except TinyLLMError as error:
            self._fail(slot, error)

    def _fail(self, slot: _Slot, error: object) -> None:
        print(f"tiny-llm: line {slot.known['line']}: {error}", file=sys.stderr)
        self.errors += 1
        slot.text = error_of(slot.known, error, slot.key)

    def _collect(self) -> None:
        """Take what the engine has finished."""
        running = []
        for slot in self._running:
            if slot.handle is None or slot.handle.state != "done":
                running.append(slot)
                continue
            result = slot.handle.result()
            slot.handle = None
            self._tokens += len(result.token_ids)
            self._prompt_tokens += result.prompt_tokens
            self._cached_tokens += result.cached_tokens
            if result.finish_reason == "error":
                error = result.error
                self._fail(slot, error and (error.__cause__ or error))
            else:
                slot.text = line_of(slot.known, result, slot.key)
        self._running = running

    def _write(self) -> None:
        """Write what has no unanswered line before it."""
        while self._unwritten and self._unwritten[0].text is not None:
            self.answers.write(self._unwritten[0].text)
            self._unwritten.popleft()
            self.written += 1


def _params(args: Namespace) -> SamplingParams:
    """What the options say. Raises ParameterError."""
    return SamplingParams(
        max_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=0 if args.top_k is None else args.top_k,
        top_p=1.0 if args.top_p is None else args.top_p,
        min_p=0.0 if args.min_p is None else args.min_p,
        seed=args.seed,
    )


def _input(name: str) -> AbstractContextManager[BinaryIO]:
    if name == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return open(name, "rb")
    except OSError as error:
        raise ParameterError(f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ParameterError(f"{name!r} is no file: {error}") from error


def _count(source: BinaryIO) -> int | None:
    """How many lines there are, for the bar; None where that cannot be known."""
    if not sys.stderr.isatty() or not source.seekable() or source is sys.stdin.buffer:
        return None
    count = sum(1 for _ in numbered(source))
    source.seek(0)
    return count


def _bar(output: str) -> AbstractContextManager[ProgressBar]:
    """No bar where the answers are shown in its place."""
    if output == "-" and sys.stdout.isatty():
        return nullcontext(lambda done, total, note="": None)
    return progress_bar("Answering")
