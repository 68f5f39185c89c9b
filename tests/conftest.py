import signal

import pytest

import tiny_llm  # noqa: F401  (before any test imports mlx: it preloads the BLAS)

# A shell that starts pytest in the background has it ignore Ctrl-C, and the programs
# under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
