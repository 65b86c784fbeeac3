"""Micro-benchmarks that the adapters share; torch comes in as an argument."""
