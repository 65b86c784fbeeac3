"""``geartrain bench comm``: the gradient exchange over emulated links, measured."""
