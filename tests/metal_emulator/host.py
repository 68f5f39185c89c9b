"""The processes that run kernels: a kernel's crash or endless loop ends only them."""

import atexit
import subprocess
from contextlib import suppress
from pathlib import Path
from threading import Lock

# How many processes of mode "fast" wait for their next job.
_KEPT = 16
_kept: dict[Path, "Host"] = {}
_lock = Lock()


class Host:
    """A process that runs jobs of one kernel (see runtime/main.cpp)."""

    def __init__(self, executable: Path) -> None:
        self._process = subprocess.Popen(
            [executable], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, *arguments: object) -> int:
        """Runs a job. Returns 0, or the exit status of the process, which has ended."""
        line = " ".join(map(str, arguments)) + "\n"
        # A process that has ended already says so by its exit status.
        with suppress(BrokenPipeError):
            self._process.stdin.write(line.encode())
            if self._process.stdout.read(1):
                return 0
        return self._process.wait()

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def run_once(executable: Path, *arguments: object) -> int:
    """Runs a job in a process of its own; see Host.run."""
    host = Host(executable)
    try:
        return host.run(*arguments)
    finally:
        host.close()


def run_kept(executable: Path, *arguments: object) -> int:
    """Runs a job in a process that then waits for the next one; see Host.run."""
    with _lock:
        host = _kept.pop(executable, None)
    host = host or Host(executable)
    unwanted: Host | None = host
    try:
        status = host.run(*arguments)
        if status == 0:
            unwanted = _keep(executable, host)
    finally:
        if unwanted:
            unwanted.close()
    return status


def _keep(executable: Path, host: Host) -> Host | None:
    """Keeps a host for the next job; returns one for which there is no more room."""
    with _lock:
        other = _kept.pop(executable, None)
        _kept[executable] = host  # the last used is the last
        if other is None and len(_kept) > _KEPT:
            other = _kept.pop(next(iter(_kept)))
    return other


@atexit.register
def end_hosts() -> None:
    """Ends the processes that wait."""
    while _kept:
        _kept.popitem()[1].close()
