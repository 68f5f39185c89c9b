import os
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from tiny_llm import default_model
from tiny_llm.errors import (
    ModelNotFoundError,
    ParameterError,
    UnsupportedModelError,
)
from tiny_llm.hub import MODEL_FILES, find_model
from tiny_llm.hub_progress import progress_bars


def http_error(kind, text="said no"):
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    return kind(text, response=response)


class FakeHub:
    """Stands in for huggingface_hub's downloads: a folder, or an error."""

    def __init__(self, monkeypatch, folder):
        self.folder = folder
        self.online = self.cached = None
        self.names = []
        self.calls = []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot)
        monkeypatch.setattr(huggingface_hub, "list_repo_files", self.listing)

    def snapshot(self, repo_id, *, local_files_only=False, **options):
        self.calls.append((repo_id, local_files_only, options))
        error = self.cached if local_files_only else self.online
        if error is not None:
            raise error
        return str(self.folder)

    def listing(self, repo_id, *, revision=None):
        return self.names


@pytest.fixture
def hub(monkeypatch, tmp_path):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    return FakeHub(monkeypatch, folder)


def test_the_default_model_has_a_name(monkeypatch, tmp_path):
    monkeypatch.setattr(default_model, "path", lambda: tmp_path / "default.gguf")
    assert find_model("smollm2") == tmp_path / "default.gguf"


def test_existing_folders_and_gguf_files_are_taken_as_they_are(tmp_path, monkeypatch):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"whatever")  # the reader says what is wrong with it
    blob = tmp_path / "sha256-1234"
    blob.write_bytes(b"GGUF and more")
    assert find_model(tmp_path) == tmp_path
    assert find_model(str(tmp_path)) == tmp_path
    assert find_model(file) == file
    assert find_model(str(blob)) == blob
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/a.gguf") == file
    monkeypatch.chdir(tmp_path)
    assert find_model("a.gguf") == Path("a.gguf")


def test_a_local_folder_wins_over_a_repository_of_the_same_name(
    tmp_path, monkeypatch, hub
):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_model("owner/name") == Path("owner/name")
    assert hub.calls == []


@pytest.mark.parametrize(
    "name",
    [
        "./no_such",
        "../no_such",
        "/no/such",
        "~/no_such_folder_of_mine",
        "no_such.gguf",
        "owner/no_such.gguf",
        "a/b/c",
        "a\\b",
        "no_such_name",
        "a b/c",
        "a/b:c.safetensors",
        "a/b:",
        "",
        "x" * 5000,
        "a\0b",
        Path("owner/name"),
    ],
)
def test_names_of_nothing_are_not_looked_for_on_the_hub(name, hub):
    with pytest.raises(ModelNotFoundError) as caught:
        find_model(name)
    assert repr(str(name)[:100])[1:-1] in str(caught.value)
    assert hub.calls == []


def test_other_files_are_refused(tmp_path):
    for name in ("model.safetensors", "pytorch_model.bin", "notes"):
        path = tmp_path / name
        path.write_bytes(b"12345678")
        with pytest.raises(UnsupportedModelError, match=f"{name} is not a GGUF file"):
            find_model(path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UnsupportedModelError, match="pipe is not a GGUF file"):
        find_model(pipe)


