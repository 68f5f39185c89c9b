"""Beam search against transformers, a naive search, brute force; and its pages."""

import importlib.util
import inspect
import itertools
import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import oracle
import pytest

from tiny_llm import load_model, load_tokenizer, stream_generate
from tiny_llm.beam import beam_search
from tiny_llm.beam_hypotheses import Hypotheses
from tiny_llm.cache import PagePool, PageTable
from tiny_llm.cache.batching import Batch
from tiny_llm.errors import ParameterError, PromptError, TinyLLMError
from tiny_llm.models import Decoder

CASES = json.loads((oracle.DATA / "beam.json").read_text())
PROMPT = oracle.goldens("llama_tied")[1].ids  # 17 tokens


@pytest.fixture
def tied():
    return oracle.model("llama_tied")


def log_softmax(logits):
    logits = np.asarray(logits, dtype=np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


def naive_beams(model, prompt, width, limit, *, eos=(), create_cache=None, change=None):
    """(tokens, sum) of the `width` best, by sum: whole sequences anew at each step.

    change: (tokens, logits [V]) -> logits. No early stopping; ties are refused.
    """
    running, ended = [([], 0.0)], []
    for length in range(1, limit + 1):
        found = []
        for tokens, total in running:
            ids = [*prompt, *tokens]
            cache = create_cache and create_cache()
            logits = model(mx.array([ids]), cache=cache, logits_to_keep=1)[0, -1]
            if change is not None:
                logits = change(ids, np.array(logits))
            scores = log_softmax(logits)
            found += [([*tokens, i], total + own) for i, own in enumerate(scores)]
        found.sort(key=lambda own: -own[1])
        totals = [total for _, total in found[: 2 * width]]
        assert min(a - b for a, b in itertools.pairwise(totals)) > 1e-4, "too close"
        last = length == limit
        ended += [own for own in found[:width] if last or own[0][-1] in eos]
        running = [own for own in found if own[0][-1] not in eos][:width]
    return sorted(ended, key=lambda own: -own[1])[:width]


def assert_same(found, expected, tolerance=1e-4):
    assert [own.token_ids for own in found] == [tokens for tokens, _ in expected]
    sums = [own.sum_logprob for own in found]
    assert sums == pytest.approx([total for _, total in expected], abs=tolerance)


class Watched:
    """The pools that beam_search made, and what was done with their pages."""

    def __init__(self, monkeypatch):
        self.pools, self.in_use = [], []
        self.forks, self.copies, self.partial = 0, [], 0
        self.fail = None  # (name, number of the call, exception)
        self.calls = {}
        create, copy, fork = (
            Decoder.create_page_pool,
            PagePool.copy_page,
            PageTable.fork,
        )
        plan, call = Batch.plan_step, Decoder.__call__

        def create_page_pool(model, **options):
            self.pools.append(create(model, **options))
            return self.pools[-1]

        def copy_page(pool, group, source, target):
            self.count("copy_page")
            self.copies.append(source)
            last = [table.pages[group][-1] for table in pool.tables if table.length]
            assert source in last, "only a last page is copied"
            copy(pool, group, source, target)

        def forked(table):
            self.count("fork")
            self.forks += 1
            self.partial += table.length % table.pool.page_size != 0
            return fork(table)

        def plan_step(batch, appends):
            held = [set(append.table.pages[0]) for append in appends]
            self.in_use.append(batch.pool.pages_in_use)
            if len(batch.pool.windows) == 1:
                assert batch.pool.pages_in_use == len(set.union(*held))
            batch.pool.check()
            return plan(batch, appends)

        def called(model, *arguments, **options):
            self.count("model")
            return call(model, *arguments, **options)

        monkeypatch.setattr(Decoder, "create_page_pool", create_page_pool)
        monkeypatch.setattr(Decoder, "__call__", called)
        monkeypatch.setattr(PagePool, "copy_page", copy_page)
        monkeypatch.setattr(PageTable, "fork", forked)
        monkeypatch.setattr(Batch, "plan_step", plan_step)

    def count(self, name):
        self.calls[name] = self.calls.get(name, 0) + 1
        if self.fail is not None and self.fail[:2] == (name, self.calls[name]):
            raise self.fail[2]

    def assert_given_back(self):
        assert self.pools
        for pool in self.pools:
            pool.check()
            assert pool.pages_in_use == 0


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


# --- what is found


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["idx"]))
def test_sequences_and_scores_are_those_of_transformers(tied, case):
    eos = case["eos_token_ids"] or ()
    found = beam_search(
        tied,
        case["ids"],
        num_beams=4,
        max_new_tokens=16,
        num_return_sequences=4,
        eos_token_ids=eos,
        length_penalty=case["length_penalty"],
        early_stopping=case["early_stopping"],
    )
    assert [own.score for own in found] == pytest.approx(case["scores"], rel=1e-3)
    sequences = [own.token_ids for own in found]
    if case["score_gap"] > 1e-3:
        assert sequences == case["sequences"]
    assert sorted(sequences) == sorted(case["sequences"])
    for own in found:
        length = len(own.token_ids)
        expected = own.sum_logprob / length ** case["length_penalty"]
        assert own.score == pytest.approx(expected)
        assert own.finished == (own.token_ids[-1] in eos)


