"""The server's view of one rank: a process, and a connection that carries orders to the rank and reports back.

Ranks on other machines connect to the server. This module has both sides of their handshake. In the handshake, each
side proves to the other that it knows the shared key. Both sides send a random nonce. The proof is an HMAC-SHA-256 (RFC
2104) of both nonces under the key, so a recorded handshake cannot be replayed. Later messages are not encrypted, and
torch.distributed does not authenticate at all. Ranks therefore need a private network.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import msgspec
import trio

from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import VERSION
from trioserve.ranks.messages import FrameReader, RankPlace, Report, decode_report, framed
from trioserve.ranks.stage_sockets import RANK_VANISHED_SECONDS, make_blocking
from trioserve.trio_tools.connection_limit import ConnectionLimit, Place, remote_address
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.tcp_stream import connect_tcp

__all__ = [
    "KILLED",
    "Challenge",
    "Connection",
    "Hello",
    "Process",
    "RankLink",
    "RankProcess",
    "SocketConnection",
    "Verdict",
    "answered",
    "challenge",
    "connect_rank",
    "is_server",
    "verdict",
    "wait_for_ranks",
]

logger = logging.getLogger(__name__)


KILLED = "was killed"  # A killed rank is always the cause of a failure. Other ranks may end because they lost a rank.
RECEIVE_BYTES = 1 << 16
# Longest wait for the end of a process after the end of its connection. A process closes its files before it ends.
EXIT_SECONDS_MAX = 0.05
# Longest wait for the end of a process after SIGKILL. A GPU driver may need time to free memory.
REAP_SECONDS_MAX = 5.0


class Connection(Protocol):
    """A byte stream between the server and a rank."""

    @property
    def peer_host(self) -> str:
        """Address of the machine of a rank that connected from another machine."""
        ...

    async def wait_readable(self) -> None: ...
    async def wait_writable(self) -> None: ...

    def receive(self, byte_count_max: int) -> bytes:
        """Return the bytes that have arrived, or no bytes at the end of the stream.

        Args:
            byte_count_max: most bytes to return.

        Raises:
            BlockingIOError: nothing has arrived yet.
            OSError: the connection is lost.
        """
        ...

    def send(self, content: bytes | bytearray) -> int:
        """Send without waiting, and return the number of bytes that the kernel accepted.

        Args:
            content: bytes to send.

        Raises:
            BlockingIOError: the send buffer is full.
            OSError: the connection is lost.
        """
        ...

    def close(self) -> None: ...


class Process(Protocol):
    """Interface of the process of a rank on this machine. RankProcess implements it."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    async def exited(self) -> None: ...
    def how_ended(self) -> str | None: ...
    def close(self) -> None: ...


@uninterrupted
class SocketConnection:
    """A Connection on a socket.

    Args:
        socket: a connected socket, which this object owns and closes.
    """

    def __init__(self, socket: socket.socket) -> None:
        socket.setblocking(False)
        self._socket = socket
        self.peer_host = _peer(socket)

    async def wait_readable(self) -> None:
        await trio.lowlevel.wait_readable(self._socket)

    async def wait_writable(self) -> None:
        await trio.lowlevel.wait_writable(self._socket)

    def receive(self, byte_count_max: int) -> bytes:
        return self._socket.recv(byte_count_max)

    def send(self, content: bytes | bytearray) -> int:
        return self._socket.send(content)

    def close(self) -> None:
        trio.lowlevel.notify_closing(self._socket)
        self._socket.close()


