"""Cache layouts: each keeps one layer's keys and values and attends over them."""

from .base import KvCache, NoCache
from .full import TinyKvFullCache

__all__ = ["KvCache", "NoCache", "TinyKvFullCache"]
