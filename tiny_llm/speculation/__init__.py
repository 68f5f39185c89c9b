"""Speculative decoding: tokens are guessed, and one forward pass verifies them all.

    base           what guesses, and its state for one request
    prompt_lookup  guesses from the prompt and the output themselves
    draft_model    guesses of a smaller model
    length         how many tokens to guess: what was right lately, what a pass costs
    drafting       these together, for one request

A guess is never more than a proposal: every row of the pass is decided as plain
decoding decides it, and the rows after the first wrong guess are taken back. A guessed
token is a proposal from a point mass, for which "draw from the target, keep the guess
if it was drawn" IS the rejection sampling of Leviathan et al. 2023 (algorithm 1): the
guess x is accepted with probability p(x), and otherwise the token is distributed as p
without x, normalised. So the output has the target's distribution, and with a seed it
is the same output.
"""

from .base import Counts, Drafter, Speculation
from .draft_model import DraftModel
from .drafting import Drafting
from .length import DraftLength, StepCosts
from .prompt_lookup import PromptLookup

__all__ = [
    "Counts",
    "DraftLength",
    "DraftModel",
    "Drafter",
    "Drafting",
    "PromptLookup",
    "Speculation",
    "StepCosts",
]
