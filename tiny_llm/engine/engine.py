"""Many requests at once: submit them, or have a whole list answered."""

from __future__ import annotations

import atexit
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from types import FrameType, TracebackType
from typing import Any

import mlx.core as mx

from ..errors import (
    EngineClosedError,
    ParameterError,
    RequestError,
    whole_number,
)
from ..kernels import on_gpu, reads_pages
from ..memory import PAGE_SIZE
from ..models import Decoder
from ..progress import Progress
from ..result import Result
from ..sampling.params import SamplingParams
from ..speculation import Speculation
from ..tokenizer import Tokenizer
from .answer_all import answer_all
from .budget import StepCost
from .choices import Choices, submit_choices, wants_several
from .core import Core
from .entry import Entry
from .handle import Handle
from .intake import Intake, Prompt, check_parts
from .kv import KvMemory, default_kv_memory
from .request import Request
from .runner import Runner
from .scheduler import Scheduler
from .stats import Stats, stats_of


class Engine:
    """Answers many requests at once; each as if it were alone.

    `with Engine(model, tokenizer) as engine: engine.generate(prompts)`, or `submit` and
    iterate the handles. Without a thread the steps are taken by whoever waits for a
    result (or calls `step`); `start` has one thread take them, for servers and
    coroutines. Submitting and cancelling is possible from any thread.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        max_batch: int = 32,
        max_step_tokens: int = 512,
        kv_memory: int | None = None,
        page_size: int = PAGE_SIZE,
        prefix_cache: bool = True,
        kv_bits: int | None = None,
        kv_group_size: int | None = None,
        pipeline: bool | None = None,
        page_views: bool | None = None,
        compile_decode: bool | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """tokenizer: for prompts that are text, and for text in the answers.

        max_batch: requests that run at the same time. max_step_tokens: rows of one step
        at most. kv_memory: bytes for keys and values at most, taken as they are needed
        (None: max_batch times 512 tokens, or the model's context if that is more, in at
        most a quarter of the machine's memory). page_size: tokens a page. prefix_cache:
        find what prompts have in common with earlier ones. kv_bits, kv_group_size:
        packed as a "quantized" cache. pipeline: launch a step before the tokens of the
        one before are read (None: on a GPU). page_views: read pages where they lie
        rather than through a table, as the kernels do (None: except on a GPU).
        compile_decode: compile steps that only decode when their shape recurs (None: on
        a GPU); the model's weights must not change then. Not with page_views.
        speculation: PromptLookup() or DraftModel(model), to guess tokens that a step
        verifies; the tokens are the same. Not for requests with samplers or logits
        processors of their own.

        Raises ParameterError.
        """
        check_parts(model, tokenizer)
        if speculation is not None:
            if not isinstance(speculation, Speculation):
                raise ParameterError(
                    f"speculation is {speculation!r:.60}; PromptLookup() or "
                    "DraftModel(model) is needed"
                )
            speculation.drafter(model.config.vocab_size)  # refuses other vocabularies
        for name, value in (
            ("prefix_cache", prefix_cache),
            ("pipeline", True if pipeline is None else pipeline),
            ("page_views", True if page_views is None else page_views),
            ("compile_decode", True if compile_decode is None else compile_decode),
        ):
            if not isinstance(value, bool):
                raise ParameterError(f"{name} must be True or False, got {value!r}")
        max_batch = whole_number("max_batch", max_batch, least=1)
        max_step_tokens = whole_number("max_step_tokens", max_step_tokens, least=1)
        if page_views is None:
            page_views = not reads_pages()
        if compile_decode is None:
            compile_decode = on_gpu() and not page_views
        if compile_decode and page_views:
            raise ParameterError(
                "compile_decode needs page_views=False: views of the pages change with "
                "every token"
            )
        self.model, self.tokenizer = model, tokenizer
        packing = {"bits": kv_bits, "group_size": kv_group_size}
        self.pool = model.create_page_pool(
            memory=default_kv_memory(model, max_batch, page_size, packing)
            if kv_memory is None
            else whole_number("kv_memory", kv_memory, least=1),
            page_size=page_size,
            max_requests=max_batch,
            max_append=max_step_tokens,
            grows=True,
            **packing,
        )
        self.speculation = speculation
        self._intake = Intake(model, tokenizer)
        self._memory = KvMemory(self.pool, prefix_cache)
        cost = StepCost()
        self._scheduler = Scheduler(
            self._memory, cost, max_batch=max_batch, max_step_tokens=max_step_tokens
        )
        pipeline = on_gpu() if pipeline is None else pipeline
        runner = Runner(
            model,
            self.pool,
            views=page_views,
            compiles=compile_decode,
            pipelined=pipeline,
        )
        self._core = Core(
            runner,
            self._memory,
            self._scheduler,
            cost,
            pipeline=pipeline,
            speculation=speculation,
        )
        self._numbers = count()
        self._arrived: deque[Entry] = deque()
        self._cancelled: deque[Request] = deque()
        # (an RLock: Ctrl-C as it is given back may leave it taken by this thread)
        self._stepping = threading.RLock()
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> Handle:
        """Have a prompt answered; returns at once. From any thread.

        prompt: a string (continued as it is), chat messages, which go through the chat
        template with template_options, or token ids.

        Raises at once PromptError, ParameterError, TokenizerError (ChatTemplateError),
        OutOfPagesError (it would not fit if it were alone) and EngineClosedError.
        """
        if wants_several(params):
            raise ParameterError(
                "params ask for several answers (n, best_of): use submit_choices"
            )
        return self._submit(prompt, params, template_options, None)

    def submit_choices(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> Choices:
        """As submit, for params.n answers (the best of params.best_of).

        The prompt is computed once; its pages are shared. Raises as submit.
        """
        return submit_choices(
            params,
            lambda own, first: self._submit(
                prompt if first is None else first.request.prompt,
                own,
                template_options if first is None else None,
                None if first is None else first.request,
            ),
        )

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        template_options: Mapping[str, Any] | None,
        leader: Request | None,
    ) -> Handle:
        request, stop_ids = self._intake.request(prompt, params, template_options)
        request.leader = leader
        self._memory.refuse(request)
        handle = Handle(self, request)
        new_text = self._intake.text_of(request)
        text = None if new_text is None else new_text()
        entry = Entry(request, handle, stop_ids, new_text, text)
        with self._news:
            if self._closed:
                raise EngineClosedError("the engine is closed: make another one")
            # (here: whoever arrives later has a higher number, whatever threads do)
            request.number = next(self._numbers)
            self._arrived.append(entry)
            self._news.notify_all()
        return handle

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> list[Result]:
        """Answer prompts; the results are in their order.

        params: for all, or one each. progress: called with (answers done, of how many);
        None draws a bar if standard error is a terminal. A prompt that cannot be used
        gives a result with finish_reason "error". On Ctrl-C all are cancelled.

        Raises ParameterError for other arguments, before any work.
        """
        return answer_all(self, prompts, params, template_options, progress)

    def step(self) -> bool:
        """One step of all requests: schedule, run, postprocess.

        False: there was nothing to do. Raises ParameterError where a thread does that.
        """
        if self._thread is not None and not self._closed:
            raise ParameterError("the engine's own thread takes the steps")
        return self._step()

    def start(self) -> None:
        """Have one thread take the steps, from now on until `close`."""
        if self._closed:
            raise EngineClosedError("the engine is closed")
        with self._news:
            if self._thread is None:
                thread = threading.Thread(
                    target=self._run, name="tiny_llm engine", daemon=True
                )
                thread.start()
                self._thread = thread
                # A thread that is cut off within MLX would abort the process.
                atexit.register(self.close)

    def close(self) -> None:
        """End the thread after its step, and cancel what has not ended.

        Raises ParameterError where a sampler of its own calls it.
        """
        self._refuse_samplers()
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self.close)
        with self._work():
            self._take_news()
            for entry in list(self._core.entries.values()):
                self._core.cancel(entry.request)

    @property
    def stats(self) -> Stats:
        """Where the engine stands, and what it has done so far."""
        return stats_of(self._core, waiting=len(self._arrived))

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages, tables and requests agree."""
        with self._stepping:
            self._core.check()

    # For those who wait.

    def settle(self) -> None:
        """Have what was cancelled end now, where no thread does that."""
        if self._thread is None:
            with self._work():
                self._take_news()

    def drive(self, wait: Callable[[], None]) -> None:
        """Bring all requests on by a step: wait for the thread, or take the step."""
        self._refuse_samplers()
        if self._thread is not None:
            wait()
        else:
            self._step()

    def ensure_thread(self) -> None:
        """Have a thread that steps, without anybody driving."""
        if self._thread is None and not self._closed:
            self.start()

    def cancel(self, request: Request) -> None:
        """End a request before the next step."""
        with self._news:
            if not (self._closed or request.done):
                self._cancelled.append(request)
                self._news.notify_all()

    def _take_news(self) -> bool:
        """Do what was asked for since the last step."""
        found = bool(self._arrived or self._cancelled)
        while self._arrived:
            self._core.add(self._arrived[0])  # (twice, where Ctrl-C comes in between)
            self._arrived.popleft()
        while self._cancelled:
            self._core.cancel(self._cancelled[0])
            self._cancelled.popleft()
        return found

    @contextmanager
    def _work(self) -> Iterator[None]:
        """For whoever works on the requests: one at a time."""
        self._refuse_samplers()
        with self._stepping, self._core.guarded():
            yield

    def _refuse_samplers(self) -> None:
        """Raise ParameterError within a step: what it calls must not wait for it."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if (
                frame.f_code is Core.step.__code__
                and frame.f_locals["self"] is self._core
            ):
                raise ParameterError(
                    "a sampler must not step, wait for or close its own engine"
                )
            frame = frame.f_back

    def _step(self) -> bool:
        with self._work():
            found = self._take_news()
            return self._core.step() or found

    def _run(self) -> None:
        """What the thread does."""
        try:
            self._loop()
        finally:
            # MLX's streams of a thread that is gone abort the process as it ends
            mx.synchronize()
            mx.clear_streams()

    def _loop(self) -> None:
        while True:
            with self._news:
                while not (
                    self._arrived
                    or self._cancelled
                    or self._core.entries
                    or self._closed
                ):
                    self._news.wait()
                if self._closed:
                    return
            try:
                self._step()
            except BaseException as error:  # our mistake: nobody must wait for ever
                self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        cause = error if isinstance(error, Exception) else RequestError(repr(error))
        with self._work():
            for entry in list(self._core.entries.values()):
                self._core.fail(entry.request, cause)
