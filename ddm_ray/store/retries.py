"""Retry policies: a failed request to a store is repeated, with growing pauses, for a limited time."""

import itertools
import random
import re
import sys
import time
from collections.abc import Callable
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
# Matched by text, since obstore has no class for a refused LIST. The addresses are those of clouds' metadata services,
# which obstore asks for a key if it was given none.
_NO_KEY = re.compile(r"//169\.254\.169\.254|//metadata\.google")
# obstore deletes by S3's request for several keys, which succeeds even if it denies each key.
_DENIED = re.compile(
    r"status code: 4(?!04|08|09|29)\d\d|Received redirect|DeleteObjects request failed .*\(code: AccessDenied\)$"
)
# An upload that no longer exists was completed by an earlier request; only its response was lost.
_FINAL = re.compile(r"status code: 501|status code: 404(?!.*NoSuchUpload)")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"|\bTimedOut\b')
_DETAIL = re.compile(r" in \S+s(?:, after \d+ retries, max_retries: \d+, retry_timeout: \S+)?\s+- ")


class Trouble(Enum):
    """The kind of reason for which a request failed."""

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
    """Why a request failed, as one line."""
    text = refusal(error)
    trouble = Trouble.of(error)
    if isinstance(error, Undecided) or trouble is Trouble.KEYLESS:
        return text
    # obstore's first line doesn't say why a connection failed; its debug text does.
    cause = _CAUSE.search(str(error)) if "error sending request" in text else None
    return f"{trouble.value}: {_DETAIL.sub(': ', text)}" + (f" ({cause[1] or 'no answer in time'})" if cause else "")


class Undecided(BaseError):
    """A store says that an object exists but doesn't return it: another writer's request is under way, or it errs."""


@dataclass(frozen=True)
class RetryPolicy:
    """Time for which a request is repeated while a store doesn't answer. All times are in seconds.

    With `denials`, denied requests are repeated, too, since a revoked key may come back. A store that has never
    allowed a request is repeated for at most `first_denials` seconds. obstore itself repeats a request `repeats` times
    within seconds, during which Ctrl-C has no effect. Longer waits happen here; each request is signed again.
    """

    seconds: float
    denials: bool = False
    first_denials: float = 60.0
    first_pause: float = 0.5
    longest_pause: float = 5.0
    longest_denied: float = 15.0
    repeats: int = 3

    def pause(self, failures: int, error: BaseError) -> float:
        """Pause after so many failures, the last with this error. Pauses are jittered, since many clients fail at once.

        After denied requests, which stores charge for, pauses grow to `longest_denied`.
        """
        longest = self.longest_denied if Trouble.of(error) is Trouble.DENIED else self.longest_pause
        pause = min(self.first_pause * 2.0 ** min(failures - 1, 20), longest)
        return random.uniform(pause / 2, pause)

    def retry_config(self) -> "RetryConfig":
        """The part of the policy that obstore carries out."""
        first, longest = timedelta(seconds=self.first_pause), timedelta(seconds=4 * self.first_pause)
        return {
            "max_retries": self.repeats,
            "backoff": {"init_backoff": first, "max_backoff": longest},
            "retry_timeout": timedelta(seconds=SHORT_RETRIES.seconds),
        }


SHORT_RETRIES = RetryPolicy(seconds=15)
"""Policy for commands that a person waits for, and for callers that try again themselves."""
NO_RETRIES = RetryPolicy(seconds=0, repeats=0)
"""Policy for callers that try once."""
LONG_RETRIES = RetryPolicy(seconds=600, denials=True)
"""Policy for training, where a failure would cost hours of work."""


class RetryingClient:
    """Sends requests to one store, repeats them by the policy, and reports an outage on stderr."""

    def __init__(self, url: str, retry_policy: RetryPolicy):
        self._url, self._policy = url, retry_policy
        self._admitted = self._warned = False

    def ask(self, request: Callable[[], T]) -> T:
        """The request's answer; FileNotFoundError counts as an answer. Raises the last obstore error."""
        began = time.monotonic()
        for failures in itertools.count(1):
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
                time.sleep(min(self._policy.pause(failures, error), left))
            else:
                self._answered()
                return answer
        raise AssertionError

    def passes(self, error: BaseError) -> bool:
        """True if the same request may succeed later without a repair: a store that allowed it once may do so again."""
        trouble = Trouble.of(error)
        return trouble is Trouble.AWAY or (self._admitted and trouble is not Trouble.FINAL)

    def _longest(self, error: BaseError) -> float:
        """Seconds for which a request with this error is repeated."""
        policy, trouble = self._policy, Trouble.of(error)
        if trouble is Trouble.DENIED and not self._admitted:
            return min(policy.seconds, policy.first_denials) if policy.denials else 0.0
        return policy.seconds if self.passes(error) and (policy.denials or trouble is Trouble.AWAY) else 0.0

    def _warn(self, error: BaseError, began: float, left: float) -> None:
        """Warn once per outage, and not of one that ends at once."""
        if not self._warned and time.monotonic() - began > 2 * self._policy.first_pause:
            self._warned = True
            print(f"warning: {self._url}: {reason(error)}; trying on for up to {left:.0f} s", file=sys.stderr)

    def _answered(self) -> None:
        if self._warned:
            print(f"{self._url}: storage answers again", file=sys.stderr)
        self._admitted, self._warned = True, False
