"""Beam search: the likeliest sequences, by keeping the best few at every step.

The beams are the rows of one batch over one page pool. Each has a table of its own;
the pages behind it are shared. A beam that goes on in two ways is forked: references
are counted, and only a last page that is not full is copied when it is written.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, NamedTuple, cast

import mlx.core as mx

from .beam_hypotheses import BeamSequence, EarlyStopping, Hypotheses
from .cache import Append, KvCache, PagePool, PageTable
from .cache.batching import batching_cache
from .errors import ParameterError, PromptError, TinyLLMError, whole_number
from .generation import checked_ids, checked_processors, checked_prompt
from .models import Decoder
from .progress import Progress
from .sampling import LogitsProcessor, check_logits
from .sampling.candidates import largest, log_total

# Small pages, since a page is what is copied when a beam is forked.
_PAGE_SIZE = 16


def beam_search(
    model: Decoder,
    prompt_tokens: Sequence[int] | mx.array,
    *,
    num_beams: int = 4,
    max_new_tokens: int = 256,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    num_return_sequences: int = 1,
    eos_token_ids: int | Iterable[int] = (),
    logits_processors: Sequence[LogitsProcessor] = (),
    prefill_chunk: int = 2048,
    page_size: int = _PAGE_SIZE,
    kv_bits: int | None = None,
    kv_group_size: int | None = None,
    progress: Progress | None = None,
) -> list[BeamSequence]:
    """The best num_return_sequences continuations of a prompt, best first.

    Each step extends num_beams sequences by every token and keeps the num_beams best
    sums of log-probabilities. A sequence ends at an id of eos_token_ids (if it is among
    the num_beams best then), at max_new_tokens, or where the context is full; ended
    ones compare by score: sum / length ** length_penalty. early_stopping: when to stop
    (Hypotheses.complete). The rules are those of transformers 5, but for processors:
    there they get log-probabilities. With one beam the tokens are those of greedy
    decoding (early_stopping="never" searches on). Fewer sequences come back only where
    the vocabulary or the processors allow no more.

    logits_processors: as in stream_generate, (token ids int32 [T], logits [1, V]) ->
    logits [1, V], called for each beam with the prompt and the beam's own tokens; the
    log-probabilities are those of what they return, -inf rules a token out. Beams come
    and go, so a processor must not keep state between calls.

    page_size, kv_bits, kv_group_size: of the pool, whose memory is allocated as pages
    are first used; prefill_chunk, progress: as in stream_generate.

    Raises, before any work: PromptError for a prompt that is empty, holds an id outside
    the vocabulary, or is longer than the context; ParameterError for other arguments
    that cannot be used, also if not even the machine's whole memory holds the beams.
    While searching: ParameterError for what a processor must not return, TinyLLMError
    if the logits are not numbers.
    """
    config = model.config
    prompt = checked_prompt(prompt_tokens, config.vocab_size)
    num_beams = whole_number("num_beams", num_beams, least=1)
    max_new_tokens = whole_number("max_new_tokens", max_new_tokens, least=1)
    returned = whole_number("num_return_sequences", num_return_sequences, least=1)
    if returned > num_beams:
        raise ParameterError(
            f"num_return_sequences is {returned}, but there are num_beams={num_beams}"
        )
    prefill_chunk = whole_number("prefill_chunk", prefill_chunk, least=1)
    page_size = whole_number("page_size", page_size, least=1)
    stop_ids = _eos_ids(eos_token_ids)
    processors = checked_processors(logits_processors)
    if progress is not None and not callable(progress):
        raise ParameterError(f"progress is {progress!r}; a function is needed")
    room = config.context_length - len(prompt)
    if room < 0:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens, but the model's context is "
            f"{config.context_length} tokens"
        )
    limit = min(max_new_tokens, room + 1)  # the last token is not stored
    hypotheses = Hypotheses(num_beams, limit, length_penalty, early_stopping)
    # All beams see the prompt's full pages, and each has its own from there on.
    full, rest = divmod(len(prompt), page_size)
    own = -(-(rest + limit - 1) // page_size)
    pool = model.create_page_pool(
        tokens=page_size * max(full + num_beams * own, 1),
        page_size=page_size,
        bits=kv_bits,
        group_size=kv_group_size,
        grows=True,
    )
    search = _Search(model, pool, prompt, num_beams, stop_ids, processors)
    try:
        search.run(hypotheses, prefill_chunk, progress)
    finally:
        for table in list(pool.tables):
            table.free()
    return hypotheses.best[:returned]


class _Beam(NamedTuple):
    """A sequence that goes on: its pages, new tokens, sum of log-probabilities."""

    table: PageTable
    tokens: list[int]
    total: float


class _Candidate(NamedTuple):
    """A beam's next token, and the sum with it."""

    row: int
    token: int
    total: float


