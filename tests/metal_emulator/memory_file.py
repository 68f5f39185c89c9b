"""Files in memory, through which arrays go to the processes that run kernels."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Unused ones are kept, as fresh memory is slow to write to; but not too much of it.
_KEPT, _KEPT_BYTES = 4, 64 << 20
_unused: list["MemoryFile"] = []


class MemoryFile:
    """A file without a place on a disk; another process opens it by its path."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("metal_emulator")
        self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def write(self, parts: Iterable[bytes | memoryview]) -> None:
        """Writes the parts, one after the other, from the file's beginning on."""
        with open(self.descriptor, "wb", closefd=False) as file:
            file.seek(0)
            file.writelines(parts)

    def clear(self) -> None:
        """Makes it an empty file."""
        os.ftruncate(self.descriptor, 0)

    def read(self) -> bytes:
        """All that is in the file."""
        with open(self.descriptor, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()


@contextmanager
def memory_file() -> Iterator[MemoryFile]:
    """A file whose content is undefined."""
    file = _unused.pop() if _unused else MemoryFile()
    keep = False
    try:
        yield file
        keep = os.fstat(file.descriptor).st_size < _KEPT_BYTES
    finally:
        if keep and len(_unused) < _KEPT:
            _unused.append(file)
        else:
            os.close(file.descriptor)
