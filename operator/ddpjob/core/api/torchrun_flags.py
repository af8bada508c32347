"""The flags of torchrun allowed in a job, and what to do in place of the others.

FLAGS has a row for each flag of torchrun in torch 2.13. The rules of the CRD and the table in
docs/users/reference.md have the same flags. tests/unit/test_torchrun_flags.py compares them, and
tests/agent/test_torchrun.py compares FLAGS with the installed torchrun.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ddpjob.core.api import names
from ddpjob.core.api.readers import SpecError, did_you_mean, quoted

# What to do in place of several flags with the same reason.
RENDEZVOUS = "the operator sets the rendezvous; remove it"
LOG_FILES = (
    "the agent reads the output of each rank, so torchrun's log files would be empty; remove it, "
    "and use ddpjob logs"
)


@dataclass(frozen=True)
class Flag:
    """A flag of torchrun.

    - `instead`: why a job cannot give it, and what to do; empty for a working flag.
    - `is_set`: the operator sets it, or what it would change, at each start of torchrun.
    - `letter`: its short form. `takes_value`: False for a switch.
    """

    name: str
    instead: str = ""
    is_set: bool = False
    letter: str = ""
    takes_value: bool = True

    @property
    def spellings(self) -> tuple[str, ...]:
        """Return the names declared in torchrun's parser, without the short form."""
        with_underscores = "--" + self.name[2:].replace("-", "_")
        return tuple(dict.fromkeys((self.name, with_underscores)))

    @property
    def variable(self) -> str:
        """Return the variable that torchrun takes for the flag."""
        return names.RESERVED_PREFIX + self.name[2:].replace("-", "_").upper()


FLAGS = (
    # The size of the job, and how its nodes find each other.
    Flag("--nnodes", "set spec.nodes instead", is_set=True),
    Flag("--nproc-per-node", "set spec.nprocPerNode instead", is_set=True),
    Flag("--node-rank", RENDEZVOUS, is_set=True),
    Flag("--rdzv-backend", RENDEZVOUS, is_set=True),
    Flag("--rdzv-endpoint", RENDEZVOUS, is_set=True),
    Flag("--rdzv-id", RENDEZVOUS, is_set=True),
    Flag("--rdzv-conf", "set spec.torchrun.rdzvConf instead", is_set=True),
    Flag("--standalone", RENDEZVOUS, is_set=True, takes_value=False),
    Flag("--master-addr", RENDEZVOUS, is_set=True),
    Flag("--master-port", RENDEZVOUS, is_set=True),
    Flag("--local-addr", RENDEZVOUS, is_set=True),
    Flag(
        "--max-restarts",
        "set spec.failurePolicy.maxRestarts instead: all pods start again together",
        is_set=True,
    ),
    # What each process runs.
    Flag("--module", "begin spec.args with -m and the module", letter="-m", takes_value=False),
    Flag("--no-python", takes_value=False),
    Flag(
        "--run-path",
        "the pod would never be ready, since no new Python starts; remove it",
        takes_value=False,
    ),
    Flag("--start-method"),
    Flag("--numa-binding"),
    Flag("--virtual-local-rank", takes_value=False),
    # How torchrun watches and ends its processes.
    Flag("--monitor-interval"),
    Flag("--event-log-handler"),
    Flag("--role"),
    Flag("--signals-to-handle", "the agent ends torchrun by SIGTERM; remove it"),
    Flag(
        "--shutdown-timeout",
        "the operator derives it from the grace period of the pod; set "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT in spec.env instead",
    ),
    # The agent gives each rank a pipe for its output, in place of torchrun's files.
    Flag("--log-dir", LOG_FILES),
    Flag("--redirects", LOG_FILES, letter="-r"),
    Flag("--tee", LOG_FILES, letter="-t"),
    Flag("--logs-specs", LOG_FILES),
    Flag("--duplicate-stdout-filters", LOG_FILES),
    Flag("--duplicate-stderr-filters", LOG_FILES),
    Flag(
        "--local-ranks-filter",
        "the agent reads the output of each rank; remove it, and use ddpjob logs --rank",
    ),
    Flag(
        "--help",
        "torchrun would print its help and train nothing; remove it",
        letter="-h",
        takes_value=False,
    ),
)


def check_flags(words: Sequence[str], where: str) -> None:
    """Raise SpecError for the first of the words that cannot follow torchrun.

    `where` is the field with the words.
    """
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            raise SpecError(f"{where}: the script belongs to spec.args, got {quoted(word)}")
        problem = why_not(word)
        if problem:
            raise SpecError(f"{where}: {problem}")
        (flag,) = candidates(word)
        if flag.takes_value and "=" not in word:
            value = next(rest, None)
            if value is None or value.startswith("-"):
                raise SpecError(f"{where}: {word} needs a value; write {word}=VALUE")
        if not flag.takes_value and "=" in word:
            raise SpecError(f"{where}: {flag.name} takes no value, got {quoted(word)}")


def why_not(word: str) -> str:
    """Return why a word that begins with `-` cannot be given to torchrun, or an empty string."""
    found = candidates(word)
    if not found:
        hint = did_you_mean(_name(word), [flag.name for flag in FLAGS])
        return f"unknown flag of torchrun {quoted(word)}{hint}"
    if len(found) > 1:
        names = ", ".join(flag.name for flag in found)
        return f"{word} can be any of {names}; write the whole name"
    (flag,) = found
    if flag.instead:
        return f"{_described(word, flag)} cannot be used: {flag.instead}"
    # The unambiguous abbreviations depend on the versions of torch and of Python.
    if _written_name(word) not in flag.spellings:
        return f"write {flag.name} in place of {quoted(_written_name(word))}"
    return ""


def advice_on_variable(name: str) -> str:
    """Return the field to set in place of a variable that torchrun takes for a flag, if any."""
    for flag in FLAGS:
        advice, is_advice, _ = flag.instead.partition(" instead")
        if flag.variable == name and is_advice:
            return advice
    return ""


def candidates(word: str) -> tuple[Flag, ...]:
    """Return the possible flags of a word: several for the beginning of several names.

    torchrun accepts `_` in place of `-`, the beginning of a name, and `-r3` in place of `-r 3`.
    """
    name = _name(word)
    if not name.startswith("--"):
        return tuple(flag for flag in FLAGS if flag.letter and flag.letter == word[:2])
    exact = tuple(flag for flag in FLAGS if flag.name == name)
    # "--" is the beginning of every name.
    begun = tuple(flag for flag in FLAGS if len(name) > 2 and flag.name.startswith(name))
    return exact or begun


def _written_name(word: str) -> str:
    return word.partition("=")[0]


def _name(word: str) -> str:
    """Return the name in a word, written with `-` only."""
    return _written_name(word).replace("_", "-")


def _described(word: str, flag: Flag) -> str:
    """Return a word, with the name of the flag if it is not to be seen."""
    is_clear = _name(word) == flag.name
    return word if is_clear else f"{word} ({flag.name})"
