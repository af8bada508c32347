"""Tests on an NVIDIA GPU."""
