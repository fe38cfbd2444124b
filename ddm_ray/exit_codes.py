"""Exit codes of commands, which tell a launcher or a scheduler what to do next."""

import os

from ddm_ray.errors import DDMError

EXIT_NEVER, EXIT_AGAIN = 1, os.EX_TEMPFAIL
"""Exit codes of a failed command: it fails again until something is mended (1), or it may be tried again later (75)."""


def exit_code(error: BaseException) -> int:
    """The exit code of a command that this error ended."""
    passes = error.passes if isinstance(error, DDMError) else isinstance(error, ConnectionError | TimeoutError)
    return EXIT_AGAIN if passes else EXIT_NEVER
