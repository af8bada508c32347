"""Tests with the real packages of other frameworks."""
