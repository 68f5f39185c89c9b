"""A miniature of the engine around the scheduler: pages are counted, tokens are 0."""

from tiny_llm.engine.budget import StepCost
from tiny_llm.engine.request import Request
from tiny_llm.engine.scheduler import LEAST_ROWS, Scheduler
from tiny_llm.sampling.params import SamplingParams

FIXED, PER_ROW, PER_KEY = 75.0, 1.5, 0.0017  # ms, as measured for SmolLM2 on two cores


def step_ms(rows, keys):
    return FIXED + PER_ROW * rows + PER_KEY * keys


def known_cost():
    """A StepCost that knows exactly how long steps take."""
    cost = StepCost()
    for rows, keys in [(8, 1000), (100, 9000), (30, 20000), (60, 60000)]:
        cost.add(rows, keys, step_ms(rows, keys))
    return cost


def request(number, prompt=10, limit=20, output=0, computed=0):
    made = Request(number, [0] * prompt, SamplingParams(), limit)
    made.output, made.computed = [0] * output, computed
    return made


class CountedPages:
    """A Memory that counts pages, and refuses to be used wrongly."""

    def __init__(self, pages=10_000, page_size=16, reused=()):
        self.pages, self.page_size = pages, page_size
        self.held = {}
        self.reused = dict(reused)  # number -> tokens of its prompt that are found
        self.opened = []  # numbers and the tokens reserved
        self.refuse = set()  # numbers that find no page once
        self.slow = {}  # number -> steps until its pages can be written to
        self.delayed = False  # somebody's pages could not be, in this step

    @property
    def free(self):
        return self.pages - sum(self.held.values())

    def needed(self, tokens):
        return -(-tokens // self.page_size)

    def open(self, request, reserve):
        assert request.number not in self.held
        assert request.table is None
        assert request.length <= reserve <= request.most
        if self.needed(reserve) > self.free:
            return False
        self.held[request.number] = self.needed(reserve)
        self.opened.append((request.number, reserve))
        request.table = object()
        request.computed = min(self.reused.get(request.number, 0), request.length - 1)
        return True

    def ready(self, request, coming, patient):
        assert request.number in self.held
        assert coming >= 0
        if patient and self.slow.get(request.number, 0) > 0:
            self.slow[request.number] -= 1
            self.delayed = True
            return False
        self.slow.pop(request.number, None)
        return True

    def grow(self, request, stop):
        self.slow.pop(request.number, None)  # at once then
        more = self.needed(stop) - self.held[request.number]
        if more > self.free or request.number in self.refuse:
            self.refuse.discard(request.number)
            return False
        self.held[request.number] += max(more, 0)
        return True

    def close(self, request):
        del self.held[request.number]


class Play:
    """Runs a scheduler as the engine does, checking every step.

    answers: number -> tokens after which its answer ends. pipelined: a step is planned
    before the tokens of the one before are read.
    """

    def __init__(self, memory, cost=None, *, pipelined=False, answers=(), **limits):
        limits = {"max_batch": 8, "max_step_tokens": 512, **limits}
        self.memory = memory
        self.scheduler = Scheduler(memory, cost or known_cost(), **limits)
        self.pipelined, self.answers = pipelined, dict(answers)
        self.unread = []
        self.done = []
        self.refusals = 0  # steps that had to be planned again

    def add(self, *requests):
        for each in requests:
            self.scheduler.add(each)
        return requests[0] if len(requests) == 1 else requests

    @property
    def busy(self):
        return bool(self.scheduler.running or self.scheduler.waiting or self.unread)

    def step(self):
        """Plan, check and count a step as run; returns it."""
        before, decoding = self.snapshot(), self.decoding()
        self.memory.delayed = False
        plan = self.scheduler.schedule(settled=not self.unread)
        if plan is None:
            assert self.unread
            assert self.snapshot() == before, "None changes nothing"
            self.refusals += 1
            self.read()
            decoding = self.decoding()
            plan = self.scheduler.schedule()
            assert plan is not None
        self.check(plan, decoding)
        if self.pipelined:
            self.read()
        self.unread = [s.request for s in plan if s.samples]
        if not self.pipelined:
            self.read()
        return plan

    def run(self, most):
        """Steps until nothing is left to do; at most so many. Returns how many."""
        count = 0
        while self.busy:
            count += 1
            assert count <= most, "somebody starves"
            self.step()
        return count

    def read(self):
        for each in self.unread:
            if each.table is None:
                continue  # cancelled meanwhile: the token is dropped
            each.in_flight -= 1
            each.output.append(0)
            if len(each.output) >= min(each.limit, self.answers.get(each.number, 1e9)):
                self.scheduler.remove(each, finished=True)
                self.done.append(each)
        self.unread = []

    def cancel(self, request):
        if request not in self.done:
            self.scheduler.remove(request)

    def snapshot(self):
        queues = self.scheduler.running, self.scheduler.waiting
        return [
            [(r.number, r.computed, r.in_flight, r.preemptions) for r in queue]
            for queue in queues
        ]

    def decoding(self):
        running = self.scheduler.running
        return [r for r in running if r.decoding and not r.exhausted]

    def check(self, plan, decoders):
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert len(running) <= self.scheduler.max_batch
        numbers = [r.number for r in (*running, *waiting)]
        assert numbers == sorted(set(numbers)), "the older run, the younger wait"
        assert self.memory.free >= 0
        assert set(self.memory.held) == {r.number for r in running}
        rows = {s.request.number: s for s in plan}
        assert len(rows) == len(plan), "one segment each"
        assert sum(s.count for s in plan) <= self.scheduler.max_step_tokens
        for request, start, count, samples, _ in plan:
            assert request in running
            assert count > 0
            assert start + count == request.computed
            held = self.memory.held[request.number] * self.memory.page_size
            assert request.computed <= min(held, request.most)
            assert samples == (start + count == request.length - samples)
            assert len(request.output) + request.in_flight <= request.limit
        decoding = [s for s in plan if s.request in decoders]
        assert plan[: len(decoding)] == decoding, "decode rows come first"
        for part in (decoding, plan[len(decoding) :]):
            assert [s.request.number for s in part] == sorted(
                s.request.number for s in part
            )
        served = [r.number in rows for r in running if r.computed < r.length - 1]
        assert served == sorted(served, reverse=True), "no younger prompt goes first"
        for each in decoders:
            assert each.number in rows or each in waiting, "decode rows never wait"
        if not all(served) or any(s.count < left(s) for s in plan):
            prompt_rows = sum(s.count for s in plan) - len(decoding)
            room = self.scheduler.max_step_tokens - len(decoding)
            enough = prompt_rows >= min(LEAST_ROWS, room)
            assert enough or self.memory.delayed, "prompts get on"


def left(segment):
    """Rows that its request had to compute when the segment was planned."""
    request = segment.request
    return request.length - segment.samples - segment.start


def steps_enough(requests, scheduler):
    """Steps within which all must end: one after the other, each read twice."""
    chunk = min(LEAST_ROWS, scheduler.max_step_tokens - scheduler.max_batch + 1)
    return sum(2 * (-(-r.most // chunk) + r.limit + 2) for r in requests)
