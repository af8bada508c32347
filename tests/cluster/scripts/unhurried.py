"""Run `ddp_trainer` with a pause after each step: python unhurried.py ARGS...

A fault then finds the training in its middle, also in a slow cluster. More steps instead would use
the CPU time of the other tests.
"""

import sys
import time

from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_trainer.cli.main import main

PAUSE = 0.06  # seconds

register_optimizer_step_post_hook(lambda *_: time.sleep(PAUSE))
sys.exit(main())
