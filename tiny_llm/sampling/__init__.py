"""Logits -> token ids, on the device, every row by its own rules.

The order of what changes logits, as transformers has it: logit bias, frequency and
presence penalty, repetition penalty, DRY, what is forbidden (min_tokens, bad words,
grammars), temperature, top-n-sigma, top-k, top-p, min-p, typical-p, XTC.
"""

from .params import SamplingParams
from .processors import LogitsProcessor, make_logits_processors
from .sampler import Sampler, check_logits, checked_choice, greedy, make_sampler

__all__ = [
    "LogitsProcessor",
    "Sampler",
    "SamplingParams",
    "check_logits",
    "checked_choice",
    "greedy",
    "make_logits_processors",
    "make_sampler",
]
