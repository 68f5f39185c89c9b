"""A safetensors file that is replaced as a whole and knows its own checksums.

The metadata has two: `header_sha256` of the header (keys sorted, without that entry)
and `data_sha256` of the bytes after it. Reading copies the bytes by plain reads: MLX
would map them lazily, and a file that is damaged or cut short meanwhile would end the
process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx
import numpy as np

from .errors import CacheFileError, CorruptFileError, ParameterError
from .files import file_size

_HEADER_SUM, _DATA_SUM = "header_sha256", "data_sha256"
_LARGEST_HEADER = 100_000_000  # as the safetensors library has it
_BLOCK = 1 << 20

# safetensors' name, MLX's type, and what NumPy reads it as (it has no bfloat16)
_DTYPES: dict[str, tuple[mx.Dtype, str]] = {
    "F32": (mx.float32, "<f4"),
    "F16": (mx.float16, "<f2"),
    "BF16": (mx.bfloat16, "<u2"),
    "U32": (mx.uint32, "<u4"),
    "I32": (mx.int32, "<i4"),
}


class TensorSpec(NamedTuple):
    """A tensor's type, as safetensors spells it, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * np.dtype(_DTYPES[self.dtype][1]).itemsize


def dtype_name(dtype: mx.Dtype) -> str:
    """The name of a dtype in the file. Raises ParameterError."""
    for name, (own, _) in _DTYPES.items():
        if own == dtype:
            return name
    raise ParameterError(f"arrays of {dtype} cannot be saved")


def write_tensors(
    path: str | os.PathLike[str],
    metadata: Mapping[str, str],
    arrays: Mapping[str, mx.array],
) -> None:
    """Write arrays and metadata; an existing file is replaced.

    Whatever happens meanwhile, even a kill or a power cut, the path leads to the old
    file or to the new one, whole. (A kill can leave a hidden file ending in .tmp beside
    it.) The data go through SHA-256, about 0.06 s for 100 MB. Raises CacheFileError if
    the file cannot be written.
    """
    specs = {
        name: TensorSpec(dtype_name(a.dtype), a.shape) for name, a in arrays.items()
    }
    with _replacing(path) as file:
        digest = hashlib.sha256()
        file.write(_header(metadata, specs, digest.hexdigest()))
        for array in arrays.values():
            data = _bytes_of(array)
            digest.update(data)
            file.write(data)
        file.seek(0)  # the header is as long with the right sums
        file.write(_header(metadata, specs, digest.hexdigest()))


