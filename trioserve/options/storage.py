"""Options of objects that outlive a request: stored responses, background responses, connections,
batches and detached streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from trioserve.api.limits import (
    ROUTER_GRACE,
    BackgroundSettings,
    BatchSettings,
    ConnectionSettings,
    DetachSettings,
)
from trioserve.options.option import about
from trioserve.store.settings import StoreSettings

__all__ = ["ConnectionOptions", "StorageOptions"]


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """Options of websocket connections of the Responses API, at servers with an engine and at routers."""

    # fmt: off
    responses_connection_timeout: Annotated[float, about(
        "highest age of a websocket connection of the Responses API in seconds; clients then open a new one",
        "SECONDS", gt=0, le=86400)] = ConnectionSettings().seconds_max
    responses_connection_max_bytes: Annotated[int, about(
        "highest size of the responses that all such connections keep in memory, at most 16 MiB of them for one "
        "connection; above it, the largest connection loses its oldest responses",
        "BYTES", ge=0)] = ConnectionSettings().all_kept_bytes_max
    # fmt: on

    def connection_settings(self) -> ConnectionSettings:
        """Return the limits of websocket connections of the Responses API."""
        return ConnectionSettings(
            seconds_max=self.responses_connection_timeout, all_kept_bytes_max=self.responses_connection_max_bytes
        )


@dataclass(frozen=True, kw_only=True)
class StorageOptions(ConnectionOptions):
    """Options of data and streams that outlive a request."""

    # fmt: off
    data_dir: Annotated[str | None, about(
        "directory for data that outlives a request, such as stored responses; the data survives a restart; default: "
        "in memory", "DIR")] = None
    store_max_bytes: Annotated[int, about(
        "highest size of the stored data; above it, the oldest responses of the largest user are deleted, and data for "
        "which nothing can be deleted is refused with 507", "BYTES", ge=65536)] = StoreSettings().bytes_max
    store_max_objects: Annotated[int, about(
        "highest number of stored responses, files and other objects; above it, objects are deleted as for "
        "--store-max-bytes", "N", ge=1)] = StoreSettings().objects_max
    store_ttl: Annotated[float, about(
        "seconds that a response is stored", "SECONDS", gt=0, le=3.2e9)] = StoreSettings().seconds_max
    max_background_responses: Annotated[int, about(
        "background responses at a time, at most half of them of one caller; further ones are refused with 429",
        "N", ge=0)] = BackgroundSettings().responses_max
    background_timeout: Annotated[float, about(
        "longest time of a background response in seconds",
        "SECONDS", gt=0, le=86400)] = BackgroundSettings().seconds_max
    max_batches: Annotated[int, about(
        "unfinished batches at a time, at most a quarter of them of one caller; further ones are refused with 429",
        "N", ge=0)] = BatchSettings().batches_max
    batch_concurrency: Annotated[int, about(
        "requests of batches that run at a time; at most half of --max-num-seqs",
        "N", ge=1, le=1024)] = BatchSettings().lines_at_once
    detach_timeout_max: Annotated[float, about(
        "highest X-Detach-Timeout in seconds: how long a streamed response continues after its client has left, if the "
        "request sends X-Session-Id and X-Detach-Timeout; 0: no response continues",
        "SECONDS", ge=0, le=86400)] = DetachSettings().seconds_max
    max_detached_streams: Annotated[int, about(
        "streams at a time that may continue without their client, at most half of them of one caller; further ones "
        "are refused with 429", "N", ge=1)] = DetachSettings().streams_max
    router_grace: Annotated[float, about(
        "seconds that a stream continues after its router has died, so that another router can take it over; only for "
        "routers with --router-peers; 0: the stream ends at once", "SECONDS", ge=0, le=60)] = ROUTER_GRACE.seconds_max
    max_router_streams: Annotated[int, about(
        "streams of such routers at a time that can be taken over; further streams end with their router",
        "N", ge=1, le=4096)] = ROUTER_GRACE.streams_max
    # fmt: on

    def store_settings(self) -> StoreSettings:
        """Return the limits of the store."""
        return StoreSettings(
            bytes_max=self.store_max_bytes, objects_max=self.store_max_objects, seconds_max=self.store_ttl
        )

    def background_settings(self) -> BackgroundSettings:
        """Return the limits of background responses."""
        count = self.max_background_responses
        return BackgroundSettings(
            responses_max=count, responses_of_one_max=(count + 1) // 2, seconds_max=self.background_timeout
        )

    def batch_settings(self) -> BatchSettings:
        """Return the limits of batches."""
        count = self.max_batches
        return BatchSettings(
            batches_max=count, batches_of_one_max=(count + 3) // 4, lines_at_once=self.batch_concurrency
        )

    def router_grace_settings(self) -> DetachSettings:
        """Return the limits of streams whose router has failed."""
        count = self.max_router_streams
        return DetachSettings(seconds_max=self.router_grace, streams_max=count, streams_of_one_max=count)

    def detach_settings(self) -> DetachSettings:
        """Return the limits of detached streams, which continue after their client has disconnected."""
        count = self.max_detached_streams
        return DetachSettings(
            seconds_max=self.detach_timeout_max, streams_max=count, streams_of_one_max=(count + 1) // 2
        )
