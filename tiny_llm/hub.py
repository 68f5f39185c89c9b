"""From the name that a user gives to a folder or file on this machine.

    "smollm2"                   the default model, fetched once (default_model.py)
    "path/to/folder"            a folder with config.json and safetensors
    "path/to/model.gguf"        one GGUF file
    "owner/name"                a model on the Hugging Face Hub
    "owner/name:file.gguf"      one GGUF file of a model on the Hub

The Hub's files stay in huggingface_hub's own cache; without a network they are taken
from there. HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean to that library.
"""

import glob
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from . import default_model
from .errors import (
    ModelNotFoundError,
    ParameterError,
    TinyLLMError,
    UnsupportedModelError,
)
from .files import PICKLES
from .hub_progress import progress_bars

DEFAULT_MODELS: dict[str, Callable[[], Path]] = {
    default_model.NAME: lambda: default_model.path()
}
# Weights, settings and tokenizer; at the top of the repository only, and without the
# second copy of the weights that some repositories carry. Never a pickle.
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model")
_NOT_NEEDED = ["*/*", "consolidated*"]
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+?)(?::([^\\]+\.gguf))?", re.ASCII)


def find_model(
    name_or_path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    files: Sequence[str] | None = None,
) -> Path:
    """The folder or GGUF file of a model, downloaded first if need be.

    A file comes back only if it is a GGUF by its name or its first bytes. `revision`
    is a branch, tag or commit on the Hub. `files` are the glob patterns to download
    from a Hub repository instead of MODEL_FILES; local models ignore them.

    Raises ModelNotFoundError (nothing there, not allowed, or not reachable and not
    cached), UnsupportedModelError (only pickled weights, or a file of another format)
    and ParameterError (a revision for a model that is not on the Hub).
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise ParameterError(f"a model's name or path is needed, not {name_or_path!r}")
    name = os.fspath(name_or_path)
    if isinstance(name_or_path, str) and name in DEFAULT_MODELS:
        _no_revision(name, revision)
        return DEFAULT_MODELS[name]()
    local = _local(name)
    if local is not None:
        _no_revision(name, revision)
        return local
    hub_name = _HUB_NAME.fullmatch(name) if isinstance(name_or_path, str) else None
    if hub_name is None or _looks_like_path(name, in_repo=hub_name[2]):
        raise ModelNotFoundError(
            f"there is no model at {name[:200]!r}: pass an existing folder or .gguf "
            f"file, {' or '.join(map(repr, DEFAULT_MODELS))}, or a name on the Hub "
            "such as 'owner/name' or 'owner/name:file.gguf'"
        )
    repo, gguf = hub_name.groups()
    if gguf is not None:
        return _one_file(repo, revision, gguf)
    return _folder(repo, revision, files)


def _no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise ParameterError(
            f"revision={revision!r} has no meaning for {name!r}: "
            "only models on the Hub have revisions"
        )


def _local(name: str) -> Path | None:
    """The path that `name` is, if something is there."""
    if not name:
        raise ModelNotFoundError("the model's name is empty")
    try:
        path = Path(name).expanduser()
        found = path.exists()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFoundError(
            f"{name[:200]!r} cannot be looked up: {reason}"
        ) from error
    if not found:
        if path.is_symlink():
            raise ModelNotFoundError(f"{path} is a symlink that leads nowhere")
        return None
    if path.is_dir() or (is_file and path.suffix == ".gguf") or _is_gguf(path, is_file):
        return path
    raise UnsupportedModelError(
        f"{path} is not a GGUF file; for safetensors pass the folder that also holds "
        "config.json (pickled weights are not read at all)"
    )


def _is_gguf(path: Path, is_file: bool) -> bool:
    if not is_file:  # opening a pipe would wait for a writer
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error}") from error


def _looks_like_path(name: str, in_repo: str | None) -> bool:
    # "a/b:c.gguf" names a file of a repository; "a/b.gguf" can only be a lost path.
    return name.startswith((".", "/", "~")) or (
        in_repo is None and name.endswith(".gguf")
    )


def _one_file(repo: str, revision: str | None, name: str) -> Path:
    # A snapshot of one file: unlike hf_hub_download it gives up at once offline.
    path = _fetch(repo, revision, allow_patterns=[glob.escape(name)]) / name
    if not path.is_file():
        raise ModelNotFoundError(f"{repo!r} has no file {name!r}")
    return path


def _folder(repo: str, revision: str | None, files: Sequence[str] | None) -> Path:
    folder = _fetch(
        repo,
        revision,
        allow_patterns=list(files or MODEL_FILES),
        ignore_patterns=list(_NOT_NEEDED),
    )
    if files is None and not any(folder.glob("*.safetensors")):
        raise _no_weights(repo, revision)
    return folder


def _no_weights(repo: str, revision: str | None) -> TinyLLMError:
    import huggingface_hub

    try:
        names = list(huggingface_hub.list_repo_files(repo, revision=revision))
    except Exception:  # every HTTP library has errors of its own
        return ModelNotFoundError(
            f"no *.safetensors file of {repo!r} is cached here, and the Hub does not "
            "answer; check the network"
        )
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return ModelNotFoundError(
            f"{repo!r} holds GGUF files, name one: "
            + ", ".join(repr(f"{repo}:{name}") for name in ggufs[:8])
        )
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        return UnsupportedModelError(
            f"{repo!r} has only pickled weights ({', '.join(pickles[:4])}), which can "
            "run code when read; tiny_llm reads only safetensors and GGUF"
        )
    return ModelNotFoundError(f"{repo!r} has no *.safetensors file")


def _fetch(repo: str, revision: str | None, **patterns: list[str]) -> Path:
    """The snapshot's folder: brought up to date, or else as the cache has it."""
    import huggingface_hub
    from huggingface_hub import errors

    def call(**more: bool) -> Path:
        download: Callable[..., str] = huggingface_hub.snapshot_download
        return Path(download(repo, revision=revision, **patterns, **more))

    what = repr(repo) if revision is None else f"{repo!r} (revision {revision!r})"
    with progress_bars():
        try:
            return call()
        except errors.GatedRepoError as error:
            raise ModelNotFoundError(
                f"{what} is gated: ask for access on its page on the Hub, then run "
                "`hf auth login` or set HF_TOKEN"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ModelNotFoundError(
                f"{what} is not on the Hub, nor a path here: check the spelling; "
                "if it is private, run `hf auth login` or set HF_TOKEN"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ModelNotFoundError(
                f"{repo!r} has no revision {revision!r}"
            ) from error
        except errors.HFValidationError as error:
            raise ModelNotFoundError(f"{what} cannot be a name: {error}") from error
        except Exception as error:  # which ones depends on the HTTP library in use
            return _from_cache(call, what, error)


def _from_cache(call: Callable[..., Path], what: str, online: Exception) -> Path:
    try:
        return call(local_files_only=True)
    except Exception:
        cause = online.__cause__ or online
        reason = str(cause).strip().split("\n")[0]
        raise ModelNotFoundError(
            f"{what} could not be fetched from the Hub "
            f"({type(cause).__name__}: {reason}) and is not in its cache here; check "
            "the network, or download it elsewhere and pass the folder's path"
        ) from online
