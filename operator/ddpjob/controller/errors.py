"""The exceptions of the controller, in addition to those of a request.

Exception
├── Unreachable            of ddpjob.kube.errors
│   └── GaveWay            other requests needed its place
│       └── NotSent        the request was not sent
├── Refused                the API server does not accept an object now, or never will
└── MustStop               this process must end; the next start continues
    ├── LeaseLost          another operator may lead
    ├── MoreIsReadable     something unwatched can be read now
    └── CannotRun          a requirement of the operator is missing
"""

from ddpjob.kube.errors import Unreachable


class GaveWay(Unreachable):
    """The request was ended, or not sent, because others needed its place. It did not fail."""


class NotSent(GaveWay):
    """The request was not sent, because too many of its kind hang. Nothing has changed."""


class Refused(Exception):
    """The API server does not accept an object now, or never will if `final`.

    `counts_ended_pods` is True if a quota counts ended pods too. `passes` is True for a momentary
    refusal: the next try needs no back-off.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        final: bool = False,
        counts_ended_pods: bool = False,
        passes: bool = False,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.final = final
        self.counts_ended_pods = counts_ended_pods
        self.passes = passes


class MustStop(Exception):
    """This process must end. The next start continues from the cluster's state."""


class LeaseLost(MustStop):
    """Another operator may lead by now, so nothing may be written any more."""


class MoreIsReadable(MustStop):
    """A namespace or the nodes have become readable since the watches began."""


class CannotRun(MustStop):
    """A requirement of the operator is missing. The message says what to do."""
