import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from broken import BROKEN
from make_gguf import small_gguf
from oracle import DATA, VARIANTS, goldens

import tiny_llm
from tiny_llm import load, load_model, load_tokenizer, stream_generate
from tiny_llm.errors import (
    LoadError,
    ParameterError,
    TokenizerError,
    UnsupportedModelError,
    WeightsError,
)


def copy(variant, tmp_path):
    return shutil.copytree(DATA / variant, tmp_path / variant)


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    weights = dict(mx.load(str(path)))
    change(weights)
    mx.eval(weights)
    path.unlink()
    mx.save_safetensors(str(path), weights)


def greedy(model, variant, prompt=1):
    golden = goldens(variant)[prompt]
    return list(stream_generate(model, golden.ids, max_new_tokens=24)), golden.greedy


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_model_ends_in_our_error_naming_the_file(name, tmp_path):
    path = BROKEN[name](tmp_path)
    with pytest.raises((LoadError, TokenizerError)) as caught:
        load(path)
    assert str(path) in str(caught.value) or path.name in str(caught.value)


def test_load_gives_a_model_and_its_tokenizer():
    loaded = load(DATA / "llama_llama3rope_bias")
    model, tokenizer = loaded
    assert model.config.model_type == "llama"
    ids = tokenizer.encode("Hello world")
    assert ids[0] == tokenizer.bos_token_id == 1
    assert list(stream_generate(model, ids, max_new_tokens=2))


