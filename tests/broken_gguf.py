"""Makers of broken GGUF files: name -> maker(tmp_path) -> the file's path."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from make_gguf import small_gguf

BROKEN_GGUF: dict[str, Callable[[Path], Path]] = {}


def _gguf(name, change):
    """A GGUF file of which `change` edits the bytes."""

    def make(tmp_path):
        path = small_gguf(tmp_path / "model.gguf")
        path.write_bytes(change(path.read_bytes()))
        return path

    BROKEN_GGUF[name] = make


def _gguf_written(name, **options):
    """A GGUF file that was written wrong by options of write_gguf."""

    def make(tmp_path):
        return small_gguf(tmp_path / "model.gguf", **options)

    BROKEN_GGUF[name] = make


def field_at(data, name):
    """The offset just behind the length-prefixed string `name`."""
    raw = name.encode()
    return data.index(struct.pack("<Q", len(raw)) + raw) + 8 + len(raw)


def patched(data, at, raw):
    return data[:at] + raw + data[at + len(raw) :]


def _patch(name, shift, raw):
    """Overwrite bytes `shift` behind the end of a key or a tensor's name."""
    return lambda data: patched(data, field_at(data, name) + shift, raw)


def _rename(old, new):
    assert len(old) == len(new)
    return lambda data: data.replace(old.encode(), new.encode())


