import os
import secrets
import socket
import stat
import subprocess
import tempfile
import threading
import time
import tracemalloc
from pathlib import Path

import psutil
import pytest

from csloc_utils import sandbox
from csloc_utils.errors import InputError
from csloc_utils.sandbox import check_programs, run_python

SOLVED = "def double(n):\n    return 2 * n\nassert double(4) == 8\n"
WRONG = "def double(n):\n    return n\nassert double(4) == 8\n"


@pytest.fixture
def shut_in():
    if sandbox.available() is None:
        pytest.skip(f"no isolation on this machine: {sandbox._probe()[1]}")


@pytest.fixture
def fresh_probe():
    sandbox._probe.cache_clear()
    yield
    sandbox._probe.cache_clear()


def watched(code, **limits):
    """The outcome, every process seen below us with its command lines, the most at one time."""
    outcomes, seen, most = [], {}, 0
    thread = threading.Thread(target=lambda: outcomes.append(run_python(code, **limits)))
    thread.start()
    while thread.is_alive():
        below = psutil.Process().children(recursive=True)
        most = max(most, len(below))
        for process in below:
            try:
                seen[process] = seen.get(process, "") + " ".join(process.cmdline())
            except psutil.Error:  # it ended in between
                pass
        time.sleep(0.02)
    return outcomes[0], seen, most


def all_gone(processes, seconds=3.0):
    """Whether none of them lives on (the kernel may take a moment to end a namespace)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(process.is_running() for process in processes):
            return True
        time.sleep(0.02)
    return False


# -- what counts as a pass ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, reason",
    [
        (SOLVED, "passed"),
        (WRONG, "failed"),
        ("def double(n:\n", "failed"),
        ("x = '\ud800'", "failed"),  # a lone surrogate, which no file of Python may hold
        ("raise KeyboardInterrupt", "failed"),
        ("import numpy", "failed"),  # the standard library only, on every machine
        ("if __name__ == '__main__':\n    assert False", "failed"),
        ("input()", "failed"),
        ("import sys\nassert sys.stdin.read() == '' and sys.argv == ['program.py']", "passed"),
        ("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()", "passed"),
        (
            "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\nA()",
            "passed",
        ),
    ],
)
def test_program_passes_only_if_its_tests_do(shut_in, code, reason):
    outcome = run_python(code)
    assert (outcome.reason, outcome.passed) == (reason, reason == "passed")


@pytest.mark.parametrize(
    "code, reason",
    [
        ("import os\nos._exit(0)", "ended early"),
        ("import sys\nsys.exit(0)", "ended early"),
        ("import sys\nsys.exit('no')", "ended early"),
        ("import os\nprint('passed', flush=True)\nos._exit(0)", "ended early"),
        ("import os\nos.closerange(0, 64)\nos._exit(0)", "ended early"),
        ("import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()\n"
         "while True: pass", "ended early"),
        ("import os\nif os.fork(): os._exit(0)\nassert True", "ended early"),
        ("import os, atexit\natexit.register(os._exit, 0)", "failed"),
        ("import sys\nsys.stdout.close()", "failed"),
        ("import os\nos.kill(os.getpid(), 9)", "killed"),
        ("import ctypes\nctypes.string_at(0)", "killed"),
    ],
)  # fmt: skip
def test_leaving_before_the_tests_is_no_pass(shut_in, code, reason):
    tests = "" if "fork" in code else "\nassert False, 'the test'\n"
    assert run_python(code + tests).reason == reason


def test_bad_status_after_the_tests_is_no_pass(shut_in):
    code = SOLVED + "import atexit, os\natexit.register(os._exit, 3)\n"
    assert run_python(code).reason == "ended early"


def test_guessing_the_report_is_no_pass(shut_in):
    """Knowing where and how to report does not help without the token of this run."""
    code = """
import os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, b"d" + bytes(32))
    except OSError:
        pass
