"""Pass the pipes of a spawned process of multiprocessing from its stand-in to its fork.

The stand-in inherits them. The fork is no child of it, and opens them again. This is possible for
pipes, and not for sockets.
"""

import os
import stat
from contextlib import suppress

# The variable with the numbers of the descriptors.
VARIABLE = "FORK_SERVER_DESCRIPTORS"


def offer() -> bool:
    """Name the inherited descriptors in the environment. Return False if a fork cannot open one."""
    descriptors = _inherited()
    os.environ[VARIABLE] = " ".join(map(str, descriptors))
    return all(stat.S_ISFIFO(os.fstat(each).st_mode) for each in descriptors)


def _inherited() -> list[int]:
    """Return the descriptors passed on by the parent process. Python's own are not inheritable."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
    return found


def take(stand_in: int) -> None:
    """Open the pipes named by the stand-in with this process id, under their numbers."""
    for name in os.environ.pop(VARIABLE, "").split():
        if os.path.lexists(f"/proc/self/fd/{name}"):
            raise OSError(f"descriptor {name} of the spawned process is open in the fork already")
        path = f"/proc/{stand_in}/fd/{name}"
        access = os.O_WRONLY if os.lstat(path).st_mode & stat.S_IWUSR else os.O_RDONLY
        opened = os.open(path, access)
        # A fork that becomes a new Python keeps them.
        if opened == int(name):
            os.set_inheritable(opened, True)
        else:
            os.dup2(opened, int(name))
            os.close(opened)