def test_dead_symlinks_are_named(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    gone = tmp_path / "gone"
    gone.symlink_to(tmp_path / "nowhere")
    for path in (loop, gone):
        with pytest.raises(ModelNotFoundError, match=path.name):
            find_model(path)


def test_a_revision_is_refused_where_it_means_nothing(tmp_path):
    for name in ("smollm2", tmp_path):
        with pytest.raises(ParameterError, match="revision='v1'"):
            find_model(name, revision="v1")


def test_a_repository_is_fetched_without_pickles_and_subfolders(hub):
    (hub.folder / "model.safetensors").touch()
    assert find_model("owner/name", revision="v1") == hub.folder
    ((repo, local_only, options),) = hub.calls
    assert (repo, local_only, options["revision"]) == ("owner/name", False, "v1")
    names = [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "merges.txt",
    ]
    unwanted = [
        "pytorch_model.bin",
        "model.pt",
        "model.pth",
        "x.pkl",
        "consolidated.safetensors",
        "original/model.safetensors",
        "onnx/config.json",
        "model.gguf",
        "modeling_custom.py",
    ]
    chosen = huggingface_hub.utils.filter_repo_objects(
        names + unwanted,
        allow_patterns=options["allow_patterns"],
        ignore_patterns=options["ignore_patterns"],
    )
    assert list(chosen) == names
    assert options["allow_patterns"] == list(MODEL_FILES)


def test_only_the_asked_for_files_are_fetched(hub):
    # No weights in the folder, none asked for: not an error.
    assert find_model("owner/name", files=["tokenizer*"]) == hub.folder
    assert hub.calls[0][2]["allow_patterns"] == ["tokenizer*"]


def test_one_gguf_file_of_a_repository(hub):
    (hub.folder / "sub").mkdir()
    file = hub.folder / "sub" / "m-Q4_0.gguf"
    file.touch()
    assert find_model("owner/name:sub/m-Q4_0.gguf") == file
    assert hub.calls[0][2]["allow_patterns"] == ["sub/m-Q4_0.gguf"]
    with pytest.raises(ModelNotFoundError, match=r"has no file 'other\.gguf'"):
        find_model("owner/name:other.gguf")


def test_without_a_network_the_cache_serves(hub):
    (hub.folder / "model.safetensors").touch()
    hub.online = ConnectionError("no route")
    assert find_model("owner/name") == hub.folder
    assert [local_only for _, local_only, _ in hub.calls] == [False, True]


def test_without_network_and_cache_the_reason_is_told(hub):
    hub.online = errors.LocalEntryNotFoundError("cannot find it\nlong advice")
    hub.online.__cause__ = ConnectionError("no route to host")
    hub.cached = errors.LocalEntryNotFoundError("not cached")
    with pytest.raises(ModelNotFoundError) as caught:
        find_model("owner/name")
    message = str(caught.value)
    assert "'owner/name'" in message
    assert "ConnectionError: no route to host" in message
    assert "pass the folder's path" in message


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (http_error(errors.RepositoryNotFoundError), "'owner/name'.* is not on the"),
        (http_error(errors.GatedRepoError), "'owner/name'.* is gated.*hf auth login"),
        (http_error(errors.RevisionNotFoundError), "has no revision 'v9'"),
        (errors.HFValidationError("bad name"), "bad name"),
        (http_error(errors.HfHubHTTPError, "502 Bad Gateway"), "502 Bad Gateway"),
    ],
)
def test_what_the_hub_says_is_translated(error, words, hub):
    hub.online = error
    hub.cached = errors.LocalEntryNotFoundError("not cached")
    with pytest.raises(ModelNotFoundError, match=words):
        find_model("owner/name", revision="v9")


def test_a_repository_of_pickles_is_refused(hub):
    hub.names = ["config.json", "pytorch_model.bin"]
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin.*safetensors"):
        find_model("owner/name")


def test_a_repository_of_ggufs_lists_them(hub):
    hub.names = ["README.md", "m.Q4_0.gguf", "m.Q8_0.gguf", "old.bin"]
    with pytest.raises(ModelNotFoundError, match=r"'owner/name:m\.Q4_0\.gguf', 'owner"):
        find_model("owner/name")


def test_a_repository_without_weights_says_so(hub, monkeypatch):
    def offline(*arguments, **options):
        raise ConnectionError

    monkeypatch.setattr(huggingface_hub, "list_repo_files", offline)
    with pytest.raises(
        ModelNotFoundError, match="is cached here, and the Hub does not"
    ):
        find_model("owner/name")
    monkeypatch.setattr(
        huggingface_hub, "list_repo_files", lambda *_, **__: ["README.md"]
    )
    with pytest.raises(ModelNotFoundError, match=r"has no \*\.safetensors"):
        find_model("owner/name")


@pytest.mark.parametrize(
    ("terminal", "show", "shown"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_progress_bars_are_for_terminals(terminal, show, shown, monkeypatch):
    from huggingface_hub.utils import are_progress_bars_disabled

    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    before = are_progress_bars_disabled()
    with progress_bars(show):
        assert are_progress_bars_disabled() != shown
    assert are_progress_bars_disabled() == before
