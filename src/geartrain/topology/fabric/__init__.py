"""What a host is made of, as far as its exchange with others depends on it. Read only."""
