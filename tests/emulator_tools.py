"""Whether this machine can run the emulator, for the tests that need it."""

import os

import metal_emulator
import pytest

# Set by CI on Linux: a machine without the toolchain fails the tests instead.
REQUIRE = "TINY_LLM_REQUIRE_EMULATOR"


def why_no_emulator() -> str:
    """What the emulator lacks on this machine and what to install; "" if nothing."""
    try:
        metal_emulator.check_toolchain()
    except metal_emulator.ToolchainError as error:
        return str(error)
    return ""


_REASON = why_no_emulator()
_SKIPPED = bool(_REASON) and os.environ.get(REQUIRE, "0") in ("", "0")

needs_emulator = pytest.mark.skipif(_SKIPPED, reason=_REASON or "not skipped")
"""Skips a test where there is no emulator, or lets it fail if REQUIRE is set."""
