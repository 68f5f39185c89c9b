"""From parsed arguments to a model and a sampler: the same for generate and chat."""

from __future__ import annotations

from argparse import Namespace

from ..errors import PromptError
from ..loader import Loaded, load
from ..sampling import Sampler, make_sampler


def sampler_of(args: Namespace) -> Sampler:
    """The sampler that the options describe. Raises ParameterError."""
    return make_sampler(
        args.temperature,
        top_k=0 if args.top_k is None else args.top_k,
        top_p=1.0 if args.top_p is None else args.top_p,
        min_p=0.0 if args.min_p is None else args.min_p,
        seed=args.seed,
    )


def load_from(args: Namespace) -> Loaded:
    """The model and tokenizer that the options name. Raises as loader.load."""
    return load(
        args.model,
        revision=args.revision,
        dtype=args.dtype,
        quantize=args.quantize,
    )


def check_text(text: str, what: str) -> str:
    """The text, if it is one: bytes that are not UTF-8 arrive as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(f"{what} is not UTF-8 text: {error.reason}") from error
    return text
