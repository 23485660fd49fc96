"""Every bound of connections and messages, with unit and reason: nothing that a client can make grow is missing here.

What a body may say once it has arrived (how deep it nests, how many values, which ranges) is bounded where it is read:
request_types.py, chat_prompt.py, contracts/sampling.py.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["RESPONSES_BYTES_MAX", "RESPONSE_BYTES_MAX", "FrontendLimits"]

RESPONSE_BYTES_MAX = 128 * 1024 * 1024
"""Default bound of a whole response of the engine's API, estimated from its request. 2,048 vectors of 1,536 numbers are
about 70 MB of JSON, the largest whole response that OpenAI's limits allow."""

KEEP_ALIVE_SECONDS = 15.0
"""A stream is silent for so long at most. Proxies and load balancers close a silent connection after 30 to 60."""
RESPONSES_BYTES_MAX = 1024 * 1024 * 1024
"""Default bound of all whole responses together, as they grow: eight of the largest ones, which with Python's objects
take about 3 GB."""


class FrontendLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client, and all of them together, may make the front end hold, and for how long it waits for them.

    Raises StartupError, naming the limit, when a value is out of range.
    """

    # --- connections ---
    connections_max: int = 1024
    """Open at a time. The next one takes the place of one that is of no use at the moment (idle, or with half a head),
    or waits in the kernel's backlog. `trioserve` lowers it to what the limit of open files allows."""
    connections_per_address_max: int = 1008
    """Of connections_max, from one address that has shown no API key. The rest is for other addresses. Generous, since
    many clients may come through one proxy. Unix sockets have no address and no such bound."""
    unknown_connections_share_max: float = 0.75
    """Of connections_max, for connections on which no API key was shown where keys are asked for: the rest is kept for
    those that have shown one."""
    crowded_idle_seconds_min: float = 1.0
    """Idle for so long, a connection may have to make room for another one; shorter is a pause between two requests."""
    crowded_head_seconds_min: float = 0.5
    """Without a whole request for so long (a TLS handshake, silence, half a head), a connection may have to make room:
    a head is one round trip, and nobody else should wait for a slow one."""
    crowded_exchange_seconds_min: float = 5.0
    """With a request under way for so long, a connection that has shown no API key where keys are asked for may have to
    make room: without a key there are only short responses."""
    exchanges_max: int = 4096
    """Requests under way on all connections together: each is a task, of about 20 KB. Many times what an engine lets
    wait; without it, connections_max times streams_max would be the bound."""
    unknown_exchanges_share_max: float = 0.5
    """Of exchanges_max, for callers who show no API key where keys are asked for: the rest is kept for those who do.
    Half, because without a key there are only short responses: refusals, health, metrics."""
    tls_handshake_seconds_max: float = 10.0
    """A handshake is two round trips; a connection that needs longer is not a client."""
    sniff_seconds_max: float = 10.0
    """Until the first 24 bytes have told HTTP/2 from HTTP/1.1."""
    idle_seconds_max: float = 75.0
    """Without a request under way. Longer than the minute that connection pools and proxies usually keep one."""
    close_seconds_max: float = 1.0
    """For the end of a connection (GOAWAY, a TLS close): these are a courtesy, and leaving must not wait."""

    # --- one request ---
    head_bytes_max: int = 64 * 1024
    """Request line and header fields. Larger than any cookie and token we know of."""
    fields_max: int = 256
    """Header fields of one request, and trailers: each costs us some 5 us, however short it is. Browsers and proxies
    send some 30, and most servers take 100."""
    head_seconds_max: float = 10.0
    """From the first byte of an HTTP/1.1 request, or of an HTTP/2 header block, to its last, however it comes."""
    body_bytes_max: int = 32 * 1024 * 1024
    """A prompt of a million tokens is about 5 MB of text, or 8 MB as a list of numbers."""
    bodies_bytes_max: int = 512 * 1024 * 1024
    """All bodies of requests under way, together; beyond it a body is refused as overload. A connection may carry
    streams_max bodies at a time, so body_bytes_max alone bounds nothing."""
    body_bytes_per_second_min: int = 16 * 1024
    """The pace of a body: six uploads at a time over 1 Mbit/s keep it. A fixed time for the whole would either cut off
    large bodies on slow links, or wait as long for small ones."""
    body_wait_seconds_max: float = 30.0
    """How far a body may fall behind that pace, from the first wait for it on: a silence as long as this ends it, and a
    byte now and then does not help. A link that was lost is back by then, or gone."""
    body_seconds_max: float = 600.0
    """From the first wait for a body to its last byte. At the slowest pace, the largest body would hold its exchange
    and its memory for 35 minutes. Half a Mbit/s is enough to send the largest body in this time."""
    pipelined_bytes_max: int = 64 * 1024
    """HTTP/1.1: read while a response is under way, so that a close is noticed behind it. Beyond this the connection
    ends: a client that sends so much ahead has lost count."""

    # --- one response ---
    stream_buffer_bytes_max: int = 64 * 1024
    """Held for one client that is slower than its response; then `send` waits, and the engine's stream merges
    deltas."""
    socket_buffer_bytes: int = 256 * 1024
    """The kernel's send buffer of a connection (SO_SNDBUF). Left alone it grows to megabytes, and a client that stopped
    reading would go unnoticed for as long."""
    stall_seconds_max: float = 30.0
    """A client that takes nothing for so long is not coming back; what it holds is needed by others. Also how far it
    may fall behind the pace below, while something waits for it."""
    vanished_seconds_max: float = 30.0
    """Until a connection breaks whose client acknowledges nothing, by TCP's keepalive and TCP_USER_TIMEOUT: a machine
    without power or network sends no FIN. Its requests end then, and their blocks are free. As long as
    stall_seconds_max, since both are the time in which a client may come back from a lost link."""
    response_bytes_per_second_min: int = 256
    """The pace of a response: one event of a token a second, slower than anybody reads; streams_max responses at a time
    keep it over half a Mbit/s. Without it, a byte taken now and then would hold an exchange for hours."""

    # --- one HTTP/2 connection ---
    ping_seconds: float = 5.0
    """While streams run, a client that has sent nothing for so long is asked whether it still reads (PING). Some
    clients (httpcore, so httpx and openai with http2=True) forget a stream that its caller leaves early: they send
    neither RST_STREAM nor a close, and read their socket no more. Seldom enough to cost nothing."""
    ping_answer_seconds_max: float = 10.0
    """From the moment in which TCP has delivered the PING; then the connection ends, and its exchanges are cancelled.
    HTTP/2 stacks answer in milliseconds. A program that reads in the same thread in which it uses what it has read
    answers only between two reads, so this is also the longest pause that it may take."""
    streams_max: int = 256
    """Open at a time on one connection (SETTINGS_MAX_CONCURRENT_STREAMS). Each is a task and at most one request."""
    resets_per_second_max: int = 100
    """Streams that a client may open and give up, sustained: each costs a task and a place in the queue (the "rapid
    reset" attack, CVE-2023-44487). Beyond it the connection ends with ENHANCE_YOUR_CALM."""
    resets_burst_max: int = 1024
    """Above the sustained rate: a client that cancels all its streams at once, a few times over, is no attacker."""
    control_frames_per_second_max: int = 1000
    """PING, SETTINGS, PRIORITY, RST_STREAM, unknown frames, DATA in crumbs, and window updates, beyond two for each
    DATA frame we sent: they cost us work and bring nothing."""
    control_frames_burst_max: int = 4096
    """Above the sustained rate."""
    frame_cpu_share_max: float = 0.05
    """Of one core, sustained, that reading one connection's frames may cost beyond what its requests and bodies are
    worth. It is measured, since what a frame costs may depend on what earlier ones have left behind. Beyond it the
    connection ends with ENHANCE_YOUR_CALM."""
    frame_cpu_burst_seconds_max: float = 0.5
    """Above the sustained share: some twenty heads of the largest size at once."""
    control_bytes_max: int = 256 * 1024
    """Answers (PING, SETTINGS, WINDOW_UPDATE) to a client that does not read them."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if not 0 < value < 2**31:
                raise StartupError(f"{field} is {value}, allowed is more than 0 and less than 2**31")
        for field in ("unknown_exchanges_share_max", "unknown_connections_share_max", "frame_cpu_share_max"):
            if getattr(self, field) > 1:
                raise StartupError(f"{field} is {getattr(self, field)}, allowed is more than 0 and at most 1")
        # h11 and h2 need room for at least one ordinary request and one frame.
        for field, least in (("head_bytes_max", 1024), ("stream_buffer_bytes_max", 1024)):
            if getattr(self, field) < least:
                raise StartupError(f"{field} is {getattr(self, field)}, allowed is {least} or more")
