"""Code that several workloads share and the library does not need."""
