"""The words of a process after the loss of its peer, as a table: by library, with their source.

Such a process is a follower: it is not the cause of the failure. Python's own network errors have
the same words (`Connection reset by peer`) after `[Errno …]` or in brackets. They come from a
user's own connections and must not match. So each pattern has words that only its library writes.

The words of gloo, TCPStore and torchrun were seen with torch 2.13 on the CPU, after processes were
killed and networks were cut. Those of NCCL, EFA and Neuron come from the libraries' texts and from
logs in issues. They were not tried.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """A regular expression for the words of a library, and where they come from."""

    library: str
    pattern: str
    source: str


SOCKET_ERRORS = (
    r"(?:Connection (?:reset by peer|refused|timed out|aborted)|Broken pipe"
    r"|Software caused connection abort|No route to host|Host is (?:down|unreachable)"
    r"|Network is (?:unreachable|down)|Transport endpoint is not connected)"
)

# The connection to a peer broke, or the peer could not be reached.
LOST = (
    Words(
        "gloo",
        # Its own faults begin with [enforce fail at …].
        r"\[[^\[\]\s]{0,200}gloo/transport/\w{1,20}/\w{1,40}\.cc:\d{1,6}\] "
        r"(?!Timed out waiting|Can only switch)",
        "pytorch/gloo: gloo/transport/tcp/pair.cc",
    ),
    Words(
        "c10d sockets, libuv",
        r"(?:DistNetworkError|DistStoreError|DistError): " + SOCKET_ERRORS,
        "pytorch: c10d/TCPStore.cpp, Utils.hpp",
    ),
    Words(
        "c10d before torch 2.1",
        r"(?m:^(?:\[rank\d+\]:\s)?[ \t]*RuntimeError: "
        r"(?:Connection (?:reset by peer|timed out|refused)|Broken pipe)"
        r"(?:\. Exception raised from (?:recv|send)\w{1,20}.{0,300})?$)",
        "pytorch issues 55571, 75512",
    ),
    Words(
        "TCPStore",
        r"\b(?:send|recv)\w{1,20} failed on SocketImpl\(.{0,300}?\): " + SOCKET_ERRORS,
        "pytorch: c10d/Utils.hpp",
    ),
    Words("TCPStore", r"[Ff]ailed to (?:recv, got|send, sent) 0 bytes", "pytorch: c10d/Utils.hpp"),
    Words(
        "TCPStore",
        r"The client socket has (?:timed out after|failed to connect to any network address of) ",
        "pytorch: c10d/socket.cpp",
    ),
    Words(
        "NCCL",
        r"remote process exited or there was a network error|ncclRemoteError"
        r"|unhandled system error|ncclSystemError",
        "pytorch: c10d/NCCLUtils.cpp; NVIDIA/nccl issues 795, 1232",
    ),
    Words("NCCL", r"retrieving ncclUniqueIds? from ", "pytorch: c10d/ProcessGroupNCCL.cpp"),
    Words(
        "NCCL sockets",
        r"(?:socketProgress|Net ?): Connection closed by remote peer|Net : Call to (?:recv|send)"
        r"|\b(?:socket|ncclOsSocket)(?:ProgressOpt|StartConnect|PollConnect): "
        r"(?:Call to (?:recv|send)|[Cc]onnect to \S{1,80} (?:returned|failed)|exceeded)",
        "NVIDIA/nccl: src/misc/socket.cc, src/os/linux.cc; issues 1099, 1405",
    ),
    Words(
        "NCCL on InfiniBand",
        r"NET/IBP?(?:/GIN)? ?: Got completion from peer (?:\S{1,80} )?with "
        r"(?:status=(?:IBV_WC_\w+\()?|error )(?:5|12|13)\b",
        "NVIDIA/nccl: src/transport/net_ib; issues 1141, 2076",
    ),
    Words(
        "NCCL on EFA",
        r"NET/OFI Request .{0,300}"
        r"(?:Unresponsive (?:receiver|remote)|Unreachable remote|reset by remote peer"
        r"|UNDELIVERABLE)",
        "ofiwg/libfabric: prov/efa/src/efa_errno.h",
    ),
    Words(
        "monitored_barrier",
        r"successfully reached monitoredBarrier, but received errors| remote error detected from "
        r"rank: \d",
        "pytorch: c10d/ProcessGroupGloo.cpp",
    ),
    Words(
        "torchrun",
        r"RendezvousConnectionError|RendezvousClosedError|The connection to the C10d store has "
        r"failed",
        "pytorch: distributed/elastic/rendezvous/c10d_rendezvous_backend.py",
    ),
    Words("RPC", r"\(this error originated at tensorpipe/", "pytorch/tensorpipe"),
    Words(
        "Neuron, XLA",
        r"\bRX, connection closed by remote peer"
        r"|remote task has failed, got preempted, or crashed",
        "aws-neuron-sdk issues 699, 713",
    ),
    Words(
        "PJRT, gRPC",
        r"\bUNAVAILABLE: (?:Socket closed|failed to connect to all addresses)",
        "grpc: the status of a call whose peer is gone",
    ),
)

# The process waited too long for a lost, slow or stuck peer.
WAITED = (
    Words("the trainer", r"\bddp_trainer\.\w{1,20}\.SlowRankError: ", "ddp_trainer/errors.py"),
    Words(
        "gloo",
        r"Timed out waiting \d+ms for (?:send|recv) operation to complete"
        r"|Application timeout caused pair closure",
        "pytorch/gloo: gloo/transport/tcp/unbound_buffer.cc, pair.cc",
    ),
    Words(
        "TCPStore",
        r"\b(?:wait|barrier) timeout after \d+ms, keys?: "
        r"|(?:DistStoreError|RuntimeError): (?:Wait timeout|Socket Timeout)\b"
        r"|Timed out after \d+ seconds waiting for clients\. \d+/\d+ clients joined",
        "pytorch: c10d/TCPStore.cpp, HashStore.cpp",
    ),
    Words(
        "barriers",
        r"Timed out initializing process group in store based barrier"
        r"|Timed out waiting on barrier on rank"
        r"|Ranks? \d[\d, ]{0,200} failed to pass monitoredBarrier in \d+ ms"
        r"|timed out in monitoredBarrier after",
        "pytorch: distributed/distributed_c10d.py, c10d/ProcessGroupGloo.cpp",
    ),
    Words(
        "NCCL's watchdog",
        r"Watchdog caught collective operation timeout: Work\w*\("
        r"|Received a dump signal due to a collective timeout from"
        r"|due to collective timeout or exception"
        r"|NCCL communicator was aborted|NCCL timeout (?:in: |when waiting for nonblocking)",
        "pytorch: c10d/ProcessGroupNCCL.cpp",
    ),
    Words(
        "torchrun",
        r"RendezvousTimeoutError",
        "pytorch: distributed/elastic/rendezvous/dynamic_rendezvous.py",
    ),
    Words(
        "Neuron, XLA",
        r"NRT_EXEC_HW_ERR_COLLECTIVES|Stuck in collectives op"
        r"|(?i:suspected hang (?:in|between))[^\n]{0,60}(?:collectives|barrier)"
        r"|NRT_NETWORK_PROXY_FAILURE|EFA network proxy failure"
        r"|DEADLINE_EXCEEDED: Barrier timed out\. ",
        "AWS Neuron documentation: nrt_status",
    ),
)

# The text does not show whose fault it is.
UNCLEAR = (
    Words(
        "NCCL",
        r"ncclInternalError|internal error - please report this issue to the NCCL"
        r"|ProcessGroupNCCL's watchdog got stuck|watchdog hang",
        "pytorch: c10d/NCCLUtils.cpp, ProcessGroupNCCL.cpp",
    ),
    Words("Neuron", r"NRT_TIMEOUT", "AWS Neuron documentation: nrt_status"),
    Words(
        "gloo",
        r"Received data size doesn't match expected size|Detected mismatch between collectives",
        "pytorch/gloo: gloo/transport/tcp/pair.cc",
    ),
)


def _compile(table: tuple[Words, ...]) -> re.Pattern[str]:
    return re.compile("|".join(words.pattern for words in table))


FOLLOWER = _compile((*LOST, *WAITED))
TIMED_OUT = _compile(WAITED)
UNCLEAR_CAUSE = _compile(UNCLEAR)