@pytest.mark.parametrize("variant", oracle.VARIANTS)
def test_one_beam_is_greedy(variant):
    model = oracle.model(variant)
    for golden in oracle.goldens(variant):
        (found,) = beam_search(model, golden.ids, num_beams=1, max_new_tokens=24)
        assert found.token_ids == golden.greedy
        assert not found.finished
    stop = golden.greedy[5]
    (found,) = beam_search(
        model, golden.ids, num_beams=1, max_new_tokens=24, eos_token_ids=stop
    )
    assert found.token_ids == golden.greedy[: golden.greedy.index(stop) + 1]
    assert found.finished


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("prefill_chunk", [1, 7, 2048])
def test_pages_and_chunks_change_nothing(tied, page_size, prefill_chunk):
    (best,) = (case for case in CASES if case["idx"] == 19)
    found = beam_search(
        tied,
        best["ids"],
        max_new_tokens=16,
        num_return_sequences=4,
        eos_token_ids=best["eos_token_ids"],
        page_size=page_size,
        prefill_chunk=prefill_chunk,
    )
    assert [own.token_ids for own in found] == best["sequences"]


@pytest.mark.parametrize("views", [False, True])
def test_both_ways_to_read_pages_give_the_same(tied, views, monkeypatch):
    from tiny_llm.cache import batching

    monkeypatch.setattr(batching, "reads_pages", lambda: not views)
    (best,) = (case for case in CASES if case["idx"] == 18)
    found = beam_search(tied, best["ids"], max_new_tokens=16, num_return_sequences=4)
    assert [own.token_ids for own in found] == best["sequences"]


@pytest.mark.parametrize(("variant", "prompt"), [("mistral_swa", 2), ("qwen3", 1)])
def test_other_models_find_what_the_naive_search_finds(variant, prompt, watched):
    model, ids = oracle.model(variant), oracle.goldens(variant)[prompt].ids
    found = beam_search(
        model, ids, num_beams=3, max_new_tokens=20, num_return_sequences=3, page_size=4
    )
    assert_same(found, naive_beams(model, ids, 3, 20))
    assert watched.forks > 0


