"""Tests of the trainer: they need torch and two processes, and neither a cluster nor data from elsewhere."""
