"""Deadlines, silence and lost peers: told at once, decided elsewhere."""
