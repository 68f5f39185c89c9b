"""The engines that serving_load.py measures, each behind the same two steps.

An adapter is given the model's folder (llama.cpp: the GGUF file) and the trace to come.
It loads, and returns a function that plays a Load, the warm-up's or the trace's, to a
new engine over the loaded model (llama.cpp: to its one server). Whatever must be set up
comes before `load.start()`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serving_traces import Arrival, Load

Play = Callable[[Load], None]
BATCH = 32  # requests at a time: mlx-lm's default, given to all


def ours(folder: Path, trace: Sequence[Arrival]) -> Play:
    """Our Engine, stepped by hand in this thread."""
    from tiny_llm import Engine, SamplingParams, load_model

    model = load_model(folder)

    def play(load: Load) -> None:
        with Engine(model, max_batch=BATCH) as engine:
            running: dict[int, Any] = {}
            load.start()
            while not load.done:
                for number in load.due():
                    request = load.trace[number]
                    params = SamplingParams(
                        max_tokens=request.new_tokens, ignore_eos=True
                    )
                    running[number] = engine.submit(request.prompt, params)
                worked = engine.step()
                for number, handle in list(running.items()):
                    for token in handle.token_ids[len(load.tokens[number]) :]:
                        load.token(number, token)
                    if handle.state == "done":
                        check(handle.result(), load, number)
                        del running[number]
                if not worked and running:
                    raise RuntimeError(f"nothing to do, and {len(running)} not done")
                if not worked:
                    load.rest()

    return play


def check(result: Any, load: Load, number: int) -> None:
    """Raise if the engine ended a request early."""
    if len(load.tokens[number]) != load.trace[number].new_tokens:
        raise RuntimeError(
            f"request {number} ended after {len(load.tokens[number])} of "
            f"{load.trace[number].new_tokens} tokens: {result.finish_reason}, "
            f"{result.error}"
        )


def one_at_a_time(folder: Path, trace: Sequence[Arrival]) -> Play:
    """Our generator without an engine: first come, first served. The floor."""
    from tiny_llm import load_model, stream_generate

    model = load_model(folder)

    def play(load: Load) -> None:
        waiting: deque[int] = deque()
        load.start()
        while not load.done:
            waiting.extend(load.due())
            if not waiting:
                load.rest()
                continue
            number = waiting.popleft()
            prompt, new_tokens = (
                load.trace[number].prompt,
                load.trace[number].new_tokens,
            )
            for token in stream_generate(model, prompt, max_new_tokens=new_tokens):
                load.token(number, token)
                waiting.extend(load.due())

    return play


def mlx_lm(folder: Path, trace: Sequence[Arrival]) -> Play:
    """mlx-lm's BatchGenerator with the prompt cache of its server, used as that does.

    Its server's defaults: 32 requests decode, 8 prompts are read at a time in steps of
    2,048 tokens, the cache holds 10 sequences; a prompt is inserted in segments (system
    prompt, the rest), whose caches are kept as they are ready; so is each whole answer.
    Two things are done in its favour: arrivals are looked for before every step (the
    server looks twice a second), and all requests share one sampler (the server makes
    one for each, and then samples row by row).
    """
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.models.cache import LRUPromptCache
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    key = "model"

    def play(load: Load) -> None:
        kept = LRUPromptCache(10)
        generator = BatchGenerator(
            model,
            completion_batch_size=BATCH,
            prefill_batch_size=8,
            prefill_step_size=2048,
            stream=mx.default_stream(mx.default_device()),
        )
        running: dict[int, tuple[int, list[str]]] = {}  # uid: number, segments to come

        def insert(number: int) -> None:
            request = load.trace[number]
            cache, rest = kept.fetch_nearest_cache(key, request.prompt)
            stored = len(request.prompt) - len(rest)
            segments, kinds = [rest], ["user"]
            if stored < request.system:
                split = request.system - stored
                segments, kinds = [rest[:split], rest[split:]], ["system", "user"]
            (uid,) = generator.insert_segments(
                segments=[segments],
                max_tokens=[request.new_tokens],
                caches=[cache],
                all_tokens=[request.prompt[:stored]],
            )
            running[uid] = number, kinds

        load.start()
        while not load.done:
            for number in load.due():
                insert(number)
            if not running:
                load.rest()
                continue
            prompts, answers = generator.next()
            for answer in answers:
                load.token(running[answer.uid][0], answer.token)
            ended = [
                p.uid
                for p in prompts
                if p.end_of_segment and not p.end_of_prompt and running[p.uid][1]
            ]
            for uid, (cache, tokens) in generator.extract_cache(ended).items():
                kind = running[uid][1].pop(0)
                kept.insert_cache(key, tokens[:], cache, cache_type=kind)
            for answer in answers:
                if answer.finish_reason is not None:
                    kept.insert_cache(key, answer.all_tokens[:], answer.prompt_cache)
                    del running[answer.uid]
        generator.close()

    return play


def llama_cpp(file: Path, trace: Sequence[Arrival]) -> Play:
    """llama.cpp's server in this process, on its 4-bit GGUF: another class of weights.

    A slot for each request, up to BATCH, with room for the longest; its defaults
    otherwise (prompts are cached). A thread per request, which its calls block.

    Bytes that are no UTF-8 yet are held back; their tokens come with the next text, and
    only the last one's id is told: the ids written down here are 0.
    """
    import xllamacpp

    longest = max(len(r.prompt) + r.new_tokens for r in trace)
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.verbosity = 0
    params.n_parallel = min(BATCH, len(trace))
    params.n_ctx = params.n_parallel * -(-max(longest, 64) // 256) * 256
    server = xllamacpp.Server(params)

    def play(load: Load) -> None:
        failures: list[str] = []

        def one(number: int) -> None:
            request = load.trace[number]

            def receive(chunk: dict[str, Any]) -> None:
                if "error" in chunk:
                    failures.append(f"request {number}: {chunk['error']}")
                    return
                have = len(load.times[number])
                for _ in range(chunk["timings"]["predicted_n"] - have):
                    load.token(number, 0)

            server.handle_completions(
                {
                    "prompt": request.prompt,
                    "max_tokens": request.new_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                    "cache_prompt": True,
                    "stream": True,
                    "timings_per_token": True,
                },
                receive,
            )
            if len(load.times[number]) != request.new_tokens:
                failures.append(f"request {number}: {len(load.times[number])} tokens")

        threads: list[threading.Thread] = []
        load.start()
        while not load.done:
            if failures:
                raise RuntimeError("; ".join(failures))
            for number in load.due():
                threads.append(threading.Thread(target=one, args=(number,)))
                threads[-1].start()
            load.sleep(0.001)
        for thread in threads:
            thread.join()

    return play


ENGINES: dict[str, Callable[[Path, Sequence[Arrival]], Play]] = {
    "tiny_llm": ours,
    "mlx-lm": mlx_lm,
    "llama.cpp (4-bit)": llama_cpp,
    "one at a time": one_at_a_time,
}
