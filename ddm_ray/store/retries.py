"""Retry policies: a store that refuses for now is asked again, with growing pauses, and not for ever."""

import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PreconditionError,
    UnknownConfigurationKeyError,
)

from ddm_ray.store.refusals import refusal

if TYPE_CHECKING:
    from obstore.store import RetryConfig

T = TypeVar("T")

_FINAL_KINDS = (InvalidPathError, NotSupportedError, PreconditionError, UnknownConfigurationKeyError)
# By their text: a refused LIST is an error of no kind. What is at these addresses hands out keys, to who has none.
_NO_KEY = re.compile(r"//169\.254\.169\.254|//metadata\.google")
# S3 answers a deletion of several keys, as all are made, by a success that denies each.
_DENIED = re.compile(
    r"status code: 4(?!04|08|09|29)\d\d|Received redirect|DeleteObjects request failed .*\(code: AccessDenied\)$"
)
# An upload that isn't there any more was finished by a request whose answer was lost.
_FINAL = re.compile(r"status code: 501|status code: 404(?!.*NoSuchUpload)")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"|\bTimedOut\b')
_DETAIL = re.compile(r" in \S+s(?:, after \d+ retries, max_retries: \d+, retry_timeout: \S+)?\s+- ")


class Trouble(Enum):
    """Reason of a store for not doing what it is asked."""

    AWAY = "storage doesn't answer"
    DENIED = "storage denies it"
    KEYLESS = "no key"
    FINAL = "storage refuses"

    @classmethod
    def of(cls, error: BaseError) -> "Trouble":
        """The kind of an obstore error."""
        text = refusal(error)
        if isinstance(error, _FINAL_KINDS) or _FINAL.search(text):
            return cls.FINAL
        if _NO_KEY.search(text):
            return cls.KEYLESS
        return cls.DENIED if _DENIED.search(text) else cls.AWAY


def reason(error: BaseError) -> str:
    """Why a store didn't do what it was asked, as one line."""
    text = refusal(error)
    trouble = Trouble.of(error)
    if isinstance(error, Undecided) or trouble is Trouble.KEYLESS:
        return text
    # obstore's first line doesn't say why a connection failed; what it prints for debugging does.
    cause = _CAUSE.search(str(error)) if "error sending request" in text else None
    return f"{trouble.value}: {_DETAIL.sub(': ', text)}" + (f" ({cause[1] or 'no answer in time'})" if cause else "")


class Undecided(BaseError):
    """A store that says that an object exists, and has none: another writer's request is on its way, or it is wrong."""


@dataclass(frozen=True)
class RetryPolicy:
    """Time for which a store that doesn't answer is waited for, with pauses in seconds from the first to the longest.

    With `denials` one that denies is waited for, too: a key that was revoked may come back; where nothing was ever
    allowed for `first_denials` seconds at most. obstore repeats a request `repeats` times within seconds, in which
    Ctrl-C isn't heard; the minutes are waited for here, by requests that are signed anew.
    """

    seconds: float
    denials: bool = False
    first_denials: float = 60.0
    first_pause: float = 0.5
    longest_pause: float = 5.0
    repeats: int = 3

    def pauses(self) -> Iterator[float]:
        """Seconds before each next request, without end; jittered, since many are refused at the same moment."""
        pause = self.first_pause
        while True:
            yield random.uniform(pause / 2, pause)
            pause = min(2 * pause, self.longest_pause)

    def retry_config(self) -> "RetryConfig":
        """The part that is obstore's."""
        first, longest = timedelta(seconds=self.first_pause), timedelta(seconds=4 * self.first_pause)
        return {
            "max_retries": self.repeats,
            "backoff": {"init_backoff": first, "max_backoff": longest},
            "retry_timeout": timedelta(seconds=SHORT_RETRIES.seconds),
        }


SHORT_RETRIES = RetryPolicy(seconds=15)
"""Policy where a person waits, or the caller tries again."""
NO_RETRIES = RetryPolicy(seconds=0, repeats=0)
"""Policy of a caller that tries once."""
LONG_RETRIES = RetryPolicy(seconds=600, denials=True)
"""Policy where hours of training would be lost."""


class RetryingClient:
    """Asks one store, again and again as the policy has it, and says on stderr what it waits for."""

    def __init__(self, url: str, retry_policy: RetryPolicy):
        self._url, self._policy = url, retry_policy
        self._admitted = self._warned = False

    def ask(self, request: Callable[[], T]) -> T:
        """The request's answer, FileNotFoundError being one. Raises the obstore error that it raises last."""
        began = time.monotonic()
        for pause in self._policy.pauses():
            try:
                answer = request()
            except FileNotFoundError:
                self._answered()
                raise
            except BaseError as error:
                left = began + self._longest(error) - time.monotonic()
                if left <= 0:
                    raise
                self._warn(error, began, left)
                time.sleep(min(pause, left))
            else:
                self._answered()
                return answer
        raise AssertionError

    def passes(self, error: BaseError) -> bool:
        """True if the same request may be heeded later, with nothing mended: what was allowed before may be again."""
        trouble = Trouble.of(error)
        return trouble is Trouble.AWAY or (self._admitted and trouble is not Trouble.FINAL)

    def _longest(self, error: BaseError) -> float:
        """Seconds for which an error is waited for."""
        policy, trouble = self._policy, Trouble.of(error)
        if trouble is Trouble.DENIED and not self._admitted:
            return min(policy.seconds, policy.first_denials) if policy.denials else 0.0
        return policy.seconds if self.passes(error) and (policy.denials or trouble is Trouble.AWAY) else 0.0

    def _warn(self, error: BaseError, began: float, left: float) -> None:
        """Say it once an outage, and not of one that is over at once."""
        if not self._warned and time.monotonic() - began > 2 * self._policy.first_pause:
            self._warned = True
            print(f"warning: {self._url}: {reason(error)}; trying on for up to {left:.0f} s", file=sys.stderr)

    def _answered(self) -> None:
        if self._warned:
            print(f"{self._url}: storage answers again", file=sys.stderr)
        self._admitted, self._warned = True, False
