"""The header of a GGUF file: metadata and where each tensor lies, bounds-checked.

The format is llama.cpp's (ggml/docs/gguf.md): magic, version, two counts, then
key-value pairs, tensor descriptions, padding, and the tensors' bytes. Nothing in a
file is believed before it is checked against the file's size, so that no later reader
can be led out of the file or into a loop without end.
"""

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from .errors import CorruptFileError, UnsupportedModelError

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_DIMS = 4
_LONGEST_KEY = 65535
_LONGEST_ARRAY = 2**24  # the largest vocabularies have under 2**20 entries
_LARGEST_DIM = 2**31 - 1  # MLX's shapes are int32
# GGUF value types that are numbers -> struct's codes. 8 is a string, 9 an array.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"} | {
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its shape with rows first (GGUF's reversed), type, and bytes."""

    name: str
    shape: tuple[int, ...]
    type: int  # a number of gguf.GGMLQuantizationType
    type_name: str
    start: int  # from the start of the file
    nbytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says about itself."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path, data: mmap.mmap) -> GGUFHeader:
    """Read and check the header of the GGUF file `path`, mapped as `data`.

    Raises CorruptFileError (cut short, absurd counts, duplicate names, offsets outside
    the file, overlapping tensors, text that is not UTF-8) and UnsupportedModelError
    (version 1, big-endian, unknown tensor types, one part of a split model).
    """
    return _Walk(path, data).header()


class _Walk:
    """A position in the file that only moves forward, within bounds."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data
        self.at, self.end = 0, len(data)

    def fail(self, problem: str) -> NoReturn:
        raise CorruptFileError(f"{self.path} is not a sound GGUF file: {problem}")

    def refuse(self, problem: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.path}: {problem}")

    def header(self) -> GGUFHeader:
        magic = self.take(4, "the magic")
        if magic != b"GGUF":
            self.fail(f"it starts with {magic!r}, not b'GGUF'")
        version = self.u32("the version")
        if version not in _VERSIONS:
            # Byte-swapped, a small version number has its low half empty.
            swapped = " (a big-endian file)" if version and not version & 0xFFFF else ""
            self.refuse(
                f"GGUF version {version}{swapped} is not supported; little-endian "
                "files of versions 2 and 3 are: convert the model again"
            )
        tensor_count = self.count("tensors", smallest=32)
        pair_count = self.count("metadata entries", smallest=13)
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.string("a metadata key", longest=_LONGEST_KEY)
            if key in metadata:
                self.fail(f"the metadata key {key!r} occurs twice")
            metadata[key] = self.value(self.u32(f"the type of {key!r}"), key)
        parts = metadata.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            self.refuse(
                f"this is one of {parts} parts of a split model; "
                "join them first with llama.cpp's `llama-gguf-split --merge`"
            )
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            self.fail(f"general.alignment is {alignment!r}, not a multiple of 8")
        described = [self.description() for _ in range(tensor_count)]
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in described:
            if info.name in tensors:
                self.fail(f"the tensor {info.name!r} occurs twice")
            if info.start % alignment:
                self.fail(
                    f"the tensor {info.name!r} starts at {info.start}, "
                    f"not at a multiple of the alignment {alignment}"
                )
            start = base + info.start
            if start + info.nbytes > self.end:
                self.fail(
                    f"the tensor {info.name!r} ends at byte {start + info.nbytes}, "
                    f"the file at {self.end}; download it again"
                )
            tensors[info.name] = TensorInfo(
                info.name, info.shape, info.type, info.type_name, start, info.nbytes
            )
        self.check_overlaps(tensors)
        return GGUFHeader(version, metadata, tensors)

    def take(self, size: int, what: str) -> bytes:
        self.need(size, what)
        start, self.at = self.at, self.at + size
        return self.data[start : self.at]

    def need(self, size: int, what: str) -> None:
        if size > self.end - self.at:
            self.fail(
                f"{what} needs {size} bytes at offset {self.at}, "
                f"but the file ends at {self.end}"
            )

    def u32(self, what: str) -> int:
        number: int = _U32.unpack(self.take(4, what))[0]
        return number

    def u64(self, what: str) -> int:
        number: int = _U64.unpack(self.take(8, what))[0]
        return number

    def count(self, what: str, smallest: int) -> int:
        """A count of things that take at least `smallest` bytes each."""
        count = self.u64(f"the number of {what}")
        if count > self.end // smallest:
            self.fail(f"it claims {count} {what} in {self.end} bytes")
        return count

    def string(self, what: str, longest: int | None = None) -> str:
        size = self.u64(f"the length of {what}")
        if longest is not None and size > longest:
            self.fail(f"{what} is {size} bytes long, the limit is {longest}")
        return self.text(self.take(size, what), what)

    def text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8: {raw[:40]!r}")

    def value(self, kind: int, key: str) -> Any:
        what = f"the value of {key!r}"
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(key)
        code = _CODES.get(kind)
        if code is None:
            self.fail(f"{what} has the unknown type {kind}")
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[
            0
        ]

    def array(self, key: str) -> list[Any]:
        what = f"the array {key!r}"
        kind = self.u32(f"the element type of {key!r}")
        count = self.u64(f"the length of {key!r}")
        if count > _LONGEST_ARRAY:
            self.fail(f"{what} claims {count} elements")
        if kind == _STRING:
            return self.strings(count, what)
        code = _CODES.get(kind)
        if code is None:
            self.fail(f"{what} has elements of the unknown or nested type {kind}")
        layout = f"<{count}{code}"
        return list(struct.unpack(layout, self.take(struct.calcsize(layout), what)))

    def strings(self, count: int, what: str) -> list[str]:
        """`count` strings: vocabularies are long, so this loop is kept tight."""
        data, at, end = self.data, self.at, self.end
        self.need(8 * count, what)
        result = []
        for _ in range(count):
            if end - at < 8:
                self.fail(f"{what} runs beyond the end of the file")
            (size,) = _U64.unpack_from(data, at)
            at += 8
            if size > end - at:
                self.fail(f"{what} has a string of {size} bytes at offset {at}")
            raw = data[at : at + size]
            at += size
            try:
                result.append(raw.decode("utf-8"))
            except UnicodeDecodeError:
                self.fail(f"{what} holds text that is not UTF-8: {raw[:40]!r}")
        self.at = at
        return result

    def description(self) -> TensorInfo:
        """One tensor's description; `start` still counts from the first tensor."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self.string("a tensor's name", longest=_LONGEST_KEY)
        dims = self.u32(f"the number of dimensions of {name!r}")
        if not 1 <= dims <= _MOST_DIMS:
            self.fail(f"the tensor {name!r} has {dims} dimensions")
        shape = tuple(self.u64(f"the shape of {name!r}") for _ in range(dims))[::-1]
        number = self.u32(f"the type of {name!r}")
        start = self.u64(f"the offset of {name!r}")
        if any(not 0 < n <= _LARGEST_DIM for n in shape):
            self.fail(f"the tensor {name!r} has the impossible shape {list(shape)}")
        try:
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            self.refuse(f"the tensor {name!r} has the unknown type {number}")
        if shape[-1] % block:
            self.fail(
                f"the tensor {name!r} has rows of {shape[-1]} elements, which "
                f"blocks of {block} ({kind.name}) cannot fill"
            )
        elements = 1
        for n in shape:
            elements *= n
        size = elements // block * block_bytes
        return TensorInfo(name, shape, number, kind.name, start, size)

    def check_overlaps(self, tensors: dict[str, TensorInfo]) -> None:
        ordered = sorted(tensors.values(), key=lambda info: info.start)
        for first, second in pairwise(ordered):
            if first.start + first.nbytes > second.start:
                self.fail(f"the tensors {first.name!r} and {second.name!r} overlap")
