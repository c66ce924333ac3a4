"""Run Python that a language model wrote, shut in: no network, no home folder, nothing to break.

A model's answers to HumanEval or MBPP are judged by running them with their tests. Each program
gets a fresh process behind bubblewrap (`bwrap`, Linux): its own namespaces for processes, network,
mounts and IPC, the interpreter and its standard library read-only, a small scratch folder in memory
as the only place to write, an empty environment, and limits on time, memory, processes, files and
output. Without working bubblewrap nothing is run at all.

What is guaranteed: the program reaches no network and no file of the user but those of the
interpreter; it changes no file outside its scratch folder; it signals no process outside its own
namespace; when the verdict is in, all its processes are killed, whoever their parent is.

What is limited, but not to the byte: `memory` holds for each process, and there are at most
`PROCESSES` of them. A program that is out for harm can hold more in places that no limit of a
process counts (System V shared memory); it is then the first that the kernel ends, and ends in
any case when the time is up. The kernel itself is trusted.

What a verdict is worth: a pass means that the program ran to its last statement and left with
status 0. After that statement, and not before, the wrapper asks for a random token over a private
socket and echoes it; so leaving early, printing some word, closing files or killing the wrapper is
no pass. Program, tests and wrapper share one interpreter, though: code that was written against
this module could speak to the socket itself, as it could give the tests an object equal to
everything. Read a pass as evidence about a model that does not attack its judge.
"""

from __future__ import annotations

import functools
import os
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath

from csloc_utils.errors import InputError

PROCESSES = 16  # processes and threads of one program, together with the sandbox's own
SCRATCH = 64 << 20  # bytes of the scratch folder
LARGEST_FILE = 16 << 20  # bytes
OPEN_FILES = 64
START = 60.0  # seconds for bwrap and the interpreter to start, which the program's time leaves out
MIN_MEMORY = 64 << 20  # bytes: less, and the interpreter has no room of its own

BOX = "/box"  # where root's sandbox has the folders a second time
AS_ROOT = "bubblewrap, started by root"
AS_USER = "bubblewrap, in a user namespace"
REMEDY = (
    "use Linux with bubblewrap 0.8 or newer (Debian, Ubuntu: apt-get install bubblewrap) where "
    "namespaces are allowed, or leave out the tasks that run code"
)

# The side inside the sandbox. It drops root (bwrap leaves it the capabilities to), sets limits that
# it cannot raise again, says "r" (ready) and only then receives the program. The names it needs at
# the end are bound before, since a program may replace what the modules hold.
# A forked copy of the program reports nothing: the verdict is that of the first process.
_RUNNER = (
    f"BOX = {BOX!r}"
    + """
import os, resource, sys, traceback, types

def main(uid, *limits):
    write, leave, show, getpid, me = os.write, os._exit, traceback.print_exc, os.getpid, os.getpid()
    if uid:
        os.chroot(BOX)
        os.chdir("/tmp")
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for name, limit in zip("CORE MSGQUEUE NPROC FSIZE NOFILE AS CPU".split(), limits):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
    channel = os.dup(0)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    receive = open(channel, "rb", closefd=False).read
    write(channel, b"r")
    program = receive(int.from_bytes(receive(8), "big"))
    sys.argv = ["program.py"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    verdict = b"f"
    try:
        exec(compile(program.decode("utf-8", "surrogatepass"), "program.py", "exec"), vars(module))
        verdict = b"d"
    except MemoryError:
        verdict = b"m"
    except SystemExit:
        verdict = b"e"
    except BaseException:
        try:
            show()
        except BaseException:
            pass
    if getpid() != me:
        leave(1)
    write(channel, verdict)
    if verdict == b"d":
        write(channel, receive(32))
    raise SystemExit(verdict != b"d")

main(*map(int, sys.argv[1:]))
"""
)

# What `available` demands before it believes in a sandbox: no way out and an end to forking.
_PROBE = f"""
import ctypes, os, socket, time
assert ctypes.CDLL(None).unshare(0x10000000) == -1, "user namespaces can be made"
assert os.getpid() < 8, "the processes of the machine can be seen"
assert [name for _, name in socket.if_nameindex()] in ([], ["lo"]), "there is a network"
for folder in ("/", "/dev", "/usr/lib"):
    assert not os.access(folder, os.W_OK), folder + " can be written"
open("/tmp/scratch", "w").close()
try:
    os.setuid(0)
except OSError:
    pass
else:
    raise AssertionError("the program can become root")
children = []
try:
    while len(children) <= {PROCESSES}:
        children.append(os.fork())
        if not children[-1]:
            time.sleep(600)
    raise AssertionError("the number of processes has no limit")
except BlockingIOError:
    pass
"""

