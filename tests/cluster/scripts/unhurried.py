"""Run `ddp_trainer` with a pause after each step: python unhurried.py ARGS...

A fault then finds the training in its middle, also where the cluster is slow. A training of more
steps would use the CPU time that the other tests need.
"""

import sys
import time

from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_trainer.cli.main import main

PAUSE = 0.03  # seconds

register_optimizer_step_post_hook(lambda *_: time.sleep(PAUSE))
sys.exit(main())