def test_pages_behind_a_window_are_given_back_meanwhile(watched):
    model, golden = oracle.model("mistral_swa"), oracle.goldens("mistral_swa")[2]
    windowed = [w for w in model.config.windows if w is not None]
    assert set(windowed) == {12}
    beam_search(model, golden.ids, max_new_tokens=60, page_size=4)
    (pool,) = watched.pools
    groups = len(pool.windows)
    # the 12 + 64 newest tokens and a page on either side, for each beam, not 130
    all_of_it = groups * (-(-len(golden.ids) // 4) + 4 * 16)
    assert watched.in_use[-1] <= all_of_it - (len(golden.ids) + 58 - 12 - 64) // 4
    watched.assert_given_back()


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_pages_find_what_the_packed_cache_finds(bits):
    model, ids = oracle.model("qwen3"), oracle.goldens("qwen3")[1].ids

    def create_cache():
        return model.create_kv_cache("quantized", bits=bits, group_size=32)

    found = beam_search(
        model,
        ids,
        num_beams=3,
        max_new_tokens=8,
        num_return_sequences=3,
        page_size=4,
        kv_bits=bits,
        kv_group_size=32,
    )
    expected = naive_beams(model, ids, 3, 8, create_cache=create_cache)
    assert_same(found, expected)
    plain = naive_beams(model, ids, 3, 8)
    assert expected[0][1] != pytest.approx(plain[0][1], abs=1e-4)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_an_exhaustive_search_finds_the_best_of_all_sequences(penalty):
    vocabulary, limit, eos = 5, 4, 3
    model = oracle.random_model("llama_tied", seed=3, vocab_size=vocabulary)
    prompt = [1, 4, 2]
    every = list(itertools.product(range(vocabulary), repeat=limit))
    logits = model(mx.array([[*prompt, *tokens] for tokens in every]))
    scores = log_softmax(logits)[:, len(prompt) - 1 : -1]
    found = {}
    for tokens, own in zip(every, scores, strict=True):
        length = tokens.index(eos) + 1 if eos in tokens else limit
        total = sum(own[i, tokens[i]] for i in range(length))
        found[tokens[:length]] = total / length**penalty
    expected = sorted(found, key=lambda tokens: -found[tokens])
    # (all that there are: nothing is pruned)
    beams = beam_search(
        model,
        prompt,
        num_beams=341,
        max_new_tokens=limit,
        length_penalty=penalty,
        early_stopping="never",
        num_return_sequences=341,
        eos_token_ids=[eos],
    )
    assert len(beams) == len(found) == 1 + 4 + 16 + 64 * 5
    expected_scores = [found[tokens] for tokens in expected]
    assert [own.score for own in beams] == pytest.approx(expected_scores, abs=1e-4)
    assert tuple(beams[0].token_ids) == expected[0]
    assert {tuple(own.token_ids) for own in beams} == set(found)


def test_one_new_token_is_the_likeliest(tied):
    golden = oracle.goldens("llama_tied")[1]
    found = beam_search(
        tied, golden.ids, max_new_tokens=1, num_beams=3, num_return_sequences=3
    )
    scores = log_softmax(golden.logits[-1])
    best = np.argsort(-scores)[:3]
    assert [own.token_ids for own in found] == [[token] for token in best]
    assert [own.score for own in found] == pytest.approx(scores[best], abs=1e-4)


def test_a_vocabulary_smaller_than_the_candidates_returns_what_there_is():
    model = oracle.random_model("llama_tied", vocab_size=3)
    found = beam_search(
        model, [0], num_beams=5, num_return_sequences=5, max_new_tokens=1
    )
    assert sorted(own.token_ids for own in found) == [[0], [1], [2]]
    every = beam_search(model, [0], num_beams=5, eos_token_ids=[0, 1, 2])
    assert len(every) == 1
    assert every[0].finished


def test_the_search_ends_where_the_context_is_full(tied):
    context = tied.config.context_length
    prompt = (PROMPT * 40)[: context - 2]
    for own in beam_search(tied, prompt, num_return_sequences=4):
        assert len(own.token_ids) == 3  # (the last one is not stored)
        assert not own.finished
    (found,) = beam_search(tied, (PROMPT * 40)[:context])
    assert len(found.token_ids) == 1


def test_ids_come_as_lists_arrays_or_one_number(tied):
    eos = CASES[1]["eos_token_ids"][0]
    prompt = CASES[1]["ids"]
    expected = beam_search(tied, prompt, eos_token_ids=[eos], max_new_tokens=5)
    assert expected[0].finished
    for ids in (eos, np.int64(eos), mx.array([eos]), {eos}, [eos, 10**6]):
        found = beam_search(tied, mx.array(prompt), eos_token_ids=ids, max_new_tokens=5)
        assert found == expected


def test_progress_tells_the_prompt(tied):
    seen = []
    beam_search(
        tied,
        PROMPT,
        max_new_tokens=2,
        prefill_chunk=8,
        progress=lambda *done: seen.append(done),
    )
    assert seen == [(8, 17), (16, 17), (17, 17)]


def test_beams_go_on_when_the_likeliest_tokens_all_end_one(tied):
    eos, widths = [7, 8], {}

    def end(tokens, logits):
        widths[len(tokens) - len(PROMPT)] = widths.get(len(tokens) - len(PROMPT), 0) + 1
        logits[0, mx.array(eos)] = 30.0
        return logits

    found = beam_search(
        tied,
        PROMPT,
        num_beams=3,
        max_new_tokens=4,
        length_penalty=2.0,
        early_stopping="never",
        num_return_sequences=3,
        eos_token_ids=eos,
        logits_processors=[end],
    )
    assert widths[1] == 3  # (both ids end one, and there are three to go on)
    assert sorted(own.token_ids for own in found)[:2] == [[7], [8]]


# --- logits processors


def repel(tokens, logits):
    """Less of what was there; never token 5."""
    penalty = np.zeros(logits.shape[-1], dtype=np.float32)
    np.add.at(penalty, np.array(tokens), 0.75)
    penalty[5] = np.inf
    return logits - (mx.array(penalty) if isinstance(logits, mx.array) else penalty)


def test_processors_see_each_beams_own_history(tied):
    seen = []

    def note(tokens, logits):
        assert tokens.dtype == mx.int32
        assert logits.shape == (1, tied.config.vocab_size)
        seen.append(tokens.tolist())
        return logits

    found = beam_search(
        tied,
        PROMPT,
        num_beams=3,
        max_new_tokens=8,
        num_return_sequences=3,
        logits_processors=[note, repel],
    )
    assert_same(found, naive_beams(tied, PROMPT, 3, 8, change=repel))
    assert [len(tokens) - len(PROMPT) for tokens in seen] == [
        0,
        *np.repeat(range(1, 8), 3),
    ]
    for own in found:
        assert PROMPT + own.token_ids[:-1] in seen


def test_one_beam_with_processors_is_greedy_with_them(tied):
    (found,) = beam_search(
        tied, PROMPT, num_beams=1, max_new_tokens=12, logits_processors=[repel]
    )
    greedy = stream_generate(tied, PROMPT, max_new_tokens=12, logits_processors=[repel])
    assert found.token_ids == list(greedy)


def test_a_beam_whose_tokens_are_all_ruled_out_ends_alone(tied, watched):
    def only(tokens, logits):
        """9 and 8 to begin with; 9 is a dead end; after 8 come 7 and nothing else."""
        allowed = {len(PROMPT): [8, 9]}.get(len(tokens), [7])
        if tokens[-1].item() == 9:
            allowed = []
        mask = np.full(logits.shape, -np.inf, dtype=np.float32)
        mask[0, allowed] = 0
        return logits + mx.array(mask)

    found = beam_search(
        tied,
        PROMPT,
        max_new_tokens=4,
        num_return_sequences=4,
        logits_processors=[only],
    )
    assert [own.token_ids for own in found] == [[8, 7, 7, 7]]
    watched.assert_given_back()


@pytest.mark.parametrize(
    ("processor", "error", "words"),
    [
        (lambda t, x: x - mx.inf, ParameterError, "allow no token"),
        (lambda t, x: x * mx.nan, TinyLLMError, "is nan"),
        (lambda t, x: x + mx.inf, TinyLLMError, "is inf"),
        (lambda t, x: x[0], ParameterError, r"logits_processors\[0\]"),
        (lambda t, x: None, ParameterError, r"logits_processors\[0\]"),
        (lambda t, x: 1 / 0, ZeroDivisionError, "zero"),
    ],
)
@pytest.mark.parametrize("at", [0, 3])
def test_a_bad_processor_is_told_and_the_pages_given_back(
    tied, processor, error, words, at, watched
):
    def late(tokens, logits):
        if len(tokens) < len(PROMPT) + at:
            return logits
        return processor(tokens, logits)

    with pytest.raises(error, match=words):
        beam_search(tied, PROMPT, max_new_tokens=8, logits_processors=[late])
    watched.assert_given_back()


# --- pages


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_beams_share_pages_and_only_last_ones_are_copied(tied, page_size, watched):
    ids = oracle.goldens("llama_tied")[2].ids  # 70 tokens
    beam_search(tied, ids, max_new_tokens=16, page_size=page_size)
    assert watched.forks >= 3
    assert len(watched.copies) == watched.partial
    assert (watched.partial == 0) == (page_size == 1)
    full, rest = divmod(len(ids), page_size)
    prompt, *steps = watched.in_use
    assert prompt == -(-len(ids) // page_size)
    assert steps[0] == full + 4  # four beams, and their first own token
    for new, pages in enumerate(steps, start=1):
        assert pages <= full + 4 * -(-(rest + new) // page_size)
    assert len(steps) == 15
    (pool,) = watched.pools
    assert pool.allocators[0].count == full + 4 * -(-(rest + 15) // page_size)
    watched.assert_given_back()


def test_beams_of_one_branch_share_what_they_generated(tied, watched):
    case = CASES[0]  # three of the four sequences begin with the same 13 tokens
    found = beam_search(
        tied, case["ids"], max_new_tokens=16, num_return_sequences=4, page_size=1
    )
    sequences = [own.token_ids for own in found]
    assert sequences == case["sequences"]
    assert watched.copies == []
    prefixes = {tuple(own[:n]) for own in sequences for n in range(1, 16)}
    assert watched.in_use[-1] <= 1 + len(prefixes) + 4 * 2 < 1 + 4 * 15


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("broken")])
@pytest.mark.parametrize(
    ("name", "number"),
    [("model", 1), ("model", 2), ("model", 9), ("copy_page", 4), ("fork", 2)],
)
def test_whatever_cuts_it_off_gives_the_pages_back(tied, watched, error, name, number):
    watched.fail = name, number, error
    with pytest.raises(type(error)):
        beam_search(tied, PROMPT, max_new_tokens=16, prefill_chunk=16, page_size=4)
    watched.assert_given_back()
    watched.fail = None
    (again,) = beam_search(tied, PROMPT, max_new_tokens=16, page_size=4)
    (case,) = (case for case in CASES if case["idx"] == 18)
    assert again.token_ids == case["sequences"][0]


def test_memory_grows_with_what_is_used(tied, watched):
    eos = CASES[1]["eos_token_ids"]
    beam_search(
        tied, CASES[1]["ids"], max_new_tokens=500, eos_token_ids=eos, length_penalty=0.0
    )
    (pool,) = watched.pools
    assert pool.nbytes < pool.most_bytes / 10


# --- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 0}, "num_beams"),
        ({"num_beams": 2.5}, "num_beams"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
        ({"num_return_sequences": 0}, "num_return_sequences"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"length_penalty": math.inf}, "length_penalty"),
        ({"length_penalty": 1e6}, "length_penalty"),
        ({"length_penalty": -1e6}, "length_penalty"),
        ({"length_penalty": None}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"early_stopping": None}, "early_stopping"),
        ({"eos_token_ids": "2"}, "eos_token_ids"),
        ({"eos_token_ids": 2.5}, "eos_token_ids"),
        ({"eos_token_ids": None}, "eos_token_ids"),
        ({"logits_processors": [1]}, "logits_processors"),
        ({"logits_processors": None}, "logits_processors"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"page_size": 0}, "page_size"),
        ({"progress": 1}, "progress"),
        ({"kv_bits": 5}, "bits"),
        ({"kv_bits": 8, "kv_group_size": 7}, "group_size"),
        ({"kv_group_size": 32}, "group_size"),
        ({"num_beams": 10**9}, "does not fit"),
    ],
)
def test_bad_parameters_are_refused_by_name(tied, options, words):
    with pytest.raises(ParameterError, match=words):
        beam_search(tied, [1, 2], **options)