_REASONS = {b"f": "failed", b"m": "memory", b"e": "ended early"}


@dataclass(frozen=True)
class Outcome:
    """What became of one program.

    Attributes
    ----------
    reason : str
        "passed"; "failed" (an exception, a failed assert, a syntax error); "timeout"; "memory" (a
        MemoryError reached the top); "output" (printed too much); "killed" (by a signal);
        "ended early" (left before its last statement, or with a status other than 0).
    output : str
        What it printed, with the traceback if it failed; at most `output_limit` bytes.
    """

    reason: str
    output: str

    @property
    def passed(self) -> bool:
        """Whether the program ran to its end, its tests included, and left with status 0."""
        return self.reason == "passed"


def available() -> str | None:
    """Name the isolation that works on this machine, or None.

    A probe program is really run, once per process: it looks for the network, tries to write where
    it must not, to become root, and to fork without end.

    Returns
    -------
    str or None
        `AS_ROOT` (root's rights end inside), `AS_USER`, or None where `run_python` would refuse.
    """
    return _probe()[0]


def require() -> str:
    """Return what `available` names, or raise `InputError` if there is no isolation here."""
    way = available()
    if way is None:
        cause = _probe()[1] or "none is to be had here"
        raise InputError(f"Model-written code is not run without a sandbox: {cause}; {REMEDY}.")
    return way


def run_python(
    code: str, *, timeout: float = 10.0, memory: int = 1 << 30, output_limit: int = 64 << 10
) -> Outcome:
    """Run a program in a sandbox and tell whether it ran to its end.

    It sees the standard library only, an empty standard input, a fixed hash seed, and an empty
    working folder that is gone afterwards.

    Parameters
    ----------
    code : str
        The program: a model's solution followed by the tests.
    timeout : float
        Seconds from the moment the program can start; also bounds each process's CPU time.
    memory : int
        Bytes of address space of each of its processes.
    output_limit : int
        Bytes of standard output and standard error together; a program that prints more is ended.

    Returns
    -------
    Outcome
        The module's docstring says what a pass is worth.

    Raises
    ------
    InputError
        No isolation is to be had here, or a limit makes no sense.
    RuntimeError
        The sandbox, which worked before, did not start.
    """
    if not 0 < timeout <= 86400:
        raise InputError(f"The time limit is {timeout} s; give more than 0 and at most a day.")
    if memory < MIN_MEMORY or output_limit < 0:
        limits = f"{memory} bytes of memory or {output_limit} bytes of output"
        raise InputError(f"No program runs in {limits}; give at least {MIN_MEMORY} and 0.")
    return _run(require(), code, timeout, memory, output_limit)


def check_programs(programs: Sequence[str], workers: int = 2, **limits) -> list[Outcome]:
    """Run programs, `workers` at a time, with the limits of `run_python`; outcomes in their order.

    Raises
    ------
    InputError
        As for `run_python`, or `workers` below 1.
    """
    if workers < 1:
        raise InputError(f"{workers} workers can run nothing; give 1 or more.")
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda code: run_python(code, **limits), programs))


@functools.cache
def _probe() -> tuple[str | None, str]:
    """Which isolation works here, and if none, why."""
    if shutil.which("bwrap") is None:
        return None, "bubblewrap (bwrap) is not installed"
    way = AS_ROOT if os.geteuid() == 0 else AS_USER
    try:
        outcome = _run(way, _PROBE, timeout=20.0, memory=1 << 30, output_limit=64 << 10)
    except (OSError, RuntimeError) as error:
        return None, str(error)
    lines = outcome.output.strip().splitlines() or [""]
    return (way, "") if outcome.passed else (None, f"its trial {outcome.reason} ({lines[-1]})")


