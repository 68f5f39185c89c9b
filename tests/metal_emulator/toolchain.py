"""Where the compiler and the cache are."""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

# 19 is the tested version, so it comes first.
_COMPILERS = [f"clang++-{v}" for v in (19, 20, 21, 22, 18, 17)] + ["clang++"]
_TARGETS = {
    "x86_64": "x86_64-linux-gnu",
    "aarch64": "aarch64-linux-gnu",  # untested
}
INSTALL = "apt-get install clang-19 libclang-rt-19-dev binutils"


class ToolchainError(Exception):
    """The machine cannot build kernels; the message says what to install."""


@cache
def compiler() -> str:
    """The C++ compiler: ``TINY_LLM_EMULATOR_CXX``, or the first clang++ found."""
    wanted = os.environ.get("TINY_LLM_EMULATOR_CXX")
    for name in [wanted] if wanted else _COMPILERS:
        if path := shutil.which(name):
            return path
    tried = wanted or ", ".join(_COMPILERS)
    raise ToolchainError(f"the emulator needs clang (tried {tried}): {INSTALL}")


@cache
def compiler_version() -> str:
    """What the compiler says of itself."""
    return _ask_compiler("--version")


@cache
def addr2line() -> str:
    """The tool that finds the source line of an address."""
    for name in ("addr2line", "llvm-addr2line"):
        if path := shutil.which(name):
            return path
    raise ToolchainError(f"the emulator needs addr2line: {INSTALL}")


def target() -> str:
    """The target triple of this machine."""
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in _TARGETS:
        raise ToolchainError(
            "the emulator runs on x86-64 and aarch64 Linux only, not on "
            f"{platform.system()} {machine}"
        )
    return _TARGETS[machine]


def check_toolchain() -> None:
    """Raises ToolchainError if a program or library is missing."""
    target()
    addr2line()
    library = _ask_compiler("--rtlib=compiler-rt", "-print-libgcc-file-name")
    if not Path(library).is_file():
        raise ToolchainError(
            f"the emulator needs clang's runtime library ({library}): {INSTALL}"
        )


def _ask_compiler(*arguments: str) -> str:
    command = [compiler(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ToolchainError(
            f"the emulator cannot use {compiler()} ({done.stderr.strip()}): {INSTALL}"
        )
    return done.stdout.strip()


def cache_folder() -> Path:
    """Where what is built is kept.

    ``TINY_LLM_EMULATOR_CACHE``, else tiny_llm/metal_emulator in ``XDG_CACHE_HOME`` or
    in ~/.cache.
    """
    if given := os.environ.get("TINY_LLM_EMULATOR_CACHE"):
        return Path(given).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    folder = Path(base) if base else Path.home() / ".cache"
    return folder / "tiny_llm" / "metal_emulator"


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``final`` at the end if nothing is raised.

    Safe with several processes: the first rename wins, and the others' work is
    dropped.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="tmp-", dir=final.parent))
    try:
        yield work
        try:
            work.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