def test_bad_prompts_are_refused(tied):
    context, vocabulary = tied.config.context_length, tied.config.vocab_size
    for prompt, words in (
        ([], "empty"),
        ([vocabulary], "not in the vocabulary"),
        ("text", "token ids are needed"),
        ([1] * (context + 1), f"{context + 1} tokens.*{context}"),
    ):
        with pytest.raises(PromptError, match=words):
            beam_search(tied, prompt)


def test_every_parameter_is_keyword_only_and_has_a_use():
    source = inspect.getsource(beam_search).split('"""')[2]
    for name, parameter in list(inspect.signature(beam_search).parameters.items())[2:]:
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert name in source


# --- hypotheses


def test_the_best_are_kept_and_older_ones_win_ties():
    kept = Hypotheses(2, 8, 1.0, False)
    kept.add([([1, 2], -2.0, True), ([3], -3.0, True), ([4], -1.0, True)])
    assert [own.token_ids for own in kept.best] == [[1, 2], [4]]
    assert [own.score for own in kept.best] == [-1.0, -1.0]
    kept.add([([5], -1.0, True)])
    assert [own.token_ids for own in kept.best] == [[1, 2], [4]]
    kept.add([([6] * 8, -4.0, False)])
    assert [own.token_ids for own in kept.best] == [[6] * 8, [1, 2]]
    assert [own.finished for own in kept.best] == [False, True]


