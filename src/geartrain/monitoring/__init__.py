"""Shows a run to people while it goes on and afterwards. Torch-free."""
