"""Code that several workloads share. The library does not depend on it."""