os._exit(0)
"""
    assert run_python(code).reason == "ended early"


def test_replaced_functions_change_no_verdict(shut_in):
    code = "import os, sys\nos.write = os.read = sys.exit = None\nsys.stdout = None\n"
    assert run_python(code + SOLVED).reason == "passed"
    assert run_python(code + WRONG).reason == "failed"


def test_output_and_traceback_come_back(shut_in):
    outcome = run_python("print('h\u00e9', flush=True)\nassert 1 == 2, 'they differ'")
    assert outcome.output.startswith("h\u00e9\n")
    assert "line 2" in outcome.output and "they differ" in outcome.output


def test_same_program_prints_the_same_each_time(shut_in):
    code = "print(list({str(n) for n in range(50)}))"
    assert run_python(code) == run_python(code)


def test_outcomes_come_in_the_order_of_the_programs(shut_in):
    programs = ["import time\ntime.sleep(0.5)\nprint(0)", "print(1)", WRONG, "print(3)"]
    outcomes = check_programs(programs, workers=3, timeout=5)
    assert [outcome.passed for outcome in outcomes] == [True, True, False, True]
    assert [outcomes[i].output for i in (0, 1, 3)] == ["0\n", "1\n", "3\n"]


# -- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["", "import os\nos.closerange(0, 64)\n"])
def test_endless_loop_ends(shut_in, first):
    begun = time.monotonic()
    outcome = run_python(first + "while True: pass", timeout=0.5)
    assert outcome.reason == "timeout"
    assert 0.5 <= time.monotonic() - begun < 5


def test_ten_gigabytes_are_not_to_be_had(shut_in):
    assert run_python("x = bytearray(10 ** 10)").reason == "memory"
    assert run_python("x = bytearray(1 << 27)", memory=1 << 30).reason == "passed"
    assert run_python("x = bytearray(1 << 27)", memory=1 << 27).reason == "memory"


def test_scratch_folder_has_an_end(shut_in):
    code = "\n".join(
        f"open('{n}', 'wb').write(bytes({sandbox.LARGEST_FILE}))"
        for n in range(1 + sandbox.SCRATCH // sandbox.LARGEST_FILE)
    )
    outcome = run_python(code)
    assert outcome.reason == "failed" and "No space left" in outcome.output
    outcome = run_python(f"with open('a', 'wb') as f: f.write(bytes({sandbox.LARGEST_FILE + 1}))")
    assert outcome.reason == "failed" and "File too large" in outcome.output


def test_endless_output_is_cut_and_not_collected(shut_in):
    tracemalloc.start()
    try:
        outcome = run_python("for _ in range(1000): print('x' * 10 ** 6)", output_limit=1000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert outcome.reason == "output" and outcome.output == "x" * 1000
    assert peak < 2 << 20


def test_noise_on_the_private_socket_is_not_collected():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        watch = sandbox._Watch(None, ours, b"", timeout=1, output_limit=0)
        theirs.sendall(bytes(10_000))
        theirs.shutdown(socket.SHUT_WR)
        while watch._hear():
            pass
    assert len(watch.messages) < 200


def test_fork_bomb_stays_small_and_ends(shut_in):
    code = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    outcome, seen, most = watched(code, timeout=1)
    assert outcome.reason == "timeout"
    # Its own processes, and at most two of bwrap's, which another user owns where root runs it.
    assert sandbox.PROCESSES // 2 < most <= sandbox.PROCESSES + 2
    assert all_gone(seen)


def test_daemon_left_behind_is_gone(shut_in):
    mark = secrets.token_hex(8)
    code = f"""
import subprocess, sys, time
daemon = subprocess.Popen(
    [sys.executable, "-S", "-c", "import time; time.sleep(600)", "{mark}"],
    start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
time.sleep(1)
assert daemon.poll() is None
"""
    outcome, seen, _ = watched(code)
    assert outcome.reason == "passed"
    daemons = [process for process, line in seen.items() if mark in line]
    assert len(daemons) == 1 and all_gone(seen)


# -- ways out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["AF_INET", "AF_UNIX"])
def test_no_connection_gets_out(shut_in, family):
    inet = family == "AF_INET"
    with socket.socket(getattr(socket, family)) as listener:
        listener.bind(("127.0.0.1", 0) if inet else "\0" + secrets.token_hex(8))
        listener.listen()
        address = listener.getsockname()
        with socket.socket(getattr(socket, family)) as caller:  # from here it can be reached
            caller.connect(address)
            listener.accept()[0].close()
        code = f"import socket\nsocket.socket(socket.{family}).connect({address!r})"
        outcome = run_python(code)
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert outcome.reason == "failed" and "ConnectionRefusedError" in outcome.output


def test_home_folder_cannot_be_read(shut_in):
    try:
        file = tempfile.NamedTemporaryFile("w", dir=Path.home())
    except OSError as error:
        pytest.skip(f"no file can be put into the home folder: {error}")
    secret = secrets.token_hex(8)
    with file:
        file.write(secret)
        file.flush()
        os.chmod(file.name, 0o644)  # so that only the sandbox can be what hides it
        outcome = run_python(f"print(open({file.name!r}).read())")
    assert secret not in outcome.output
    assert outcome.reason == "failed" and "FileNotFoundError" in outcome.output


def test_nothing_is_written_outside_the_scratch_folder(shut_in, tmp_path):
    name = "sandbox-" + secrets.token_hex(8)
    tmp_path.chmod(0o777)
    folders = [tmp_path, Path.cwd(), Path.home(), *map(Path, ("/", "/usr/lib", "/dev", "/var"))]
    paths = [str(folder / name) for folder in folders]
    code = f"""
import os
open("kept", "x").close()
for path in {paths}:
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "w").close()
    except OSError as error:
        print(error)
