"""Choice, order and coding of collectives; the transport is torch.distributed's.

For users who keep their own training loop: ``ddp_hook`` lets a DistributedDataParallel
model, ``fsdp_hooks`` an FSDP2 model exchange its gradients by geartrain. Names are
imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geartrain.collectives.ddp_exchange import DdpExchange, ddp_hook
    from geartrain.collectives.fsdp_exchange import FsdpExchange, fsdp_hooks
    from geartrain.collectives.powersgd import register_powersgd

__all__ = [
    "DdpExchange",
    "FsdpExchange",
    "ddp_hook",
    "fsdp_hooks",
    "register_powersgd",
]

_HOMES = {
    "DdpExchange": "ddp_exchange",
    "FsdpExchange": "fsdp_exchange",
    "ddp_hook": "ddp_exchange",
    "fsdp_hooks": "fsdp_exchange",
    "register_powersgd": "powersgd",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        msg = f"module 'geartrain.collectives' has no attribute {name!r}"
        raise AttributeError(msg)
    home = importlib.import_module(f"geartrain.collectives.{_HOMES[name]}")
    return getattr(home, name)
