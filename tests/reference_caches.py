"""What each cache layout stands for, written down in the most obvious way.

Each holds everything in full precision, concatenated, and spells out what a query sees.
"""

import mlx.core as mx


class Reference:
    """Plain attention over whatever came, as rounded and as seen."""

    def __init__(self, seen=None, round_to=None):
        """seen: bool [L, S] from positions; round_to: (bits, group size)."""
        self.seen, self.round_to = seen, round_to
        self.keys = self.values = None
        self.offset = 0

    state = ()

    def attend(self, q, k, v, *, scale, window=None, softcap=None, sinks=None):
        assert softcap is None
        assert sinks is None
        k, v = self.rounded(k), self.rounded(v)
        if self.offset:
            k = mx.concatenate([self.keys, k], axis=2)
            v = mx.concatenate([self.values, v], axis=2)
        self.keys, self.values = k, v
        first, self.offset = self.offset, k.shape[2]
        queries = mx.arange(first, self.offset)[:, None]
        keys = mx.arange(self.offset)[None]
        seen = keys <= queries
        if window is not None:
            seen = seen & (queries - keys < window)
        if self.seen is not None:
            seen = seen & self.seen(queries, keys)
        group = q.shape[1] // k.shape[1]
        k, v = mx.repeat(k, group, axis=1), mx.repeat(v, group, axis=1)
        scores = mx.where(seen, q @ k.swapaxes(-1, -2) * scale, -mx.inf)
        return mx.softmax(scores, axis=-1) @ v

    def rounded(self, x):
        if self.round_to is None:
            return x
        bits, group_size = self.round_to
        packed = mx.quantize(x, group_size=group_size, bits=bits)
        return mx.dequantize(*packed, group_size=group_size, bits=bits)

    def check_rewind(self, n):
        assert 0 <= n <= self.offset

    def rewind(self, n):
        self.offset -= n
        self.keys = self.keys[:, :, : self.offset]
        self.values = self.values[:, :, : self.offset]


class Compared:
    """A layout and its reference given the same queries, keys and values.

    A packed number is a step function of the number: two runs of a model whose keys
    differ in the last bit may differ by a step. So the layout is held to its reference
    where both pack the very same keys.
    """

    def __init__(self, cache, reference):
        self.cache, self.reference = cache, reference
        self.worst = 0.0

    @property
    def offset(self):
        assert self.cache.offset == self.reference.offset
        return self.cache.offset

    @property
    def state(self):
        return self.cache.state

    def attend(self, q, k, v, **options):
        found = self.cache.attend(q, k, v, **options)
        expected = self.reference.attend(q, k, v, **options)
        difference = mx.max(mx.abs(found - expected)).item()
        self.worst = max(self.worst, difference)
        return found

    def check_rewind(self, n):
        self.cache.check_rewind(n)

    def rewind(self, n):
        self.cache.rewind(n)
        self.reference.rewind(n)


def bounded(window, keep):
    """The newest `window` keys and the first `keep`."""
    return lambda queries, keys: (keys < keep) | (queries - keys < window)
