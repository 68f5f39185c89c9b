"""Compiles a translated kernel and the runtime into one executable, with a cache."""

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from .lint import address_space_errors, compiler_errors
from .toolchain import (
    INSTALL,
    ToolchainError,
    cache_folder,
    compiler,
    compiler_version,
    new_folder,
    target,
)
from .translate import Translation

_PACKAGE = Path(__file__).resolve().parent
_SHIM, _RUNTIME = _PACKAGE / "shim", _PACKAGE / "runtime"
_FORWARDERS = (
    *("atomic", "common", "compute", "integer", "math"),
    *("simdgroup", "simdgroup_matrix"),
)
THREADGROUP_LIMIT = 32768

_EXTENSIONS = ",".join(
    ["-all", "+__opencl_c_generic_address_space"]
    + [
        f"+__cl_clang_{name}"
        for name in (
            "non_portable_kernel_param_types",
            "function_pointers",
            "variadic_functions",
            "bitfields",
        )
    ]
)
_LANGUAGE = [
    *("-x", "clcpp", "-cl-std=CLC++2021", "-cl-no-stdinc"),
    *("-Xclang", f"-cl-ext={_EXTENSIONS}"),
    # Every half and bfloat operation is rounded; a literal without suffix is float.
    *("-Xclang", "-ffloat16-excess-precision=none"),
    *("-Xclang", "-fbfloat16-excess-precision=none"),
    *("-ffp-contract=off", "-cl-single-precision-constant"),
    # Endless loops stay, so that they are found.
    *("-ftrivial-auto-var-init=pattern", "-fno-finite-loops"),
    # No frame reaches beyond the page below the stack.
    "-fstack-clash-protection",
    *("-fno-pie", "-gline-tables-only"),
    *("-fno-color-diagnostics", "-Wno-unknown-attributes", "-Wno-c++11-narrowing"),
    *("-Wimplicit-float-conversion", "-Wuninitialized", "-Wsometimes-uninitialized"),
]
_UNDEFINED = (
    "bounds,alignment,shift,integer-divide-by-zero,signed-integer-overflow,"
    "float-cast-overflow"
)
_MODES = {
    "check": [
        "-O1",
        f"-fsanitize=thread,{_UNDEFINED}",
        *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
        *("-mllvm", "-tsan-instrument-read-before-write=1"),
    ],
    "fast": ["-O2"],
}
MODES = tuple(_MODES)


class CompileError(Exception):
    """The kernel is not valid Metal, as far as clang and our lint can tell."""


def build(kernel: Translation, mode: str) -> Path:
    """The executable for a kernel; raises CompileError."""
    folder = cache_folder() / _key(mode, kernel.text)
    if folder.exists():
        os.utime(folder)  # so that what is unused can be told by its age
    else:
        runtime = _runtime_object()
        with new_folder(folder) as work:
            _compile(kernel, mode, work, runtime)
    return folder / "run"


def _key(*parts: str) -> str:
    """A name for what is made of the parts, this package and this machine's tools."""
    text = repr((parts, _tools_digest(), compiler()))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@cache
def _tools_digest() -> str:
    """Stands for all that decides how kernels are built, and whether they are."""
    tools = (compiler_version(), target(), platform.libc_ver())
    digest = hashlib.sha256(repr(tools).encode())
    code = [_PACKAGE / "build.py", _PACKAGE / "lint.py"]
    for path in sorted([*_SHIM.rglob("*"), *_RUNTIME.rglob("*"), *code]):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(arguments: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True)


def _must_run(arguments: Sequence[str | Path]) -> str:
    return _good(_run(arguments))


