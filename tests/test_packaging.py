import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import tiny_llm

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_folder_with_code_is_a_listed_package():
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "tiny_llm").rglob("__init__.py")
    }
    folders |= {
        ".".join(("tiny_llm", *path.parent.relative_to(ROOT).parts))
        for path in (ROOT / "kernels").rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders


def test_kernels_is_one_folder_under_two_names():
    assert (ROOT / "tiny_llm" / "kernels").resolve() == ROOT / "kernels"
    import tiny_llm.kernels

    assert Path(tiny_llm.kernels.__file__).resolve().parent == ROOT / "kernels"


def test_a_wheel_holds_kernels_as_tiny_llm_kernels(tmp_path, monkeypatch):
    setuptools = pytest.importorskip("setuptools", reason="pip install setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("pip install 'setuptools>=77', which pyproject.toml asks for")
    import shutil

    from setuptools import build_meta

    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".git", ".venv", "*.egg-info", "data", "build")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
    monkeypatch.chdir(source)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    wheel = build_meta.build_wheel(str(tmp_path))
    names = set(zipfile.ZipFile(tmp_path / wheel).namelist())
    assert "tiny_llm/kernels/attention.py" in names
    assert "tiny_llm/cli/__init__.py" in names
    assert "tiny_llm/py.typed" in names
    assert not any(name.startswith(("kernels/", "tests/")) for name in names)
    sdist = build_meta.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / sdist) as archive:
        held = archive.getnames()
    assert any(name.endswith("/kernels/attention.py") for name in held)


def test_public_names_exist_and_unknown_ones_do_not():
    for name in tiny_llm.__all__:
        assert getattr(tiny_llm, name) is not None
        assert name in dir(tiny_llm)
    with pytest.raises(AttributeError, match="no_such_name"):
        tiny_llm.no_such_name  # noqa: B018  (the access is the test)


def test_version_is_that_of_the_project():
    assert tiny_llm.__version__ == PROJECT["project"]["version"]


def test_nothing_of_mkl_is_asked_for_on_macos():
    for requirement in PROJECT["project"]["dependencies"]:
        if requirement.startswith(("mkl", "tbb", "mlx[cpu]")):
            assert "sys_platform == 'linux'" in requirement