def test_a_folder_without_tokenizer_files_still_gives_a_model():
    tokens, expected = greedy(load_model(DATA / "qwen3"), "qwen3")
    assert tokens == expected
    with pytest.raises(TokenizerError, match="qwen3"):
        load(DATA / "qwen3")
    with pytest.raises(TokenizerError, match="qwen3"):
        load_tokenizer(DATA / "qwen3")


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_config_layouts_give_the_same_model(variant, tmp_path):
    folder = copy(variant, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    if "rope_parameters" in config:
        inner = config.pop("rope_parameters")
        config["rope_theta"] = inner.pop("rope_theta")
        config["rope_scaling"] = inner
        config["torch_dtype"] = config.pop("dtype")
    else:
        inner = config.pop("rope_scaling") or {"rope_type": "default"}
        config["rope_parameters"] = {**inner, "rope_theta": config.pop("rope_theta")}
        config["dtype"] = config.pop("torch_dtype")
    (folder / "config.json").write_text(json.dumps(config))
    tokens, expected = greedy(load_model(folder), variant, 2)
    assert tokens == expected


def test_rope_parameters_are_not_ignored(tmp_path):
    folder = copy("qwen3", tmp_path)
    edit_config(folder, rope_parameters={"rope_theta": 99.0, "rope_type": "default"})
    tokens, expected = greedy(load_model(folder), "qwen3", 2)
    assert tokens != expected


@pytest.mark.parametrize(
    ("variant", "changes", "words"),
    [
        ("llama_tied", {"model_type": "mamba"}, "mamba.*llama"),
        ("llama_tied", {"model_type": "absent"}, "model_type is missing"),
        ("llama_tied", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("llama_tied", {"pretraining_tp": 2}, "pretraining_tp is 2"),
        ("llama_tied", {"logit_scale": 0.5}, "does not implement logit_scale=0.5"),
        ("llama_tied", {"sliding_window": 8}, "does not implement sliding_window=8"),
        ("llama_tied", {"hidden_size": "absent"}, "hidden_size is missing"),
        ("llama_tied", {"hidden_size": 66}, "divisor of 66"),
        ("llama_tied", {"num_key_value_heads": 3}, "divisor of the 4 heads"),
        ("llama_tied", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("llama_tied", {"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ("llama_tied", {"num_attention_heads": True}, "num_attention_heads is True"),
        ("llama_tied", {"quantization_config": {"quant_method": "awq"}}, "awq"),
        ("llama_tied", {"quantization": {"group_size": 64, "bits": 7}}, "bits=7"),
        ("llama_tied", {"quantization": {"group_size": "32", "bits": 4}}, "'32'"),
        ("llama_tied", {"quantization": 4}, "quantization is 4"),
        ("llama_tied", {"quantization": {"group_size": 0, "bits": 4}}, "group_size=0"),
        ("llama_tied", {"quantization": {"group_size": 32, "bits": None}}, "bits=None"),
        (
            "llama_tied",
            {"quantization": {"group_size": 32, "bits": 4, "lm_head": {"bits": 7}}},
            "lm_head.*bits=7",
        ),
        (
            "llama_tied",
            {"quantization": {"group_size": 32, "bits": 4, "secret": "mxfp4"}},
            "secret.*mxfp4",
        ),
        ("llama_tied", {"rope_theta": 10**400}, "rope_theta"),
        ("llama_tied", {"is_causal": False}, "is_causal is False"),
        ("llama_tied", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            "llama_tied",
            {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
            "mxfp4",
        ),
        ("mistral_swa", {"layer_types": ["full_attention"]}, "layer_types"),
        ("mistral_swa", {"layer_types": ["chunked_attention"] * 2}, "chunked"),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 2},
            "'sliding_attention'",  # without use_sliding_window
        ),
    ],
)
def test_settings_that_are_not_implemented_are_refused_by_name(
    variant, changes, words, tmp_path
):
    folder = copy(variant, tmp_path)
    if variant == "mistral_swa":
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        if len(changes["layer_types"]) == 2:
            changes = {"layer_types": changes["layer_types"][:1] * layers}
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        load_model(folder)
    assert "config.json" in str(caught.value)


def test_settings_that_are_off_or_harmless_are_accepted(tmp_path):
    folder = copy("llama_tied", tmp_path)
    edit_config(folder, logit_scale=None, use_mup=False, transformers_version="9")
    tokens, expected = greedy(load_model(folder), "llama_tied")
    assert tokens == expected


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("extra", [True, False])
def test_a_tied_head_ignores_an_extra_one_and_an_untied_needs_its_own(
    tied, extra, tmp_path
):
    folder = copy("llama_tied", tmp_path)
    edit_config(folder, tie_word_embeddings=tied)
    zeros = mx.zeros((384, 64))
    if extra:
        edit_weights(folder, lambda w: w.update({"lm_head.weight": zeros}))
    if not tied and not extra:
        with pytest.raises(WeightsError, match=r"lm_head\.weight is missing"):
            load_model(folder)
        return
    tokens, expected = greedy(load_model(folder), "llama_tied")
    if tied:
        assert tokens == expected
    else:  # the head of zeros is used: every logit is equal
        assert tokens == [0] * 24


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "gate_proj", "o_proj"])
def test_a_missing_weight_is_named_as_the_checkpoint_names_it(name, tmp_path):
    folder = copy("llama_tied", tmp_path)
    block = "mlp" if name == "gate_proj" else "self_attn"
    full = f"model.layers.1.{block}.{name}.weight"
    edit_weights(folder, lambda w: w.pop(full))
    with pytest.raises(WeightsError, match=f"{full} is missing"):
        load_model(folder)


def test_an_unused_weight_is_named(tmp_path):
    folder = copy("llama_tied", tmp_path)
    bias = {"model.layers.0.self_attn.q_proj.bias": mx.zeros((64,))}
    edit_weights(folder, lambda w: w.update(bias))
    with pytest.raises(WeightsError, match=r"not use.*q_proj\.bias"):
        load_model(folder)


def test_inverse_frequencies_of_old_checkpoints_are_passed_over(tmp_path):
    folder = copy("llama_tied", tmp_path)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": mx.zeros((8,))}
    edit_weights(folder, lambda w: w.update(old))
    assert load_model(folder)


@pytest.mark.parametrize("shape", [(64, 63), (63, 64), (64,), (64, 64, 1)])
def test_a_wrong_shape_is_named_with_both_shapes(shape, tmp_path):
    folder = copy("llama_tied", tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_weights(folder, lambda w: w.update({name: mx.zeros(shape)}))
    with pytest.raises(WeightsError) as caught:
        load_model(folder)
    assert name in str(caught.value)
    assert str(list(shape)) in str(caught.value)
    assert "[64, 64]" in str(caught.value)


def test_integer_weights_are_refused(tmp_path):
    folder = copy("llama_tied", tmp_path)
    ints = {"model.norm.weight": mx.zeros((64,), dtype=mx.int32)}
    edit_weights(folder, lambda w: w.update(ints))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight.*int32"):
        load_model(folder)


# ---- dtypes and quantisation


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_is_that_of_weights_and_logits(dtype):
    model = load_model(DATA / "llama_tied", dtype=dtype)
    wanted = getattr(mx, dtype)
    assert model.layers[0].mlp.down_proj.weight.dtype == wanted
    logits = model(mx.array([goldens("llama_tied")[1].ids]))
    assert logits.dtype == wanted
    error = np.abs(np.array(logits[0].astype(mx.float32)) - goldens("llama_tied")[1][1])
    assert error.max() < {"float32": 2e-4, "float16": 0.1, "bfloat16": 0.6}[dtype]


def test_bad_arguments_are_refused_before_anything_is_sought():
    with pytest.raises(ParameterError, match="int8"):
        load("no/such-model", dtype="int8")
    with pytest.raises(ParameterError, match="3bit"):
        load_model("no/such-model", quantize="3bit")
    for bad in ({"dtype": []}, {"quantize": []}, {"dtype": None}):
        with pytest.raises(ParameterError, match=next(iter(bad))):
            load("no/such-model", **bad)
    for name in (5, None, b"smollm2"):
        with pytest.raises(ParameterError, match="name or path"):
            load(name)


def mlx_quantised(tmp_path, bits, own=None):
    """A folder as mlx-lm writes it, and the same weights dequantised."""
    folder, plain = copy("llama_tied", tmp_path), tmp_path / "plain"
    shutil.copytree(folder, plain)
    table = {"group_size": 32, "bits": bits, **(own or {})}
    edit_config(folder, quantization=table, quantization_config=table)
    packed, dense = {}, {}
    for name, weight in mx.load(str(plain / "model.safetensors")).items():
        module = name.removesuffix(".weight")
        entry = table.get(module, table)
        if weight.ndim == 1 or entry is False:
            packed[name] = dense[name] = weight
            continue
        size, width = entry["group_size"], entry["bits"]
        w, s, b = mx.quantize(weight, group_size=size, bits=width)
        packed |= {name: w, f"{module}.scales": s, f"{module}.biases": b}
        dense[name] = mx.dequantize(w, s, b, group_size=size, bits=width)
    for target, weights in ((folder, packed), (plain, dense)):
        mx.eval(weights)
        (target / "model.safetensors").unlink()
        mx.save_safetensors(str(target / "model.safetensors"), weights)
    return folder, plain


OWN = {
    "model.layers.0.self_attn.v_proj": {"group_size": 32, "bits": 8},
    "model.layers.1.mlp.down_proj": False,
    "model.embed_tokens": {"group_size": 64, "bits": 8},
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("own", [None, OWN], ids=["alike", "overrides"])
@pytest.mark.parametrize("gpu", [False, True])
def test_mlx_quantised_folders_compute_what_their_weights_say(
    bits, own, gpu, tmp_path, monkeypatch
):
    folder, plain = mlx_quantised(tmp_path, bits, own)
    monkeypatch.setattr(tiny_llm.loader, "on_gpu", lambda: gpu)
    model, reference = load_model(folder), load_model(plain)
    packed = model.layers[1].self_attn.qkv_proj.packing
    assert packed == ((32, bits) if gpu else None)
    # one part at 8 bits: the fused matrix cannot stay packed at 4
    if gpu and own and bits == 4:
        assert model.layers[0].self_attn.qkv_proj.packing is None
    ids = mx.array([goldens("llama_tied")[2].ids])
    assert mx.abs(model(ids) - reference(ids)).max() < 1e-3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.embed_tokens.biases"), "embed_tokens.biases is missin"),
        (lambda w: w.pop("model.embed_tokens.weight"), "embed_tokens.weight is missin"),
        (
            lambda w: w.update({"model.embed_tokens.scales": mx.zeros((384, 1))}),
            "embed_tokens.scales has shape",
        ),
        (
            lambda w: w.update({"model.embed_tokens.weight": mx.zeros((384, 64))}),
            "embed_tokens.weight is mlx.core.float32",
        ),
    ],
)
def test_damaged_quantised_weights_are_named(change, words, tmp_path):
    folder, _ = mlx_quantised(tmp_path, 4)
    edit_weights(folder, change)
    with pytest.raises(WeightsError, match=words):
        load_model(folder)


def test_a_context_of_one_token_loads(tmp_path):
    folder = copy("llama_tied", tmp_path)
    edit_config(folder, max_position_embeddings=1)
    assert len(list(stream_generate(load_model(folder), [1], max_new_tokens=9))) == 1


def test_a_module_said_to_be_dense_may_not_have_scales(tmp_path):
    folder, _ = mlx_quantised(tmp_path, 4)
    table = {"group_size": 32, "bits": 4, "model.embed_tokens": False}
    edit_config(folder, quantization=table)
    with pytest.raises(WeightsError, match=r"model\.embed_tokens has scales, but"):
        load_model(folder)


def test_scales_without_a_quantization_entry_are_refused(tmp_path):
    folder, _ = mlx_quantised(tmp_path, 4)
    edit_config(folder, quantization=None, quantization_config=None)
    with pytest.raises(WeightsError, match=r"has scales, but config\.json has no"):
        load_model(folder)


@pytest.mark.parametrize("quantize", ["4bit", "8bit"])
def test_quantize_on_load_rounds_every_matrix(quantize, monkeypatch):
    bits = int(quantize[0])
    plain = load_model(DATA / "qwen2")
    dense = load_model(DATA / "qwen2", quantize=quantize)
    monkeypatch.setattr(tiny_llm.loader, "on_gpu", lambda: True)
    packed = load_model(DATA / "qwen2", quantize=quantize)
    up, rounded = plain.layers[0].mlp.gate_up_proj, dense.layers[0].mlp.gate_up_proj
    assert packed.layers[0].mlp.gate_up_proj.packing == (64, bits)
    assert rounded.packing is None
    expected = mx.dequantize(
        *mx.quantize(up.weight, group_size=64, bits=bits), group_size=64, bits=bits
    )
    assert mx.array_equal(rounded.weight, expected)
    ids = mx.array([goldens("qwen2")[1].ids])
    assert mx.abs(packed(ids) - dense(ids)).max() < 1e-3
    error = mx.abs(dense(ids) - plain(ids)).max().item()
    assert 0.001 < error < {4: 8.0, 8: 0.5}[bits]


def test_a_quantised_model_is_not_quantised_again(tmp_path):
    folder, _ = mlx_quantised(tmp_path, 4)
    for dtype in ("auto", "float16"):
        with pytest.raises(UnsupportedModelError, match="quantised already"):
            load_model(folder, dtype=dtype, quantize="8bit")


def test_matrices_that_do_not_divide_into_groups_are_named():
    # the MLP's 96 inputs take groups of 32
    model = load_model(DATA / "llama_tied", dtype="float16", quantize="4bit")
    assert model.layers[0].mlp.down_proj.packing == (32, 4)
    assert model.embed_tokens.packing == (64, 4)


# ---- GGUF


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
def test_a_gguf_file_gives_the_same_model_packed_or_not(dtype, tmp_path):
    path = small_gguf(tmp_path / "small.gguf", types={})
    dense, other = load_model(path), load_model(path, dtype=dtype)
    ids = mx.array([[1, 5, 9, 2]])
    error = mx.abs(dense(ids) - other(ids).astype(mx.float32)).max()
    assert error < (0.1 if dtype == "float16" else 1e-3)
    assert tiny_llm.load_model(path).config.model_type == "llama"
