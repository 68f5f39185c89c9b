import gc
import io
import signal
import sys
from pathlib import Path

import pytest

import tiny_llm  # noqa: F401  (before any test imports mlx: it preloads the BLAS)

TINY = Path(__file__).parent / "data" / "llama_llama3rope_bias"

# A shell that starts pytest in the background has it ignore Ctrl-C, and the programs
# under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def quick_collections():
    """For tests that collect garbage often: what there was before is left aside."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def smollm2_gguf():
    """The default model's file; fetched if it is not cached yet."""
    from tiny_llm import default_model
    from tiny_llm.errors import LoadError

    try:
        return default_model.path()
    except LoadError as error:
        pytest.skip(
            f"the default model is not here and cannot be fetched ({error}); get it "
            "once with `tiny-llm generate` on a machine with a network, or set "
            f"{default_model.PATH_VARIABLE}"
        )


@pytest.fixture(scope="module")
def no_template(tmp_path_factory):
    """The folder of llama_llama3rope_bias without its chat template."""
    folder = tmp_path_factory.mktemp("no_template")
    for file in TINY.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    return str(folder)


@pytest.fixture
def run(capsys, monkeypatch):
    """Run the command line; returns (exit status, stdout, stderr)."""
    from tiny_llm.cli import main

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(
            sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        )
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = ended.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
