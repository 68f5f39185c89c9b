"""Ctrl-C may come between any two lines: the books and the tokens stay right."""

import gc
import sys
from collections import Counter

import mlx.core as mx
import pytest
from paged_model import Request, Rows, poison

from tiny_llm.cache import PagePool, fork, rewind
from tiny_llm.memory import KvShape

FILES = ("cache/table.py", "cache/pages.py", "cache/pool.py", "cache/paged.py")
LAYERS, DIM = 2, 8


def interrupted(operation, after):
    """Run until so many lines of the paged cache are done; whether it came to that."""
    lines, cut = 0, False

    def trace(frame, event, argument):
        nonlocal lines, cut
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        if event == "line":
            lines += 1
            if lines > after:
                sys.settrace(None)
                cut = True
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return cut


class Scene:
    """A request and a fork of it, over layers of full attention and of a window."""

    def __init__(self):
        shape = KvShape((None, 4), 2, DIM, 4)
        self.pool = PagePool(shape, mx.float32, tokens=240, page_size=4)
        self.rows = Rows(DIM)
        first = Request.empty(self.pool, DIM)
        self.append(first, 60)
        self.append(first, 30)
        self.requests = [first, Request(fork(first.cache), list(first.stored))]
        self.length = 90

    def append(self, request, n):
        new = self.rows.make(request.lengths[0], n, LAYERS)
        for layer, entry in enumerate(request.cache):
            k, v = (mx.array(rows)[None] for rows in new[layer])
            q = mx.zeros((1, 4, n, DIM))
            entry.attend(q, k, v, scale=1.0, window=entry.window)
        for layer in range(LAYERS):
            request.add(layer, new[layer])

    def fork(self):
        first = self.requests[0]
        self.requests.append(Request(fork(first.cache), list(first.stored)))

    def check(self, length):
        """After the interrupt the caller rewinds the first request to a length."""
        first, other = self.requests[:2]
        rewind(first.cache, length)
        for layer in range(LAYERS):
            first.cut(layer, length)
        gc.collect()
        self.pool.check()
        for group, allocator in enumerate(self.pool.allocators):
            held = Counter(p for r in self.requests for p in r.table.pages[group])
            assert allocator.references == [held[p] for p in range(allocator.count)]
        for _ in range(2):  # and both can go on
            for request in self.requests:
                request.table.check()
                request.check_contents()
            poison(self.pool, self.requests)
            self.append(first, 9)
            self.append(other, 9)


OPERATIONS = {
    "append": lambda scene: scene.append(scene.requests[0], 13),
    "rewind": lambda scene: rewind(scene.requests[0].cache, scene.length - 7),
    "fork": Scene.fork,
    "free": lambda scene: scene.requests[0].table.free(),
}


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupt_at_any_line_leaves_books_and_tokens_right(name):
    after, lengths = 0, {"rewind": 90 - 7, "free": 0}
    while True:
        scene = Scene()
        if not interrupted(lambda scene=scene: OPERATIONS[name](scene), after):
            break
        scene.check(lengths.get(name, scene.length))
        after += {"append": 3, "rewind": 1}.get(name, 2)  # (each is a scene)
    assert after > 50
