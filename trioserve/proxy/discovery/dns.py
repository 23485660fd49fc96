"""Endpoints from DNS: every address of a name (A, AAAA), or every target of a service (SRV, RFC 2782)."""

from __future__ import annotations

import logging

import dns.asyncresolver
import dns.exception
import dns.resolver
import trio

from trioserve.proxy.discovery.source import EndpointReceiver, EndpointTemplate, report_endpoints

__all__ = ["DnsSource"]

logger = logging.getLogger(__name__)

LOOKUP_SECONDS_MAX = 10.0
# DNS answers have a lifetime (TTL). A lookup before the end of the TTL gives the same answer. A lookup much later keeps
# dead endpoints listed.
AGAIN_SECONDS_MIN = 1.0
AGAIN_SECONDS_MAX = 30.0
FAILED_SECONDS = 5.0


class DnsSource:
    """Source that looks up one name regularly.

    Args:
        name: DNS name. A name that begins with an underscore, such as _http._tcp.llm.example.org, is looked up with SRV
            records. The resolver's search list applies, so the short name of a service is enough in Kubernetes.
        port: Port of the addresses. SRV records have their own ports.
        scheme: "http" or "https".
        template: Makes the configuration of an endpoint from its URL.
        resolver: DNS client, for tests. None: the system's settings.
    """

    def __init__(
        self,
        name: str,
        *,
        port: int = 80,
        scheme: str = "http",
        template: EndpointTemplate,
        resolver: dns.asyncresolver.Resolver | None = None,
    ) -> None:
        self.name = f"dns:{name}"
        self._query = name
        self._port = port
        self._scheme = scheme
        self._template = template
        self._resolver = resolver

    async def run(self, fleet: EndpointReceiver) -> None:
        resolver = self._resolver or dns.asyncresolver.Resolver()
        while True:
            try:
                urls, seconds = await self._look_up(resolver)
            except (dns.exception.DNSException, OSError) as error:
                logger.warning("endpoints kept source=%s: %s", self.name, error)
                seconds = FAILED_SECONDS
            else:
                report_endpoints(fleet, self.name, [self._template(url) for url in sorted(urls)])
            await trio.sleep(min(AGAIN_SECONDS_MAX, max(AGAIN_SECONDS_MIN, seconds)))

    async def _look_up(self, resolver: dns.asyncresolver.Resolver) -> tuple[set[str], float]:
        """Return the URLs, and the lifetime of the DNS answer in seconds."""
        if self._query.startswith("_"):
            answer = await resolver.resolve(self._query, "SRV", search=True, lifetime=LOOKUP_SECONDS_MAX)
            records = [(str(record.target).rstrip("."), record.port) for record in answer]
            assert answer.rrset is not None
            return {f"{self._scheme}://{host}:{port}" for host, port in records}, answer.rrset.ttl
        urls: set[str] = set()
        ttls: list[float] = []
        failure: dns.exception.DNSException | None = None
        for kind in ("A", "AAAA"):
            try:
                answer = await resolver.resolve(self._query, kind, search=True, lifetime=LOOKUP_SECONDS_MAX)
            except dns.resolver.NoAnswer as error:
                failure = error
                continue
            assert answer.rrset is not None
            ttls.append(answer.rrset.ttl)
            for record in answer:
                host = f"[{record.address}]" if kind == "AAAA" else record.address
                urls.add(f"{self._scheme}://{host}:{self._port}")
        if failure is not None and not urls:
            raise failure
        return urls, min(ttls)
