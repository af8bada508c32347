"""Exponential back-off: the one formula for every retry of the operator."""

# Beyond this exponent every delay has reached its limit, and 2 ** n would not fit into a float.
MAX_EXPONENT = 32


def exponential_delay(failures: int, first: float, longest: float) -> float:
    """Return the seconds to wait after `failures` failures in a row.

    The delay is `first` seconds after one failure, doubles with each further one, and is at most
    `longest` seconds. It is 0 without a failure.
    """
    if failures < 1:
        return 0.0
    return min(first * 2.0 ** min(failures - 1, MAX_EXPONENT), longest)
