"""The rendezvous store: an own process, so that no slow device slows it down."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING

from geartrain.launch.parent_death import die_with_parent

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented


def open_store(address: str) -> TCPStore:
    """Host a store on one address, IPv4 or IPv6, and a port that the kernel picks."""
    # Imported here, as launch is torch-free; documented, though not in its __all__.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def serve(parent_id: int, address: str) -> None:
    """Host a store, report its port on stdout, and end at end of stdin.

    The listening socket is made here, since torch's own listens on every interface.

    Args:
        parent_id: Process id of the launcher.
        address: The one address it listens on, IPv4 or IPv6.
    """
    die_with_parent(parent_id)
    store = open_store(address)
    port = store.port
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    del store  # it served until here


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
