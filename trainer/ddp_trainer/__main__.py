"""`python -m ddp_trainer WORKLOAD`; apart from `main`, which the processes of --spawn could not import by this name."""

import sys

from ddp_trainer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
