"""Make a virtual environment for a pod on this machine, for the packages of the job's setup."""

import site
import venv
from importlib.util import find_spec
from pathlib import Path
from subprocess import CalledProcessError

# The path of Python may have spaces, but the first line of a script cannot contain such a path. pip
# writes its scripts in the same form.
TORCHRUN = """\
#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
from torch.distributed.run import main

main()
"""


NO_PIP = (
    "cannot make a virtual environment for spec.setup, since this Python has no ensurepip; on "
    "Debian and Ubuntu, install python3-venv"
)


def create_environment(folder: Path) -> None:
    """Make a virtual environment with the packages of this Python and a torchrun of its own.

    Packages installed into it come first. Raises OSError.
    """
    if find_spec("ensurepip") is None:
        raise OSError(NO_PIP)
    try:
        venv.EnvBuilder(symlinks=True, with_pip=True).create(folder)
    except CalledProcessError as error:
        words = (error.output or b"").decode(errors="replace").strip()
        raise OSError(f"cannot install pip into {folder}: {words[-200:]}") from error
    (packages,) = folder.glob("lib/python*/site-packages")
    parents = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        parents.append(site.getusersitepackages())
    # Unlike a path in this file, `addsitedir` also reads the .pth files there.
    lines = [f"import site; site.addsitedir({parent!r})\n" for parent in parents]
    (packages / "packages-of-parent.pth").write_text("".join(lines))
    torchrun = folder / "bin" / "torchrun"
    torchrun.write_text(TORCHRUN.format(python=folder / "bin" / "python"))
    torchrun.chmod(0o755)
