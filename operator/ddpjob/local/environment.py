"""Make a virtual environment for a pod on this machine, for the packages of the job's setup."""

import site
import venv
from importlib.util import find_spec
from pathlib import Path
from subprocess import CalledProcessError

# The path of Python may have spaces, but the first line of a script cannot contain such a path. pip
# writes its scripts in the same form.
PROGRAM = """\
#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
from {module} import main

raise SystemExit(main())
"""

TORCHRUN = "torch.distributed.run"
PIP = "pip._internal.cli.main"

NO_PIP = (
    "cannot make a virtual environment for spec.setup, since this Python has neither pip nor "
    "ensurepip; on Debian and Ubuntu, install python3-venv"
)


def create_environment(folder: Path) -> None:
    """Make a virtual environment with the packages of this Python, and its own torchrun and pip.

    Packages installed into it come first. Raises OSError.
    """
    # To install another copy of pip takes six seconds of CPU time.
    has_pip = bool(find_spec("pip"))
    if not (has_pip or find_spec("ensurepip")):
        raise OSError(NO_PIP)
    try:
        venv.EnvBuilder(symlinks=True, with_pip=not has_pip).create(folder)
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
    programs = {"torchrun": TORCHRUN}
    if has_pip:
        programs |= {"pip": PIP, "pip3": PIP}
    for name, module in programs.items():
        program = folder / "bin" / name
        program.write_text(PROGRAM.format(python=folder / "bin" / "python", module=module))
        program.chmod(0o755)
