_seed = [2**63 + 7]


def wait_device_ops(devices=()):
    pass


def get_rng_state(device=None):
    return _seed[0]


def set_rng_state(seed, device=None):
    _seed[0] = seed
