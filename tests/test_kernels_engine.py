"""The whole engine with our kernels in it: the same tokens as without them.

The kernels run on Metal, or in the emulator (unchecked there: test_kernels_*.py check
them). Everything else runs as ever.
"""

import metal_emulator
import mlx.core as mx
import pytest
from engine_cases import any_model
from engine_runs import alone, engine_of, finish, prompts
from kernel_cases import METAL, needs_kernels
from oracle import goldens, model, smollm2_cases

import tiny_llm
from tiny_llm import SamplingParams, stream_generate
from tiny_llm.cache import rewind
from tiny_llm.engine.budget import StepCost
from tiny_llm.kernels import metal

pytestmark = needs_kernels
LONG = 20


@pytest.fixture
def launched(monkeypatch):
    """Kernels run; the names of those that were launched."""
    names = []
    make = mx.fast.metal_kernel if METAL else metal_emulator.metal_kernel

    def metal_kernel(name, **options):
        built = make(name=name, **options)

        def launch(**arguments):
            names.append(name)
            return built(**arguments)

        return launch

    monkeypatch.setenv(metal.VARIABLE, "metal")
    monkeypatch.setenv("TINY_LLM_EMULATOR_MODE", "fast")
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    metal.forget()
    yield names
    metal.forget()


def launches(names, part):
    return sum(part in name for name in names)


@pytest.fixture
def steady_chunks(monkeypatch):
    """128 rows of a prompt in a step, however long steps take.

    The emulator is slow: the engine would cut prompts into rows of 8, which our kernels
    take, so that it became slower still, and what runs depended on the machine's load.
    """
    monkeypatch.setattr(StepCost, "rows_within", lambda *_: 128)


@pytest.mark.smollm2
@pytest.mark.usefixtures("steady_chunks")
def test_smollm2_side_by_side_gives_the_reference_tokens(launched, smollm2_gguf):
    m = tiny_llm.load_model(smollm2_gguf)
    cases, new = smollm2_cases(), 12
    with engine_of(m, max_batch=8, kv_memory=1 << 26) as engine:
        params = SamplingParams(max_tokens=new, ignore_eos=True)
        handles = [engine.submit(case["ids"], params) for case in cases]
        finish(engine)
        for handle, case in zip(handles, cases, strict=True):
            assert handle.result().token_ids == case["greedy"][:new]
    assert launches(launched, "cached_attention") >= 30 * (new - 1)
    assert launches(launched, "kv_rows") >= 30 * new


@pytest.mark.smollm2
@pytest.mark.parametrize("kind", ["paged", "quantized", "packed pages"])
def test_one_request_of_smollm2(launched, kind, smollm2_gguf, monkeypatch):
    m = tiny_llm.load_model(smollm2_gguf)
    case = smollm2_cases()[0]

    def tokens():
        if kind == "quantized":
            cache = m.create_kv_cache("quantized", bits=8)
        else:
            packing = {"bits": 8} if kind == "packed pages" else {}
            cache = m.create_kv_cache("paged", tokens=256, page_size=32, **packing)
        options = {"max_new_tokens": 12, "prefill_chunk": 8, "cache": cache}
        return list(stream_generate(m, case["ids"], **options))

    found = tokens()
    assert launches(launched, "cached_attention") >= 30 * 12
    if kind == "paged":
        assert found == case["greedy"][:12]
    monkeypatch.setenv(metal.VARIABLE, "reference")
    count = len(launched)
    assert tokens() == found
    assert len(launched) == count


@pytest.mark.parametrize("variant", ["llama_tied", "mistral_swa", "qwen2", "qwen3"])
@pytest.mark.parametrize(("page_size", "chunk"), [(16, 1), (32, 5), (16, 70)])
def test_a_paged_request_is_the_reference_however_it_is_cut(
    variant, page_size, chunk, launched
):
    m = model(variant)
    for golden in goldens(variant):
        cache = m.create_kv_cache("paged", tokens=256, page_size=page_size)
        options = {"max_new_tokens": 24, "prefill_chunk": chunk, "cache": cache}
        assert list(stream_generate(m, golden.ids, **options)) == golden.greedy
    assert launches(launched, "cached_attention") > 24 * len(m.layers)


def test_several_rows_are_taken_and_given_back(launched):
    """As speculation does: five tokens at a time, some of which are wrong."""
    m, golden = model("llama_tied"), goldens("llama_tied")[0]
    sequence = [*golden.ids, *golden.greedy]
    cache = m.create_kv_cache("paged", tokens=256, page_size=16)
    place = 0
    while place < len(sequence) - 5:
        wrong = [*sequence[place : place + 3], 1, 2]
        logits = m(mx.array([wrong]), offset=place, cache=cache)
        if place > len(golden.ids):
            best = mx.argmax(logits[0, :3], axis=-1).tolist()
            assert best == sequence[place + 1 : place + 4]
        place += 3
        rewind(cache, place)
    assert launches(launched, "cached_attention") > len(m.layers)


@pytest.mark.parametrize("variant", ["llama_tied", "mistral_swa", "qwen3"])
@pytest.mark.parametrize("pages", [6, 64])
def test_requests_of_a_batch_are_as_if_alone(variant, pages, launched):
    """Ragged, joining and leaving, prompts in chunks beside; in few pages they wait."""
    asked = prompts(variant, [3, 14, 9, 40, 12, 30], LONG)
    expected = [alone(variant, ids, LONG) for ids in asked]
    with engine_of(variant, pages=pages, max_step_tokens=24) as engine:
        handles = []
        for ids in asked:
            handles.append(engine.submit(ids, SamplingParams(max_tokens=LONG)))
            engine.step()
            engine.step()
        finish(engine)
        found = [handle.result().token_ids for handle in handles]
    assert found == expected
    assert launches(launched, "cached_attention") > LONG


@pytest.mark.parametrize("variant", ["llama_wide", "qwen2_wide"])
@pytest.mark.parametrize("bits", [8, 4])
def test_packed_pages_give_the_tokens_of_the_reference(
    variant, bits, launched, monkeypatch
):
    m = any_model(variant)
    asked = [list(range(5, 5 + n)) for n in (3, 17, 30)]

    def tokens():
        with engine_of(m, kv_bits=bits, kv_memory=1 << 22) as engine:
            params = SamplingParams(max_tokens=8)
            handles = [engine.submit(ids, params) for ids in asked]
            finish(engine)
            return [handle.result().token_ids for handle in handles]

    found = tokens()
    assert launches(launched, "quantize_kv") > 0
    monkeypatch.setenv(metal.VARIABLE, "reference")
    assert tokens() == found
