"""Common code of several workloads. The library does not depend on it."""
