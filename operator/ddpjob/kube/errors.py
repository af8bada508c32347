"""The exceptions of a request to the API server.

CallFailed         a request failed and can be retried
├── ApiError       the API server answered with an error
└── Unreachable    the API server did not answer
NotConfigured      there is no cluster to send a request to
"""

# Words in the message of an admission policy or webhook. The policy may change, or its server may
# be down, so another try may succeed.
ADMISSION_WORDS = ("admission webhook", "calling webhook", "ValidatingAdmissionPolicy")


class CallFailed(Exception):
    """A request failed and can be retried."""


class ApiError(CallFailed):
    """An error of the API server: its HTTP status, its reason and its message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class Unreachable(CallFailed):
    """No answer of the API server: connection refused, reset, or timed out.

    The request may have been carried out or not.
    """


class NotConfigured(Exception):
    """There is no cluster to send a request to. The message says what to do."""


def is_admission(message: str) -> bool:
    """Return True if a policy or a webhook gave the answer, and not the API server itself."""
    return any(words in message for words in ADMISSION_WORDS)
