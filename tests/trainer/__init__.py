"""Tests of the trainer. They need torch and several processes, but no cluster and no downloads."""
