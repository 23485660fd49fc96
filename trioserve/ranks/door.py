"""Where ranks of other machines come to their server."""

from __future__ import annotations

import ipaddress
import logging
import socket
import struct
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec
import trio

from trioserve.contracts.errors import StartupError
from trioserve.ranks.frames import framed
from trioserve.ranks.handshake import Challenge, Hello, Verdict, answered, challenge, is_server, verdict
from trioserve.ranks.stage_meeting import RANK_VANISHED_SECONDS, make_blocking
from trioserve.trio_tools.places import Place, Places, remote_address
from trioserve.trio_tools.tcp_stream import connect_tcp

__all__ = ["connect_rank", "wait_for_ranks"]

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

HANDSHAKE_SECONDS_MAX = 10.0
HANDSHAKES_MAX = 64  # at a time; for another one, the oldest of the address that has most ends
HANDSHAKES_OF_ADDRESS_MAX = 32  # of these: all ranks of a machine come at once
HANDSHAKE_BYTES_MAX = 4096


async def wait_for_ranks(
    host: str, port: int, ranks: Collection[int], key: str, *, on_wait: Callable[[list[int]], None]
) -> dict[int, socket.socket]:
    """Connections of all of these ranks, the caller's to close. host: by what they find this machine; it listens there
    if that is an address of its own, and everywhere if it is a name. on_wait: is told who is still awaited, at first
    and whenever that changes. Raises StartupError if nobody can listen there."""
    found: dict[int, socket.socket] = {}
    strangers = Places(
        places_max=HANDSHAKES_MAX, strangers_max=HANDSHAKES_MAX, per_address_max=HANDSHAKES_OF_ADDRESS_MAX
    )
    is_complete = trio.Event()

    async def greet(stream: trio.SocketStream, place: Place) -> None:
        """Nothing that a stranger sends gets out of here."""
        rank = None
        try:
            with trio.CancelScope() as scope, trio.fail_after(HANDSHAKE_SECONDS_MAX):
                place.may_end_at, place.end = _at_any_time, scope.cancel
                rank = await _greeted(stream, ranks, found, key)
            if scope.cancelled_caught:
                logger.warning("a connection for ranks was given up error=others came before it said who it is")
            if rank is not None and rank not in found:
                found[rank] = _taken_out(stream)
                on_wait([rank for rank in ranks if rank not in found])
                if len(found) == len(ranks):
                    is_complete.set()
        except (trio.TooSlowError, trio.BrokenResourceError, EOFError, ValueError, OSError, RecursionError) as error:
            logger.warning("a connection for ranks was given up error=%s", str(error)[:200] or type(error).__name__)
        except Exception:
            logger.exception("a connection for ranks failed")  # a fault of ours, and one connection's alone
        finally:
            strangers.leave(place)
            stream.socket.close()

    async def accept(listener: trio.SocketListener) -> None:
        while True:
            stream = await strangers.accept(listener)
            place = strangers.enter(remote_address(stream))
            if place is None:  # the others of its address are ending
                stream.socket.close()
            else:
                nursery.start_soon(greet, stream, place)

    try:
        listeners = await trio.open_tcp_listeners(port, host=host if _is_address(host) else None)
    except OSError as error:
        raise StartupError(
            f"nobody can listen for ranks at --master-addr {host}, --master-port {port}: {error.strerror or error}; an "
            "address has to be this machine's, and with a name it listens at all that this machine has"
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
    """Or a name, which says nothing of where to listen: in a new pod it is not known yet, Debian's /etc/hosts makes it
    127.0.1.1, and it may be that of something which passes connections on."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


async def _greeted(stream: trio.SocketStream, ranks: Collection[int], found: Collection[int], key: str) -> int | None:
    asked = challenge()
    await _say(stream, asked)
    hello = await _heard(stream, Hello)
    given = verdict(asked, hello, key)
    if given.refused is None and hello.rank not in ranks:
        given = Verdict(refused=f"rank {hello.rank} is none of those that are awaited from elsewhere: {list(ranks)}")
    elif given.refused is None and hello.rank in found:
        given = Verdict(refused=f"rank {hello.rank} is there already")
    await _say(stream, given)
    if given.refused is None:
        return hello.rank
    logger.warning("a rank is refused rank=%d reason=%s", hello.rank, given.refused[:200])
    return None


async def connect_rank(host: str, port: int, rank: int, key: str) -> socket.socket:
    """A connection of this rank to its server, the caller's to close. Raises OSError if nobody listens there yet, or
    the connection ends, and StartupError if the two do not suit each other."""
    stream = await connect_tcp(host, port, vanished_seconds=RANK_VANISHED_SECONDS)
    try:
        with trio.fail_after(HANDSHAKE_SECONDS_MAX):
            asked = await _heard(stream, Challenge)
            hello = answered(asked, rank, key)
            await _say(stream, hello)
            given = await _heard(stream, Verdict)
    except (trio.TooSlowError, trio.BrokenResourceError, EOFError) as error:
        await trio.aclose_forcefully(stream)
        raise ConnectionError(f"the server at {host}:{port} has not answered") from error
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    if given.refused is not None or not is_server(asked, hello, given, key):
        await trio.aclose_forcefully(stream)
        raise StartupError(
            f"the server at {host}:{port} does not take rank {rank}: "
            f"{given.refused or 'it does not know the key, so it is somebody else'}"
        )
    return _taken_out(stream)


def _taken_out(stream: trio.SocketStream) -> socket.socket:
    """The connection, without Trio, with what shows that the other side is gone."""
    connection = socket.socket(fileno=stream.socket.detach())
    try:
        make_blocking(connection)  # whichever process has it
    except BaseException:
        connection.close()
        raise
    return connection


async def _say(stream: trio.SocketStream, message: Any) -> None:
    await stream.send_all(framed(msgspec.msgpack.encode(message)))


async def _heard(stream: trio.SocketStream, kind: type[T]) -> T:
    """One message and no byte more: what follows is for somebody else. Raises EOFError and ValueError."""
    (length,) = struct.unpack("<I", await _exactly(stream, 4))
    if length > HANDSHAKE_BYTES_MAX:
        raise ValueError(f"a greeting is to have {length} bytes")
    return msgspec.msgpack.decode(await _exactly(stream, length), type=kind)


async def _exactly(stream: trio.SocketStream, byte_count: int) -> bytes:
    received = b""
    while len(received) < byte_count:
        part = await stream.receive_some(byte_count - len(received))
        if not part:
            raise EOFError("the other side has closed the connection")
        received += part
    return received
