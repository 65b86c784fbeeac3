"""When the receiver's kernel had what was sent, by the sender's kernel. Linux only.

The kernel stamps the moment at which the last byte of each ``send`` was acknowledged.
No process takes part in that, on either host, so that a busy host does not blur it: a
process that reads late finds packets that the kernel has merged, with one time for all.

Source: Documentation/networking/timestamping.rst, SOF_TIMESTAMPING_TX_ACK.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

# Of linux/asm-generic/socket.h and linux/net_tstamp.h; the socket module lacks them.
_SO_TIMESTAMPING = 37
_SOFTWARE, _OPT_ID, _TX_ACK, _OPT_TSONLY = 1 << 4, 1 << 7, 1 << 9, 1 << 11
_MSG_ERRQUEUE = 0x2000
_ORIGIN_TIMESTAMPING = 4
_STAMP = struct.Struct("@qq")
_ERROR = struct.Struct("@IBBBBII")
"""struct sock_extended_err: errno, origin, type, code, pad, info, data."""
_ANCILLARY_BYTES = 512
_RECEIVED_ERRORS = ((socket.IPPROTO_IP, 11), (socket.IPPROTO_IPV6, 25))
"""IP_RECVERR and IPV6_RECVERR."""
_WRAP = 1 << 32


def stamp_acknowledgements(sock: socket.socket) -> bool:
    """Ask the kernel for the stamps; whether it will give them."""
    if sys.platform != "linux":
        return False
    flags = _SOFTWARE | _OPT_ID | _TX_ACK | _OPT_TSONLY
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, flags)
    except OSError:
        return False
    return True


def read_acknowledgements(sock: socket.socket) -> list[tuple[float, int]]:
    """Collect the stamps so far, without waiting.

    Returns:
        (Unix time, bytes acknowledged since the stamps were asked for), rising.
    """
    points: dict[int, float] = {}
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            _, ancillary, _, _ = sock.recvmsg(0, _ANCILLARY_BYTES, _MSG_ERRQUEUE)
            stamp, last_byte = None, None
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPING):
                    seconds, nanoseconds = _STAMP.unpack(data[: _STAMP.size])
                    stamp = seconds + nanoseconds * 1e-9
                elif (level, kind) in _RECEIVED_ERRORS:
                    error = _ERROR.unpack(data[: _ERROR.size])
                    last_byte = error[6] if error[1] == _ORIGIN_TIMESTAMPING else None
            if stamp is not None and last_byte is not None:
                points[(last_byte + 1) % _WRAP] = stamp
    return [(at_s, count) for count, at_s in sorted(points.items())]
