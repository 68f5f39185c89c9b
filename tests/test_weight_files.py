import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from broken import BROKEN_CONFIGS, BROKEN_FILES, INDEX, SHARD, sharded, single
from make_gguf import DATA
from safetensors.numpy import load_file

from tiny_llm.errors import (
    CorruptFileError,
    LoadError,
    UnsupportedModelError,
    WeightsError,
)
from tiny_llm.gguf_file import GGUFFile
from tiny_llm.json_files import read_json
from tiny_llm.weight_files import read_weights


def read_everything(path):
    """What loading does with a model's files, up to the model itself."""
    if path.is_dir():
        read_json(path / "config.json")
        mx.eval(read_weights(path))
    else:
        file = GGUFFile(path)
        file.config()
        mx.eval(file.weights(keep_quantized=False))


def test_a_single_file_gives_its_tensors():
    weights = read_weights(DATA / "llama_tied")
    expected = load_file(DATA / "llama_tied" / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, array in expected.items():
        assert weights[name].dtype == mx.float32
        assert np.array_equal(np.array(weights[name]), array)


def test_shards_give_all_their_tensors():
    folder = DATA / "llama_llama3rope_bias"
    weights = read_weights(folder)
    expected = {}
    for file in folder.glob("*.safetensors"):
        expected |= load_file(file)
    assert weights.keys() == expected.keys()
    assert weights.keys() == read_json(folder / INDEX)["weight_map"].keys()
    assert all(np.array_equal(np.array(weights[n]), a) for n, a in expected.items())


def test_the_only_file_may_have_any_name(tmp_path):
    folder = single(tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "._weights.safetensors").write_bytes(b"a Mac's companion file")
    assert len(read_weights(folder)) == len(read_weights(DATA / "llama_tied"))


def test_symlinked_files_are_followed(tmp_path):
    # The Hub's cache is made of symlinks.
    for file in (DATA / "llama_tied").iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert len(read_weights(tmp_path)) == len(read_weights(DATA / "llama_tied"))


def test_every_dtype_of_mlx_is_read(tmp_path):
    arrays = {
        str(dtype): mx.array([0, 1, 3]).astype(dtype)
        for dtype in (
            mx.float32,
            mx.float16,
            mx.bfloat16,
            mx.uint32,
            mx.uint8,
            mx.int32,
            mx.int8,
            mx.int64,
            mx.bool_,
        )
    }
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays)
    weights = read_weights(tmp_path)
    for name, array in arrays.items():
        assert weights[name].dtype == array.dtype
        assert mx.array_equal(weights[name], array)


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_broken_files_end_in_an_error_that_names_the_file(name, tmp_path):
    path = BROKEN_FILES[name](tmp_path)
    with pytest.raises(LoadError) as caught:
        read_everything(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", BROKEN_CONFIGS)
def test_broken_configs_have_whole_files(name, tmp_path):
    read_everything(BROKEN_CONFIGS[name](tmp_path))


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("weights_missing", WeightsError, "no weights"),
        ("weights_cut_by_one", CorruptFileError, "model.safetensors"),
        ("dtype_float64", UnsupportedModelError, "self_attn.q_proj.weight' has dtype"),
        ("dtype_float8", UnsupportedModelError, "F8_E4M3"),
        ("tensor_empty", WeightsError, "'extra'"),
        ("only_pickles", UnsupportedModelError, "pytorch_model.bin"),
        ("second_file", WeightsError, "adapter.safetensors"),
        ("weights_a_directory", CorruptFileError, "is a directory"),
        ("weights_are_an_lfs_pointer", CorruptFileError, "git lfs pull"),
        ("weights_a_pipe", CorruptFileError, "pipe"),
        ("weights_a_dangling_symlink", CorruptFileError, "symlink to nothing"),
        ("shard_missing", CorruptFileError, SHARD),
        ("shard_truncated", CorruptFileError, SHARD),
        ("shard_stray", WeightsError, "model-00004-of-00004.safetensors"),
        ("shard_lacks_a_tensor", WeightsError, "lacks 'model."),
        ("index_missing", WeightsError, INDEX),
        ("index_lacks_a_tensor", WeightsError, "in no file"),
        ("index_places_wrongly", WeightsError, "model-00003-of-00003.safetensors"),
        ("index_leads_out", CorruptFileError, "../model.safetensors"),
        ("index_not_a_string", CorruptFileError, "is 7"),
        ("gguf_version_1", UnsupportedModelError, "version 1"),
        ("gguf_big_endian", UnsupportedModelError, "big-endian"),
        ("gguf_split", UnsupportedModelError, "llama-gguf-split --merge"),
        ("gguf_architecture", UnsupportedModelError, "'rwkv6'"),
        ("gguf_cut_in_tensors", CorruptFileError, "download it again"),
        ("gguf_offset_overlapping", CorruptFileError, "overlap"),
        ("gguf_layers_absurd", CorruptFileError, "block_count"),
        ("gguf_layers_too_few", WeightsError, "blk.1."),
        ("gguf_layers_too_many", WeightsError, "blk.2."),
        ("gguf_tensor_shape", WeightsError, "[3, 5]"),
        ("gguf_tensor_unused", WeightsError, "blk.0.no_such.weight"),
        ("gguf_unknown_setting", UnsupportedModelError, "no_such_setting = 1.5"),
    ],
)
def test_the_error_says_what_was_found(name, kind, words, tmp_path):
    with pytest.raises(kind) as caught:
        read_everything(BROKEN_FILES[name](tmp_path))
    assert type(caught.value) is kind
    assert words in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    folder = single(tmp_path)
    file = folder / "model.safetensors"
    file.chmod(0)
    # The permission bits do not stop root.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != file)
    with pytest.raises(CorruptFileError, match=r"model\.safetensors cannot be read"):
        read_weights(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CorruptFileError, match="no_such_folder cannot be listed"):
        read_weights(tmp_path / "no_such_folder")


def test_a_folder_of_ggufs_asks_for_one_of_them(tmp_path):
    (tmp_path / "a.gguf").touch()
    with pytest.raises(WeightsError, match=r"a\.gguf: pass the path of a \.gguf file"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("kind", "seeds"), [("safetensors", 600), ("index", 300), ("gguf", 600)]
)
def test_damaged_files_are_read_or_refused_but_never_crash(kind, seeds, tmp_path):
    program = Path(__file__).with_name("fuzz_files.py")
    folder = tmp_path / "fuzz"
    folder.mkdir()
    command = [sys.executable, "-W", "error", str(program), kind, str(folder)]
    done = subprocess.run(
        [*command, "0", str(seeds)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["read"] + counts["refused"] == seeds
    assert counts["refused"] > seeds / 4
    shutil.rmtree(folder, ignore_errors=True)


def test_the_unbroken_models_are_read(tmp_path):
    read_everything(single(tmp_path / "a"))
    read_everything(sharded(tmp_path / "b"))
