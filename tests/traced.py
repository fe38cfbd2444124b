"""Faults at the border of the operating system: a process is killed, or its disk is full, at its n-th write.

The process is traced (ptrace, Linux on x86-64), so that what compiled libraries write is met as well. A
seccomp filter stops it at the calls that change a disk alone: all others run at full speed.
"""

import ctypes
import errno
import os
import signal
import struct
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

TRACEME, CONTINUE, SETOPTIONS, GETREGSET, SETREGSET = 0, 7, 0x4200, 0x4204, 0x4205
NT_PRSTATUS = 1
CLONE, SECCOMP, EXITKILL = 0x8, 0x80, 0x100000
WALL = 0x40000000
# What a wait tells at a call that the filter names: the event's number above SIGTRAP.
AT_CALL = 7 << 8 | signal.SIGTRAP
# prctl's names, and the words of the filter's language (linux/filter.h, linux/seccomp.h).
NO_NEW_PRIVILEGES, SET_FILTER, FILTER_MODE = 38, 22, 2
LOAD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
TRACE, ALLOW = 0x7FF00000, 0x7FFF0000

# Places of the call's number, its result and its arguments among the registers.
NUMBER, RESULT, FIRST, SECOND = 15, 10, 14, 13
# The calls that change a disk: on open files; on a name that is their first argument; or their second.
ON_FILES = {1: "write", 18: "pwrite", 20: "writev", 74: "fsync", 75: "fdatasync", 77: "ftruncate"}
ON_NAMES = {82: "rename", 86: "link", 87: "unlink", 83: "mkdir", 84: "rmdir", 76: "truncate"}
ON_NAMES_AT = {264: "rename", 316: "rename", 265: "link", 263: "unlink", 258: "mkdir"}
TAKES_SPACE = {"write", "pwrite", "writev", "rename", "link", "mkdir"}


class DiskFault(Enum):
    """What happens as the n-th call that changes the disk begins."""

    KILL = "SIGKILL"
    FULL = "no space left"


@dataclass(frozen=True)
class Outcome:
    """How the process ended (0, 1 for an exception, -9 if killed), and the calls that it made."""

    status: int
    calls: list[str]


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, pid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace {request}: {os.strerror(number)}")


def _stop_at_calls(numbers: list[int]) -> None:
    """From here on the tracer of this process, and of threads that it starts, sees these calls and no others."""
    lines = [(LOAD, 0, 0, 0)]  # the call's number
    lines += [(IF_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    lines += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, TRACE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(code)))
    for arguments in ((NO_NEW_PRIVILEGES, 1, 0), (SET_FILTER, FILTER_MODE, ctypes.addressof(program))):
        if _libc.prctl(*arguments, 0, 0):
            number = ctypes.get_errno()
            raise OSError(number, f"prctl {arguments[0]}: {os.strerror(number)}")


class _Registers:
    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.values = (ctypes.c_uint64 * 40)()  # more than there are
        self.vector = _Iovec(ctypes.addressof(self.values), ctypes.sizeof(self.values))
        _ptrace(GETREGSET, thread, NT_PRSTATUS, ctypes.addressof(self.vector))

    def save(self) -> None:
        _ptrace(SETREGSET, self.thread, NT_PRSTATUS, ctypes.addressof(self.vector))


def traced(
    work: Callable[[], object],
    below: str,
    fault: DiskFault | None = None,
    at: int = 0,
    watch: Callable[[str, str], object] = lambda name, where: None,
) -> Outcome:
    """Run `work` in a forked process; with a fault, at its `at`-th call (from 1) on files below a folder.

    A full disk stays full: from that call on all that need space fail. `watch` is told each call and its first file as
    it begins; the thread that makes it waits meanwhile.
    """
    child = os.fork()
    if child == 0:
        try:
            _libc.ptrace(TRACEME, 0, 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            _stop_at_calls([*ON_FILES, *ON_NAMES, *ON_NAMES_AT])
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
    _ptrace(SETOPTIONS, child, 0, CLONE | SECCOMP | EXITKILL)
    return _Tracer(child, below, fault, at, watch).run()


class _Tracer:
    def __init__(
        self, child: int, below: str, fault: DiskFault | None, at: int, watch: Callable[[str, str], object]
    ) -> None:
        self.child, self.below, self.fault, self.at, self.watch = child, below, fault, at, watch
        self.calls: list[str] = []

    def run(self) -> Outcome:
        _ptrace(CONTINUE, self.child)
        while True:
            thread, status = os.waitpid(-1, WALL)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                if thread == self.child:
                    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
                    return Outcome(code, self.calls)
                continue
            stop = os.WSTOPSIG(status)
            with suppress(ProcessLookupError):  # a thread may end with its process at any time
                if status >> 8 == AT_CALL:
                    self.begins(thread)
                _ptrace(CONTINUE, thread, 0, 0 if stop in (signal.SIGTRAP, signal.SIGSTOP) else stop)

    def begins(self, thread: int) -> None:
        """A call of the filter's is about to be made."""
        registers = _Registers(thread)
        name, where = self.concerned(thread, registers)
        if not where.startswith(self.below):
            return
        self.calls.append(name)
        self.watch(name, where)
        if self.fault is DiskFault.KILL and len(self.calls) == self.at:
            os.kill(self.child, signal.SIGKILL)
        elif self.fault is DiskFault.FULL and len(self.calls) >= self.at and name in TAKES_SPACE:
            # A call without a number isn't made; what stands as its result is what the thread gets.
            registers.values[NUMBER] = ctypes.c_uint64(-1).value
            registers.values[RESULT] = ctypes.c_uint64(-errno.ENOSPC).value
            registers.save()

    def concerned(self, thread: int, registers: _Registers) -> tuple[str, str]:
        """The call's name, and the file that it changes; of two names the one before."""
        number, first, second = (registers.values[place] for place in (NUMBER, FIRST, SECOND))
        where = ""
        with suppress(OSError):
            if number in ON_FILES:
                where = os.readlink(f"/proc/{thread}/fd/{first}")
            elif number in ON_NAMES or number in ON_NAMES_AT:
                with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
                    memory.seek(first if number in ON_NAMES else second)
                    where = memory.read(4096).partition(b"\0")[0].decode(errors="replace")
        return (ON_FILES | ON_NAMES | ON_NAMES_AT)[number], where
