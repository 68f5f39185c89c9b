"""Requests -> steps: many answers at once, each as if it were alone."""

from .engine import Engine
from .handle import Handle, Piece
from .params import SamplingParams
from .stats import Stats

__all__ = ["Engine", "Handle", "Piece", "SamplingParams", "Stats"]
