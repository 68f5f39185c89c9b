import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from oracle import DATA, VARIANTS, goldens, model, random_model

import tiny_llm
from tiny_llm.errors import ParameterError
from tiny_llm.layers import Linear
from tiny_llm.quantize import quantize


def close(a, b, tolerance=2e-4):
    a = np.array(a)
    assert a.shape == b.shape
    assert np.abs(a - b).max() <= tolerance


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("prompt", range(3))
def test_logits_equal_the_reference_at_every_position(variant, prompt):
    golden = goldens(variant)[prompt]
    close(model(variant)(mx.array([golden.ids]))[0], golden.logits)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_logits_do_not_depend_on_how_the_prompt_is_cut(variant, chunk):
    golden = goldens(variant)[2]
    cache = model(variant).create_kv_cache()
    parts = []
    for start in range(0, len(golden.ids), chunk):
        part = mx.array([golden.ids[start : start + chunk]])
        parts.append(model(variant)(part, offset=start, cache=cache)[0])
    close(mx.concatenate(parts), golden.logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_last_logits_of_a_generation_equal_the_reference(variant):
    golden = goldens(variant)[1]
    ids = [*golden.ids, *golden.greedy[:-1]]
    close(model(variant)(mx.array([ids]), logits_to_keep=1)[0, 0], golden.last_logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_a_batch_are_as_if_alone(variant):
    first, second = goldens(variant)[1], goldens(variant)[2]
    rows = mx.array([first.ids, second.ids[: len(first.ids)]])
    logits = model(variant)(rows)
    close(logits[0], first.logits)
    close(logits[1], second.logits[: len(first.ids)])


@pytest.mark.parametrize("variant", ["llama_tied", "qwen3"])
def test_one_offset_per_row_shifts_each_row_by_its_own(variant):
    # Rotary attention depends on distances only, so a shifted row computes the same.
    golden = goldens(variant)[1]
    rows = mx.array([golden.ids, golden.ids, golden.ids])
    for offset in ([0, 5, 300], mx.array([0, 5, 300])):
        logits = model(variant)(rows, offset=offset)
        for row in logits:
            close(row, golden.logits, 1e-3)


def test_a_wrong_offset_changes_the_logits():
    golden = goldens("llama_tied")[2]
    m = model("llama_tied")
    cache = m.create_kv_cache()
    m(mx.array([golden.ids[:40]]), cache=cache)
    wrong = m(mx.array([golden.ids[40:]]), offset=0, cache=cache)
    assert np.abs(np.array(wrong[0]) - golden.logits[40:]).max() > 0.1


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_to_keep_selects_positions_before_the_head(variant):
    golden = goldens(variant)[1]
    m, ids = model(variant), mx.array([golden.ids])
    close(m(ids, logits_to_keep=3)[0], golden.logits[-3:])
    close(m(ids, logits_to_keep=mx.array([4, 0]))[0], golden.logits[[4, 0]])
    assert m(ids, logits_to_keep=0).shape == (1, 0, golden.logits.shape[1])
    assert m(ids, logits_to_keep=99).shape == (1, *golden.logits.shape)


def test_bad_calls_are_refused():
    m = model("llama_tied")
    with pytest.raises(ParameterError, match="shape"):
        m(mx.array([1, 2, 3]))
    with pytest.raises(ParameterError, match="2 layers"):
        m(mx.array([[1]]), cache=m.create_kv_cache()[:1])
    with pytest.raises(ParameterError, match="2 offsets for a batch of 3"):
        m(mx.array([[1], [2], [3]]), offset=[0, 1])
    with pytest.raises(ParameterError, match="negative"):
        m(mx.array([[1]]), offset=-1)
    with pytest.raises(ParameterError, match="logits_to_keep"):
        m(mx.array([[1]]), logits_to_keep=-1)
    with pytest.raises(ParameterError, match="'dense'"):
        m.create_kv_cache("no such kind")


def test_parameters_are_reachable_as_an_mlx_module():

    names = dict(tree_flatten(model("qwen3").parameters()))
    assert names["layers.0.self_attn.qkv_proj.weight"].shape == (8 * 32, 64)
    assert sum(a.size for a in names.values()) == 127424  # tests/data: index.json


def test_windows_of_mixed_layers_follow_the_layer_types(tmp_path):
    # qwen2 with a window in the upper layer only, both ways to say it
    config = tiny_llm.loader.read_json(DATA / "qwen2" / "config.json")
    from tiny_llm.config import ConfigReader
    from tiny_llm.models import build

    def windows(**changes):
        return build(ConfigReader({**config, **changes}, "test")).config.windows

    assert windows() == (None, None)
    assert windows(sliding_window=9) == (None, None)
    on = {"use_sliding_window": True, "sliding_window": 9}
    assert windows(**on, max_window_layers=1) == (None, 9)
    assert windows(**on, layer_types=["sliding_attention", "full_attention"]) == (
        9,
        None,
    )


def test_replaced_weights_count_in_later_decode_steps():
    # whatever is compiled must not keep the weights it was compiled with
    m = tiny_llm.load_model(DATA / "llama_tied")
    golden = goldens("llama_tied")[1]
    one = mx.array([golden.ids[:1]])
    before = m(one)
    m.layers[1].mlp.down_proj.weight = mx.zeros((64, 96))
    after = m(one)
    assert mx.abs(after - before).max() > 0.01
    assert mx.abs(after - m(mx.array([golden.ids[:2]]))[:, :1]).max() < 1e-4
    m.embed_tokens.weight = mx.zeros((384, 64))
    assert mx.abs(m(one)).max() == 0


def test_weights_changed_in_place_count_too():
    m = tiny_llm.load_model(DATA / "llama_tied")
    down, x = m.layers[1].mlp.down_proj, mx.ones((3, 96))
    before = down(x)
    down.weight *= 2
    assert mx.allclose(down(x), 2 * before)
    down.weight[1] = 0
    assert not down(x)[:, 1].any()


def test_a_model_that_has_run_keeps_no_dense_weights_once_quantised():
    mx.clear_cache()  # (buffers of others may be larger than asked for)
    m = random_model("llama_tied", hidden_size=256, intermediate_size=1024)
    m(mx.array([[1, 2, 3]]))
    mx.clear_cache()
    quantize(m, 4)
    mx.eval(m.parameters())
    packed = sum(array.nbytes for _, array in tree_flatten(m.parameters()))
    gc.collect()
    held = mx.get_active_memory()
    del m
    gc.collect()
    assert held - mx.get_active_memory() < 1.2 * packed


@pytest.mark.parametrize("variant", ["llama_yarn", "qwen3", "mistral_swa"])
def test_the_metal_paths_compute_the_same(variant, monkeypatch):
    import sys

    for name in ("attention", "elementwise", "linear", "rotary"):
        module = sys.modules[f"tiny_llm.kernels.{name}"]
        monkeypatch.setattr(module, "on_gpu", lambda: True)
    m = tiny_llm.load_model(DATA / variant)
    golden = goldens(variant)[2]
    tokens = tiny_llm.stream_generate(
        m, golden.ids, max_new_tokens=24, prefill_chunk=16
    )
    assert list(tokens) == golden.greedy
    rows = mx.array([golden.ids[:1], golden.ids[:1]])
    one = m(rows, offset=[0, 9])
    assert mx.abs(one[0] - one[1]).max() < 1e-3


@pytest.mark.parametrize("place", ["qkv_proj", "o_proj"])
def test_an_exception_within_a_step_leaves_the_model_usable(place, monkeypatch):
    m = tiny_llm.load_model(DATA / "qwen3")
    golden = goldens("qwen3")[1]
    layer = type(m.layers[0].self_attn.o_proj)
    call, calls = layer.__call__, []

    def interrupted(self, *args):
        if self is getattr(m.layers[1].self_attn, place) and not calls:
            calls.append(1)
            raise KeyboardInterrupt
        return call(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(layer, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            m(mx.array([[1]]))
    tokens = tiny_llm.stream_generate(m, golden.ids, max_new_tokens=24)
    assert list(tokens) == golden.greedy


@pytest.mark.parametrize("variant", ["mistral_swa", "qwen2"])
def test_windows_of_absent_and_null_keys_are_those_of_transformers(variant):
    from tiny_llm.config import ConfigReader
    from tiny_llm.models import build

    config = tiny_llm.loader.read_json(DATA / variant / "config.json")
    config |= {"use_sliding_window": True, "max_window_layers": 0}
    if variant == "mistral_swa":
        del config["use_sliding_window"], config["max_window_layers"]

    def window(values):
        return build(ConfigReader(values, "test")).config.windows[0]

    del config["sliding_window"]
    assert window(config) == 4096
    assert window({**config, "sliding_window": None}) is None
    assert window({**config, "sliding_window": 9}) == 9


def test_a_layer_uses_the_weights_that_it_has_now():
    layer, x = Linear(8, 4), mx.random.normal((3, 8))
    for weight in (mx.random.normal((4, 8)), mx.random.normal((4, 8))):
        layer.weight = weight
        assert mx.allclose(layer(x), x @ weight.T)
    layer.update({"weight": mx.ones((4, 8))})
    assert mx.allclose(layer(x), x @ mx.ones((8, 4)))
    assert list(layer.parameters()) == ["weight"]
