"""A list of prompts -> the list of their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ..errors import EngineClosedError, ParameterError, TinyLLMError
from ..progress import Progress, progress_bar
from ..result import Result
from ..sampling.params import SamplingParams
from .choices import Choices, wants_several
from .handle import Handle
from .intake import Prompt

Waiting = list[Handle | Choices | Result]


class Submitter(Protocol):
    """The engine, as it is needed here."""

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> Handle:
        """Have a prompt answered."""

    def submit_choices(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> Choices:
        """Have it answered several times."""

    def settle(self) -> None:
        """Have what was cancelled end now."""


def answer_all(
    engine: Submitter,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    template_options: Mapping[str, Any] | None,
    progress: Progress | None,
) -> list[Result]:
    """See Engine.generate."""
    each = _checked(prompts, params, progress)
    waiting: Waiting = []
    try:
        for prompt, own in zip(prompts, each, strict=True):
            submit: Any = engine.submit
            if wants_several(own):
                submit = engine.submit_choices
            try:
                waiting.append(submit(prompt, own, template_options=template_options))
            except EngineClosedError:
                raise
            except TinyLLMError as error:
                waiting.append(Result(finish_reason="error", error=error))
        if progress is not None:
            return _results(waiting, progress)
        with progress_bar("answering") as bar:
            return _results(waiting, bar)
    except BaseException:
        for item in waiting:
            if not isinstance(item, Result):
                item.cancel()
        engine.settle()
        raise


def _checked(
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    progress: Progress | None,
) -> list[SamplingParams | None]:
    """The params of each prompt. Raises ParameterError."""
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        raise ParameterError(f"prompts is {prompts!r:.60}; a list is needed")
    if progress is not None and not callable(progress):
        raise ParameterError(f"progress is {progress!r}; a function is needed")
    each: list[Any] = [params] * len(prompts)
    if isinstance(params, Sequence):
        each = list(params)
    if len(each) != len(prompts):
        raise ParameterError(f"{len(each)} params for {len(prompts)} prompts")
    for own in each:
        if own is not None and not isinstance(own, SamplingParams):
            raise ParameterError(f"params is {own!r:.60}; SamplingParams are needed")
    return each


def _results(waiting: Waiting, progress: Progress) -> list[Result]:
    results = []
    for item in waiting:
        if isinstance(item, Result):
            results.append(item)
            continue
        while not item.done:
            item.wait()
            done = sum(isinstance(w, Result) or w.done for w in waiting)
            progress(done, len(waiting))
        results.append(item.result())
    return results
