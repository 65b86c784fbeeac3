"""Emulated devices: CPU processes held to a share of a core and to their memory."""
