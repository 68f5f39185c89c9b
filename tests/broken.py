"""Makers of broken models: name -> maker(tmp_path) -> the path to hand to `load`.

BROKEN_FILES cannot be read whatever the model; BROKEN_CONFIGS have a readable
config.json that describes no model we can run. BROKEN is both.
"""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from broken_gguf import BROKEN_GGUF
from make_gguf import DATA
from safetensors.numpy import load_file, save_file

Maker = Callable[[Path], Path]
BROKEN_FILES: dict[str, Maker] = dict(BROKEN_GGUF)
BROKEN_CONFIGS: dict[str, Maker] = {}

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def single(tmp_path):
    """A copy of a whole model with one safetensors file."""
    return Path(shutil.copytree(DATA / "llama_tied", tmp_path / "model"))


def sharded(tmp_path):
    """A copy of a whole model in three shards."""
    return Path(shutil.copytree(DATA / "llama_llama3rope_bias", tmp_path / "model"))


# ---- safetensors folders: `edit` works on the copied folder


def _folder(name, start, edit):
    def make(tmp_path):
        folder = start(tmp_path)
        edit(folder)
        return folder

    assert name not in BROKEN_FILES
    BROKEN_FILES[name] = make


def _in_file(change, file="model.safetensors"):
    """An edit of one file's bytes."""

    def edit(folder):
        path = folder / file
        path.write_bytes(change(path.read_bytes()))

    return edit


