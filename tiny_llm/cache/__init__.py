"""Cache layouts: each keeps one layer's keys and values and attends over them."""

from .base import Held, KvCache, Layout, NoCache, rewind
from .batching import BatchingKvCache
from .create import create_kv_cache, create_page_pool
from .full import QuantizedKvCache, TinyKvFullCache
from .page_index import Append
from .paged import PagedKvCache, fork
from .pool import PagePool
from .rotating import RotatingKvCache
from .step_plan import StepPlan
from .table import PageTable

__all__ = [
    "Append",
    "BatchingKvCache",
    "Held",
    "KvCache",
    "Layout",
    "NoCache",
    "PagePool",
    "PageTable",
    "PagedKvCache",
    "QuantizedKvCache",
    "RotatingKvCache",
    "StepPlan",
    "TinyKvFullCache",
    "create_kv_cache",
    "create_page_pool",
    "fork",
    "rewind",
]
