"""Faults on purpose: a seeded schedule against a running training, and what must hold."""
