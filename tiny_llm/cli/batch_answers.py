"""The file that `tiny-llm batch` writes, and goes on with after it was stopped."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import ParameterError, TinyLLMError
from ..result import Result
from .batch_lines import Line

_BEGINNING = re.compile(rb'\{"line": [1-9][0-9]*(, "|,? ?$)')  # of every answer


class Kept(NamedTuple):
    """What a file held already: answers, and how many of them are errors."""

    answers: int
    errors: int


class Answers:
    """One JSON line for each input line, in the order of those.

    A line is written whole and flushed, so only the last one can be torn.
    """

    def __init__(self, file: BinaryIO, name: str, *, resumes: bool) -> None:
        """resumes: what the file holds may be gone on with."""
        self._file, self.name, self._resumes = file, name, resumes

    def resume(
        self, lines: Iterator[Line], key: Callable[[Line], str], *, force: bool
    ) -> Kept:
        """Go on behind the answers that are there, and take their lines off `lines`.

        key: what is noted of a line with its answer. A torn last answer is cut off.
        force: forget all answers. Raises ParameterError for a file that is another's,
        or belongs to other lines or settings; then it stays as it is.
        """
        if not self._resumes:
            return Kept(0, 0)
        end = errors = answers = 0
        for raw in () if force else self._file:
            if not raw.endswith(b"\n") and _is_torn(raw):
                break
            answer = self._parse(raw)
            line = next(lines, None)
            if line is None:
                raise self._refusal("has more answers than the input has lines")
            self._compare(answer, line, key(line))
            end += len(raw)
            answers += 1
            errors += "error" in answer
        self._file.truncate(end)
        self._file.seek(end)
        return Kept(answers, errors)

    def write(self, answer: str) -> None:
        """Append a line. Raises TinyLLMError if that is not possible."""
        try:
            # (a lone surrogate, as an id may have it, is no UTF-8)
            self._file.write(answer.encode("utf-8", "backslashreplace") + b"\n")
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise TinyLLMError(
                f"{self.name} cannot be written: {error.strerror}"
            ) from error

    def _parse(self, raw: bytes) -> dict[str, Any]:
        answer: Any = None
        with suppress(ValueError, RecursionError):
            answer = json.loads(raw)
        if not isinstance(answer, dict) or not {"line", "key"} <= answer.keys():
            raise self._refusal("is not a file of `tiny-llm batch`")
        return answer

    def _compare(self, answer: dict[str, Any], line: Line, key: str) -> None:
        if answer["line"] != line.number:
            raise self._refusal(
                f"answers line {answer['line']!r:.20} where line {line.number} is next"
            )
        if answer["key"] == key:
            return
        if str(answer["key"]).partition("-")[0] == key.partition("-")[0]:
            raise self._refusal(f"answers another line {line.number}: it was changed")
        raise self._refusal(
            f"was made with other settings (from line {line.number} on): another "
            f"model, sampling, system message or --kv-bits"
        )

    def _refusal(self, why: str) -> ParameterError:
        return ParameterError(f"{self.name} {why}; --force starts anew")


@contextmanager
def opened(output: str, source: BinaryIO) -> Iterator[Answers]:
    """The answers' file, which nobody else writes meanwhile; "-": standard output.

    Raises ParameterError if it cannot be opened, is the input, or is in use.
    """
    if output == "-":
        yield Answers(sys.stdout.buffer, "standard output", resumes=False)
        return
    path = Path(output)
    try:
        special = path.exists() and not path.is_file()  # a pipe, a device
        flags = os.O_WRONLY if special else os.O_RDWR | os.O_CREAT
        file = os.fdopen(os.open(path, flags, 0o666), "wb" if special else "r+b")
    except OSError as error:
        raise ParameterError(f"{output} cannot be written: {error.strerror}") from error
    except ValueError as error:
        raise ParameterError(f"{output!r} is no file: {error}") from error
    try:
        if not special:
            _claim(file, output, source)
        yield Answers(file, output, resumes=not special)
    finally:
        with suppress(OSError):  # what could not be flushed was told by `write`
            file.close()


def line_of(known: dict[str, Any], result: Result, key: str) -> str:
    """The line to write for an answer. known: the line's number, and its id."""
    answer = {
        **known,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.token_ids),
        "cached_tokens": result.cached_tokens,
        "seconds": round(result.total_seconds, 3),
    }
    if isinstance(result.stop_reason, str):
        answer["stop_reason"] = result.stop_reason
    if result.reasoning:
        answer["reasoning"] = result.reasoning
    if result.logprobs is not None:
        answer["logprobs"] = [_number(x) for x in result.logprobs]
    if result.top_logprobs is not None:
        answer["top_logprobs"] = [_likeliest(top) for top in result.top_logprobs]
    if result.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [
            {"logprob": _number(own), "likeliest": _likeliest(top)}
            for own, top in result.prompt_logprobs
        ]
    return json.dumps({**answer, "key": key}, ensure_ascii=False)


def _number(x: float) -> float | None:
    return round(x, 6) if math.isfinite(x) else None  # (JSON has no infinity)


def _likeliest(top: list[tuple[int, float]]) -> list[list[Any]]:
    return [[token, _number(x)] for token, x in top]


def error_of(known: dict[str, Any], error: object, key: str) -> str:
    """The line to write for a line that has no answer."""
    answer = {**known, "error": str(error), "key": key}
    return json.dumps(answer, ensure_ascii=False)


def _claim(file: BinaryIO, name: str, source: BinaryIO) -> None:
    """Refuse a file that is the input, or that another process writes."""
    own = os.fstat(file.fileno())
    with suppress(OSError):  # an input without a descriptor
        other = os.fstat(source.fileno())
        if stat.S_ISREG(other.st_mode) and os.path.samestat(own, other):
            raise ParameterError(f"{name} is the input; the answers need another file")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ParameterError(f"{name} is being written by another process") from None
    except OSError:  # a file system without locks
        return


def _is_torn(raw: bytes) -> bool:
    """Whether it may be the beginning of an answer."""
    return b'{"line": '.startswith(raw) or _BEGINNING.match(raw) is not None
