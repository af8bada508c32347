"""Stands in for torch_xla.runtime: ranks as its plug-in for Neuron gives them."""

import os

# Until xm.set_replication, each process has a world size of 1.
replicated = False


def device_type():
    return "NEURON"


def global_ordinal():
    return int(os.environ.get("RANK", 0))


def world_size():
    # As in torch_xla's plug-in for Neuron, torchrun's variables count only under torchrun.
    return (
        int(os.environ["WORLD_SIZE"]) if replicated and "TORCHELASTIC_RUN_ID" in os.environ else 1
    )
