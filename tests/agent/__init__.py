"""Tests of the agent alone. Only test_torchrun.py needs torch, and none needs a cluster."""
