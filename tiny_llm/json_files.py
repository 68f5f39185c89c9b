"""JSON files (config.json and its like), read with an error for each way to be bad."""

import json
from pathlib import Path
from typing import Any

from .errors import CorruptFileError
from .files import file_size

# tokenizer.json files of 35 MB exist; beyond this something else has that name.
_LARGEST = 256 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Raises CorruptFileError, which names the file and says what it found, when the
    file is missing, not a regular file, unreadable, empty, larger than 256 MiB, not
    UTF-8, not JSON, nested too deeply, or when its top level is not an object.
    """
    size = file_size(path)
    if size == 0:
        raise CorruptFileError(f"{path} is empty")
    if size > _LARGEST:
        raise CorruptFileError(f"{path} has {size} bytes: too large for a JSON file")
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise CorruptFileError(
            f"{path} is not UTF-8: byte {error.object[error.start]:#04x} "
            f"at offset {error.start}"
        ) from error
    except RecursionError as error:
        raise CorruptFileError(f"{path} is nested too deeply") from error
    except ValueError as error:  # also numbers of more than 4300 digits
        raise CorruptFileError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptFileError(
            f"{path} holds a JSON {_kind(value)} where an object ({{...}}) belongs"
        )
    return value


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names: dict[type, str] = {list: "array", str: "string", bool: "boolean"}
    return names.get(type(value), "number")
