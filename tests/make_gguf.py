"""Small valid GGUF files, written by the gguf package from Hugging Face folders."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

DATA = Path(__file__).parent / "data"
Type = gguf.GGMLQuantizationType

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    """model.layers.3.mlp.up_proj.bias -> blk.3.ffn_up.bias"""
    module, kind = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        layer, rest = module.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_NAMES[rest]}.{kind}"
    top = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    return f"{top[module]}.{kind}"


def interleave(rows, heads):
    """llama.cpp's order of a Llama's q and k rows: two halves become pairs."""
    pairs = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def read_folder(folder):
    """(config, tensors) of one of tests/data's folders."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(file))
    return json.loads((folder / "config.json").read_text()), tensors


def random_model(*, hidden=256, layers=1, vocab=64, seed=0):
    """(config, tensors) of a Llama whose rows are long enough for K-quants."""
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": hidden,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    tensors = {
        "model.embed_tokens.weight": normal(vocab, hidden),
        "model.norm.weight": normal(hidden),
    }
    for layer in range(layers):
        p = f"model.layers.{layer}."
        tensors |= {
            p + "input_layernorm.weight": normal(hidden),
            p + "post_attention_layernorm.weight": normal(hidden),
            p + "self_attn.q_proj.weight": normal(hidden, hidden),
            p + "self_attn.k_proj.weight": normal(hidden // 2, hidden),
            p + "self_attn.v_proj.weight": normal(hidden // 2, hidden),
            p + "self_attn.o_proj.weight": normal(hidden, hidden),
            p + "mlp.gate_proj.weight": normal(hidden, hidden),
            p + "mlp.up_proj.weight": normal(hidden, hidden),
            p + "mlp.down_proj.weight": normal(hidden, hidden),
        }
    return config, tensors


def metadata_of(config):
    """What llama.cpp's converter would write for this config."""
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    return {
        "general.architecture": arch,
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": rope.get("rope_theta", config.get("rope_theta")),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def tokenizer_metadata():
    """A byte-level tokenizer of 384 entries: that of tests/data/qwen2."""
    read = json.loads((DATA / "qwen2" / "tokenizer.json").read_text())
    model = read["model"]
    ids = dict(model["vocab"])
    special = {t["content"]: t["id"] for t in read["added_tokens"]}
    ids |= special
    tokens = sorted(ids, key=ids.get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in tokens],
        "tokenizer.ggml.merges": merges,
    }


def encode(tensor, kind, seed=0):
    """A float32 array as the bytes of a GGUF type; random blocks for K- and I-quants
    (nothing here quantises to those) with scales that are finite."""
    try:
        return gguf.quants.quantize(tensor, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rng = np.random.default_rng(seed)
        shape = (*tensor.shape[:-1], tensor.shape[-1] // block * size)
        # No byte above 0x3B: no float16 made of two of them is inf or NaN.
        return rng.integers(0, 0x3C, size=shape, dtype=np.uint8)


def write_gguf(path, model, *, types=None, metadata=None, change=None):
    """Write `model`, a (config, tensors) pair.

    types: GGUF name -> type, or None for F32. metadata: entries to add or, with None,
    to leave out. change: called with the dict of GGUF name -> float32 array.
    """
    config, tensors = model
    values = metadata_of(config) | (metadata or {})
    arrays = {}
    for name, array in tensors.items():
        if values["general.architecture"] == "llama":
            if ".q_proj." in name:
                array = interleave(array, config["num_attention_heads"])
            if ".k_proj." in name:
                array = interleave(array, config["num_key_value_heads"])
        arrays[gguf_name(name)] = array
    if change is not None:
        change(arrays)
    writer = gguf.GGUFWriter(path, values.pop("general.architecture") or "")
    for key, value in values.items():
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, array in arrays.items():
        kind = (types(name) if types and array.ndim == 2 else None) or Type.F32
        writer.add_tensor(name, encode(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_gguf(path, **options):
    """A whole GGUF model, with a tokenizer."""
    options["metadata"] = tokenizer_metadata() | options.get("metadata", {})
    return write_gguf(path, read_folder(DATA / "llama_tied"), **options)
