"""The rows of a step -> a token for each, every row by its request's rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..errors import ParameterError
from ..token_masks import apply_masks
from .adjust import add, penalise
from .candidates import largest, log_total, row_tops
from .rules import Rules
from .sampler import check_logits, checked_choice
from .select import Selected, in_order, select


class Row(NamedTuple):
    """A row that samples. place: of the new token in the answer.

    tokens: its request's context, the row's own token the last one (which may be any
    number where it has not been read), if the rules look back. drafted: how many at
    the end may be taken back. mask: uint32 [ceil(V / 32)], what a grammar allows;
    must_end: and that is only the end.
    """

    rules: Rules
    place: int
    tokens: Sequence[int] = ()
    drafted: int = 0
    mask: np.ndarray | None = None
    must_end: bool = False


class Sampled(NamedTuple):
    """What a step chose, lazily.

    tokens: int32 [R]; tops: float [R], the model's largest logit (NaN if any is).
    scores: float [R], the tokens' own after all changes: -inf if none was allowed.
    logprobs: float [R], top_ids and top_logprobs [R, n]: of the rows that want them,
    if any does. errors: row -> what its caller's own code raised.
    """

    tokens: mx.array
    tops: mx.array
    scores: mx.array | None
    logprobs: mx.array | None
    top_ids: mx.array | None
    top_logprobs: mx.array | None
    errors: dict[int, BaseException]

    def arrays(self) -> list[mx.array]:
        """What there is to be computed."""
        return [x for x in self[:6] if isinstance(x, mx.array)]


def sample_rows(
    logits: mx.array, rows: Sequence[Row], last: mx.array, *, wait: bool
) -> Sampled:
    """Choose for each row of logits [R, V].

    last: int [R], the rows' own tokens, maybe still to be computed. wait: whether the
    logits may be computed meanwhile.
    """
    errors: dict[int, BaseException] = {}
    changed = adjusted(logits, rows, last, errors)
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        own = row.rules.params
        kind = "own" if own.sampler else "greedy" if own.greedy else "drawn"
        groups.setdefault(kind, []).append(i)
    top = max((row.rules.params.top_logprobs for row in rows), default=0)
    processed = any(_wants(row, "processed") for row in rows)
    parts = []
    for kind, places in groups.items():
        some = changed if len(places) == len(rows) else changed[mx.array(places)]
        own_rows = [rows[i] for i in places]
        report = top if processed else None
        if kind == "greedy":
            part = _greedy(some, report)
        elif kind == "drawn":
            uniforms = mx.array([r.rules.uniform(r.place) for r in own_rows])
            filters = [r.rules.filters_at(r.place) for r in own_rows]
            part = select(some, filters, uniforms, wait=wait, top=report)
        else:
            part = _own(some, own_rows, places, errors, report)
        parts.append(part)
    found = in_order(parts, [i for places in groups.values() for i in places])
    if any(_wants(row, "raw") for row in rows):
        found = _with_raw(found, logits, rows, top)
    tokens, scores = found.tokens.astype(mx.int32), None
    if changed is not logits:
        chosen = mx.maximum(tokens, 0)[:, None]
        scores = mx.take_along_axis(changed, chosen, axis=1)[:, 0]
    return Sampled(tokens, row_tops(logits), scores, *found[1:], errors)


def _wants(row: Row, mode: str) -> bool:
    own = row.rules.params
    return own.logprobs and own.logprobs_mode == mode


def adjusted(
    logits: mx.array,
    rows: Sequence[Row],
    last: mx.array,
    errors: dict[int, BaseException],
) -> mx.array:
    """The logits after everything that is done to them before the filters."""
    if any(row.rules.params.logit_bias for row in rows):
        logits = add(
            logits.astype(mx.float32), [row.rules.params.logit_bias for row in rows]
        )
    if any(row.rules.penalised for row in rows):
        nothing = np.zeros(0, np.int32), np.zeros(0, np.int32)
        logits = penalise(
            logits.astype(mx.float32),
            [
                row.rules.table(row.tokens, row.drafted)
                if row.rules.penalised
                else nothing
                for row in rows
            ],
            last,
            frequency=[row.rules.params.frequency_penalty for row in rows],
            presence=[row.rules.params.presence_penalty for row in rows],
            repetition=[row.rules.params.repetition_penalty for row in rows],
        )
    terms = [row.rules.terms(row.tokens, row.place, row.must_end) for row in rows]
    if any(terms):
        logits = add(logits.astype(mx.float32), terms)
    for i, row in enumerate(rows):
        if row.rules.params.logits_processors:
            logits = _processed(logits, i, row, errors)
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    if masked:
        masks = np.stack([rows[i].mask for i in masked])  # type: ignore[misc]
        logits = apply_masks(logits, masked, masks)
    return logits


def _processed(
    logits: mx.array, i: int, row: Row, errors: dict[int, BaseException]
) -> mx.array:
    """Have a request's own processors change its row.

    What they fail at must not be in the step's graph, so it is computed here. (Such a
    request's last token is known.)
    """
    own = logits[i : i + 1]
    try:
        tokens = mx.array(list(row.tokens), dtype=mx.int32)
        for number, processor in enumerate(row.rules.params.logits_processors):
            own = processor(tokens, own)
            check_logits(own, number, (1, logits.shape[1]))
        top = mx.max(own).item()
        if top != top or top == math.inf:
            raise ParameterError(f"logits_processors made the largest logit {top}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() too
        errors[i] = error
        return logits
    parts = [logits[:i], own.astype(logits.dtype), logits[i + 1 :]]
    return mx.concatenate([part for part in parts if part.shape[0]])


def _greedy(logits: mx.array, top: int | None) -> Selected:
    tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    if top is None:
        return Selected(tokens)
    return reported(tokens, logits, top)


def reported(tokens: mx.array, logits: mx.array, top: int) -> Selected:
    """The tokens, with log-probabilities by the logits."""
    total = log_total(logits)
    own = mx.take_along_axis(logits, tokens[:, None], axis=1).astype(mx.float32) - total
    ids, best = largest(logits.astype(mx.float32), min(max(top, 1), logits.shape[1]))
    return Selected(tokens, own[:, 0], ids[:, :top], (best - total)[:, :top])


def _own(
    logits: mx.array,
    rows: Sequence[Row],
    places: Sequence[int],
    errors: dict[int, BaseException],
    top: int | None,
) -> Selected:
    """Rows whose callers have samplers of their own, one after the other.

    What these fail at must not be in the step's graph, so it is computed here.
    """
    mx.eval(logits)
    chosen = []
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        own = logits[i : i + 1].astype(mx.float32)
        try:
            sampler: Any = row.rules.params.sampler
            ids = checked_choice(sampler(own - mx.logsumexp(own, axis=-1)), rows=1)
            token: int = ids.item()  # type: ignore[assignment]
            # (an id out of range is told when it is read; it must not be looked up)
            chosen.append(token if 0 <= token < logits.shape[1] else -1)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() too
            errors[place] = error
            chosen.append(0)
    tokens = mx.array(chosen, dtype=mx.int32)
    return Selected(tokens) if top is None else reported(tokens, logits, top)


def _with_raw(
    found: Selected, logits: mx.array, rows: Sequence[Row], top: int
) -> Selected:
    """With log-probabilities by the model's own logits for the rows that want these."""
    raw = reported(mx.maximum(found.tokens, 0), logits, top)
    if found.logprobs is None:
        return raw._replace(tokens=found.tokens)
    mine = mx.array([_wants(row, "raw") for row in rows])
    pairs = zip(raw[1:], found[1:], strict=True)
    return Selected(
        found.tokens,
        *(
            mx.where(mine if a.ndim == 1 else mine[:, None], a, b)
            for a, b in pairs
            if a is not None and b is not None
        ),
    )
