"""What checkpoints cost and survive, beside ``torch.distributed.checkpoint``."""
