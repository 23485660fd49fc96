"""All limits of connections and messages, with unit and reason.

If a client can make a value of the front end grow, the value has a limit here. Limits on the content of a body (nesting
depth, number of values, ranges) are in other modules: request_types.py, chat_prompt.py, contracts/sampling.py.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["RESPONSES_BYTES_MAX", "RESPONSE_BYTES_MAX", "FrontendLimits"]

RESPONSE_BYTES_MAX = 128 * 1024 * 1024
"""Default limit of a whole response of the engine's API, estimated from its request. The largest whole response that
OpenAI's limits allow is 2,048 vectors of 1,536 numbers: about 70 MB of JSON."""

KEEP_ALIVE_SECONDS = 15.0
"""The longest silence of a stream. Proxies and load balancers close a silent connection after 30 to 60 seconds."""
RESPONSES_BYTES_MAX = 1024 * 1024 * 1024
"""Default limit of all whole responses together, while they are built: eight of the largest responses. With Python's
objects these take about 3 GB.
"""


class FrontendLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the memory that the front end holds for clients, and on the time that it waits for them.

    Raises:
        StartupError: a value is out of range. The message names the limit.
    """

    # --- connections ---
    connections_max: int = 1024
    """Maximum number of open connections. The next connection replaces a connection that is unused at the moment (idle,
    or with an incomplete head). If there is none, the next connection waits in the kernel's backlog. `trioserve` lowers
    this limit to fit the limit of open files.
    """
    connections_per_address_max: int = 1008
    """Maximum number of connections from one address on which no API key was shown. The rest of connections_max is for
    other addresses. The default is high because many clients may share one proxy. Connections to a Unix socket have no
    address, so this limit does not apply.
    """
    unknown_connections_share_max: float = 0.75
    """Share of connections_max for connections on which no API key was shown, if the server requires keys. The rest is
    reserved for connections that have shown a key."""
    crowded_idle_seconds_min: float = 1.0
    """Idle seconds after which a connection may be closed to accept another connection. A shorter silence is only a
    pause between two requests.
    """
    crowded_head_seconds_min: float = 0.5
    """Seconds without a whole request head (TLS handshake, silence, incomplete head) after which a connection may be
    closed to accept another connection. A head takes one round trip, and other clients should not wait for a slow head.
    """
    crowded_exchange_seconds_min: float = 5.0
    """Seconds of a running request after which a connection without an API key may be closed to accept another
    connection, if the server requires keys. Responses to callers without a key are short.
    """
    exchanges_max: int = 4096
    """Maximum number of running requests of all connections together. Each request is a task of about 20 KB. A
    websocket counts only while one of its responses runs. The
    default is many times the queue of an engine. Without this limit, connections_max times streams_max requests could
    run.
    """
    unknown_exchanges_share_max: float = 0.5
    """Share of exchanges_max for callers without an API key, if the server requires keys. The rest is reserved for
    callers with a key. Half is enough: responses without a key are short (refusals, health, metrics)."""
    tls_handshake_seconds_max: float = 10.0
    """Time for the TLS handshake. The handshake takes two round trips, and a real client needs no longer than this
    limit.
    """
    sniff_seconds_max: float = 10.0
    """Time until the first 24 bytes have arrived, which distinguish HTTP/2 from HTTP/1.1."""
    idle_seconds_max: float = 75.0
    """Time without a running request. Connection pools and proxies usually close an idle connection after a minute, so
    they close a connection before the server does.
    """
    close_seconds_max: float = 1.0
    """Time for the end of a connection (GOAWAY, TLS close). The end is a courtesy, which must not delay a shutdown."""

    # --- one request ---
    head_bytes_max: int = 64 * 1024
    """Maximum size of the request line and the header fields together. No known cookie or token is larger."""
    fields_max: int = 256
    """Maximum number of header fields of one request, and of trailers. Each field costs about 5 us, even if it is
    short. Browsers and proxies send about 30, and most servers accept 100.
    """
    head_seconds_max: float = 10.0
    """Time from the first to the last byte of an HTTP/1.1 request head or an HTTP/2 header block. Bytes that arrive do
    not extend this time.
    """
    body_bytes_max: int = 32 * 1024 * 1024
    """Maximum size of one request body. A prompt of a million tokens is about 5 MB as text, or 8 MB as a list of
    numbers.
    """
    bodies_bytes_max: int = 512 * 1024 * 1024
    """Maximum size of the bodies of all running requests together. Beyond this limit, a body is refused as overload.
    The limit is needed in addition to body_bytes_max, because one connection may carry streams_max bodies at a time.
    """
    body_bytes_per_second_min: int = 16 * 1024
    """Minimum rate of a body. Six parallel uploads over 1 Mbit/s still reach this rate. A fixed time instead would
    interrupt large bodies on slow links, or wait too long for small bodies.
    """
    body_wait_seconds_max: float = 30.0
    """Longest time by which a body may be later than the minimum rate allows, measured from the first wait for the
    body. A silence of this length ends the body. A byte now and then does not prevent this. A lost network link usually
    recovers within this time, or never.
    """
    body_seconds_max: float = 600.0
    """Time from the first wait for a body to its last byte. Without this limit, the largest body at the minimum rate
    would keep its exchange and its memory for 35 minutes. 0.5 Mbit/s is enough for the largest body in this time.
    """
    pipelined_bytes_max: int = 64 * 1024
    """HTTP/1.1: maximum number of bytes of later requests that are read during a response, so that a close after these
    bytes is noticed. A client that sends more is broken, and the connection ends.
    """

    # --- one response ---
    stream_buffer_bytes_max: int = 64 * 1024
    """Maximum number of unsent bytes for one client that reads slower than its handler sends. Beyond this limit, `send`
    waits, and the engine's stream merges deltas.
    """
    socket_buffer_bytes: int = 256 * 1024
    """The kernel's send buffer of a connection (SO_SNDBUF). By default it grows to megabytes, which would hide a client
    that has stopped reading."""
    stall_seconds_max: float = 30.0
    """Time without reading after which a client fails, so that other requests get its blocks. Also the longest time by
    which a client may be later than response_bytes_per_second_min allows, while bytes wait for it.
    """
    vanished_seconds_max: float = 30.0
    """Time without any acknowledgement after which TCP breaks a connection (keepalive and TCP_USER_TIMEOUT), because a
    machine that lost power or network sends no FIN. Then the requests of the connection end and their blocks are free.
    The default equals stall_seconds_max: both limits wait for a network link to recover.
    """
    response_bytes_per_second_min: int = 256
    """Minimum rate at which a client reads a response: about one token event per second, slower than people read. Over
    0.5 Mbit/s, streams_max parallel responses still reach this rate. Without this limit, a client that reads a byte now
    and then would keep an exchange open for hours.
    """

    # --- one websocket ---
    websocket_message_bytes_max: int = 32 * 1024 * 1024
    """Maximum size of one message from the client: the same as body_bytes_max, because a message carries what a request
    body carries. permessage-deflate is off, so a message cannot grow after it has arrived.
    """
    websocket_unread_bytes_max: int = 32 * 1024 * 1024
    """Maximum size of the messages that wait for the handler. A single message may always wait. Each message counts 128
    bytes more than its content. The server reads ahead of the handler to notice that the client leaves. A client that
    sends more loses its connection.
    """
    websocket_fragments_max: int = 4096
    """Maximum number of fragments of one message. Each frame costs about 15 us, even if it is empty. Clients that split
    messages send 8 KB or more in one fragment, so this number is enough for the largest message.
    """
    websocket_control_frames_per_second_max: int = 20
    """Frames without content per second that a client may send, sustained: pings, pongs and empty frames. Each ping
    costs a reply. Clients send one ping in some seconds.
    """
    websocket_control_frames_burst_max: int = 200
    """Frames without content above the sustained rate, such as those that a lost network link has delayed."""
    websocket_ping_seconds: float = 20.0
    """Silence of a client after which it gets a ping. Proxies close a silent connection after 30 to 60 seconds (nginx:
    60). A ping and its reply cost about 0.1 ms.
    """
    websocket_pong_seconds_max: float = 20.0
    """Time to answer a ping with any byte. After that, the websocket ends and its handler is cancelled. Clients in one
    thread answer only between two steps of their own work, so this is also the longest pause of such a client.
    """
    websocket_idle_seconds_max: float = 1800.0
    """Time without a message in either direction after which the server closes a websocket. An agent may wait half an
    hour for a tool, such as a test run or the approval of a person. Pings do not count, because every client library
    answers them without its user.
    """
    websockets_max: int = 8192
    """Maximum number of open websockets of all connections together. They do not count as running requests, because
    most of them wait for their agents. An idle websocket takes about 30 KB.
    """
    websockets_per_caller_max: int = 512
    """Maximum number of open websockets of one API key, or of one address if the server requires no keys or the caller
    has shown none. Half of connections_max, so that one caller cannot occupy all connections for hours. Connections to
    a Unix socket have no address, so without a key the limit does not apply to them.
    """

    # --- one HTTP/2 connection ---
    ping_seconds: float = 5.0
    """Silence of a client with running streams after which it gets a PING. Some clients (httpcore, so httpx and openai
    with http2=True) forget a stream that their caller leaves early. These clients send neither RST_STREAM nor a close,
    and no longer read their socket. At this interval, PINGs have no measurable cost.
    """
    ping_answer_seconds_max: float = 10.0
    """Time to answer a PING after TCP has delivered it. After that, the connection ends and its exchanges are
    cancelled. HTTP/2 stacks answer in milliseconds. A client that reads and processes events in one thread answers only
    between two reads, so this is also the longest pause of such a client."""
    streams_max: int = 256
    """Maximum number of open streams of one connection (SETTINGS_MAX_CONCURRENT_STREAMS). Each stream is a task and at
    most one request.
    """
    resets_per_second_max: int = 100
    """Streams per second that a client may open and reset, sustained. Each such stream costs a task and a position in
    the queue (the "rapid reset" attack, CVE-2023-44487). Beyond this limit, the connection ends with ENHANCE_YOUR_CALM.
    """
    resets_burst_max: int = 1024
    """Resets above the sustained rate. A client that cancels all of its streams a few times is not an attacker."""
    control_frames_per_second_max: int = 1000
    """Frames per second that cost time but carry no content: PING, SETTINGS, PRIORITY, RST_STREAM, unknown frames, DATA
    of a few bytes, and window updates. For each DATA frame that we sent, two window updates do not count.
    """
    control_frames_burst_max: int = 4096
    """Control frames above the sustained rate."""
    frame_cpu_share_max: float = 0.05
    """Sustained share of one core for reading the frames of one connection, without the normal cost of its requests and
    bodies. The cost is measured, because it may depend on the state after earlier frames. Beyond this limit, the
    connection ends with ENHANCE_YOUR_CALM.
    """
    frame_cpu_burst_seconds_max: float = 0.5
    """CPU seconds above the sustained share: about twenty heads of the largest size at once."""
    control_bytes_max: int = 256 * 1024
    """Maximum size of unsent replies to control frames (PING, SETTINGS, WINDOW_UPDATE), for a client that does not read
    the replies.
    """

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if not 0 < value < 2**31:
                raise StartupError(f"{field} is {value}, allowed is more than 0 and less than 2**31")
        for field in ("unknown_exchanges_share_max", "unknown_connections_share_max", "frame_cpu_share_max"):
            if getattr(self, field) > 1:
                raise StartupError(f"{field} is {getattr(self, field)}, allowed is more than 0 and at most 1")
        # h11 and h2 need memory for at least one ordinary request and one frame.
        for field, least in (("head_bytes_max", 1024), ("stream_buffer_bytes_max", 1024)):
            if getattr(self, field) < least:
                raise StartupError(f"{field} is {getattr(self, field)}, allowed is {least} or more")
