"""Measure how fast the operator brings up gangs, beside Indexed Jobs and a bare client."""
