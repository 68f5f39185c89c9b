"""The files around a model in Hugging Face's layout that concern its text side.

Each function reads one thing and raises TokenizerError naming the file that is
missing, damaged, or has a value of the wrong type. Files that are optional may be
absent.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from .chat_template import parse_chat_template
from .errors import CorruptFileError, TokenizerError
from .files import file_size
from .json_files import read_json

_SPECIAL_NAMES = tuple(
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn what the tokenizers library raises into a TokenizerError about `what`.

    It raises bare Exceptions, and for what its authors did not expect a Rust panic,
    which is a BaseException whose class cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"{what}: {error}") from error
        raise


def read_backend(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer.json of a folder."""
    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise TokenizerError(f"{folder} is not a folder; a tokenizer is read from one")
    if not os.path.lexists(path):
        if (folder / "tokenizer.model").exists() or (folder / "vocab.json").exists():
            raise TokenizerError(
                f"{folder} has a tokenizer in an older format, but no tokenizer.json. "
                "Convert it once with transformers: AutoTokenizer.from_pretrained("
                "folder).save_pretrained(folder)"
            )
        raise TokenizerError(f"{folder} has no tokenizer.json")
    data = _read_bytes(path)
    with library_errors(f"{path} is not a usable tokenizer"):
        backend = tokenizers.Tokenizer.from_buffer(data)
        backend.encode("a")  # some damage shows only when it is used
        return backend


def read_special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name ("bos_token", ...), from both files that name them."""
    config_file = folder / "tokenizer_config.json"
    map_file = folder / "special_tokens_map.json"
    token_map = read_optional_json(map_file)
    found = {}
    for name in _SPECIAL_NAMES:
        source, path = (
            (config, config_file) if name in config else (token_map, map_file)
        )
        match source.get(name):
            case None:
                pass
            case str(token) | {"content": str(token)}:
                found[name] = token
            case value:
                raise TokenizerError(f"{path}: {name} must be a string, not {value!r}")
    return found


def read_eos_ids(folder: Path) -> set[int]:
    """All EOS ids that config.json and generation_config.json list."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        config = read_optional_json(folder / name)
        nested = config.get("text_config")
        for part in (config, nested if isinstance(nested, dict) else {}):
            value = part.get("eos_token_id")
            ids = value if isinstance(value, list) else [value]
            for token_id in ids if value is not None else ():
                if not isinstance(token_id, int) or isinstance(token_id, bool):
                    raise TokenizerError(
                        f"{folder / name}: eos_token_id must be an integer or a list "
                        f"of integers, not {value!r:.60}"
                    )
                if token_id >= 0:  # some files say "none" by -1
                    found.add(token_id)
    return found


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, from the newest place that the folder has them in."""
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        try:
            return {"default": _read_bytes(path).decode()}
        except UnicodeDecodeError as error:
            raise TokenizerError(f"{path} is not UTF-8 text: {error}") from error
    path = folder / "chat_template.json"
    if os.path.lexists(path):
        return parse_chat_template(
            read_optional_json(path).get("chat_template"), str(path)
        )
    path = folder / "tokenizer_config.json"
    return parse_chat_template(config.get("chat_template"), str(path))


def read_flag(folder: Path, config: Mapping[str, Any], name: str) -> bool | None:
    """A true or false of tokenizer_config.json; None where it does not say."""
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: {name} must be true or false, "
            f"not {value!r:.60}"
        )
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is no file."""
    if not os.path.lexists(path):
        return {}
    try:
        return read_json(path)
    except CorruptFileError as error:
        raise TokenizerError(str(error)) from error


def _read_bytes(path: Path) -> bytes:
    try:
        file_size(path)
        return path.read_bytes()
    except CorruptFileError as error:
        raise TokenizerError(str(error)) from error
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
