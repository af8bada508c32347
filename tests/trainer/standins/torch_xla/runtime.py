"""Stands in for torch_xla.runtime: ranks as its plug-in for Neuron gives them."""

import os

replicated = False  # until xm.set_replication, each process is a world of its own


def device_type():
    return "NEURON"


def global_ordinal():
    return int(os.environ.get("RANK", 0))


def world_size():
    # As torch_xla's plugin for Neuron: torchrun's variables count only where torchrun is seen.
    return (
        int(os.environ["WORLD_SIZE"]) if replicated and "TORCHELASTIC_RUN_ID" in os.environ else 1
    )
