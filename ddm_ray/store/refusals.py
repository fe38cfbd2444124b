"""Refusals of storage: the reason as one line, and whether a later try may succeed."""

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress

from ddm_ray.errors import DDMError, StorageError
from ddm_ray.remedies import Fix
from ddm_ray.spelling import one_line, printable

# Metadata services of clouds. A client without a key asks them for one.
_KEY_SERVICE = re.compile(r"http://(169\.254\.169\.254|metadata\.google\.internal)")
ELSEWHERE = "make room there, or name another folder by TMPDIR"
"""Remedy for a temporary folder that is full, or that this user may not write to."""
FULL_BYTES = 2**20
"""A disk with less room is taken for the full one."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MENDED = dict.fromkeys(_FULL, "free some space there")
_MENDED[errno.EFBIG] = "raise this shell's limit (ulimit -f unlimited), or choose a file system that has larger files"
# Errors that may be gone a moment later: of a device, of a network, or of a busy machine. All others need a person.
_OF_A_MOMENT = re.compile(
    "EIO|ESTALE|ENOENT|EREMOTEIO|EAGAIN|EINTR|EBUSY|ENOLCK|ETXTBSY|EMFILE|ENFILE|ENOMEM|ENOBUFS|EPIPE|ETIMEDOUT"
    "|ENET(DOWN|UNREACH|RESET)|ECONN(ABORTED|RESET|REFUSED)|ENOTCONN|ESHUTDOWN|EHOST(DOWN|UNREACH)|EADDRNOTAVAIL"
    "|ECANCELED|EPROTO|ECOMM|ENOLINK|ENONET"
)
# obstore's errors have the number only in their text.
_NUMBER = re.compile(r"\(os error (\d+)\)")


@contextmanager
def as_storage_error(
    where: object,
    fix: Fix | None = None,
    kinds: tuple[type[BaseException], ...] = (OSError,),
    missing: type[DDMError] = StorageError,
    fixes: Mapping[int, Fix] = _MENDED,
) -> Iterator[None]:
    """Turn exceptions of these `kinds` into a StorageError of one line that begins with `where`.

    Its remedy is `fix`, else that in `fixes` for the system's number. `missing`: the error that replaces a
    FileNotFoundError.
    """
    try:
        yield
    except kinds as error:
        kind = missing if isinstance(error, FileNotFoundError) else StorageError
        refused = kind(f"{where}: {refusal(error, where)}", fix or fixes.get(_number(error) or 0))
        refused.passes &= may_pass(error)
        raise refused from None


def temporary_folder() -> str:
    """The system's temporary folder, or that of TMPDIR. Raises StorageError if nothing can be written to any."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise StorageError(one_line(error.strerror or error), ELSEWHERE, passes=False) from None


def as_temporary_error(folder: str | None = None, elsewhere: str = ELSEWHERE) -> AbstractContextManager[None]:
    """Turn local disk errors in a temporary folder, by default the system's, into a StorageError of one line.

    `elsewhere`: the remedy if the folder is full, or if this user may not write to it.
    """
    fixes = _MENDED | dict.fromkeys((*_FULL, errno.EACCES, errno.EPERM, errno.EROFS), elsewhere)
    return as_storage_error(folder or temporary_folder(), fixes=fixes)


def in_words(error: OSError) -> str:
    """One line for a system's error. For a full disk, if the error names no file, it names the folder if it can."""
    if error.filename:
        fix = _MENDED.get(error.errno or 0)
        return f"{error.filename}: {refusal(error, error.filename)}{f'; {fix}' if fix else ''}"
    if error.errno not in _FULL:
        return f"storage: {refusal(error)}"
    full = list[str]()
    for likely in (temporary_folder, os.getcwd):
        with suppress(OSError, StorageError):  # no temporary folder is left, or the current one is deleted
            if shutil.disk_usage(folder := likely()).free < FULL_BYTES:
                full.append(folder)
    return f"{' or '.join(full)}: {refusal(error)}; {ELSEWHERE}" if full else f"what this writes to: {refusal(error)}"


def may_pass(error: BaseException) -> bool:
    """False for a refusal that a person must mend: no space, no permission, what a disk can't do at all, or no key."""
    number = _number(error)
    lasts = number is not None and not _OF_A_MOMENT.fullmatch(errno.errorcode.get(number, ""))
    return not lasts and not _KEY_SERVICE.search(str(error))


def _number(error: BaseException) -> int | None:
    """The system's number of an error; None if it has none."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return int(match[1]) if (match := _NUMBER.search(str(error))) else None


def refusal(error: BaseException, where: object = None) -> str:
    """Why storage refused, as one printable line: the system's reason, and the file if it isn't the one at `where`.

    An error without a number, as libraries raise them, gives the first paragraph of its text.
    """
    if isinstance(error, OSError) and error.errno:
        name = error.filename
        text = os.strerror(error.errno) + (f": {name}" if name is not None and str(name) != str(where) else "")
    else:
        text = str(error).split("\n\n")[0] or type(error).__name__
        if service := _KEY_SERVICE.search(text):
            keys = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what your storage calls them"
            text = f"no key: {keys}, where this command and Ray are started (asked in vain: {service[0]})"
    return printable(text, 500)
