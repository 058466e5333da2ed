"""What a network and strangers can do to the TCP transport."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time

import pytest
import torch

from genserve.core.errors import ConfigError, StaleTensor, TensorError, TransferFailed
from genserve.core.tensors.ref import TensorRef
from genserve.core.tensors.transports import tcp, tcp_server, wire
from tests.core.tensors.conftest import TOKEN
from tests.core.tensors.peer import same_bytes, sample
from tests.core.tensors.proxy import Proxy

NUM_BYTES = 3 << 20


@pytest.fixture
def far(open_store):
    """A store that listens, and a tensor in it as another machine sees it."""
    store = open_store(listen=("127.0.0.1", 0), token=TOKEN)
    return store, seen_from_far(store.put(sample("uint8", (NUM_BYTES,)), ["reader"]))


@pytest.fixture
def one_place(open_store):
    """A server that has room for one peer, and a tensor as another machine sees it."""
    owner = open_store(token=TOKEN)
    server = tcp_server.TcpServer(("127.0.0.1", 0), TOKEN, owner._local.read, max_connections=1)
    ref = owner.put(sample("uint8", (1000,)), ["reader"])
    yield (
        server,
        seen_from_far(dataclasses.replace(ref, owner=ref.owner._replace(host="127.0.0.1")), server.port),
    )
    server.close()


def seen_from_far(ref: TensorRef, port: int | None = None) -> TensorRef:
    owner = ref.owner._replace(machine="elsewhere", port=port or ref.owner.port)
    return dataclasses.replace(ref, owner=owner)


@pytest.fixture
def through():
    proxies = []

    def between(ref: TensorRef, tamper) -> tuple[Proxy, TensorRef]:
        proxies.append(Proxy(ref.owner.port, tamper))
        return proxies[-1], seen_from_far(ref, proxies[-1].port)

    yield between
    for proxy in proxies:
        proxy.close()


@pytest.mark.parametrize("cut_at", [0, 30, 90, 120, 200_000, 1_500_000, NUM_BYTES])
def test_a_connection_cut_in_the_middle_is_resumed(far, through, open_store, cut_at):
    _, ref = far
    proxy, ref = through(
        ref, lambda number, at, data: None if number == 0 and at + len(data) > cut_at else data
    )
    got = open_store(token=TOKEN).get(ref).wait(10)
    assert same_bytes(got, sample("uint8", (NUM_BYTES,)))
    assert proxy.num_connections == 2
    # Whole chunks that had come are not sent again.
    assert proxy.bytes_from_owner < NUM_BYTES + 2 * wire.CHUNK_BYTES


def test_a_network_that_breaks_again_and_again_only_delays(far, through, open_store):
    """Every connection ends after one chunk: as long as there is progress, it goes on."""
    _, ref = far
    per_connection = wire.CHUNK_BYTES + 4096
    proxy, ref = through(ref, lambda _, at, data: None if at + len(data) > per_connection + 65536 else data)
    got = open_store(token=TOKEN).get(ref).wait(20)
    assert same_bytes(got, sample("uint8", (NUM_BYTES,)))
    assert proxy.num_connections > len(tcp.PAUSES_S)


def test_a_network_without_progress_is_given_up(far, through, open_store):
    _, ref = far
    proxy, ref = through(ref, lambda _, at, data: None if at + len(data) > 100_000 else data)
    with pytest.raises(TransferFailed, match="attempts"):
        open_store(token=TOKEN).get(ref).wait(10)
    assert proxy.num_connections == len(tcp.PAUSES_S) + 1


@pytest.mark.parametrize("at", [100, 116, 2_000, 1_000_000, NUM_BYTES + 100])
def test_garbled_bytes_never_arrive(far, through, open_store, at):
    _, ref = far

    def flip(number: int, start: int, data: bytes) -> bytes:
        if number == 0 and start <= at < start + len(data):
            changed = bytearray(data)
            changed[at - start] ^= 0x10
            return bytes(changed)
        return data

    _, ref = through(ref, flip)
    try:
        got = open_store(token=TOKEN).get(ref).wait(10)
    except TensorError:
        return  # a header that makes no sense is refused
    assert same_bytes(got, sample("uint8", (NUM_BYTES,)))


def test_bytes_that_are_always_garbled_are_given_up(far, through, open_store):
    _, ref = far
    _, ref = through(ref, lambda _, at, data: data if at < 100 else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(TransferFailed, match=r"checksum|longer"):
        open_store(token=TOKEN).get(ref).wait(10)


def test_a_network_that_stands_still_is_noticed(far, through, open_store, monkeypatch):
    monkeypatch.setattr(tcp, "STALL_S", 0.2)
    _, ref = far
    stopped = threading.Event()

    def stall(number: int, at: int, data: bytes) -> bytes:
        if number == 0 and at > 1_000_000:
            stopped.wait(5)
        return data

    proxy, ref = through(ref, stall)
    got = open_store(token=TOKEN).get(ref).wait(5)
    stopped.set()
    assert same_bytes(got, sample("uint8", (NUM_BYTES,)))
    assert proxy.num_connections == 2


def test_waiting_can_time_out_and_go_on(far, through, open_store):
    _, ref = far
    go = threading.Event()

    def late(_: int, at: int, data: bytes) -> bytes:
        if at > 100:
            go.wait(5)
        return data

    _, ref = through(ref, late)
    fetch = open_store(token=TOKEN).get(ref)
    with pytest.raises(TimeoutError):
        fetch.wait(0.05)
    assert not fetch.done()
    go.set()
    assert same_bytes(fetch.wait(5), sample("uint8", (NUM_BYTES,)))
    assert fetch.done()
    fetch.cancel()
    assert same_bytes(fetch.wait(), sample("uint8", (NUM_BYTES,)))


def test_after_cancel_nothing_is_written(far, through, open_store):
    _, ref = far
    _, ref = through(ref, lambda _, at, data: time.sleep(0.005) or data)
    out = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    fetch = open_store(token=TOKEN).get(ref, out)
    while not out[1000]:
        time.sleep(0.002)
    fetch.cancel()
    before = out.clone()
    assert fetch.done()
    with pytest.raises(TransferFailed, match="cancelled"):
        fetch.wait()
    time.sleep(0.05)
    assert torch.equal(out, before)
    assert not torch.equal(out, sample("uint8", (NUM_BYTES,)))


def test_closing_the_reader_ends_its_fetches(far, through, open_store):
    _, ref = far
    _, ref = through(ref, lambda _, at, data: time.sleep(0.02) or data)
    reader = open_store(token=TOKEN)
    fetches = [reader.get(ref) for _ in range(12)]
    start_s = time.monotonic()
    reader.close()
    for fetch in fetches:
        with pytest.raises(TransferFailed):
            fetch.wait(5)
    assert time.monotonic() - start_s < 2


def test_a_fetch_cancelled_while_it_queues_connects_to_nobody(far, through, open_store):
    _, ref = far
    proxy, ref = through(ref, lambda _, at, data: data)
    fetch = tcp.Pull(tcp.Tcp(TOKEN), ref, None)
    fetch.cancel()
    fetch.run()
    with pytest.raises(TransferFailed, match="cancelled"):
        fetch.wait(0)
    time.sleep(0.05)
    assert proxy.num_connections == 0


def test_a_closed_reader_begins_no_fetch(far):
    _, ref = far
    reader = tcp.Tcp(TOKEN)
    reader.close()
    with pytest.raises(TensorError, match="closed"):
        reader.get(ref, None)


def test_a_tensor_released_while_it_travels_is_stale(through, open_store):
    """Larger than what the kernel would take in at once."""
    store = open_store(48 << 20, listen=("127.0.0.1", 0), token=TOKEN)
    near = store.put(torch.zeros(24 << 20, dtype=torch.uint8), ["reader"])
    released = threading.Event()

    def release(_: int, at: int, data: bytes) -> bytes:
        if at > 200_000 and not released.is_set():
            store.release(near, "reader")
            store.put(torch.ones(24 << 20, dtype=torch.uint8), ["another"])
            released.set()
        return data

    _, ref = through(near, release)
    with pytest.raises(StaleTensor):
        open_store(token=TOKEN).get(ref).wait(10)
    assert released.is_set()


def test_more_fetches_than_threads(open_store):
    store = open_store(listen=("127.0.0.1", 0), token=TOKEN)
    reader = open_store(token=TOKEN)
    fetches = [
        reader.get(seen_from_far(store.put(sample("uint8", (50_000,), seed), ["r"]))) for seed in range(40)
    ]
    for seed, fetch in enumerate(fetches):
        assert same_bytes(fetch.wait(10), sample("uint8", (50_000,), seed))


class TestStrangers:
    @pytest.mark.parametrize("token", ["another", TOKEN + " ", TOKEN.upper()])
    def test_a_wrong_token_is_refused(self, far, open_store, token):
        _, ref = far
        start_s = time.monotonic()
        with pytest.raises(TransferFailed, match="token"):
            open_store(token=token).get(ref).wait(5)
        assert time.monotonic() - start_s < 1  # and not tried again

    def test_no_token_reads_nothing(self, far, open_store):
        _, ref = far
        with pytest.raises(TensorError, match="token"):
            open_store().get(ref)

    def test_nothing_is_read_without_a_proof(self, far):
        store, ref = far
        request = wire.Request(ref.owner.name, ref.epoch, ref.generation, ref.offset, ref.nbytes, 0).pack()
        for first in (b"", bytes(64)):
            with socket.create_connection(("127.0.0.1", ref.owner.port), timeout=2) as stranger:
                greeting = wire.receive(stranger, wire.GREETING.size)
                assert greeting.startswith(wire.MAGIC)
                stranger.sendall(first + request + bytes(8))
                rest = b""
                with contextlib.suppress(ConnectionError):
                    while data := stranger.recv(65536):
                        rest += data
                assert len(rest) <= wire.WELCOME.size
        store.check(dataclasses.replace(ref, owner=store.address))

    def test_a_proof_cannot_be_replayed(self, far, through, open_store):
        """What a peer sent once is of no use to who listened: the nonce has changed."""
        _, ref = far
        token = TOKEN.encode()
        with socket.create_connection(("127.0.0.1", ref.owner.port), timeout=2) as first:
            _, _, nonce = wire.GREETING.unpack(wire.receive(first, wire.GREETING.size))
            mine = bytes(range(32))
            proof = wire.PROOF.pack(mine, wire.prove(token, b"client", mine, nonce))
            first.sendall(proof)
            status, _ = wire.WELCOME.unpack(wire.receive(first, wire.WELCOME.size))
            assert status == wire.OK
        with socket.create_connection(("127.0.0.1", ref.owner.port), timeout=2) as second:
            wire.receive(second, wire.GREETING.size)
            second.sendall(proof)
            status, _ = wire.WELCOME.unpack(wire.receive(second, wire.WELCOME.size))
            assert status == wire.REFUSED

    @pytest.mark.parametrize("seed", range(4))
    def test_noise_ends_one_connection_only(self, far, open_store, seed):
        _, ref = far
        noise = sample("uint8", (1 << 20,), seed).numpy().tobytes()
        with peer_connection(ref) as known:
            known.sendall(noise[: wire.REQUEST_BYTES])
            assert known.recv(1) == b""
        with socket.create_connection(("127.0.0.1", ref.owner.port), timeout=2) as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(noise)
                while stranger.recv(65536):
                    pass
        open_store(token=TOKEN).get(ref).wait(5)

    def test_requests_that_cannot_be_are_refused(self, far):
        _, ref = far
        name, size = ref.owner.name, ref.nbytes
        good = wire.Request(name, ref.epoch, ref.generation, ref.offset, size, 0)
        wrong = [
            dataclasses.replace(good, offset=2**63),
            dataclasses.replace(good, nbytes=2**63),
            dataclasses.replace(good, nbytes=size + 256),
            dataclasses.replace(good, nbytes=size - 1),
            dataclasses.replace(good, offset=256),
            dataclasses.replace(good, generation=0),
            dataclasses.replace(good, epoch=0),
            dataclasses.replace(good, name="0" * 32),
        ]
        with peer_connection(ref) as peer:
            for request in wrong:
                peer.sendall(request.pack())
                status, length = wire.REPLY.unpack(wire.receive(peer, wire.REPLY.size))
                assert (status, length) == (wire.STALE, 0), request
            peer.sendall(good.pack())
            assert wire.REPLY.unpack(wire.receive(peer, wire.REPLY.size)) == (wire.OK, size)

    def test_silent_strangers_lock_nobody_out(self, far, open_store):
        _, ref = far
        with contextlib.ExitStack() as held:
            silent = [
                held.enter_context(socket.create_connection(("127.0.0.1", ref.owner.port), timeout=2))
                for _ in range(100)
            ]
            open_store(token=TOKEN).get(ref).wait(3)
            for oldest in silent[: 100 - tcp_server.MAX_HANDSHAKES]:
                wire.receive(oldest, wire.GREETING.size)
                assert oldest.recv(1) == b""

    def test_idle_peers_make_room_and_busy_ones_do_not(self, one_place, open_store):
        server, ref = one_place
        readers = [open_store(token=TOKEN) for _ in range(2)]
        for turn in range(4):
            assert same_bytes(readers[turn % 2].get(ref).wait(5), sample("uint8", (1000,)))
            assert server.num_connections() == 1
        with peer_connection(ref) as busy:
            busy.sendall(b"x")  # the first byte of a request
            deadline_s = time.monotonic() + 2
            while server._idle and time.monotonic() < deadline_s:
                time.sleep(0.001)
            fetch = readers[0].get(ref)
            time.sleep(0.1)
            assert not fetch.done() and server.num_connections() == 1
        assert same_bytes(fetch.wait(5), sample("uint8", (1000,)))

    def test_whoever_says_nothing_is_put_out(self, far, monkeypatch):
        monkeypatch.setattr(tcp_server, "HANDSHAKE_S", 0.1)
        _, ref = far
        with socket.create_connection(("127.0.0.1", ref.owner.port), timeout=2) as silent:
            wire.receive(silent, wire.GREETING.size)
            assert silent.recv(1) == b""
        with socket.create_connection(("127.0.0.1", ref.owner.port), timeout=2) as slow:
            wire.receive(slow, wire.GREETING.size)
            start_s = time.monotonic()
            with contextlib.suppress(OSError):
                while time.monotonic() - start_s < 2:
                    slow.sendall(b"x")
                    time.sleep(0.03)
            assert time.monotonic() - start_s < 1

    def test_a_wildcard_address_is_refused(self, open_store):
        for host in ("", "0.0.0.0", "::"):
            with pytest.raises(ConfigError, match="listen"):
                open_store(listen=(host, 0), token=TOKEN)

    def test_a_taken_port_is_a_clear_error(self, open_store, directory):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            with pytest.raises(ConfigError, match="listen"):
                open_store(listen=taken.getsockname(), token=TOKEN)
        assert not list(directory.glob("genserve-*"))


def peer_connection(ref: TensorRef) -> socket.socket:
    """A connection that has shown the token."""
    connection = socket.create_connection(("127.0.0.1", ref.owner.port), timeout=2)
    _, _, nonce = wire.GREETING.unpack(wire.receive(connection, wire.GREETING.size))
    mine = bytes(32)
    connection.sendall(wire.PROOF.pack(mine, wire.prove(TOKEN.encode(), b"client", mine, nonce)))
    status, _ = wire.WELCOME.unpack(wire.receive(connection, wire.WELCOME.size))
    assert status == wire.OK
    return connection


class TestFalseOwners:
    """Who answers instead of the owner, even with the right token, can't harm the reader."""

    @pytest.fixture
    def answers(self):
        listener = socket.create_server(("127.0.0.1", 0))
        replies: list[bytes] = []
        seen = []

        def serve(token: bytes) -> None:
            try:
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        nonce = bytes(32)
                        connection.sendall(wire.GREETING.pack(wire.MAGIC, wire.OK, nonce))
                        theirs, _ = wire.PROOF.unpack(wire.receive(connection, wire.PROOF.size))
                        proof = wire.prove(token, b"server", nonce, theirs)
                        connection.sendall(wire.WELCOME.pack(wire.OK, proof))
                        seen.append(wire.receive(connection, wire.REQUEST_BYTES))
                        connection.sendall(b"".join(replies))
                        connection.settimeout(0.5)
                        while connection.recv(1024):
                            pass
            except OSError:
                pass

        def start(*frames: bytes, token: str = TOKEN) -> int:
            replies.extend(frames)
            threading.Thread(target=serve, args=(token.encode(),), daemon=True).start()
            return listener.getsockname()[1]

        yield start, seen
        listener.close()

    @pytest.mark.parametrize(
        "frames",
        [
            (wire.REPLY.pack(wire.OK, 2**62),),
            (wire.REPLY.pack(wire.OK, 1),),
            (wire.REPLY.pack(77, NUM_BYTES),),
            (wire.REPLY.pack(wire.OK, NUM_BYTES), wire.CHUNK.pack(2**31, 0)),
            (wire.REPLY.pack(wire.OK, NUM_BYTES), wire.CHUNK.pack(wire.CHUNK_BYTES + 1, 0)),
            (wire.REPLY.pack(wire.OK, NUM_BYTES), wire.CHUNK.pack(0, wire.OK)),
        ],
        ids=["too much", "too little", "no status", "huge chunk", "long chunk", "early end"],
    )
    def test_frames_that_cannot_be_are_refused_at_once(self, far, answers, open_store, frames):
        _, ref = far
        start, seen = answers
        with pytest.raises(TransferFailed):
            open_store(token=TOKEN).get(seen_from_far(ref, start(*frames))).wait(5)
        assert len(seen) == 1

    def test_an_owner_without_the_token_is_refused(self, far, answers, open_store):
        _, ref = far
        start, seen = answers
        with pytest.raises(TransferFailed, match="token"):
            open_store(token=TOKEN).get(seen_from_far(ref, start(token="guessed"))).wait(5)
        assert seen == []  # not even what was asked for

    def test_another_service_is_no_store(self, far, open_store):
        _, ref = far
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" * 10)

            threading.Thread(target=serve, daemon=True).start()
            with pytest.raises(TransferFailed, match="no tensor store"):
                open_store(token=TOKEN).get(seen_from_far(ref, listener.getsockname()[1])).wait(5)

    def test_nothing_is_allocated_before_the_owner_has_agreed(self, far, open_store):
        _, ref = far
        huge = dataclasses.replace(ref, shape=(1 << 50,), nbytes=1 << 50)
        with pytest.raises(StaleTensor):
            open_store(token=TOKEN).get(huge).wait(5)
