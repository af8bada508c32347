"""The exceptions of a request to the API server.

CallFailed         a request failed and can be retried
├── ApiError       the API server answered with an error
└── Unreachable    the API server did not answer
NotConfigured      there is no cluster to send a request to
"""

# Words in the message of an admission policy or webhook. The policy may change, or its server may
# be down, so another try may succeed.
ADMISSION_WORDS = ("admission webhook", "calling webhook", "ValidatingAdmissionPolicy")

# How the message of a 404 begins if the API server does not serve the requested kind or API.
UNSERVED = ("404 page not found", "the server could not find the requested resource")


class CallFailed(Exception):
    """A request failed and can be retried."""


class ApiError(CallFailed):
    """An error of the API server: its HTTP status, its reason and its message."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def is_absent(self) -> bool:
        """Return True if the API server has no such object.

        A kind that is not served, a proxy and a webhook have answers with 404 too. They say nothing
        about the object.
        """
        is_of_server = self.status == 404 and self.reason == "NotFound"
        return is_of_server and not self.is_unserved and not is_admission(self.message)

    @property
    def is_unserved(self) -> bool:
        """Return True if the API server does not serve the requested kind or API."""
        return self.status == 404 and self.message.startswith(UNSERVED)


class Unreachable(CallFailed):
    """No answer of the API server: connection refused, reset, or timed out.

    The request may have been carried out or not.
    """


class NotConfigured(Exception):
    """There is no cluster to send a request to. The message says what to do."""


def is_admission(message: str) -> bool:
    """Return True if a policy or a webhook gave the answer, and not the API server itself."""
    return any(words in message for words in ADMISSION_WORDS)
