"""Run `python -m ddp_trainer WORKLOAD`.

`main` is in another module, because the processes of --spawn cannot import this one by name.
"""

import sys

from ddp_trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