class TensorFile:
    """Such a file, open for reading. `specs` are its tensors, in their order."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the header. Raises CorruptFileError, naming the file.

        Whether the header is as it was written, `check_header` tells; so that a later
        version may be recognised before.
        """
        self.path = Path(path)
        file_size(self.path)  # a pipe would wait for a writer
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115
        except OSError as error:
            raise CorruptFileError(f"{self.path} cannot be read: {error}") from error
        try:
            self.size = os.fstat(self._file.fileno()).st_size
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def check_header(self) -> None:
        """Raise CorruptFileError unless header and size are as they were written."""
        try:
            found = _header_sum(self._header)
        except RecursionError as error:
            raise self._damaged("its header is nested too deeply") from error
        if self.metadata.get(_HEADER_SUM) != found:
            raise self._damaged("its header is not as it was written")
        start = 0
        for name, value in self._header.items():
            if name == "__metadata__":
                continue
            spec = _spec(value)
            if spec is None or value["data_offsets"] != [start, start + spec.nbytes]:
                raise self._damaged(f"the entry of tensor {name!r} is {value!r:.100}")
            self.specs[name] = spec
            self._starts[name] = self._data + start
            start += spec.nbytes
        if self._data + start != self.size:
            raise self._damaged(
                f"it has {self.size} bytes, but {self._data + start} were written"
            )

    def check_data(self) -> None:
        """Raise CorruptFileError unless all tensors are as they were written.

        Reads the file once: 0.1 s for 100 MB.
        """
        digest = hashlib.sha256()
        self._file.seek(self._data)
        try:
            while block := self._file.read(_BLOCK):
                digest.update(block)
        except OSError as error:
            raise self._damaged(str(error)) from error
        if self.metadata.get(_DATA_SUM) != digest.hexdigest():
            raise self._damaged("its data are not as they were written")

    def read(self, name: str) -> mx.array:
        """One tensor, in memory of its own."""
        spec = self.specs[name]
        dtype, plain = _DTYPES[spec.dtype]
        data = np.empty(spec.shape, dtype=plain)
        try:
            self._file.seek(self._starts[name])
            count = self._file.readinto(data.data.cast("B"))
        except OSError as error:
            raise self._damaged(str(error)) from error
        if count != spec.nbytes:
            raise self._damaged("it was cut short while it was read")
        array = mx.array(data)
        return array if array.dtype == dtype else array.view(dtype)

    def _read_header(self) -> None:
        length = int.from_bytes(self._file.read(8), "little")
        if self.size < 8 or not 2 <= length <= min(self.size - 8, _LARGEST_HEADER):
            raise self._damaged("it does not begin as a safetensors file does")
        try:
            header = json.loads(self._file.read(length).decode("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self._damaged(f"its header cannot be read: {error}") from error
        metadata = header.get("__metadata__") if isinstance(header, dict) else None
        if not isinstance(metadata, dict):
            raise self._damaged("its header has no metadata")
        self._header: dict[str, Any] = header
        self.metadata: dict[str, Any] = metadata
        self.specs: dict[str, TensorSpec] = {}
        self._starts: dict[str, int] = {}
        self._data = 8 + length

    def _damaged(self, what: str) -> CorruptFileError:
        return CorruptFileError(f"{self.path} is damaged, or no saved cache: {what}")


def _header(
    metadata: Mapping[str, str], specs: Mapping[str, TensorSpec], data_sum: str
) -> bytes:
    """The first bytes of the file: length and JSON, padded as the format wants it."""
    header: dict[str, Any] = {"__metadata__": {**metadata, _DATA_SUM: data_sum}}
    start = 0
    for name, spec in specs.items():
        stop = start + spec.nbytes
        header[name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    header["__metadata__"][_HEADER_SUM] = _header_sum(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _LARGEST_HEADER:
        raise ParameterError(
            f"the notes make a header of {len(text)} bytes; {_LARGEST_HEADER} is the "
            f"most"
        )
    return len(text).to_bytes(8, "little") + text


def _header_sum(header: Mapping[str, Any]) -> str:
    metadata = {k: v for k, v in header["__metadata__"].items() if k != _HEADER_SUM}
    text = json.dumps({**header, "__metadata__": metadata}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _spec(value: Any) -> TensorSpec | None:
    """A tensor's entry in the header; None if it is no such thing."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        return None
    dtype, shape = value["dtype"], value["shape"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        return None
    if not isinstance(shape, list) or not all(
        type(n) is int and 0 < n < 1 << 31 for n in shape
    ):
        return None
    return TensorSpec(dtype, tuple(shape))


def _bytes_of(array: mx.array) -> memoryview:
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    if sys.byteorder != "little":  # pragma: no cover
        raise CacheFileError("saved caches are little-endian; this machine is not")
    return np.ascontiguousarray(np.array(array)).data.cast("B")


def check_replaceable(path: Path) -> None:
    """Raise CacheFileError for what exists and must not be replaced by a file."""
    if path.exists():
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise CacheFileError(f"{path} exists and is not a regular file")
        if not mode & 0o222:
            raise CacheFileError(f"{path} exists and is read-only")


@contextlib.contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file beside `path`, which takes its place if the block succeeds.

    A symlink is followed. Raises CacheFileError.
    """
    try:
        target = Path(os.path.realpath(path))  # so that a symlink stays one
    except ValueError as error:
        raise CacheFileError(f"{path!r} is no path: {error}") from error
    new = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        check_replaceable(target)
        # 0o666 less the umask, as any new file; tempfile's would be 0o600
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with open(descriptor, "wb") as file:
                if target.exists():  # may be private: it stays so
                    os.fchmod(descriptor, stat.S_IMODE(target.stat().st_mode))
                yield file
                file.flush()
                os.fsync(descriptor)
            os.replace(new, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise
        _sync_folder(target.parent)
    except OSError as error:
        raise CacheFileError(f"{path} cannot be written: {error}") from error


def _sync_folder(folder: Path) -> None:
    """Have the new name on the disk too, where the file system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
