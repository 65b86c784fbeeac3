"""What a host's settings should be for exchanging gradients, and why. It never sets any."""
