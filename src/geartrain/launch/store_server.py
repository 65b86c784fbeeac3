"""The rendezvous store: an own process, so that no slow device slows it down."""

from __future__ import annotations

import socket
import sys

from geartrain.launch.parent_death import die_with_parent


def serve(parent_id: int) -> None:
    """Host a store on loopback, report its port on stdout, and end at end of stdin.

    The listening socket is made here, since torch's own listens on every interface.
    """
    die_with_parent(parent_id)
    # Imported here, as launch is torch-free; documented, though not in its __all__.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    del store  # it served until here


if __name__ == "__main__":
    serve(int(sys.argv[1]))
