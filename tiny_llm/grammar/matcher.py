"""Where one output stands in its grammar: which tokens may follow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import GrammarError, ParameterError, whole_number
from ..token_masks import Mask
from .vocabulary import GrammarVocabulary


class Matcher:
    """The state of one output; GrammarCompiler.compile makes it.

    An output is tokens of text, then EOS, which is allowed where the grammar may end.
    After EOS, only EOS follows, so that a step that runs ahead has a token to choose.
    All EOS ids of the model are equal.

    One thread at a time may use a matcher, any thread. mask() lets other Python threads
    run while the library works. Errors of the library during mask() (a state too
    complex for its limits) are GrammarErrors too.
    """

    def __init__(self, library: Any, vocabulary: GrammarVocabulary) -> None:
        self._library = library
        self._vocabulary = vocabulary
        self._texts = 0  # tokens of text; the library knows only these
        self._ends = 0  # EOS tokens after them
        self._mask: Mask | None = None  # of the present state

    def __len__(self) -> int:
        """How many tokens were taken, EOS included."""
        return self._texts + self._ends

    @property
    def accepting(self) -> bool:
        """Whether the output may end here: its text is complete, or has ended."""
        return self._ends > 0 or bool(self._library.is_accepting())

    @property
    def finished(self) -> bool:
        """Whether nothing but EOS can follow."""
        return self.accepting and not (self.mask() & self._vocabulary.text).any()

    def mask(self) -> Mask:
        """The tokens that may follow, packed: uint32 [ceil(V / 32)], read-only.

        Bit i of word w is token 32 w + i. Never empty: raises GrammarError where the
        vocabulary has no token that the grammar needs.
        """
        if self._mask is None:
            self._mask = self._compute()
            self._mask.flags.writeable = False
        return self._mask

    def fill(self, row: Mask) -> None:
        """Write mask() into a row [ceil(V / 32)] of uint32."""
        row[:] = self.mask()

    def advance(self, token: int) -> None:
        """Take the next token. Raises GrammarError, unchanged, if it is not allowed."""
        if self.allowed([token]) == 0:
            raise GrammarError(
                f"the grammar does not allow token {token} as token {len(self)} of the "
                f"output"
            )
        self._mask = None
        if token in self._vocabulary.eos_ids:
            self._ends += 1
            return
        self._texts += 1
        if not self._library.consume_token(token):
            raise GrammarError(
                f"the grammar fails: {reason(self._library.get_error())}"
            )

    def allowed(self, tokens: Sequence[int]) -> int:
        """How many of the tokens, from the first on, may follow. Changes nothing."""
        if self._ends:
            return self._leading_ends(tokens)
        vocabulary = self._vocabulary
        texts = 0
        while texts < len(tokens) and self._is_text(tokens[texts], texts):
            texts += 1
        run = list(tokens[:texts])
        valid: int = self._library.validate_tokens(run) if run else 0
        if valid < texts or texts == len(tokens):
            return valid
        if tokens[texts] not in vocabulary.eos_ids or not self._accepts_after(run):
            return valid
        return valid + self._leading_ends(tokens[texts:])

    def masks(self, tokens: Sequence[int]) -> Mask:
        """mask() before each of the tokens and after the last: [n + 1, ceil(V / 32)].

        n is allowed(tokens): rows that nothing can reach are left out. For verifying a
        draft in one step. Changes nothing.
        """
        valid = self.allowed(tokens)
        rows = [self.mask()]
        try:
            for token in tokens[:valid]:
                self.advance(token)
                rows.append(self.mask())
        finally:
            self.rollback(len(rows) - 1)
        return np.stack(rows)

    def rollback(self, count: int) -> None:
        """Forget the newest tokens. Raises ParameterError if there are fewer."""
        count = whole_number("count", count, least=0)
        if count > len(self):
            raise ParameterError(f"cannot take back {count} tokens of {len(self)}")
        if count == 0:
            return
        self._mask = None
        ends = min(count, self._ends)
        self._ends -= ends
        if count > ends:
            self._texts -= count - ends
            if not self._library.rollback(count - ends):
                raise GrammarError(
                    f"the grammar fails: {reason(self._library.get_error())}"
                )

    def copy(self) -> Matcher:
        """A matcher in the same state, which goes on by itself."""
        twin = Matcher(self._library.deep_copy(), self._vocabulary)
        twin._texts, twin._ends, twin._mask = self._texts, self._ends, self._mask
        return twin

    def _compute(self) -> Mask:
        vocabulary = self._vocabulary
        if self._ends:
            return vocabulary.eos
        packed = np.frombuffer(self._library.compute_bitmask(), dtype=np.uint32)
        error = reason(self._library.get_error()) if self._library.is_error() else ""
        text = vocabulary.text if self._texts else vocabulary.first
        mask: Mask = packed[: len(text)] & text  # it has room for one id more
        if self._library.is_accepting():
            mask |= vocabulary.eos
        if error in ("", "NoExtension", "NoExtensionBias"):
            if mask.any() and not error:
                return mask
            error = "no token of this tokenizer can follow, not even EOS"
        raise GrammarError(
            f"the grammar cannot go on after {self._texts} tokens: {error}"
        )

    def _is_text(self, token: int, after: int) -> bool:
        if not 0 <= token < self._vocabulary.size:
            return False
        first = self._texts + after == 0
        bits = self._vocabulary.first if first else self._vocabulary.text
        return bool(bits[token // 32] >> np.uint32(token % 32) & np.uint32(1))

    def _leading_ends(self, tokens: Sequence[int]) -> int:
        count = 0
        while count < len(tokens) and tokens[count] in self._vocabulary.eos_ids:
            count += 1
        return count

    def _accepts_after(self, texts: list[int]) -> bool:
        if not texts:
            return bool(self._library.is_accepting())
        self._library.consume_tokens(texts)
        accepts = bool(self._library.is_accepting())
        self._library.rollback(len(texts))
        return accepts


def reason(message: str) -> str:
    """The library's words without its traces and its quotation of the grammar."""
    message = re.split(r"<backtrace>|<state>", message)[0]
    message = re.sub(r"^ *\d+ \| .*$|^ *\^$", "", message, flags=re.MULTILINE)
    message = " ".join(message.split()).removeprefix("at 1(8): ")
    return f"{message:.500}" or "no reason was given"
