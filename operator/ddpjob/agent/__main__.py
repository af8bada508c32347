"""Run a program of the agent: python FOLDER PROGRAM ARGS..., with this folder, wherever it is."""

import importlib.util
import os
import signal
import sys

# Process 1 ignores signals without a handler. A pod deleted during the import of the agent would
# otherwise last for its whole grace period.
if sys.argv[1] == "agent":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))

# A name unlikely to be a user's module.
PACKAGE = "ddpjob_agent"

# Python searches the folder itself first. A file there could hide a module of torch or of a user.
folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]
first_file = os.path.join(folder, "__init__.py")
spec = importlib.util.spec_from_file_location(PACKAGE, first_file)
assert spec
assert spec.loader
package = importlib.util.module_from_spec(spec)
sys.modules[PACKAGE] = package
spec.loader.exec_module(package)

_, name, *args = sys.argv
program = importlib.import_module(f"{PACKAGE}.{name}")
sys.exit(program.main(args))