def split_header(data):
    """A safetensors file's (header object, tensor bytes)."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join_header(header, body):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _in_header(change):
    def edit(data):
        header, body = split_header(data)
        return join_header(change(header) or header, body)

    return _in_file(edit)


def _tensor(**changes):
    return _in_header(lambda header: header[Q_PROJ].update(changes))


def _become(make_other, file="model.safetensors"):
    """The file is replaced by something that is no file."""

    def edit(folder):
        (folder / file).unlink()
        make_other(folder / file)

    return edit


def _index(change):
    def edit(folder):
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return edit


def _placed(where):
    return _index(lambda index: index["weight_map"].update({Q_PROJ: where}))


def _pickle_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _empty_tensor(header):
    header["extra"] = {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}


def _as_float64(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors[Q_PROJ] = tensors[Q_PROJ].astype(np.float64)
    save_file(tensors, folder / "model.safetensors")


def _as_float8(folder):
    tensors = load_file(folder / "model.safetensors")
    path = folder / "model.safetensors"
    tensors[Q_PROJ] = tensors[Q_PROJ].astype(np.uint8)
    save_file(tensors, path)
    header, body = split_header(path.read_bytes())
    header[Q_PROJ]["dtype"] = "F8_E4M3"
    path.write_bytes(join_header(header, body))


def _drop_from_shard(folder):
    tensors = load_file(folder / SHARD)
    tensors.popitem()
    save_file(tensors, folder / SHARD)


_HUGE = struct.pack("<Q", 2**62)
for _name, _edit in {
    "weights_missing": lambda folder: (folder / "model.safetensors").unlink(),
    "weights_empty": _in_file(lambda data: b""),
    "weights_zero_bytes": _in_file(lambda data: bytes(len(data))),
    "weights_cut_in_length": _in_file(lambda data: data[:5]),
    "weights_cut_after_length": _in_file(lambda data: data[:8]),
    "weights_cut_in_header": _in_file(lambda data: data[:300]),
    "weights_cut_in_tensors": _in_file(lambda data: data[: len(data) // 2]),
    "weights_cut_by_one": _in_file(lambda data: data[:-1]),
    "weights_trailing_bytes": _in_file(lambda data: data + b"\0" * 64),
    "header_length_huge": _in_file(lambda data: _HUGE + data[8:]),
    "header_length_zero": _in_file(lambda data: bytes(8) + data[8:]),
    "header_length_short": _in_file(lambda data: struct.pack("<Q", 9) + data[8:]),
    "header_not_utf8": _in_file(lambda data: data[:20] + b"\xff\xfe" + data[22:]),
    "header_a_list": _in_header(lambda header: [header]),
    "header_empty_object": _in_file(lambda data: join_header({}, b"")),
    "header_deeply_nested": _in_file(
        lambda data: struct.pack("<Q", 100_000) + b"[" * 100_000
    ),
    "shape_wrong": _tensor(shape=[63, 64]),
    "shape_negative": _tensor(shape=[-64, -64]),
    "shape_overflows": _tensor(shape=[2**33, 2**33]),
    "shape_a_string": _tensor(shape="64"),
    "dtype_unknown": _tensor(dtype="F33"),
    "dtype_other_size": _tensor(dtype="F16"),
    "dtype_float64": _as_float64,
    "dtype_float8": _as_float8,
    "tensor_empty": _in_header(_empty_tensor),
    "offsets_outside": _tensor(data_offsets=[2**40, 2**40 + 16384]),
    "offsets_negative": _tensor(data_offsets=[-16384, 0]),
    "offsets_reversed": _tensor(data_offsets=[16384, 0]),
    "offsets_overlapping": _tensor(data_offsets=[0, 16384]),
    "offsets_floats": _tensor(data_offsets=[0.5, 16384.5]),
    "only_pickles": _pickle_only,
    "second_file": lambda folder: shutil.copy(
        folder / "model.safetensors", folder / "adapter.safetensors"
    ),
    "weights_a_directory": _become(Path.mkdir),
    "weights_a_pipe": _become(os.mkfifo),
    "weights_a_symlink_loop": _become(lambda path: path.symlink_to(path)),
    "weights_a_dangling_symlink": _become(lambda path: path.symlink_to("nowhere")),
    "weights_are_html": _in_file(lambda data: b"<!DOCTYPE html><html></html>" * 9),
    "weights_are_an_lfs_pointer": _in_file(
        lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    ),
    "config_missing": lambda folder: (folder / "config.json").unlink(),
    "config_empty": _in_file(lambda data: b"", "config.json"),
    "config_zero_bytes": _in_file(lambda data: bytes(64), "config.json"),
    "config_not_json": _in_file(lambda data: data[:-20], "config.json"),
    "config_not_utf8": _in_file(lambda data: b"\xff" + data, "config.json"),
    "config_a_list": _in_file(lambda data: b"[1, 2]", "config.json"),
    "config_null": _in_file(lambda data: b"null", "config.json"),
    "config_deeply_nested": _in_file(lambda data: b'{"a":' * 200_000, "config.json"),
    "config_endless_number": _in_file(
        lambda data: b'{"hidden_size": ' + b"9" * 5000 + b"}", "config.json"
    ),
    "config_a_directory": _become(Path.mkdir, "config.json"),
    "config_a_symlink_loop": _become(lambda path: path.symlink_to(path), "config.json"),
}.items():
    _folder(_name, single, _edit)

for _name, _edit in {
    "shard_missing": lambda folder: (folder / SHARD).unlink(),
    "shard_truncated": _in_file(lambda data: data[:-100], SHARD),
    "shard_lacks_a_tensor": _drop_from_shard,
    "shard_stray": lambda folder: shutil.copy(
        folder / SHARD, folder / "model-00004-of-00004.safetensors"
    ),
    "shard_a_directory": _become(Path.mkdir, SHARD),
    "index_missing": lambda folder: (folder / INDEX).unlink(),
    "index_empty": _in_file(lambda data: b"", INDEX),
    "index_a_directory": _become(Path.mkdir, INDEX),
    "index_a_symlink_loop": _become(lambda path: path.symlink_to(path), INDEX),
    "index_without_map": _index(lambda index: index.pop("weight_map")),
    "index_map_empty": _index(lambda index: index.update(weight_map={})),
    "index_map_a_list": _index(lambda index: index.update(weight_map=[SHARD])),
    "index_lacks_a_tensor": _index(lambda index: index["weight_map"].pop(Q_PROJ)),
    "index_has_one_too_many": _index(
        lambda index: index["weight_map"].update({"model.extra": SHARD})
    ),
    "index_places_wrongly": _placed("model-00003-of-00003.safetensors"),
    "index_leads_out": _placed("../model.safetensors"),
    "index_absolute": _placed("/etc/hostname.safetensors"),
    "index_backslashes": _placed("..\\model.safetensors"),
    "index_not_a_string": _placed(7),
    "index_null": _placed(None),
    "index_names_a_pickle": _placed("pytorch_model.bin"),
}.items():
    _folder(_name, sharded, _edit)


# ---- config.json that is JSON, but no model


def _config(**changes):
    def make(tmp_path):
        folder = single(tmp_path)
        config = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            if value is REMOVE:
                del config[key]
            else:
                config[key] = value
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


REMOVE = object()
BROKEN_CONFIGS |= {
    "config_object_empty": lambda tmp_path: _emptied(single(tmp_path)),
    "model_type_missing": _config(model_type=REMOVE),
    "model_type_unknown": _config(model_type="no_such_model"),
    "model_type_a_number": _config(model_type=3),
    "hidden_size_missing": _config(hidden_size=REMOVE),
    "hidden_size_a_string": _config(hidden_size="64"),
    "hidden_size_negative": _config(hidden_size=-64),
    "hidden_size_zero": _config(hidden_size=0),
    "hidden_size_wrong": _config(hidden_size=128),
    "hidden_size_absurd": _config(hidden_size=2**40),
    "hidden_size_a_float": _config(hidden_size=64.5),
    "heads_do_not_divide": _config(num_attention_heads=5),
    "heads_zero": _config(num_attention_heads=0),
    "kv_heads_do_not_divide": _config(num_key_value_heads=3),
    "layers_missing": _config(num_hidden_layers=REMOVE),
    "layers_too_many": _config(num_hidden_layers=3),
    "layers_too_few": _config(num_hidden_layers=1),
    "layers_absurd": _config(num_hidden_layers=10**9),
    "layers_a_list": _config(num_hidden_layers=[2]),
    "vocab_wrong": _config(vocab_size=383),
    "vocab_absurd": _config(vocab_size=2**45),
    "vocab_null": _config(vocab_size=None),
    "intermediate_wrong": _config(intermediate_size=95),
    "eps_a_string": _config(rms_norm_eps="1e-5"),
    "eps_negative": _config(rms_norm_eps=-1.0),
    "eps_nan": _config(rms_norm_eps=float("nan")),
    "theta_zero": _config(rope_theta=0.0),
    "theta_a_string": _config(rope_theta="10000"),
    "context_negative": _config(max_position_embeddings=-1),
    "rope_type_unknown": _config(rope_scaling={"rope_type": "spiral", "factor": 2.0}),
    "rope_factor_missing": _config(rope_scaling={"rope_type": "linear"}),
    "rope_factor_zero": _config(rope_scaling={"rope_type": "linear", "factor": 0.0}),
    "rope_scaling_a_string": _config(rope_scaling="linear"),
    "activation_unknown": _config(hidden_act="no_such_function"),
    "untied_without_head": _config(tie_word_embeddings=False),
    "tie_a_string": _config(tie_word_embeddings="yes"),
    "bias_missing": _config(attention_bias=True),
    "quantization_nonsense": _config(quantization={"group_size": "32", "bits": 4}),
}


def _emptied(folder):
    (folder / "config.json").write_text("{}")
    return folder


BROKEN = BROKEN_FILES | BROKEN_CONFIGS
