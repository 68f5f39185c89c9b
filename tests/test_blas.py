import os
import subprocess
import sys

import pytest
from oracle import DATA

from tiny_llm import blas

linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="nothing is preloaded off Linux"
)


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


REPORT = "from tiny_llm import blas; print(blas.chosen())"


@linux
def test_off_leaves_mlx_alone():
    done = run(REPORT, TINY_LLM_BLAS="off")
    assert "name=None" in done.stdout
    assert "TINY_LLM_BLAS=off" in done.stdout


@linux
def test_a_library_that_cannot_be_loaded_is_an_error_naming_it():
    # when a model is loaded: the import itself must not fail
    code = (
        "import tiny_llm\n"
        f"try: tiny_llm.load({str(DATA / 'llama_llama3rope_bias')!r})\n"
        "except tiny_llm.TinyLLMError as error: print(error)"
    )
    done = run(code, TINY_LLM_BLAS="/nowhere/libblas.so")
    assert done.returncode == 0, done.stderr
    assert "TINY_LLM_BLAS=/nowhere/libblas.so: cannot be loaded" in done.stdout


@linux
def test_too_late_is_said():
    done = run(f"import mlx.core; {REPORT}; print(blas.advice())")
    assert "mlx.core was imported first" in done.stdout
    assert "slow BLAS" in done.stdout or "None" in done.stdout


@linux
def test_a_chosen_library_is_the_one_in_use():
    code = (
        "from tiny_llm import blas\n"
        "import mlx.core as mx\n"
        "mx.eval(mx.ones((64, 64)) @ mx.ones((64, 64)))\n"
        "path = blas.chosen().path\n"
        "maps = open('/proc/self/maps').read()\n"
        "print(path, path is None or path.split('/')[-1] in maps)\n"
        "print(blas.gflops())"
    )
    done = run(code, TINY_LLM_BLAS="")
    assert done.returncode == 0, done.stderr
    path, used = done.stdout.splitlines()[0].rsplit(" ", 1)
    assert used == "True"
    assert float(done.stdout.splitlines()[1]) > 0
    if path != "None":
        again = run(code, TINY_LLM_BLAS=path)
        assert again.stdout.splitlines()[0] == f"{path} True"


@linux
def test_without_any_library_one_line_says_how_to_get_one(monkeypatch):
    monkeypatch.delenv("TINY_LLM_BLAS", raising=False)
    monkeypatch.setattr(blas, "_load_mkl", lambda: None)
    monkeypatch.setattr(blas, "_load_openblas", lambda: None)
    monkeypatch.setattr(blas, "_chosen", blas.chosen())
    monkeypatch.setattr(blas, "gflops", lambda: 3.0)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    blas.preload()
    blas.advice.cache_clear()
    line = blas.advice()
    blas.advice.cache_clear()
    assert "3.0 GFLOP/s" in line
    assert "install" in line
    assert "\n" not in line


@linux
def test_mkl_without_tbb_is_passed_over_since_it_would_abort(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmkl_rt.so.2").write_bytes(b"not a library")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(blas.site, "getuserbase", lambda: str(tmp_path))
    assert blas._load_mkl() is None


def test_keeping_freed_memory_does_not_fail_anywhere():
    blas.keep_freed_memory()
