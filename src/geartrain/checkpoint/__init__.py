"""Whole states on disk and over the wire, bit for bit and without pickle."""
