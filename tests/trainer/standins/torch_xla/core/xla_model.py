"""Stands in for torch_xla.core.xla_model: random state and replication."""

from torch_xla import runtime

_seed = [2**63 + 7]


def get_xla_supported_devices(max_devices=None):
    return ["cpu"]


def set_replication(device, devices):
    runtime.replicated = bool(devices)


def wait_device_ops(devices=()):
    pass


def get_rng_state(device=None):
    return _seed[0]


def set_rng_state(seed, device=None):
    _seed[0] = seed
