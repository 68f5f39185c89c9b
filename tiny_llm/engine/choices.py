"""Several answers to one prompt, which share its pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import ParameterError
from ..result import Result
from ..sampling.params import SamplingParams
from ..sampling.random_numbers import other_seed
from .handle import Handle


def wants_several(params: object) -> bool:
    """Whether several answers are asked for."""
    if not isinstance(params, SamplingParams):
        return False
    return params.n > 1 or params.best_of is not None


def params_of_choices(params: SamplingParams) -> list[SamplingParams]:
    """One request's params for each answer: with a seed, each has one of its own."""
    count = params.best_of or params.n
    ranked = count > params.n  # (by their tokens' log-probabilities)
    single = replace(params, n=1, best_of=None, logprobs=params.logprobs or ranked)
    later = replace(single, prompt_logprobs=None)  # (the prompt's are told once)
    return [
        replace(
            later if i else single,
            seed=None if params.seed is None else other_seed(params.seed, i),
        )
        for i in range(count)
    ]


class Choices:
    """The answers to one prompt: `handles` for their streams, then `results`."""

    def __init__(self, params: SamplingParams, handles: Sequence[Handle]) -> None:
        self.params, self.handles = params, list(handles)

    @property
    def done(self) -> bool:
        """Whether all have ended."""
        return all(handle.done for handle in self.handles)

    def cancel(self) -> None:
        """End them all."""
        for handle in self.handles:
            handle.cancel()

    def wait(self) -> None:
        """Until something new happened to one that goes on."""
        for handle in self.handles:
            if not handle.done:
                handle.wait()
                return

    def results(self) -> list[Result]:
        """Wait for all; n of them, nothing is raised.

        In the order of their seeds; with best_of above n, those with the highest mean
        log-probability of their tokens, the best first, and failed ones last.
        """
        found = [handle.result() for handle in self.handles]
        if len(found) == self.params.n:
            return found
        best = sorted(found, key=_mean_logprob, reverse=True)[: self.params.n]
        if not self.params.logprobs:  # (they were for us)
            for result in best:
                result.logprobs = None
        return best

    def result(self) -> Result:
        """The first of `results`, with all of them as its choices."""
        results = self.results()
        results[0].choices = results
        if results[0].prompt_logprobs is None:
            results[0].prompt_logprobs = self.handles[0].result().prompt_logprobs
        return results[0]


def _mean_logprob(result: Result) -> tuple[bool, float]:
    values = result.logprobs or [float("-inf")]
    return result.error is None, sum(values) / len(values)


def submit_choices(
    params: SamplingParams,
    submit: Callable[[SamplingParams, Handle | None], Handle],
) -> Choices:
    """Submit each answer's request; submit takes its params and the first one's handle.

    Raises what submit raises, then none of them goes on; and ParameterError.
    """
    if not isinstance(params, SamplingParams):
        raise ParameterError(f"params is {params!r:.60}; SamplingParams are needed")
    handles: list[Handle] = []
    try:
        for own in params_of_choices(params):
            handles.append(submit(own, handles[0] if handles else None))
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
    return Choices(params, handles)
