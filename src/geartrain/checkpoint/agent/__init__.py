"""Tier 1: a process beside the trainer keeps states in memory and at its peers."""
