"""A PostgreSQL server of our own, on loopback, for as long as a module's tests run."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest


def _program(name):
    """Debian keeps a server's programs outside the path."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    found = shutil.which(name)
    return found or (str(places[0]) if places else None)


def _user():
    """PostgreSQL refuses to run as root: then whom to run it as."""
    if os.geteuid() != 0:
        return {}
    import pwd

    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    pytest.skip("runs as root, and there is no user postgres or nobody to run a server as")


@pytest.fixture(scope="module")
def postgresql():
    """The URL of an empty database."""
    programs = [_program(name) for name in ("initdb", "postgres", "pg_isready")]
    if None in programs:
        pytest.skip("no PostgreSQL server here: install Debian's package postgresql")
    initdb, postgres, pg_isready = programs
    who = _user()
    folder = Path(tempfile.mkdtemp(prefix="virtualgrad-postgresql-"))
    if who:
        os.chown(folder, who["user"], who["group"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = folder / "data"
    how = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, **who}
    made = subprocess.run(
        [initdb, "-D", data, "-U", "tester", "-A", "trust", "--no-sync"], check=False, **how
    )
    if made.returncode != 0:
        pytest.skip(f"initdb failed: {made.stderr.decode().strip()}")
    arguments = ["-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", folder, "-c", "fsync=off"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([postgres, *arguments], **{**how, "stderr": log})
    try:
        begin = time.monotonic()
        ready = [pg_isready, "-q", "-h", "127.0.0.1", "-p", str(port), "-U", "tester"]
        while subprocess.run(ready, check=False).returncode != 0:
            if server.poll() is not None or time.monotonic() - begin > 120:
                pytest.skip(f"the server did not start: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.05)
        yield f"postgresql://tester@127.0.0.1:{port}/postgres"
    finally:
        server.send_signal(signal.SIGQUIT)  # at once: nothing in it is wanted any more
        server.wait(30)
        shutil.rmtree(folder, ignore_errors=True)
