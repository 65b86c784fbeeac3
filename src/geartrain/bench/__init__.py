"""Benchmarks: what the promise is worth, against its bound and against plain DDP."""
