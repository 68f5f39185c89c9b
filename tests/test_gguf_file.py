import math

import gguf
import mlx.core as mx
import numpy as np
import pytest
from make_gguf import (
    DATA,
    Type,
    encode,
    gguf_name,
    interleave,
    random_model,
    read_folder,
    small_gguf,
    write_gguf,
)

from tiny_llm.errors import LoadError, UnsupportedModelError
from tiny_llm.gguf_file import GGUFFile

# Every type for which llama.cpp publishes files, and for which gguf has the maths.
TYPES = [
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ2_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "MXFP4"),
]


def same_bits(ours, expected):
    return np.array_equal(
        np.array(ours).view(np.uint32), np.ascontiguousarray(expected).view(np.uint32)
    )


def as_gguf_reads(path, model):
    """Hugging Face name -> float32, all by the gguf package, q and k in HF's order."""
    config, tensors = model
    read = {t.name: t for t in gguf.GGUFReader(path).tensors}
    result = {}
    for name in tensors:
        tensor = read[gguf_name(name)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for part, key in heads.items():
            if part in name and config["model_type"] == "llama":
                # The inverse of `interleave`: pairs become two halves again.
                pairs = values.reshape(config[key], -1, 2, *values.shape[1:])
                values = pairs.swapaxes(1, 2).reshape(values.shape)
        result[name] = values
    return result


@pytest.mark.parametrize("kind", TYPES)
def test_float32_weights_equal_the_gguf_package_bit_for_bit(kind, tmp_path):
    model = random_model()
    path = write_gguf(tmp_path / "m.gguf", model, types=lambda name: Type[kind])
    weights = GGUFFile(path).weights(keep_quantized=False)
    expected = as_gguf_reads(path, model)
    assert weights.keys() == expected.keys()
    for name, array in expected.items():
        assert weights[name].dtype == mx.float32
        assert weights[name].shape == array.shape
        assert same_bits(weights[name], array), name


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("arch", ["qwen2", "llama"])
def test_kept_weights_equal_those_of_mx_load(kind, arch, tmp_path):
    config, tensors = random_model()
    model = (config | {"model_type": arch}, tensors)
    if arch == "qwen2":
        for part, rows in (("q", 256), ("k", 128), ("v", 128)):
            tensors[f"model.layers.0.self_attn.{part}_proj.bias"] = np.arange(
                rows, dtype=np.float32
            )
    path = write_gguf(tmp_path / "m.gguf", model, types=lambda name: Type[kind])
    weights = GGUFFile(path).weights(keep_quantized=True)
    loaded = mx.load(str(path))
    names = {}
    for name in tensors:
        for part in ("weight", "scales", "biases", "bias"):
            theirs = gguf_name(name).rsplit(".", 1)[0] + "." + part
            if theirs in loaded:
                names[name.rsplit(".", 1)[0] + "." + part] = theirs
    assert weights.keys() == names.keys()
    moved = 0
    for ours, theirs in names.items():
        expected = np.array(loaded[theirs])
        if arch == "llama" and ("q_proj" in ours or "k_proj" in ours):
            heads = 4 if "q_proj" in ours else 2
            moved += not np.array_equal(np.array(weights[ours]), expected)
            assert np.array_equal(interleave(np.array(weights[ours]), heads), expected)
        else:
            assert np.array_equal(np.array(weights[ours]), expected), ours
        assert weights[ours].dtype == loaded[theirs].dtype
    assert (moved > 0) == (arch == "llama")


@pytest.mark.parametrize(("kind", "bits"), [("Q8_0", 8), ("Q4_0", 4), ("Q4_1", 4)])
def test_packed_weights_stand_for_the_float32_ones(kind, bits, tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", random_model(), types=lambda name: Type[kind]
    )
    file = GGUFFile(path)
    packed = file.weights(keep_quantized=True)
    quantized = 0
    for name, array in file.weights(keep_quantized=False).items():
        module = name.removesuffix(".weight")
        if module + ".scales" not in packed:
            assert mx.array_equal(packed[name], array)
            continue
        quantized += 1
        values = mx.dequantize(
            packed[name],
            packed[module + ".scales"].astype(mx.float32),
            packed[module + ".biases"].astype(mx.float32),
            group_size=32,
            bits=bits,
        )
        assert mx.array_equal(values, array), name
    assert quantized == 8
    assert file.config()["quantization"] == {"group_size": 32, "bits": bits}
    assert "quantization" not in file.config(keep_quantized=False)


def test_bfloat16_stays_bfloat16(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", random_model(), types=lambda name: Type.BF16)
    file = GGUFFile(path)
    kept, full = file.weights(keep_quantized=True), file.weights(keep_quantized=False)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert kept[name].dtype == mx.bfloat16
    assert mx.array_equal(kept[name].astype(mx.float32), full[name])
    assert "quantization" not in file.config()


def test_other_types_are_kept_as_float16(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", random_model(), types=lambda name: Type.Q6_K)
    file = GGUFFile(path)
    kept, full = file.weights(keep_quantized=True), file.weights(keep_quantized=False)
    name = "model.layers.0.mlp.up_proj.weight"
    assert kept[name].dtype == mx.float16
    assert np.array_equal(np.array(kept[name]), np.array(full[name]).astype(np.float16))


def test_mixed_types_are_described_module_by_module(tmp_path):
    def types(name):
        if name == "token_embd.weight":
            return Type.Q8_0
        return Type.Q6_K if "attn_v" in name else Type.Q4_0

    file = GGUFFile(write_gguf(tmp_path / "m.gguf", random_model(), types=types))
    assert file.config()["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
        "model.layers.0.self_attn.v_proj": False,
    }
    weights = file.weights(keep_quantized=True)
    assert weights["model.embed_tokens.weight"].shape == (64, 256 * 8 // 32)
    assert weights["model.layers.0.mlp.up_proj.weight"].shape == (256, 256 * 4 // 32)
    assert "model.layers.0.self_attn.v_proj.scales" not in weights


@pytest.mark.parametrize(
    "folder", ["llama_tied", "llama_llama3rope_bias", "qwen2", "qwen3"]
)
def test_a_written_model_comes_back_whole(folder, tmp_path):
    config, tensors = read_folder(DATA / folder)
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", (config, tensors)))
    for keep in (True, False):
        weights = file.weights(keep_quantized=keep)
        assert weights.keys() == tensors.keys()
        for name, array in tensors.items():
            assert np.array_equal(np.array(weights[name]), array), name
    ours = file.config()
    for key in (
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "hidden_act",
    ):
        if key in config:
            assert ours[key] == config[key], key
    rope = config.get("rope_parameters") or {}
    assert ours["rope_theta"] == rope.get("rope_theta", config.get("rope_theta"))
    assert ours["rms_norm_eps"] == pytest.approx(config["rms_norm_eps"], rel=1e-7)
    heads = config["num_attention_heads"]
    assert ours["head_dim"] == config.get("head_dim", config["hidden_size"] // heads)
    if config["model_type"] == "llama":
        assert ours["attention_bias"] == config["attention_bias"]
        assert ours["mlp_bias"] == config["mlp_bias"]


def config_with(tmp_path, change=None, **metadata):
    metadata = {key.replace("__", "."): value for key, value in metadata.items()}
    path = small_gguf(tmp_path / "m.gguf", metadata=metadata, change=change)
    return GGUFFile(path).config()


def test_llama3_frequency_factors_are_passed_on(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)

    def add(arrays):
        arrays["rope_freqs.weight"] = factors

    config = config_with(tmp_path, change=add)
    assert config["rope_scaling"] == {
        "rope_type": "factors",
        "factors": factors.tolist(),
    }


def test_rope_scaling_is_translated(tmp_path):
    assert config_with(tmp_path)["rope_scaling"] is None
    assert config_with(tmp_path, llama__rope__scaling__factor=4.0)["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    yarn = config_with(
        tmp_path,
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=128,
        llama__rope__scaling__yarn_beta_fast=16.0,
    )
    assert yarn["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    }
    off = config_with(
        tmp_path, llama__rope__scaling__type="none", llama__rope__scaling__factor=4.0
    )
    assert off["rope_scaling"] is None


def test_a_llama_with_a_window_is_a_mistral(tmp_path):
    config = config_with(tmp_path, llama__attention__sliding_window=12)
    assert config["model_type"] == "mistral"
    assert config["sliding_window"] == 12


def test_every_end_of_turn_token_is_an_eos(tmp_path):
    config = config_with(
        tmp_path,
        tokenizer__ggml__eot_token_id=5,
        tokenizer__ggml__eom_token_id=2,
        tokenizer__ggml__bos_token_id=2**32 - 1,
    )
    assert config["eos_token_id"] == [2, 5]
    assert config["bos_token_id"] is None


def test_uniform_lists_of_head_counts_are_one_number(tmp_path):
    config = config_with(tmp_path, llama__attention__head_count=[4, 4])
    assert config["num_attention_heads"] == 4


def test_an_own_output_head_is_not_tied(tmp_path):
    def add(arrays):
        arrays["output.weight"] = arrays["token_embd.weight"] * 2

    path = small_gguf(tmp_path / "m.gguf", change=add)
    file = GGUFFile(path)
    assert file.config()["tie_word_embeddings"] is False
    weights = file.weights(keep_quantized=False)
    assert mx.array_equal(
        weights["lm_head.weight"], weights["model.embed_tokens.weight"] * 2
    )


def test_neutral_unknown_settings_are_accepted(tmp_path):
    config = config_with(tmp_path, llama__expert_count=0, llama__logit_scale=False)
    assert config["model_type"] == "llama"


def test_metadata_of_every_type_are_plain_values(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    written = {
        "u8": 200,
        "i8": -100,
        "u16": 60000,
        "i16": -30000,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 0.5,
        "f64": math.pi,
        "yes": True,
        "text": "größer 日本 👋🏽",
        "ints": [1, -2, 3],
        "texts": ["a", "", "ďábel"],
        "truths": [True, False],
    }
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", math.pi)
    writer.add_bool("yes", True)
    writer.add_string("text", written["text"])
    for key in ("ints", "texts", "truths"):
        writer.add_array(key, written[key])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFFile(path).metadata
    assert metadata == written | {"general.architecture": "llama"}
    assert type(metadata["yes"]) is bool
    assert type(metadata["truths"][0]) is bool


def test_version_2_is_read(tmp_path):
    path = small_gguf(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[4] = 2
    path.write_bytes(data)
    assert GGUFFile(path).config()["num_hidden_layers"] == 2


def test_integer_tensors_are_refused_by_name(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf",
        random_model(),
        types=lambda name: Type.Q8_1 if "ffn_up" in name else None,
    )
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.ffn_up\.weight' .*Q8_1"):
        GGUFFile(path).weights(keep_quantized=True)


def test_no_architecture_is_an_error(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(16))
    with pytest.raises(LoadError, match="architecture None"):
        GGUFFile(path).config()


def test_encode_gives_finite_scales():
    raw = encode(np.zeros((4, 256), np.float32), Type.Q4_K)
    assert np.isfinite(gguf.dequantize(raw, Type.Q4_K)).all()


@pytest.mark.smollm2
def test_smollm2_describes_itself(smollm2_gguf):
    file = GGUFFile(smollm2_gguf)
    assert file.config() | {"rms_norm_eps": 0} == {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "rms_norm_eps": 0,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "mlp_bias": False,
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "quantization": {
            "group_size": 32,
            "bits": 4,
            "model.embed_tokens": {"group_size": 32, "bits": 8},
        },
    }
    assert file.config()["rms_norm_eps"] == pytest.approx(1e-5)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert file.metadata["tokenizer.ggml.merges"][0] == "Ġ t"


@pytest.mark.smollm2
def test_smollm2_weights_equal_those_of_mx_load(smollm2_gguf):
    weights = GGUFFile(smollm2_gguf).weights(keep_quantized=True)
    loaded = mx.load(str(smollm2_gguf))
    assert len(weights) == len(loaded)
    down = "blk.7.ffn_down", "model.layers.7.mlp.down_proj"
    embed = "token_embd", "model.embed_tokens"
    for theirs, ours in (down, embed):
        for part in ("weight", "scales", "biases"):
            assert mx.array_equal(weights[f"{ours}.{part}"], loaded[f"{theirs}.{part}"])
    q = np.array(weights["model.layers.7.self_attn.q_proj.weight"])
    assert np.array_equal(interleave(q, 9), np.array(loaded["blk.7.attn_q.weight"]))
