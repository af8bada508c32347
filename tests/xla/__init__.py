"""Tests on the real torch_xla."""
