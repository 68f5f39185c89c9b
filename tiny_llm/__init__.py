"""A small, fast and provably exact LLM inference engine on MLX."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import blas

blas.preload()  # before the first import of mlx.core: see blas.py

if TYPE_CHECKING:
    from .beam import beam_search
    from .beam_hypotheses import BeamSequence
    from .cache import TinyKvFullCache
    from .cache_file import load_kv_cache, save_kv_cache
    from .conversation import Conversation
    from .engine import Engine, SamplingParams
    from .errors import OutOfPagesError, ParameterError, TinyLLMError
    from .generation import stream_generate
    from .grammar import Grammar
    from .loader import load, load_model, load_tokenizer
    from .result import Result
    from .sampling import make_logits_processors, make_sampler
    from .speculation import DraftModel, PromptLookup
    from .text import generate, stream_text
    from .tokenizer import Tokenizer

__version__ = "0.1.0"

_HOME = {
    "BeamSequence": "beam_hypotheses",
    "Conversation": "conversation",
    "DraftModel": "speculation",
    "Engine": "engine",
    "Grammar": "grammar",
    "OutOfPagesError": "errors",
    "ParameterError": "errors",
    "PromptLookup": "speculation",
    "Result": "result",
    "SamplingParams": "engine",
    "TinyKvFullCache": "cache",
    "TinyLLMError": "errors",
    "Tokenizer": "tokenizer",
    "beam_search": "beam",
    "generate": "text",
    "load": "loader",
    "load_kv_cache": "cache_file",
    "load_model": "loader",
    "load_tokenizer": "loader",
    "make_logits_processors": "sampling",
    "make_sampler": "sampling",
    "save_kv_cache": "cache_file",
    "stream_generate": "generation",
    "stream_text": "text",
}

__all__ = [
    "BeamSequence",
    "Conversation",
    "DraftModel",
    "Engine",
    "Grammar",
    "OutOfPagesError",
    "ParameterError",
    "PromptLookup",
    "Result",
    "SamplingParams",
    "TinyKvFullCache",
    "TinyLLMError",
    "Tokenizer",
    "beam_search",
    "generate",
    "load",
    "load_kv_cache",
    "load_model",
    "load_tokenizer",
    "make_logits_processors",
    "make_sampler",
    "save_kv_cache",
    "stream_generate",
    "stream_text",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `tiny-llm --help` needs none."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