@pytest.mark.parametrize(
    ("early_stopping", "penalty", "running", "complete"),
    [
        (True, 1.0, -0.1, True),
        (False, 1.0, -0.1, False),  # / 2 is better than -1.5
        (False, 1.0, -3.0, True),  # / 2 is as good
        ("never", 1.0, -3.0, False),  # / 8 may be better
        ("never", 1.0, -12.0, True),
        ("never", -1.0, -0.8, True),  # * 2 is worse, and longer is worse still
        ("never", -1.0, -0.6, False),  # (here, not at the longest length)
        (False, -1.0, -0.8, True),
        (False, 0.0, -1.4, False),
        ("never", 0.0, -1.5, True),
    ],
)
def test_when_the_search_is_complete(early_stopping, penalty, running, complete):
    kept = Hypotheses(2, 8, penalty, early_stopping)
    kept.add([([1], -1.5, True)])
    assert not kept.complete(-100.0, 2)  # one is missing still
    kept.add([([2], -1.0, True)])
    assert kept.complete(running, 2) == complete


# --- the benchmark


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parent.parent / "benchmarks" / "beam.py"
    spec = importlib.util.spec_from_file_location("beam_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_runs_both_ways_and_prints_ratios(benchmark, capsys):
    tiny = str(oracle.DATA / "llama_llama3rope_bias")
    assert benchmark.main(["--quick", "--model", tiny]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| 16")]
    assert [row[1] for row in rows] == ["prompt", "step", "total"]
    for _, _, beams, streams, ratio in rows:
        assert float(beams) > 0
        assert float(streams) > 0
        assert float(ratio) > 0


def test_the_benchmarks_streams_have_a_prompt_each(benchmark):
    assert benchmark.prompts_of(range(5), 3, 3) == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


# --- SmolLM2


@pytest.mark.smollm2
def test_smollm2s_best_beam_is_likelier_than_greedy(smollm2_gguf):
    model, tokenizer = load_model(smollm2_gguf), load_tokenizer(smollm2_gguf)
    prompt = tokenizer.encode("The three primary colours are")
    found = beam_search(
        model, prompt, max_new_tokens=12, length_penalty=0.0, num_return_sequences=4
    )
    greedy = list(stream_generate(model, prompt, max_new_tokens=12))
    (one,) = beam_search(model, prompt, max_new_tokens=12, num_beams=1)
    assert one.token_ids == greedy
    for own in [*found, one]:  # the sums are those of the whole sequence at once
        ids = prompt + own.token_ids
        scores = log_softmax(model(mx.array([ids]))[0])[len(prompt) - 1 : -1]
        total = sum(scores[i, token] for i, token in enumerate(own.token_ids))
        assert own.sum_logprob == pytest.approx(total, abs=12 * 5e-4)
    assert found[0].sum_logprob > one.sum_logprob + 0.1
    assert [own.score for own in found] == [own.sum_logprob for own in found]
    assert [own.score for own in found] == sorted(
        (b.score for b in found), reverse=True
    )
