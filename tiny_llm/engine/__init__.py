"""Requests -> steps: many answers at once, each as if it were alone."""

from ..sampling.params import SamplingParams
from .engine import Engine
from .handle import Handle, Piece
from .stats import Stats

__all__ = ["Engine", "Handle", "Piece", "SamplingParams", "Stats"]
