"""What launcher and worker say to each other before the script begins."""

READY = b"R"
"""From a worker: it has imported what it was to preload."""
GO = b"G"
"""To a worker: its device is set up and its spec written."""
