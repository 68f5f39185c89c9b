"""The search for the compiler, the cache, and the tests' skips without them."""

import os
import subprocess
import sys
from pathlib import Path

import metal_emulator
import pytest
from emulator_tools import REQUIRE, why_no_emulator
from metal_emulator import toolchain


@pytest.fixture
def fresh_search(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TINY_LLM_EMULATOR_CXX", raising=False)
    toolchain.compiler.cache_clear()
    yield monkeypatch
    toolchain.compiler.cache_clear()


def test_missing_compiler(fresh_search: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh_search.setenv("PATH", str(tmp_path))
    with pytest.raises(metal_emulator.ToolchainError, match="apt-get install clang-19"):
        toolchain.compiler()


def test_compiler_from_the_environment(
    fresh_search: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "mine"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    fresh_search.setenv("TINY_LLM_EMULATOR_CXX", str(compiler))
    assert toolchain.compiler() == str(compiler)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TINY_LLM_EMULATOR_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert toolchain.cache_folder() == tmp_path / "tiny_llm" / "metal_emulator"
    monkeypatch.setenv("TINY_LLM_EMULATOR_CACHE", str(tmp_path / "mine"))
    assert toolchain.cache_folder() == tmp_path / "mine"


def test_first_finished_folder_wins(tmp_path: Path) -> None:
    final = tmp_path / "entry"
    with toolchain.new_folder(final) as slow:
        (slow / "who").write_text("slow")
        with toolchain.new_folder(final) as quick:
            (quick / "who").write_text("quick")
    assert (final / "who").read_text() == "quick"
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def _fake(folder: Path, name: str, script: str) -> Path:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


@pytest.mark.skipif(sys.platform != "linux", reason="the emulator runs on Linux only")
def test_each_missing_part_is_named(
    fresh_search: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toolchain.addr2line.cache_clear()
    fresh_search.setenv("PATH", str(tmp_path))
    assert why_no_emulator().startswith("the emulator needs addr2line: apt-get install")
    _fake(tmp_path, "addr2line", "")
    assert why_no_emulator().startswith("the emulator needs clang (tried clang++-19")
    _fake(tmp_path, "clang++-20", "echo /nowhere/libclang_rt.builtins.a")
    needed = "the emulator needs clang's runtime library (/nowhere/libclang_rt"
    assert why_no_emulator().startswith(needed)
    library = tmp_path / "libclang_rt.builtins.a"
    library.touch()
    _fake(tmp_path, "clang++-20", f"echo {library}")
    assert why_no_emulator() == ""
    _fake(tmp_path, "clang++-20", "echo broken >&2; exit 1")
    assert "(broken)" in why_no_emulator()
    toolchain.addr2line.cache_clear()


TEST = """
import mlx.core as mx
from emulator_tools import needs_emulator
from metal_emulator import Kernel

@needs_emulator
def test_it():
    one = (1, 1, 1)
    Kernel("one", ["x"], ["out"], "out[0] = x;").run([1], [(1,)], [mx.int32], one, one)
"""


@pytest.mark.parametrize("required", [False, True])
def test_without_the_toolchain_tests_skip_and_in_ci_fail(
    tmp_path: Path, required: bool
) -> None:
    (tmp_path / "test_it.py").write_text(TEST)
    environment = os.environ | {
        "PATH": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parent),
        REQUIRE: "1" if required else "",
    }
    environment.pop("TINY_LLM_EMULATOR_CXX", None)
    command = [sys.executable, "-m", "pytest", "-rs", "-c", os.devnull, "--rootdir"]
    command += [tmp_path, "-p", "no:cacheprovider", tmp_path / "test_it.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == int(required), done.stdout + done.stderr
    assert ("1 failed" if required else "1 skipped") in done.stdout
    linux = sys.platform == "linux"
    message = "apt-get install clang-19" if linux else "Linux only"
    assert message in done.stdout.replace("\n", " ")
