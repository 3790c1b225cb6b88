"""The sockets by which hosts meet: what has come, in which order, and of which rank."""

import datetime
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from helpers.lives import Store
from helpers.processes import run
from helpers.waits import DEADLINE, SHORT, until

import tilewise.distributed as td
from tilewise.distributed.layouts.group import store_of
from tilewise.distributed.transport import arena as arenas
from tilewise.distributed.transport.wire import WORD, Wire


def meetings(rank):
    """Ranks meet, disagree, raise, and meet again, of any number of ranks."""
    host = arenas.host_of(dist.group.WORLD)
    for turn in (0, 1, 0):
        for call in range(10):
            host.meet(f"call {call}")
            assert host.wait("notes", str(rank)) == [str(x) for x in range(host.ranks)]
        with pytest.raises(td.RankMismatch, match=f"rank {turn} called|called other"):
            host.meet("other" if rank == turn else "one")
        with pytest.raises(ValueError if rank == turn else td.RankMismatch, match="of a rank"):
            with arenas.Reporting(dist.group.WORLD):
                if rank == turn:
                    raise ValueError("of a rank")
                host.meet("a call")
    host.meet("the end")
    dist.barrier()  # rank 0 has the store


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_meetings(ranks):
    run(meetings, ranks)


def late(rank, first):
    """Ranks connect in any order, however late, and although an earlier group's address is there,
    at which none listens, or a stranger.
    """
    with socket.create_server(("localhost", 0)) as stranger:
        if rank == 1:
            place = f"{'00' * 8} {stranger.getsockname()[1]} localhost"
            store_of(dist.group.WORLD).set("tilewise/0", place)
            threading.Thread(target=lambda: stranger.accept()[0].close(), daemon=True).start()
        dist.barrier()
        time.sleep(0.3 * ((rank + first) % 3))
        arenas.host_of(dist.group.WORLD).meet("a call")
        dist.barrier()


@pytest.mark.parametrize("first", range(3))
def test_ranks_that_are_late_connect(first):
    run(late, 3, first)


def died(rank, victim):
    """A rank that dies once it has announced a call has come to it: none of the others is taken
    for lost, as what it has told does not go by other ranks.
    """
    host = arenas.host_of(dist.group.WORLD)
    host.meet("a call")
    if rank == victim:
        host.announce("the next call")
        os.kill(os.getpid(), signal.SIGKILL)
    if victim:
        host.meet("the next call")
    with pytest.raises(td.RankLost, match=f"^rank {victim} of 4 did not come to call"):
        host.meet("the last call" if victim else "the next call")
    store = Store(rank, 3).store  # rank 0 has it, and may not end before the others
    store.add("ended", 1)
    assert rank or until(lambda: store.add("ended", 0) == 3, "all have raised")


def test_a_rank_that_dies_after_it_has_come():
    run(died, 4, 2, timeout=SHORT, killed=(2,))


@pytest.fixture
def wire():
    """The wire of a rank of two, and the socket that tells it."""
    wire = Wire(1, 2)
    told, telling = socket.socketpair()
    told.setblocking(False)
    wire.peers[0] = told
    yield wire, telling
    wire.close()
    telling.close()


def word(epoch, number, fingerprint=7):
    return WORD.pack(epoch, number, fingerprint)


def test_words_of_an_epoch_that_has_ended_are_passed_over(wire):
    mine, other = wire
    for x in (word(0, 1), word(0, 2), word(1, 1)):
        other.send(x)
    assert mine.hear(0, word(1, 1)) == word(1, 1)
    assert mine.hear(0, word(1, 2)) is None


def test_a_word_of_a_later_epoch_stays(wire):
    mine, other = wire
    other.send(word(1, 1))
    assert mine.hear(0, word(0, 5)) is None  # an error has ended epoch 0
    assert mine.hear(0, word(1, 1, 9)) == word(1, 1)
    assert mine.hear(0, word(1, 2)) is None


def test_words_in_parts_and_ranks_that_ended(wire):
    mine, other = wire
    whole = word(0, 1)
    for x in whole[:5], whole[5:]:
        assert mine.hear(0, whole) is None
        other.send(x)
    assert mine.hear(0, whole) == whole
    other.close()
    mine.tell(whole)
    mine.tell(whole)
    assert mine.hear(0, word(0, 2)) is None


def test_a_stranger_is_no_rank():
    """Rank 0 takes the connection of a rank alone."""
    store, first, second = dist.HashStore(), Wire(0, 2), Wire(1, 2)
    first.listen(store, key="a key")
    port = first.listener.getsockname()[1]
    with socket.create_connection(("localhost", port)) as stranger, ThreadPoolExecutor() as pool:
        stranger.sendall(bytes(100))
        timeout = datetime.timedelta(seconds=DEADLINE)
        connected = pool.submit(second.connect, store, key="a key", timeout=timeout)
        until(lambda: first.hear(1, word(0, 1)) or first.peers, "the rank")
        connected.result()
    first.open()
    first.tell(word(0, 1))
    assert until(lambda: second.hear(0, word(0, 1)), "a word") == word(0, 1)
    first.close()
    second.close()