class _Search:
    """One call of beam_search, its arguments checked."""

    def __init__(
        self,
        model: Decoder,
        pool: PagePool,
        prompt: list[int],
        num_beams: int,
        stop_ids: frozenset[int],
        processors: Sequence[LogitsProcessor],
    ) -> None:
        self.model, self.pool, self.prompt = model, pool, prompt
        self.num_beams, self.stop_ids, self.processors = num_beams, stop_ids, processors
        self.cache = batching_cache(pool, 0)
        self.batch = self.cache[0].batch
        vocabulary = model.config.vocab_size
        # Of a row's tokens: with all that stop, num_beams are left to go on with.
        stops = sum(0 <= token < vocabulary for token in stop_ids)
        self.count = min(num_beams + stops, vocabulary)

    def run(
        self, hypotheses: Hypotheses, chunk: int, progress: Progress | None
    ) -> None:
        """Search; what was found is in the hypotheses."""
        table = PageTable(self.pool)
        logits = self._prefill(table, chunk, progress)
        beams = [_Beam(table, [], 0.0)]
        for length in range(1, hypotheses.limit + 1):
            found = self._candidates(beams, logits)
            last = length == hypotheses.limit
            hypotheses.add(
                ([*beams[row].tokens, token], total, token in self.stop_ids)
                for row, token, total in found[: self.num_beams]
                if last or token in self.stop_ids
            )
            going = [own for own in found if own.token not in self.stop_ids]
            going = going[: self.num_beams]
            if last or not going or hypotheses.complete(going[0].total, length):
                break
            beams = _follow(beams, going)
            logits = self._step(beams)
        if not hypotheses.best:
            raise ParameterError(
                "the logits_processors allow no token to go on with: a row of logits "
                "needs at least one that is not -inf"
            )

    def _prefill(
        self, table: PageTable, chunk: int, progress: Progress | None
    ) -> mx.array:
        """Run the prompt; the logits [1, V] of its last token."""
        prompt = self.prompt
        logits = None
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            stop = start + len(part)
            table.prepare(start, stop)
            append = Append(table, start, len(part))
            keep = [len(part) - 1] if stop == len(prompt) else []
            logits = self._forward([append], part, range(start, stop), keep)
            mx.eval(logits, self.pool.rows)
            if progress is not None:
                progress(stop, len(prompt))
        assert logits is not None
        return logits

    def _step(self, beams: Sequence[_Beam]) -> mx.array:
        """Append the newest token of every beam; the logits [beams, V] after it."""
        position = len(self.prompt) + len(beams[0].tokens) - 1
        for table, *_ in beams:
            table.prepare(position, position + 1)
        appends = [Append(table, position, 1) for table, *_ in beams]
        ids = [tokens[-1] for _, tokens, _ in beams]
        return self._forward(appends, ids, [position] * len(ids), None)

    def _forward(
        self,
        appends: Sequence[Append],
        ids: Sequence[int],
        positions: Sequence[int],
        keep: list[int] | None,
    ) -> mx.array:
        """Logits [N or kept, V] of the rows, or of those in `keep`, lazily.

        One append, or several of one row each.
        """
        plan = self.batch.plan_step(appends)
        order = plan.order if len(appends) > 1 else list(range(len(ids)))
        self.batch.plan = plan
        try:
            out = self.model(
                mx.array([[ids[i]] for i in order], dtype=mx.int32),
                offset=mx.array([positions[i] for i in order], dtype=mx.int32),
                cache=cast(list[KvCache], self.cache),
                logits_to_keep=0 if keep == [] else 1,
                rows_to_keep=mx.array(keep) if keep else None,
            )
        finally:
            self.batch.plan = None
        plan.commit()
        if keep == []:
            return out
        logits = out[:, -1]
        if keep is None and order != sorted(order):
            logits = logits[mx.argsort(mx.array(order))]
        return logits

    def _candidates(self, beams: Sequence[_Beam], logits: mx.array) -> list[_Candidate]:
        """The best continuations of all beams, best first; logits: [beams, V]."""
        if self.processors:
            logits = self._processed(beams, logits)
        logits = logits.astype(mx.float32)
        read: Any = [*largest(logits, self.count), log_total(logits)[:, 0]]
        read.append(mx.max(logits, axis=1))
        mx.eval(read, self.pool.rows)
        found = []
        columns = zip(*(array.tolist() for array in read), strict=True)
        for row, (ids, scores, norm, top) in enumerate(columns):
            if top == -math.inf:  # processors ruled everything out: the beam is dead
                continue
            if not math.isfinite(top):
                raise TinyLLMError(
                    f"the largest logit after {len(beams[row].tokens)} new tokens is "
                    f"{top}: the model or a logits processor computes no numbers"
                )
            found += [
                _Candidate(row, token, beams[row].total + (score - norm))
                for token, score in zip(ids, scores, strict=True)
                if score > -math.inf
            ]
        return sorted(found, key=lambda own: -own.total)  # (stable)

    def _processed(self, beams: Sequence[_Beam], logits: mx.array) -> mx.array:
        rows = []
        for row, beam in enumerate(beams):
            tokens = mx.array(self.prompt + beam.tokens, dtype=mx.int32)
            own = logits[row : row + 1]
            shape = own.shape
            for number, processor in enumerate(self.processors):
                own = processor(tokens, own)
                check_logits(own, number, shape)
            rows.append(own)
        return mx.concatenate(rows)


def _follow(beams: Sequence[_Beam], going: Sequence[_Candidate]) -> list[_Beam]:
    """The beams of the next step: parents forked, or taken over, or freed."""
    children = Counter(own.row for own in going)
    for row, beam in enumerate(beams):
        if row not in children:
            beam.table.free()
    following = []
    for row, token, total in going:
        table, tokens, _ = beams[row]
        children[row] -= 1
        if children[row]:  # the last child has the parent's own table
            table = table.fork()
        following.append(_Beam(table, [*tokens, token], total))
    return following


def _eos_ids(ids: int | Iterable[int]) -> frozenset[int]:
    """One id or several, as a set. Raises ParameterError."""
    try:
        return frozenset([index(cast(int, ids))])
    except TypeError:
        return checked_ids(cast(Iterable[int], ids))
