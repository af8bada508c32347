import os


def device_type():
    return "NEURON"


def global_ordinal():
    return int(os.environ.get("RANK", 0))


def world_size():
    # As torch_xla's plugin for Neuron: torchrun's variables count only where torchrun is seen.
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1
