"""Whether a path is a file that one can read, before anything opens it."""

import os
import stat
from pathlib import Path

from .errors import CorruptFileError

# What the ends of names of pickled weights are. Reading a pickle can run code.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def file_size(path: Path) -> int:
    """The size in bytes of the regular file at `path` (symlinks are followed).

    Raises CorruptFileError when there is none, or it is a directory, a pipe or a
    device (opening a pipe would wait for a writer), a symlink that leads nowhere, or
    not readable by this user.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        kind = "a symlink to nothing" if path.is_symlink() else "missing"
        raise CorruptFileError(f"{path} is {kind}") from None
    except (OSError, ValueError) as error:
        raise CorruptFileError(f"{path} cannot be read: {error}") from error
    if stat.S_ISDIR(found.st_mode):
        raise CorruptFileError(f"{path} is a directory where a file belongs")
    if not stat.S_ISREG(found.st_mode):
        raise CorruptFileError(f"{path} is a pipe or a device, not a regular file")
    if not os.access(path, os.R_OK):
        raise CorruptFileError(f"{path} cannot be read: permission denied")
    return found.st_size