def _good(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        command = " ".join(map(str, done.args))
        message = f"a build step failed; is all installed ({INSTALL})?"
        raise ToolchainError(f"{message}\n{command}\n{done.stderr}")
    return done.stdout


def _runtime_object() -> Path:
    folder = cache_folder() / f"rt-{_key()}"
    if not folder.exists():
        with new_folder(folder) as work:
            flags = ["-std=c++20", "-O2", "-g1", "-fno-pie", "-target", target()]
            flags += ["-fno-exceptions", "-fno-rtti"]
            source, output = _RUNTIME / "main.cpp", work / "rt.o"
            _must_run([compiler(), *flags, "-c", source, "-o", output])
            for name in _FORWARDERS:
                (work / f"metal_{name}").write_text("#include <metal_stdlib>\n")
    return folder / "rt.o"


def _compile(kernel: Translation, mode: str, work: Path, runtime: Path) -> None:
    source, assembly = work / "kernel.clcpp", work / "kernel.ll"
    source.write_text(kernel.text)
    includes = [f"-I{path}" for path in (_SHIM, _RUNTIME, runtime.parent)]
    frontend = [compiler(), "-target", target(), *_LANGUAGE, *_MODES[mode], *includes]
    _to_assembly(frontend, source, assembly, checked=mode == "check")
    # A calling convention that only x86 takes for C's.
    text = assembly.read_text().replace(" spir_kernel ", " ")
    text, variables = _expose_threadgroup_variables(text)
    assembly.write_text(text)
    code = ["-x", "ir", *_MODES[mode], "-gline-tables-only", "-w", "-ffp-contract=off"]
    common = [compiler(), "-target", target(), "-fno-pie"]
    _must_run([*common, *code, "-c", assembly, "-o", work / "kernel.o"])
    # The C++ library is linked in: it takes long to load, and differs on machines.
    link = ["-no-pie", "-static-libstdc++", "-static-libgcc", "-Wl,--gc-sections"]
    libraries = ["--rtlib=compiler-rt", "-unwindlib=libgcc", "-lm"]
    objects = [work / "kernel.o", runtime]
    _must_run([*common, *link, *objects, *libraries, "-o", work / "run"])
    if variables:
        _check_threadgroup_bytes(work / "run")
    assembly.unlink()
    (work / "kernel.o").unlink()


def _to_assembly(
    frontend: list[str], source: Path, assembly: Path, checked: bool
) -> None:
    """clang's front end only, so that the assembly can be changed before -O1."""
    emit = ["-S", "-emit-llvm", "-Xclang", "-disable-llvm-passes"]
    dump = ["-fsyntax-only", "-w", "-Xclang", "-ast-dump"]
    with ThreadPoolExecutor(1) as pool:  # (at the same time: there are many kernels)
        tree = pool.submit(_run, [*frontend, *dump, source]) if checked else None
        done = _run([*frontend, *emit, source, "-o", assembly])
    errors = compiler_errors(done.stderr, checked)
    if tree is not None and not done.returncode:
        errors += address_space_errors(_good(tree.result()))
    if errors or done.returncode:
        raise CompileError("\n".join(errors) or done.stderr)


def _expose_threadgroup_variables(assembly: str) -> tuple[str, int]:
    """Gives each threadgroup variable a red zone and lists all in a table.

    They become externally visible, or else the optimiser would fold them.
    """
    entries: list[str] = []
    strings: list[str] = []

    def expose(m: re.Match[str]) -> str:
        symbol, type_ = m[1], m[2]
        name = re.sub(r"^_ZZ.*E\d+", "", symbol)
        label = f"@metal_emulator.name.{len(entries)}"
        text = f'[{len(name) + 1} x i8] c"{name}\\00"'
        strings.append(f"{label} = constant {text}")
        size = f"ptrtoint (ptr getelementptr ({type_}, ptr null, i32 1) to i64)"
        pointers = f"ptr @{symbol}, ptr {label}"
        entries.append(f"%metal_emulator.tg {{ {pointers}, i64 {size} }}")
        padded = f"{{ {type_}, [8192 x i8] }}"
        return f"@{symbol} = global {padded} zeroinitializer, align 4096"

    variable = (
        r"^@(_ZZ[\w.]+) = internal (?:addrspace\(\d+\) )?global (.*?) "
        r"(?:undef|zeroinitializer|poison), align \d+"
    )
    assembly = re.sub(variable, expose, assembly, flags=re.M)
    count = len(entries)
    table = f"[{', '.join(entries)}]" if entries else "zeroinitializer"
    lines = [
        "%metal_emulator.tg = type { ptr, ptr, i64 }",
        *strings,
        "@metal_emulator_threadgroup_variables = global "
        f"[{count} x %metal_emulator.tg] {table}",
        f"@metal_emulator_threadgroup_count = global i32 {count}",
    ]
    return assembly + "\n" + "\n".join(lines) + "\n", count


def _check_threadgroup_bytes(executable: Path) -> None:
    used = int(_must_run([executable, "--threadgroup-bytes"]))
    if used > THREADGROUP_LIMIT:
        raise CompileError(
            f"threadgroup memory: {used} bytes, of at most {THREADGROUP_LIMIT}"
        )