_U32, _U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
_NORM, _K = "output_norm.weight", "blk.0.attn_k.weight"
# Behind a tensor's name: dimensions u32, each u64, type u32, offset u64.
for _name, _change in {
    "gguf_empty": lambda data: b"",
    "gguf_zero_bytes": lambda data: bytes(len(data)),
    "gguf_magic": lambda data: b"GGML" + data[4:],
    "gguf_magic_only": lambda data: data[:4],
    "gguf_version_1": lambda data: patched(data, 4, _U32(1)),
    "gguf_version_9": lambda data: patched(data, 4, _U32(9)),
    "gguf_big_endian": lambda data: patched(data, 4, struct.pack(">I", 3)),
    "gguf_cut_in_counts": lambda data: data[:12],
    "gguf_cut_in_metadata": lambda data: data[:200],
    "gguf_cut_in_tokens": lambda data: data[
        : field_at(data, "tokenizer.ggml.tokens") + 500
    ],
    "gguf_cut_in_descriptions": lambda data: data[: field_at(data, _NORM) + 6],
    "gguf_cut_in_tensors": lambda data: data[: len(data) // 2],
    "gguf_cut_by_one_block": lambda data: data[:-64],
    "gguf_tensors_huge": lambda data: patched(data, 8, _U64(2**60)),
    "gguf_tensors_too_many": lambda data: patched(data, 8, _U64(25)),
    "gguf_metadata_huge": lambda data: patched(data, 16, _U64(2**63)),
    "gguf_metadata_too_many": lambda data: patched(data, 16, _U64(300)),
    "gguf_key_huge": lambda data: patched(data, 24, _U64(2**50)),
    "gguf_key_not_utf8": lambda data: patched(data, 33, b"\xff"),
    "gguf_value_type_unknown": _patch("general.architecture", 0, _U32(99)),
    "gguf_string_huge": _patch("general.architecture", 4, _U64(2**64 - 1)),
    "gguf_array_huge": _patch("tokenizer.ggml.token_type", 8, _U64(2**40)),
    "gguf_array_beyond_file": _patch("tokenizer.ggml.token_type", 8, _U64(10**6)),
    "gguf_array_nested": _patch("tokenizer.ggml.tokens", 4, _U32(9)),
    "gguf_strings_huge": _patch("tokenizer.ggml.tokens", 8, _U64(2**63)),
    "gguf_token_not_utf8": _patch("tokenizer.ggml.tokens", 24, b"\xff"),
    "gguf_token_huge": _patch("tokenizer.ggml.tokens", 16, _U64(2**61)),
    "gguf_key_twice": _rename(
        "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
    ),
    "gguf_tensor_twice": _rename("blk.0.attn_k.weight", "blk.0.attn_v.weight"),
    "gguf_no_dimensions": _patch(_NORM, 0, _U32(0)),
    "gguf_many_dimensions": _patch(_NORM, 0, _U32(2**31)),
    "gguf_dimension_zero": _patch(_NORM, 4, _U64(0)),
    "gguf_dimension_wrong": _patch(_NORM, 4, _U64(32)),
    "gguf_dimensions_overflow": _patch(_K, 4, _U64(2**32) + _U64(2**32)),
    "gguf_tensor_type_unknown": _patch(_NORM, 12, _U32(200)),
    "gguf_tensor_type_removed": _patch(_NORM, 12, _U32(4)),
    "gguf_tensor_type_larger": _patch(_NORM, 12, _U32(28)),
    "gguf_blocks_do_not_fit": _patch(_K, 20, _U32(12)),
    "gguf_offset_outside": _patch(_NORM, 16, _U64(2**40)),
    "gguf_offset_negative": _patch(_NORM, 16, _U64(2**64 - 32)),
    "gguf_offset_unaligned": _patch(_NORM, 16, _U64(4)),
    "gguf_offset_overlapping": _patch(_NORM, 16, _U64(0)),
    "gguf_key_renamed": _rename("llama.block_count", "llama.block_kount"),
}.items():
    _gguf(_name, _change)


def _replaced(name, array):
    def change(arrays):
        if array is None:
            del arrays[name]
        else:
            arrays[name] = array

    return change


_ZEROS = np.zeros((3, 5), dtype=np.float32)
for _name, _options in {
    "gguf_alignment_zero": {"metadata": {"general.alignment": 0}},
    "gguf_alignment_odd": {"metadata": {"general.alignment": 12}},
    "gguf_alignment_a_string": {"metadata": {"general.alignment": "32"}},
    "gguf_split": {"metadata": {"split.count": 3, "split.no": 0}},
    "gguf_architecture": {"metadata": {"general.architecture": "rwkv6"}},
    "gguf_encoder": {"metadata": {"llama.attention.causal": False}},
    "gguf_experts": {"metadata": {"llama.expert_count": 8}},
    "gguf_unknown_setting": {"metadata": {"llama.attention.no_such_setting": 1.5}},
    "gguf_rope_type": {"metadata": {"llama.rope.scaling.type": "longrope"}},
    "gguf_heads_zero": {"metadata": {"llama.attention.head_count": 0}},
    "gguf_heads_a_string": {"metadata": {"llama.attention.head_count": "4"}},
    "gguf_heads_vary": {"metadata": {"llama.attention.head_count": [4, 2]}},
    "gguf_heads_wrong": {"metadata": {"llama.attention.head_count": 8}},
    "gguf_kv_heads": {"metadata": {"llama.attention.head_count_kv": 3}},
    "gguf_layers_absurd": {"metadata": {"llama.block_count": 2**31}},
    "gguf_layers_too_many": {"metadata": {"llama.block_count": 3}},
    "gguf_layers_too_few": {"metadata": {"llama.block_count": 1}},
    "gguf_hidden_missing": {"metadata": {"llama.embedding_length": None}},
    "gguf_hidden_wrong": {"metadata": {"llama.embedding_length": 128}},
    "gguf_eps_nan": {
        "metadata": {"llama.attention.layer_norm_rms_epsilon": float("nan")}
    },
    "gguf_rope_dimensions": {"metadata": {"llama.rope.dimension_count": 8}},
    "gguf_embedding_missing": {"change": _replaced("token_embd.weight", None)},
    "gguf_tensor_missing": {"change": _replaced("blk.1.ffn_up.weight", None)},
    "gguf_tensor_unused": {"change": _replaced("blk.0.no_such.weight", _ZEROS)},
    "gguf_tensor_shape": {"change": _replaced("blk.0.ffn_up.weight", _ZEROS)},
    "gguf_rope_factors": {"change": _replaced("rope_freqs.weight", _ZEROS[0])},
}.items():
    _gguf_written(_name, **_options)
