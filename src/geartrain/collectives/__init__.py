"""Choice, order and coding of collectives; the transport is torch.distributed's."""
