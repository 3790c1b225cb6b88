"""Sockets by which the hosts of a group meet: each rank tells rank 0 to which call it comes, and
rank 0 tells all that they have come. What a rank has told stands, even if it dies or stands still.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import struct
import time
from typing import Any

# A rank's word on a barrier: its epoch, its number in it, and the fingerprint of the call; rank 0
# tells 0 where these differ. The words of a rank come in this order
WORD = struct.Struct(">III")
PLACE = slice(8)  # of a word, its epoch and number
NAME = 8  # bytes, by which the ranks of a group know each other from strangers
HELLO = struct.Struct(f">{NAME}sI")  # that name, and the rank that connects
SOON = 1.0  # seconds in which an address answers, and a rank that has connected says hello
PAUSE = 0.01  # seconds between attempts, as the store may have an earlier group's address


class Wire:
    """The sockets of a rank: to rank 0, or of rank 0 to all others, which connect as it waits for
    the first barrier. It leaves its address and a name in the store.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.name = rank, os.urandom(NAME)
        self.others = range(1, ranks) if rank == 0 else range(1)
        self.peers: dict[int, socket.socket] = {}
        self.listener: Any = None  # of rank 0, until the first barrier
        self.tells_last = rank == 0  # once all have come, and not as it comes itself

    def listen(self, store: Any, *, key: str) -> None:
        """Leaves the address that this machine has on the way to the store: if both are on one, the
        store's own.
        """
        address = host = _host_of(store)
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as unused:
            unused.connect((host, 1))  # sends nothing
            address = unused.getsockname()[0]
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self.listener = socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual)
        self.listener.setblocking(False)
        place = "" if address.startswith("127.") else address
        store.set(key, f"{self.name.hex()} {self.listener.getsockname()[1]} {place}")

    def connect(self, store: Any, *, key: str, timeout: datetime.timedelta) -> None:
        """Connects to rank 0; OSError if that is not there in time."""
        until = time.monotonic() + timeout.total_seconds()
        store.wait([key], timeout)
        while time.monotonic() < until:
            text = store.get(key)
            name, port, place = text.decode().split(" ")
            self.name = bytes.fromhex(name)
            hello = HELLO.pack(self.name, self.rank)
            with contextlib.suppress(OSError):
                address = place or _host_of(store), int(port)
                rank0 = socket.create_connection(address, timeout=SOON)
                rank0.sendall(hello)
                while store.get(key) == text and time.monotonic() < until:
                    with contextlib.suppress(TimeoutError):
                        if rank0.recv(len(hello)) == hello:
                            self._keep(0, other=rank0)
                            return
                        break
                rank0.close()
            time.sleep(PAUSE)
        raise TimeoutError("its address does not answer")

    def open(self) -> None:
        """Takes no more connections: all ranks have met."""
        if self.listener is not None:
            self.listener.close()
        self.listener, self.tells_last = None, len(self.others) > 1 and self.rank == 0

    def tell(self, word: bytes) -> None:
        """Tells others a word. One that has ended is not told."""
        for other in self.peers.values():
            with contextlib.suppress(OSError):
                other.send(word)

    def hear(self, rank: int, word: bytes) -> bytes | None:
        """Returns what a rank says on the barrier of this rank's word, if that has come. Earlier
        words are passed over; one of a later epoch stays.
        """
        with contextlib.suppress(OSError):
            if rank not in self.peers:
                self._accept()
                return None
            peer = self.peers[rank]
            # Looked at first: an interrupted rank has taken a whole word, or nothing
            while len(other := peer.recv(WORD.size, socket.MSG_PEEK)) == WORD.size:
                if other[PLACE] > word[PLACE]:
                    return None
                peer.recv(WORD.size)
                if other[PLACE] == word[PLACE]:
                    return other
        return None

    def close(self) -> None:
        """Closes all sockets."""
        self.open()
        for x in self.peers.values():
            x.close()

    def _accept(self) -> None:
        """Takes the connection of a rank, and of no stranger."""
        other, _ = self.listener.accept()
        other.settimeout(SOON)
        hello = other.recv(HELLO.size)
        if hello[:NAME] != self.name or len(hello) < HELLO.size:
            other.close()
            return
        other.sendall(hello)
        self._keep(HELLO.unpack(hello)[1], other=other)

    def _keep(self, rank: int, *, other: socket.socket) -> None:
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        other.setblocking(False)
        self.peers[rank] = other


def _host_of(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", "localhost")  # of one that is in files or in this process