def _command(way: str, timeout: float, memory: int) -> list[str]:
    """The command line that starts the runner in the sandbox."""
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    # Only libraries: no shell, no other program, no /etc, no /proc. The interpreter may well lie in
    # the home folder (pyenv, conda), so its prefix is not shown as a whole either.
    shown = [f"{root}/{lib}" for root in ("", "/usr") for lib in ("lib", "lib32", "lib64")]
    prefixes = ("/usr/local", sys.base_prefix, os.path.dirname(os.path.dirname(python)))
    shown += [f"{prefix.rstrip('/')}/lib" for prefix in prefixes] + [python]
    devices = ["/dev/null", "/dev/urandom"]
    # Folders on the way are named, outermost first: bwrap's own would be closed to other users.
    above = {str(up) for path in shown + devices for up in PurePosixPath(path).parents} - {"/"}
    view = []
    for base in ("", BOX) if way == AS_ROOT else ("",):
        view += ["--perms", "1777", "--size", str(SCRATCH), "--tmpfs", f"{base}/tmp"]
        for path in sorted(above):
            view += ["--perms", "0755", "--dir", base + path]
        for path in dict.fromkeys(shown):
            view += ["--ro-bind-try", path, base + path]
        for path in devices:
            view += ["--dev-bind", path, base + path]
    if way == AS_ROOT:
        # The kernel exempts root from the process limit, in a user namespace too. So the runner
        # changes to a uid of its own, from a range that distributions leave unused. And nobody may
        # make a user namespace, with mounts of its own, below a changed root: hence the BOX.
        uid = 65000 + secrets.randbelow(500)
        spaces = [f"--unshare-{kind}" for kind in ("ipc", "pid", "net", "uts", "cgroup-try")]
        spaces += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_CHROOT"]
        spaces += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        uid = 0
        spaces = ["--unshare-all", "--unshare-user", "--disable-userns"]
        spaces += ["--uid", "65534", "--gid", "65534"]
    environment = ["--clearenv", "--setenv", "HOME", "/tmp", "--setenv", "PYTHONHASHSEED", "0"]
    limits = [0, 0, PROCESSES, LARGEST_FILE, OPEN_FILES, memory, int(timeout) + 2]
    # If memory runs out, the kernel is to end this program and no other.
    first = ["sh", "-c", 'echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"', "sh"]
    return [
        *(*first, "bwrap", "--die-with-parent", "--new-session", *spaces, *environment, *view),
        *("--remount-ro", "/", "--chdir", "/tmp", "--"),
        *(python, "-s", "-S", "-B", "-X", "utf8", "-c", _RUNNER, str(uid), *map(str, limits)),
    ]


def _run(way: str, code: str, timeout: float, memory: int, output_limit: int) -> Outcome:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = subprocess.Popen(
                _command(way, timeout, memory),
                stdin=theirs,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        watch = _Watch(process, ours, code.encode("utf-8", "surrogatepass"), timeout, output_limit)
        try:
            reason = watch.reason()
        finally:
            # bwrap's end takes process 1 of the namespace with it, and so every process in it.
            process.kill()
            process.wait()
            process.stdout.close()
    output = bytes(watch.output[:output_limit]).decode("utf-8", "replace")
    if not watch.messages:
        raise RuntimeError(f"the sandbox did not start: {output.strip() or reason}")
    return Outcome(reason, output)


class _Watch:
    """Our side: hands over the program, reads with a limit, keeps the clock, gives the verdict."""

    def __init__(self, process, channel, program: bytes, timeout: float, output_limit: int):
        self.process, self.channel, self.program = process, channel, program
        self.timeout, self.output_limit = timeout, output_limit
        self.token = secrets.token_bytes(32)
        self.output, self.messages = bytearray(), bytearray()
        self.deadline = time.monotonic() + START

    def reason(self) -> str:
        self.channel.settimeout(START)
        with selectors.DefaultSelector() as selector:
            selector.register(self.channel, selectors.EVENT_READ, self._hear)
            selector.register(self.process.stdout, selectors.EVENT_READ, self._collect)
            while selector.get_map():
                if (left := self.deadline - time.monotonic()) <= 0:
                    return "timeout"
                for key, _ in selector.select(left):
                    if not key.data():
                        selector.unregister(key.fileobj)
                if len(self.output) > self.output_limit:
                    return "output"
        try:
            status = self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "timeout"
        return self._verdict(status)

    def _collect(self) -> bool:
        """Read some output; False at its end."""
        chunk = os.read(self.process.stdout.fileno(), 1 << 16)
        self.output += chunk
        return bool(chunk)

    def _hear(self) -> bool:
        """Answer the runner; False at the end, or if what comes cannot be the runner's."""
        try:
            chunk = self.channel.recv(64)
            self.messages += chunk
            if self.messages == b"r":
                self.channel.sendall(len(self.program).to_bytes(8, "big") + self.program)
                self.deadline = time.monotonic() + self.timeout
            elif self.messages == b"rd":
                self.channel.sendall(self.token)
        except OSError:
            return False
        return bool(chunk) and len(self.messages) <= 64

    def _verdict(self, status: int) -> str:
        if self.messages == b"rd" + self.token and status == 0:
            return "passed"
        if (said := bytes(self.messages[1:2])) in _REASONS:
            return _REASONS[said]
        # bwrap passes on the end by signal n as status 128 + n.
        return "killed" if status < 0 or status > 128 else "ended early"
