"""The former name of group.py. `from ddp_trainer.process_group import process_group` still works.

The import of a submodule sets the package's attribute of its name. That attribute must be the
function `process_group`, so the function itself takes the place of this module.
"""

import sys

from ddp_trainer.group import process_group

vars(process_group)["process_group"] = process_group
sys.modules[__name__] = process_group  # type: ignore[assignment]
