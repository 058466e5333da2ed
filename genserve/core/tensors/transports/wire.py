"""Frames of the TCP transport and the handshake before them. Everything has a fixed or bounded size.

    server: greeting                     magic, its nonce
    client: proof                        its nonce, HMAC of both nonces under the cluster's token
    server: welcome                      whether the proof was right, and its own proof; or that it has too many connections
    then, any number of times:
    client: request                      which bytes of which tensor, from where on; CRC-32
    server: reply                        whether they are there, and how many follow
    server: chunks                       length, CRC-32, bytes; the last has length 0 and says whether the
                                         tensor was still there when its last byte had been sent

The token itself is never sent. The connection isn't encrypted: for a cluster's own network.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
import zlib
from dataclasses import dataclass

MAGIC = b"genserve tcp 1 \n"
NONCE_BYTES = 32
CHUNK_BYTES = 512 << 10
"""No chunk is longer."""

OK, STALE, BAD, BUSY, REFUSED = range(5)

GREETING = struct.Struct(f"<16sB{NONCE_BYTES}s")
PROOF = struct.Struct(f"<{NONCE_BYTES}s32s")
WELCOME = struct.Struct("<B32s")
REPLY = struct.Struct("<BQ")
CHUNK = struct.Struct("<II")
_REQUEST = struct.Struct("<16sQQQQQ")
REQUEST_BYTES = _REQUEST.size + 4


class BadFrame(Exception):
    """What came isn't what may come here."""


@dataclass(frozen=True, slots=True)
class Request:
    """`start`: how many bytes of the tensor are there already."""

    name: str
    epoch: int
    generation: int
    offset: int
    nbytes: int
    start: int

    def pack(self) -> bytes:
        body = _REQUEST.pack(
            bytes.fromhex(self.name), self.epoch, self.generation, self.offset, self.nbytes, self.start
        )
        return body + zlib.crc32(body).to_bytes(4, "little")

    @staticmethod
    def unpack(data: bytes) -> Request:
        body = data[:-4]
        if zlib.crc32(body).to_bytes(4, "little") != data[-4:]:
            raise BadFrame("a request's checksum is wrong")
        name, *numbers = _REQUEST.unpack(body)
        request = Request(name.hex(), *numbers)
        if request.start > request.nbytes:
            raise BadFrame("a request starts behind its tensor's end")
        return request


def prove(token: bytes, side: bytes, own_nonce: bytes, other_nonce: bytes) -> bytes:
    """That `side` knows the token; good for these two nonces only."""
    return hmac.digest(token, MAGIC + side + own_nonce + other_nonce, "sha256")


def receive(connection: socket.socket, num_bytes: int, deadline_s: float | None = None) -> bytes:
    """Exactly that many. Raises ConnectionError at the end, TimeoutError at `deadline_s` (monotonic)."""
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data), deadline_s)
    return bytes(data)


def receive_into(connection: socket.socket, out: memoryview, deadline_s: float | None = None) -> None:
    filled = 0
    while filled < len(out):
        if deadline_s is not None:
            # Of the whole, so that a peer that sends byte by byte doesn't hold on for ever.
            connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        count = connection.recv_into(out[filled:])
        if not count:
            raise ConnectionError("the other side closed the connection")
        filled += count
