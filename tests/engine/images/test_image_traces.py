"""Tests of the spans, step times and metrics of image requests."""

from __future__ import annotations

from trioserve.contracts.image_generation import ImageParams
from trioserve.contracts.tracing import NO_SPAN, Span, Tracer
from trioserve.engine.lifecycle.step_times import step_trace
from trioserve.testing.fake_image_engine import open_fake_image_engine


class NotedSpan(Span):
    """A span that records its calls."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name = name
        self.lines = lines
        self.attributes: dict[str, object] = {}

    is_recording = True

    def event(self, name, attributes=None) -> None:
        self.lines.append(f"{name} {dict(attributes)}" if attributes else name)

    def note(self, attributes) -> None:
        self.attributes.update(attributes)

    def child(self, name, *, kind="internal", attributes=None) -> Span:
        return NO_SPAN

    def end(self, error=None) -> None:
        self.lines.append(f"end {error}")


class NotedTracer(Tracer):
    def __init__(self) -> None:
        self.spans: list[NotedSpan] = []

    def begin(self, name, *, parent=None, traceparent=None, attributes=None, **rest) -> Span:
        span = NotedSpan(name, [])
        span.note(attributes or {})
        self.spans.append(span)
        return span


async def test_span_records_the_stages_of_an_image_request(autojump_clock):
    async with open_fake_image_engine(paused=True) as fake:
        fake.tracer = NotedTracer()
        async with fake.generate_image("a secret", ImageParams(steps=3, n=2, partial_images=1), request_id="r"):
            await fake.step(5)
        (span,) = fake.tracer.spans
        assert span.name == "generate_content fake"
        assert span.lines == ["queue", "wait", "denoise", "first_picture", "free", "end None"]
        assert span.attributes["gen_ai.request.choice.count"] == 2
        assert span.attributes["gen_ai.response.finish_reasons"] == ["stop", "stop"]
        assert span.attributes["trioserve.image.steps"] == 3
        assert "secret" not in str(span.attributes)


async def test_span_of_a_request_that_leaves_ends_when_its_slot_is_free(autojump_clock):
    async with open_fake_image_engine(paused=True) as fake:
        fake.tracer = NotedTracer()
        stream = fake.generate_image("a cat")
        async with stream:
            await fake.step(2)
            (span,) = fake.tracer.spans
            step = fake.held_step()
            await step.__aenter__()
        assert span.lines == ["queue", "wait", "denoise", "cancel {'reason': 'abort'}"]
        await step.__aexit__(None, None, None)
        assert span.lines[-2:] == ["free", "end None"]


async def test_step_times_record_phase_and_work_of_image_steps(autojump_clock):
    async with open_fake_image_engine(step_seconds=0.5) as fake:
        await fake.generate_image("a cat", ImageParams(steps=2, n=2, guidance=3.0))
        steps = list(fake.step_times.latest())
        assert [(step.phase, step.sequence_count, step.work_count) for step in steps] == [
            ("encode", 2, 2),
            ("denoise", 2, 4),
            ("denoise", 2, 4),
            ("decode", 2, 2),
        ]
        assert [step.forward_seconds for step in steps] == [0.5] * 4
        assert b'"phase":"denoise"' in step_trace(steps)


async def test_images_and_steps_are_counted(autojump_clock):
    async with open_fake_image_engine(step_seconds=1, max_num_seqs=2) as fake:
        await fake.generate_image("a cat", ImageParams(steps=3, n=3, partial_images=2))
        page = fake.metrics.expose().decode()

        def value(name: str, labels: str = "") -> float:
            start = f"trioserve:{name}{{"
            (line,) = [line for line in page.splitlines() if line.startswith(start) and labels in line]
            return float(line.rpartition(" ")[2])

        assert value("images_total") == 3
        assert value("denoising_steps_total") == 9
        assert value("latent_slots", 'state="free"') == 2
        assert value("latent_slots", 'state="used"') == 0
        assert value("request_success_total", 'finished_reason="stop"') == 3
        assert value("e2e_request_latency_seconds_count") == 3
        assert value("time_to_first_picture_seconds_count") == 3
        assert value("step_work_sum", 'phase="denoise"') == 9
        # Two images are encoded and denoised once, which gives the first partial results.
        # The third image gets a slot after one of the others has ended.
        assert 2.0 + 2.0 < value("time_to_first_picture_seconds_sum") < value("e2e_request_latency_seconds_sum")
