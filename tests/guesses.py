"""Guesses of every kind for speculation: right, wrong, odd, of any length."""

import random

from tiny_llm.speculation import Drafter, Speculation


class Guesses(Speculation):
    """Guesses from sequences that are known (tuples of ids), spoilt at random."""

    def __init__(self, seed, known, vocabulary, max_draft=15):
        super().__init__(max_draft)
        self.seed, self.known, self.size = seed, known, vocabulary

    def drafter(self, vocabulary):
        return Guesser(self)


class Guesser(Drafter):
    free = True

    def __init__(self, guesses):
        self.guesses = guesses
        self.random = random.Random(guesses.seed)

    def look(self, tokens):
        return 0 if len(tokens) % 7 else None

    def propose(self, tokens, most):
        draw, known = self.random, []
        for sequence in self.guesses.known:
            if list(sequence[: len(tokens)]) == list(tokens):
                known = list(sequence[len(tokens) :])
        drafts = [draw.randrange(self.guesses.size) for _ in range(most)]
        right = draw.choice([0, 1, most, most, draw.randint(0, most)])
        drafts[:right] = known[:right]
        return drafts[: draw.randint(0, most)] if draw.random() < 0.3 else drafts[:most]