@uninterrupted
class RankProcess:
    """A child process that computes one rank.

    The calling thread must be the thread of the event loop, because the kernel kills the child process when the thread
    that started it ends (see rank_process).

    Args:
        connection: the child's socket of the connection. This object closes its copy after the start.
        place: place of the rank, passed on the command line.
    """

    def __init__(self, connection: socket.socket, place: RankPlace) -> None:
        others = (place.memory, place.kv_memory, place.before, place.behind)
        place_json = msgspec.json.encode(place).decode()
        with connection:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trioserve.ranks.rank_process", str(connection.fileno()), place_json],
                pass_fds=(connection.fileno(), *(other for other in others if other is not None)),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal must interrupt only the server.
            )
        self._exit_file = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        self._process.kill()

    async def exited(self) -> None:
        """Wait until the process has ended."""
        await trio.lowlevel.wait_readable(self._exit_file)

    def how_ended(self) -> str | None:
        """Return how the process ended, such as "ended with code 1". None while the process runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"{KILLED} by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"

    def close(self) -> None:
        """Kill the process and wait until it has ended. A second call does nothing."""
        if self._exit_file < 0:
            return
        self.kill()
        # This wait blocks the thread, because the process must have ended in every case when the scope ends. After
        # SIGKILL, a process usually ends within milliseconds.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_SECONDS_MAX)
        os.close(self._exit_file)
        self._exit_file = -1


@uninterrupted
class RankLink:
    """The connection to one rank, and the process of the rank if it runs on this machine.

    Args:
        rank: number of the rank.
        connection: connection to the rank. This object owns and closes it.
        on_report: called with the rank and each report.
        on_end: called once when the connection has ended, with the rank and how the rank ended.
        process: the rank's process. None if the rank runs on another machine.
    """

    def __init__(
        self,
        rank: int,
        connection: Connection,
        on_report: Callable[[int, Report], None],
        on_end: Callable[[int, str], None],
        process: Process | None = None,
    ) -> None:
        self.rank = rank
        self.process = process
        self.host = connection.peer_host
        """Address of the machine of a rank that connected from another machine."""
        self._connection = connection
        self._on_report, self._on_end = on_report, on_end
        self._unsent = bytearray()
        self._has_unsent = trio.Event()

    def __str__(self) -> str:
        place = f"process {self.process.pid}" if self.process is not None else f"on {self.host}"
        return f"rank {self.rank} ({place})"

    def send(self, message: bytes) -> None:
        """Send a message without waiting. Bytes that the kernel does not accept are sent later, in order.

        The number of unsent bytes has no limit. A rank that reads nothing also answers nothing, so RankGroup.watch
        breaks the group.

        Args:
            message: one encoded order.
        """
        frame = framed(message)
        if self._unsent:
            self._unsent += frame
            return
        sent = self._sent(frame)
        if sent < len(frame):
            self._unsent += memoryview(frame)[sent:]
            self._has_unsent.set()

    async def run(self) -> None:
        """Receive reports and send kept bytes until the connection ends, then call on_end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_rest)
            how = await self._receive()
            nursery.cancel_scope.cancel()
        if self.process is not None:
            with trio.move_on_after(EXIT_SECONDS_MAX):
                await self.process.exited()
            how = self.process.how_ended() or how
        self._on_end(self.rank, how)

    async def _receive(self) -> str:
        reader = FrameReader()
        while True:
            await self._connection.wait_readable()
            try:
                received = self._connection.receive(RECEIVE_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                return f"cannot be reached any more ({error.strerror})"
            if not received:
                return "has closed its connection"
            try:
                for message in reader.feed(received):
                    self._on_report(self.rank, decode_report(message))
            except (ValueError, msgspec.MsgspecError) as error:
                return f"sent an invalid message ({error})"

    async def _send_rest(self) -> None:
        while True:
            if not self._unsent:
                self._has_unsent = trio.Event()
                await self._has_unsent.wait()
            await self._connection.wait_writable()
            sent = self._sent(self._unsent)
            del self._unsent[:sent]

    def _sent(self, content: bytes | bytearray) -> int:
        try:
            return self._connection.send(content)
        except BlockingIOError:
            return 0
        except OSError:
            return len(content)  # The connection is lost. `_receive` notices the loss and reports it.

    def close(self) -> None:
        """Close the connection, which ends a rank on another machine, and kill a process on this machine."""
        self._connection.close()
        if self.process is not None:
            self.process.close()


def _peer(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except (OSError, IndexError):  # The socket is already closed, or has no address.
        return "another machine"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


NONCE_BYTES = 32
RANK_MAX = 2**31 - 1


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The first message of a handshake, sent by the server."""

    nonce: bytes
    version: str = VERSION


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The second message of a handshake: the rank's reply to the challenge."""

    rank: int
    nonce: bytes
    proof: bytes
    version: str = VERSION


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """The last message of a handshake: the server accepts or refuses the rank.

    Attributes:
        proof: proof that the server knows the key.
        refused: why the rank is refused. None if the rank is accepted.
    """

    proof: bytes = b""
    refused: str | None = None


def challenge() -> Challenge:
    return Challenge(secrets.token_bytes(NONCE_BYTES))


def answered(asked: Challenge, rank: int, key: str) -> Hello:
    """Return the rank's reply to a challenge.

    Args:
        asked: the server's challenge.
        rank: number of the rank.
        key: the shared key, `--ranks-key`.

    Raises:
        StartupError: the server has another version, so later messages could not be decoded.
    """
    if asked.version != VERSION:
        raise StartupError(
            f"the server is trioserve {asked.version}, and this is {VERSION}: all machines need the same version"
        )
    nonce = secrets.token_bytes(NONCE_BYTES)
    return Hello(rank, nonce, _proof(b"rank", key, asked.nonce, nonce, rank))


def verdict(asked: Challenge, hello: Hello, key: str) -> Verdict:
    """Return the server's decision about a rank. Never raises, because the sender may be a stranger.

    Args:
        asked: the challenge that the server sent.
        hello: the rank's reply to the challenge.
        key: the shared key, `--ranks-key`.
    """
    if not 0 <= hello.rank <= RANK_MAX:
        return Verdict(refused=f"its rank is {hello.rank}, allowed are 0 to {RANK_MAX}")
    if len(hello.nonce) != NONCE_BYTES:
        return Verdict(refused=f"its nonce has {len(hello.nonce)} bytes instead of {NONCE_BYTES}")
    if not hmac.compare_digest(hello.proof, _proof(b"rank", key, asked.nonce, hello.nonce, hello.rank)):
        return Verdict(refused="its key is not the server's: give both the same --ranks-key")
    if hello.version != VERSION:
        return Verdict(refused=f"it is trioserve {hello.version}, and the server is {VERSION}")
    return Verdict(_proof(b"server", key, asked.nonce, hello.nonce, hello.rank))


def is_server(asked: Challenge, hello: Hello, given: Verdict, key: str) -> bool:
    """Return whether the sender of a verdict knows the key.

    Args:
        asked: the challenge that arrived.
        hello: the reply that was sent.
        given: the verdict that arrived.
        key: the shared key, `--ranks-key`.
    """
    return hmac.compare_digest(given.proof, _proof(b"server", key, asked.nonce, hello.nonce, hello.rank))


def _proof(side: bytes, key: str, server_nonce: bytes, rank_nonce: bytes, rank: int) -> bytes:
    # Each field has a fixed length, so that different fields never produce the same bytes.
    message = b"trioserve ranks " + side.ljust(8) + server_nonce[:NONCE_BYTES].ljust(NONCE_BYTES) + rank_nonce
    return hmac.digest(key.encode(), message + rank.to_bytes(8, "little", signed=True), "sha256")


T = TypeVar("T", bound=msgspec.Struct)

HANDSHAKE_SECONDS_MAX = 10.0
# Maximum number of handshakes at a time. A further one ends the oldest handshake of the address with most handshakes.
HANDSHAKES_MAX = 64
HANDSHAKES_OF_ADDRESS_MAX = 32  # All ranks of a machine connect at the same time, from one address.
HANDSHAKE_BYTES_MAX = 4096


async def wait_for_ranks(
    host: str, port: int, ranks: Collection[int], key: str, *, on_wait: Callable[[list[int]], None]
) -> dict[int, socket.socket]:
    """Listen until all ranks of other machines have connected.

    Args:
        host: address or name by which the ranks reach this machine. The server listens only at this address, or at all
            addresses if this is a name.
        port: TCP port to listen at.
        ranks: ranks to wait for.
        key: the shared key, `--ranks-key`.
        on_wait: called with the missing ranks, at the start and after each change.

    Returns:
        A connection to each rank. The caller closes it.

    Raises:
        StartupError: this machine cannot listen at the address.
    """
    found: dict[int, socket.socket] = {}
    strangers = ConnectionLimit(
        connections_max=HANDSHAKES_MAX, strangers_max=HANDSHAKES_MAX, per_address_max=HANDSHAKES_OF_ADDRESS_MAX
    )
    is_complete = trio.Event()

    async def handle(stream: trio.SocketStream, place: Place) -> None:
        """Handle one connection. The function catches every exception that an unknown peer can cause."""
        rank = None
        try:
            with trio.CancelScope() as scope, trio.fail_after(HANDSHAKE_SECONDS_MAX):
                place.may_end_at, place.end = _at_any_time, scope.cancel
                rank = await _handshake(stream, ranks, found, key)
            if scope.cancelled_caught:
                logger.warning("a connection for ranks was closed error=replaced by a newer one during its handshake")
            if rank is not None and rank not in found:
                found[rank] = _detached(stream)
                on_wait([rank for rank in ranks if rank not in found])
                if len(found) == len(ranks):
                    is_complete.set()
        except (trio.TooSlowError, trio.BrokenResourceError, EOFError, ValueError, OSError, RecursionError) as error:
            logger.warning("a connection for ranks was closed error=%s", str(error)[:200] or type(error).__name__)
        except Exception:
            # This error is a bug of the server. It must not end the other connections.
            logger.exception("a connection for ranks failed")
        finally:
            strangers.leave(place)
            stream.socket.close()

    async def accept(listener: trio.SocketListener) -> None:
        while True:
            stream = await strangers.accept(listener)
            place = strangers.enter(remote_address(stream))
            if place is None:  # The address has the maximum number of connections, and all of them are already ending.
                stream.socket.close()
            else:
                nursery.start_soon(handle, stream, place)

    try:
        listeners = await trio.open_tcp_listeners(port, host=host if _is_address(host) else None)
    except OSError as error:
        raise StartupError(
            f"cannot listen for ranks at --master-addr {host}, --master-port {port}: {error.strerror or error}; give "
            "an address of this machine, or a name to listen at all addresses of this machine"
        ) from error
    try:
        async with trio.open_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(accept, listener)
            on_wait(list(ranks))
            await is_complete.wait()
            nursery.cancel_scope.cancel()
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    finally:
        for listener in listeners:
            listener.socket.close()
    return found


def _at_any_time() -> float:
    return 0.0


def _is_address(host: str) -> bool:
    """Return whether a host is an address, not a name.

    A name does not determine where to listen. A new pod cannot resolve its own name yet, Debian's /etc/hosts resolves
    it to 127.0.1.1, and a name may belong to a load balancer.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


async def _handshake(stream: trio.SocketStream, ranks: Collection[int], found: Collection[int], key: str) -> int | None:
    asked = challenge()
    await _send_message(stream, asked)
    hello = await _receive_message(stream, Hello)
    given = verdict(asked, hello, key)
    if given.refused is None and hello.rank not in ranks:
        given = Verdict(refused=f"rank {hello.rank} is not expected from another machine, expected are {list(ranks)}")
    elif given.refused is None and hello.rank in found:
        given = Verdict(refused=f"rank {hello.rank} is connected already")
    await _send_message(stream, given)
    if given.refused is None:
        return hello.rank
    logger.warning("a rank is refused rank=%d reason=%s", hello.rank, given.refused[:200])
    return None


async def connect_rank(host: str, port: int, rank: int, key: str) -> socket.socket:
    """Connect a rank to its server.

    Args:
        host: address of the server.
        port: port of the server.
        rank: number of the rank.
        key: the shared key, `--ranks-key`.

    Returns:
        The connection after the handshake. The caller closes it.

    Raises:
        OSError: the server does not listen yet, or the connection has ended. A retry may help.
        StartupError: the server refuses the rank, has another version, or does not know the key.
    """
    stream = await connect_tcp(host, port, vanished_seconds=RANK_VANISHED_SECONDS)
    try:
        with trio.fail_after(HANDSHAKE_SECONDS_MAX):
            asked = await _receive_message(stream, Challenge)
            hello = answered(asked, rank, key)
            await _send_message(stream, hello)
            given = await _receive_message(stream, Verdict)
    except (trio.TooSlowError, trio.BrokenResourceError, EOFError) as error:
        await trio.aclose_forcefully(stream)
        raise ConnectionError(f"the server at {host}:{port} has not answered") from error
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    if given.refused is not None or not is_server(asked, hello, given, key):
        await trio.aclose_forcefully(stream)
        raise StartupError(
            f"the server at {host}:{port} does not accept rank {rank}: "
            f"{given.refused or 'it does not know the key, so it is another server'}"
        )
    return _detached(stream)


def _detached(stream: trio.SocketStream) -> socket.socket:
    """Detach the socket of a stream from Trio, and make it fail soon after the machine of the peer vanishes."""
    connection = socket.socket(fileno=stream.socket.detach())
    try:
        make_blocking(connection)  # All processes that use the socket share O_NONBLOCK, so it must be cleared.
    except BaseException:
        connection.close()
        raise
    return connection


async def _send_message(stream: trio.SocketStream, message: Any) -> None:
    await stream.send_all(framed(msgspec.msgpack.encode(message)))


async def _receive_message(stream: trio.SocketStream, kind: type[T]) -> T:
    """Receive one message. Reads no byte after the message, because other code reads the rest of the stream.

    Raises:
        EOFError: the stream ended.
        ValueError: the message is too long or has another type.
    """
    (length,) = struct.unpack("<I", await _receive_exactly(stream, 4))
    if length > HANDSHAKE_BYTES_MAX:
        raise ValueError(f"a handshake message announces {length} bytes, {HANDSHAKE_BYTES_MAX} are allowed")
    return msgspec.msgpack.decode(await _receive_exactly(stream, length), type=kind)


async def _receive_exactly(stream: trio.SocketStream, byte_count: int) -> bytes:
    received = b""
    while len(received) < byte_count:
        part = await stream.receive_some(byte_count - len(received))
        if not part:
            raise EOFError("the other side has closed the connection")
        received += part
    return received
