"""Messages between the pool and its worker processes: JSON with a length before it, over a socket.

JSON, since what comes back was made beside hostile text: nothing is unpickled. It is plain ASCII on the wire, so that lone
surrogates and NULs pass.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

HEADER = struct.Struct("<I")


def plain(value: Any) -> Any:
    """What JSON does not know: arrays and scalars of numpy as lists and numbers, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def send(channel: socket.socket, message: Any) -> None:
    """Send one message. Errors: OSError (TimeoutError where the other side does not read within the socket's time limit)."""
    body = json.dumps(message, default=plain, separators=(",", ":")).encode("ascii")
    channel.sendall(HEADER.pack(len(body)) + body)


def receive(channel: socket.socket, most: int) -> Any:
    """Receive one message of at most `most` bytes. Errors: EOFError at the other side's end, OSError, ValueError for a broken message."""
    (size,) = HEADER.unpack(read(channel, HEADER.size))
    if size > most:
        raise ValueError(f"a message of {size} bytes; at most {most} are allowed")
    return json.loads(read(channel, size))


def read(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            raise EOFError("the other side has ended")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