"""
    try:
        for _ in range(2):  # the second run finds nothing of the first: "x" demands a new file
            outcome = run_python(code)
            assert outcome.reason == "passed"
            assert outcome.output.count("Read-only file system") >= 3
        assert [path for path in paths if os.path.exists(path)] == []
    finally:
        for path in paths:
            Path(path).unlink(missing_ok=True)


def test_program_cannot_kill_its_parents(shut_in):
    code = f"""
import os
for process in (os.getppid(), 1, -1, {os.getpid()}, {os.getppid()}):
    try:
        os.kill(process, 9)
    except OSError:
        pass
assert False, "still judged"
"""
    outcome = run_python(code)
    assert outcome.reason == "failed" and "still judged" in outcome.output


def test_program_can_make_no_namespace_or_mount(shut_in):
    """In a user namespace of its own it could mount a file system without a size limit."""
    code = """
import ctypes
libc = ctypes.CDLL(None)
assert libc.unshare(0x10000000) == -1, "CLONE_NEWUSER"
assert libc.unshare(0x00020000) == -1, "CLONE_NEWNS"
assert libc.mount(b"none", b"/tmp", b"tmpfs", 0, b"") == -1
"""
    assert run_python(code).reason == "passed"


def test_nothing_of_our_environment_is_passed_on(shut_in, monkeypatch):
    monkeypatch.setenv("CSLOC_SECRET", "hush")
    outcome = run_python("import os\nassert 'CSLOC_SECRET' not in os.environ, 'seen'")
    assert outcome.reason == "passed"


# -- no isolation, no run -----------------------------------------------------------------------


def fake_bwrap(folder, monkeypatch, script):
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def forbid_starting(monkeypatch):
    def start(*args, **kwargs):
        raise AssertionError("something was started")

    monkeypatch.setattr(subprocess, "Popen", start)


def test_nothing_runs_where_no_isolation_is_to_be_had(monkeypatch):
    monkeypatch.setattr(sandbox, "available", lambda: None)
    forbid_starting(monkeypatch)
    for attempt in (lambda: run_python(SOLVED), lambda: check_programs([SOLVED], 1)):
        with pytest.raises(InputError, match="not run without a sandbox.*apt-get install"):
            attempt()


def test_missing_bubblewrap_is_named(monkeypatch, fresh_probe):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    forbid_starting(monkeypatch)
    assert sandbox.available() is None
    with pytest.raises(InputError, match="bwrap. is not installed"):
        run_python(SOLVED)


def test_cause_of_a_bwrap_that_fails_is_passed_on(monkeypatch, tmp_path, fresh_probe):
    fake_bwrap(tmp_path, monkeypatch, "echo 'namespaces are forbidden'; exit 1")
    assert sandbox.available() is None
    with pytest.raises(InputError, match="namespaces are forbidden"):
        run_python(SOLVED)


def test_bwrap_that_isolates_nothing_is_not_believed(monkeypatch, tmp_path, fresh_probe):
    script = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'
    fake_bwrap(tmp_path, monkeypatch, script)
    assert sandbox.available() is None


@pytest.mark.parametrize(
    "limits, named",
    [
        ({"timeout": 0}, "time limit"),
        ({"timeout": float("nan")}, "time limit"),
        ({"memory": 1000}, "1000 bytes"),
        ({"output_limit": -1}, "-1 bytes of output"),
    ],
)
def test_senseless_limits_are_refused(limits, named):
    with pytest.raises(InputError, match=named):
        run_python(SOLVED, **limits)


def test_no_workers_are_refused():
    with pytest.raises(InputError, match="workers"):
        check_programs([SOLVED], workers=0)
