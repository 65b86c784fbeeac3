"""One file a vendor, independent of each other, found by entry point."""
