"""Safetensors folders: one file or shards with an index, checked and then read.

MLX reads tensors lazily and on a thread of its own, where an error ends the process.
So every file is validated first, and MLX only sees files that hold what they say.
"""

from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from .errors import CorruptFileError, UnsupportedModelError, WeightsError
from .files import PICKLES, file_size
from .json_files import read_json

INDEX_NAME = "model.safetensors.index.json"
# What MLX has a type for, as safetensors spells it. It would read FP8 as plain bytes.
_DTYPES = frozenset(
    ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "BF16", "F32")
)
_LARGEST_DIM = 2**31 - 1  # MLX's shapes are int32
_MOST_DIMS = 8
_LFS_POINTER = b"version https://git-lfs"


def read_weights(folder: Path) -> dict[str, mx.array]:
    """Every tensor of the model in `folder`, by name, lazily loaded.

    With model.safetensors.index.json: its shards, all of them, each with exactly the
    tensors that the index says. Without: the one *.safetensors file, whatever its
    name. Files whose names start with a dot are not looked at. Pickles are never read.

    Raises CorruptFileError (a file is missing, malformed or cut short), WeightsError
    (index and shards, or the files in the folder, do not fit together; an empty
    tensor) and UnsupportedModelError (only pickles, or a dtype such as F64 or FP8).
    Each names the file.
    """
    files = _weight_files(folder)
    owners = {file: tensor_names(file) for file in files}
    if (folder / INDEX_NAME).exists():
        _check_index(folder / INDEX_NAME, owners)
    weights: dict[str, mx.array] = {}
    for file in files:
        try:
            loaded = mx.load(str(file), format="safetensors")
        except (RuntimeError, ValueError) as error:
            raise CorruptFileError(f"{file} cannot be read: {error}") from error
        if not isinstance(loaded, dict):
            raise CorruptFileError(f"{file} holds no named tensors")
        weights.update(loaded)
    return weights


def tensor_names(file: Path) -> list[str]:
    """Validate the safetensors file `file` and return the names of its tensors.

    The safetensors library checks the header's length and JSON, and that shapes,
    offsets and the file's length agree; here come what it lets pass and MLX cannot do.
    """
    from safetensors import SafetensorError, safe_open

    size = file_size(file)
    if size < 1024 and file.read_bytes().startswith(_LFS_POINTER):
        raise CorruptFileError(
            f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` there"
        )
    if size < 8:
        raise CorruptFileError(
            f"{file} has {size} bytes: a safetensors file starts with 8 bytes of length"
        )
    try:
        with safe_open(str(file), framework="np") as opened:
            names = list(opened.keys())
            for name in names:
                view = opened.get_slice(name)
                _check_tensor(file, name, view.get_dtype(), view.get_shape())
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFileError(
            f"{file} is not a whole safetensors file: {error}; download it again"
        ) from error
    if not names:
        raise CorruptFileError(f"{file} holds no tensors")
    return names


def _check_tensor(file: Path, name: str, dtype: str, shape: list[int]) -> None:
    if dtype not in _DTYPES:
        raise UnsupportedModelError(
            f"{file}: tensor {name!r} has dtype {dtype}; "
            f"tiny_llm reads {', '.join(sorted(_DTYPES))}"
        )
    if len(shape) > _MOST_DIMS or any(not 0 < n <= _LARGEST_DIM for n in shape):
        raise WeightsError(f"{file}: tensor {name!r} has the unusable shape {shape}")


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the model, in the order of their names."""
    try:
        present = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    except OSError as error:
        raise CorruptFileError(f"{folder} cannot be listed: {error}") from error
    found = [p for p in present if p.suffix == ".safetensors"]
    index = folder / INDEX_NAME
    if index.exists() or index.is_symlink():
        named = _shards(index)
        stray = [p.name for p in found if p.name not in named]
        if stray:
            raise WeightsError(
                f"{index} does not name {_listing(stray)}, which lies beside it; "
                "move it out of the folder, or repair the index"
            )
        missing = sorted(named - {p.name for p in found})
        if missing:
            raise CorruptFileError(
                f"{folder} lacks {_listing(missing)}, which {INDEX_NAME} names; "
                "download it"
            )
        return found
    if len(found) == 1:
        return found
    if found:
        raise WeightsError(
            f"{folder} has {_listing([p.name for p in found])} but no {INDEX_NAME}: "
            "which of them make up the model is unknown"
        )
    pickles = [p.name for p in present if p.suffix in PICKLES]
    if pickles:
        raise UnsupportedModelError(
            f"{folder} has only pickled weights ({_listing(pickles)}), which can run "
            "code when read; tiny_llm reads safetensors and GGUF: convert them first"
        )
    ggufs = [p.name for p in present if p.suffix == ".gguf"]
    if ggufs:
        raise WeightsError(
            f"{folder} has no *.safetensors file but {_listing(ggufs)}: "
            "pass the path of a .gguf file, not of its folder"
        )
    raise WeightsError(f"{folder} has no weights: no *.safetensors file is in it")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(f"{index} has no 'weight_map' object")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CorruptFileError(
                f"{index}: the file of {tensor!r} is {shard!r}, not a string"
            )
        # A bare file name: an index must not lead out of the model's folder.
        if (
            not shard.endswith(".safetensors")
            or shard.startswith(".")
            or set(shard) & set("/\\\0")
        ):
            raise CorruptFileError(
                f"{index}: the file of {tensor!r} is {shard!r}, "
                "not the bare name of a .safetensors file"
            )
    return weight_map


def _shards(index: Path) -> set[str]:
    return set(_weight_map(index).values())


def _check_index(index: Path, owners: Mapping[Path, list[str]]) -> None:
    """Each tensor lies in the shard that the index names, and nowhere else."""
    weight_map = _weight_map(index)
    for file, names in owners.items():
        for name in names:
            if weight_map.get(name) != file.name:
                raise WeightsError(
                    f"{file} holds {name!r}, which {index.name} "
                    f"places in {weight_map.get(name, 'no file')}"
                )
    held = {name for names in owners.values() for name in names}
    for name, shard in weight_map.items():
        if name not in held:
            raise WeightsError(
                f"{index.parent / shard} lacks {name!r}, which {index.name} "
                "places there"
            )


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
