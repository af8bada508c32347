"""The verdict on the end of an attempt. It is found in causes.py, and in hangs.py for a hang."""

import re
from dataclasses import dataclass

from ddpjob.core.api.names import Cause
from ddpjob.core.api.reasons import Reason
from ddpjob.core.observe.disruptions import NODE_PRESSURE
from ddpjob.core.observe.observation import Pod
from ddpjob.core.observe.termination import SETUP_FAILED

# A kubelet's reasons for not admitting a pod. The node, not the job, is at fault.
REJECTED = re.compile(rf"UnexpectedAdmissionError|OutOf\w+|{NODE_PRESSURE}")


@dataclass(frozen=True)
class Verdict:
    """The cause of the end of an attempt: `reason` in one word, `message` in one sentence.

    `index` is the node in the gang. `pod` is None if the pod is gone. `script_missing`: Python did
    not find the script, so another attempt would fail in the same way. `exception`: the last line
    of the failed process's traceback, or of its output.
    """

    cause: Cause
    reason: str
    message: str
    index: int
    pod: Pod | None = None
    rank: int | None = None
    exit_code: int | None = None
    script_missing: bool = False
    exception: str = ""

    @property
    def is_own_failure(self) -> bool:
        """True if the pod itself failed. A follower has only lost its connection to a peer."""
        if self.cause is not Cause.FAILURE or self.pod is None:
            return False
        summary = self.pod.summary
        if summary is None:
            return not self.pod.follower
        # The other ranks of the node may be followers of the rank in the summary.
        return not summary.lost_peer

    @property
    def blames_node(self) -> bool:
        """True if the pod's Kubernetes node may be broken. A follower is no evidence of that."""
        if REJECTED.fullmatch(self.reason):
            return True
        # Nor is a rank that ended early, or a package index that did not answer.
        is_evidence = self.reason not in (Reason.ENDED_EARLY, SETUP_FAILED)
        return is_evidence and self.is_own_failure
