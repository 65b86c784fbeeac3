"""Executes a plan, step by step.

Import the modules directly: ``parallel.worker_spec`` is torch-free, the others are not.
"""
