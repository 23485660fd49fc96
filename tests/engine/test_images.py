"""Tests of images in chats: their tokens and blocks in the core, the ownership of their embeddings, and cancelled
requests.
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
import trio.lowlevel
from PIL import Image
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.errors import ContextTooLong, EngineFault, InvalidRequest
from trioserve.contracts.events import AbortOutcome
from trioserve.contracts.media import ImageLimits
from trioserve.contracts.pooling import PoolingParams
from trioserve.contracts.prompt import ChatPrompt, Cut
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import FakeEngine, InjectedFault, open_fake_engine
from trioserve.testing.fake_image_encoder import FAKE_IMAGES, FAKE_TILE_BYTES
from trioserve.testing.invariants import check_core

IMAGE_BYTES = 5 * FAKE_TILE_BYTES  # This is a square image.
TEN = SamplingParams(max_tokens=10, ignore_eos=True, temperature=0.0)
SIXTY = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
FOUR = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)


def png(colour: int = 0, size: tuple[int, int] = (16, 16)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (colour, 40, 200 - colour)).save(file, "PNG")
    return file.getvalue()


def chat(*images: bytes, text: str = "What?", before: str = "") -> ChatPrompt:
    parts: list[dict[str, Any]] = [{"type": "text", "text": before}] if before else []
    parts += [{"type": "image", "image": image} for image in images]
    return ChatPrompt(messages=[{"role": "user", "content": [*parts, {"type": "text", "text": text}]}])


@asynccontextmanager
async def seeing(**options: Any) -> AsyncIterator[FakeEngine]:
    options = {"image_limits": ImageLimits(), "block_count": 512, "max_model_len": 1024, **options}
    async with open_fake_engine(**options) as fake:
        yield fake
        await wait_all_tasks_blocked()
        fake.assert_all_free()


async def said(fake: FakeEngine, prompt: ChatPrompt, sampling: SamplingParams = TEN, **options: Any) -> str:
    async with fake.generate(prompt, sampling, **options) as stream:
        return "".join([delta.text async for delta in stream])


async def cached(fake: FakeEngine, prompt: ChatPrompt) -> int:
    async with fake.generate(prompt, TEN) as stream:
        async for _ in stream:
            pass
        return stream.cached_token_count


async def test_image_changes_the_response_and_its_tokens_are_counted() -> None:
    async with seeing() as fake:
        texts = [await said(fake, chat(png(colour))) for colour in (0, 100, 0)]
        assert texts[0] == texts[2] != texts[1]
        async with fake.generate(chat(png()), TEN) as stream:
            count = stream.prompt_token_count
            async for _ in stream:
                pass
        assert count == len(await fake.encode(chat(png())))
        assert count > 5 * FAKE_IMAGES.tile_tokens
        assert await fake.encode(chat(png(1))) == await fake.encode(chat(png()))


async def test_equal_images_share_blocks_and_different_images_share_only_earlier_blocks() -> None:
    async with seeing(block_size=4) as fake:
        before = "The same beginning, sixty characters long or even some more."
        assert await cached(fake, chat(png(0), before=before)) == 0
        whole = len(await fake.encode(chat(png(0), before=before)))
        assert await cached(fake, chat(png(0), before=before)) == (whole - 1) // 4 * 4
        common = await cached(fake, chat(png(1), before=before))
        # The requests share blocks only up to the block with the first row of the image.
        token_ids = await fake.encode(chat(png(1), before=before))
        assert common == token_ids.index(FAKE_IMAGES.image_token_id) // 4 * 4
        check_core(fake.core)


async def test_prompt_is_computed_in_chunks_that_divide_an_image() -> None:
    async with seeing() as fake:
        expected = await said(fake, chat(png(3), png(4)))
    async with seeing(max_num_batched_tokens=8, max_num_seqs=4) as fake:
        assert await said(fake, chat(png(3), png(4))) == expected


async def test_a_preempted_request_is_computed_again_with_its_image() -> None:
    async with seeing() as fake:
        expected = [await said(fake, chat(png(colour)), SIXTY) for colour in range(3)]
        blocks = len(await fake.encode(chat(png()))) // 4 + 1
    async with seeing(
        block_count=3 * blocks + 10, block_size=4, max_model_len=400, enable_prefix_caching=False
    ) as fake:
        texts: dict[int, str] = {}

        async def ask(colour: int) -> None:
            texts[colour] = await said(fake, chat(png(colour)), SIXTY)

        fake.pause()  # Wait until all requests have arrived, because decoding may take long.
        async with trio.open_nursery() as nursery:
            for colour in range(3):
                nursery.start_soon(ask, colour)
            while fake.stats().waiting_count < 3:
                await trio.lowlevel.checkpoint()
            fake.resume()
        assert fake.stats().preemptions_total > 0
        assert [texts[colour] for colour in range(3)] == expected


async def test_image_is_encoded_once_for_concurrent_requests() -> None:
    async with seeing() as fake:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(said, fake, chat(png()))
        assert fake.image_encoder.tile_count == 5
        await said(fake, chat(png()))
        assert fake.image_encoder.tile_count == 5
        assert fake.image_outputs.query_count == 5
        assert fake.image_outputs.hit_count >= 1
        assert fake.image_outputs.cached_bytes == IMAGE_BYTES


async def test_cached_embeddings_are_evicted_for_new_images() -> None:
    limits = ImageLimits(outputs_bytes_max=2 * IMAGE_BYTES)
    async with seeing(image_limits=limits) as fake:
        for colour in (0, 1, 0, 2):
            await said(fake, chat(png(colour)))
            assert fake.image_outputs.bytes_total <= limits.outputs_bytes_max
        assert fake.image_encoder.tile_count == 15
        await said(fake, chat(png(0)))
        assert fake.image_encoder.tile_count == 15, "the one that was used last stays"
        await said(fake, chat(png(1)))
        assert fake.image_encoder.tile_count == 20
        with pytest.raises(InvalidRequest, match="send fewer or smaller"):
            await said(fake, chat(png(0), png(1), png(2)))


async def test_request_waits_for_image_memory_in_order() -> None:
    async with seeing(image_limits=ImageLimits(outputs_bytes_max=IMAGE_BYTES)) as fake:
        fake.pause()
        texts: list[str] = []

        async def ask(colour: int) -> None:
            texts.append(await said(fake, chat(png(colour))))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 0)
            while not fake.stats().waiting_count:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(ask, 1)
            while not fake.image_outputs.waiting_count:
                await trio.lowlevel.checkpoint()
            await wait_all_tasks_blocked()
            assert fake.image_encoder.tile_count == 5
            fake.resume()
        assert len(set(texts)) == 2
        assert fake.image_encoder.tile_count == 10


@pytest.mark.parametrize("phase", ["waiting for room", "decoding", "encoding", "queued", "in a step", "decode"])
@pytest.mark.parametrize("way", ["leaves", "aborted by id"])
async def test_request_that_leaves_in_any_phase_frees_everything(phase: str, way: str) -> None:
    limits = ImageLimits(outputs_bytes_max=IMAGE_BYTES if phase == "waiting for room" else 4 * IMAGE_BYTES)
    async with seeing(image_limits=limits, paused=phase != "decode") as fake, trio.open_nursery() as nursery:
        scopes = ExitStack()
        outputs, scope = fake.image_outputs, trio.CancelScope()
        ends: list[object] = []

        async def ask() -> None:
            with scope:
                async with fake.generate(
                    chat(png(7)), SamplingParams(max_tokens=200, ignore_eos=True), request_id="r"
                ) as stream:
                    async for delta in stream:
                        ends.append(delta.finish_reason)

        if phase == "waiting for room":
            other = await nursery.start(_hold_room, fake)
        if phase == "encoding":
            fake.image_encoder.hold()
        gate = fake.image_decoder.gate
        if phase == "decoding":
            scopes.enter_context(gate.held())
        nursery.start_soon(ask)
        before = fake.stats()
        if phase == "waiting for room":
            while not outputs.waiting_count:
                await trio.lowlevel.checkpoint()
        elif phase == "decoding":
            while not gate.held_count:
                await trio.lowlevel.checkpoint()
            assert outputs.claimed_bytes == IMAGE_BYTES
        elif phase == "encoding":
            while not fake.image_encoder.waiting_count:
                await trio.lowlevel.checkpoint()
            assert outputs.claimed_bytes == IMAGE_BYTES
        elif phase == "decode":
            while not ends:
                await trio.lowlevel.checkpoint()
        else:
            while not fake.stats().waiting_count:
                await trio.lowlevel.checkpoint()

        def leave() -> None:
            if way == "leaves":
                scope.cancel()
            else:
                assert fake.abort(["r"])["r"] is AbortOutcome.ABORTED

        if phase == "in a step":
            async with fake.held_step():
                leave()
                await wait_all_tasks_blocked()
                assert outputs.claimed_bytes == IMAGE_BYTES, "the step reads them"
        else:
            leave()
            if way == "aborted by id" and phase != "decode":
                held_by_others = IMAGE_BYTES if phase == "waiting for room" else 0
                assert outputs.claimed_bytes == held_by_others, "in the same call"
        await wait_all_tasks_blocked()
        outputs.check()
        assert gate.held_count == 0, "its process is killed"
        assert fake.image_encoder.waiting_count == 0
        assert outputs.claimed_bytes == (IMAGE_BYTES if phase == "waiting for room" else 0)
        assert fake.stats().blocks_used == before.blocks_used == 0
        scopes.close()
        if phase == "waiting for room":
            other.cancel()


async def _hold_room(fake: FakeEngine, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    with trio.CancelScope() as scope:
        async with fake.generate(chat(png(99)), TEN):
            task_status.started(scope)
            await trio.sleep_forever()


async def test_request_for_the_same_image_continues_when_the_first_one_leaves() -> None:
    async with seeing() as fake:
        fake.image_encoder.hold()
        first = trio.CancelScope()
        texts: list[str] = []

        async def ask(scope: trio.CancelScope) -> None:
            with scope:
                texts.append(await said(fake, chat(png())))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, first)
            while not fake.image_encoder.waiting_count:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(ask, trio.CancelScope())
            while len(fake.live_requests()) < 2:
                await trio.lowlevel.checkpoint()
            await wait_all_tasks_blocked()
            first.cancel()
            while not fake.image_encoder.waiting_count:
                await trio.lowlevel.checkpoint()
            fake.image_encoder.release()
        assert len(texts) == 1


async def test_undecodable_image_fails_only_its_request() -> None:
    async with seeing() as fake:
        broken = png(5, (64, 64))[:-30]
        with pytest.raises(InvalidRequest, match=r"messages\[0\].content\[0\] cannot be decoded") as refusal:
            await said(fake, chat(broken))
        assert refusal.value.param == "messages[0].content[0]"
        assert await said(fake, chat(png(5)))


async def test_encoder_error_fails_only_its_request() -> None:
    async with seeing() as fake:
        fake.image_encoder.fault = RuntimeError("out of memory")
        with pytest.raises(Exception, match="could not be encoded"):
            await said(fake, chat(png()))
        fake.image_encoder.fault = None
        assert await said(fake, chat(png()))


async def test_reopened_engine_resumes_requests_with_images(autojump_clock: Any) -> None:
    async with seeing() as fake:
        expected = await said(fake, chat(png(1)))
    async with seeing(engine_restarts=2) as fake:
        fake.pause()
        texts: list[str] = []

        async def ask(colour: int) -> None:
            texts.append(await said(fake, chat(png(colour))))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 1)
            while not fake.stats().waiting_count:
                await trio.lowlevel.checkpoint()
            fake.image_encoder.hold()
            old = fake.image_encoder
            nursery.start_soon(ask, 2)
            while not old.waiting_count:
                await trio.lowlevel.checkpoint()
            fake.break_next_step(InjectedFault("a test broke it"))
            fake.resume()
        assert fake.image_encoder is not old
        assert texts[0] == expected or texts[1] == expected
        assert len(texts) == 2


async def test_no_request_waits_for_an_image_after_a_final_fault() -> None:
    with pytest.raises(EngineFault):
        async with seeing(paused=True) as fake, trio.open_nursery() as nursery:
            nursery.start_soon(said, fake, chat(png(1)))
            while not fake.stats().waiting_count:
                await trio.lowlevel.checkpoint()
            fake.image_encoder.hold()
            nursery.start_soon(said, fake, chat(png(2)))
            while not fake.image_encoder.waiting_count:
                await trio.lowlevel.checkpoint()
            fake.break_next_step()
            fake.resume()


async def test_image_placeholder_in_text_is_not_an_image() -> None:
    async with seeing() as fake:
        token_id = FAKE_IMAGES.image_token_id
        expected = await fake.encode(chat(png()))
        for text in ("And <image>?", "<image>", "<image><|end|>"):
            for prompt, count in ((chat(png(), text=text), expected.count(token_id)), (chat(text=text), 0)):
                token_ids = await fake.encode(prompt)
                assert token_ids.count(token_id) == count
                assert fake.tokenizer.decode(token_ids, skip_special_tokens=False).endswith(f"{text}assistant: ")
                assert await said(fake, prompt)


@pytest.mark.parametrize(
    "prompt, sentence",
    [
        (chat(b"no image"), "is not an image of a supported format"),
        (chat(png(size=(400, 16))), "400 x 16 pixels"),
        (chat(*[png()] * 3), "at most 2 are allowed"),
        (ChatPrompt(messages=[{"role": "user", "content": [{"type": "image", "image": "x"}]}]), "bytes of a file"),
    ],
)
async def test_invalid_image_in_a_chat_is_refused(prompt: ChatPrompt, sentence: str) -> None:
    async with seeing(image_limits=ImageLimits(images_max=2, side_max=300)) as fake:
        with pytest.raises(InvalidRequest, match=sentence):
            await said(fake, prompt)
        assert fake.image_outputs.bytes_total == 0


async def test_text_model_refuses_images_before_admission() -> None:
    async with open_fake_engine() as fake:
        with pytest.raises(InvalidRequest, match="this model accepts only text") as refusal:
            await said(fake, chat(png()))
        assert refusal.value.param == "messages[0].content[0]"
        with pytest.raises(InvalidRequest, match="this model accepts only text"):
            await fake.encode(chat(png()))


async def test_images_count_toward_the_context() -> None:
    async with seeing(max_model_len=100) as fake:
        with pytest.raises(ContextTooLong):
            await said(fake, chat(png()))
        assert fake.image_encoder.tile_count == 0


async def test_prompts_with_images_are_neither_truncated_nor_pooled() -> None:
    async with seeing() as fake:
        with pytest.raises(InvalidRequest, match="cannot be truncated"):
            await said(fake, chat(png()), cut=Cut(20))
        with pytest.raises(InvalidRequest):
            await fake.embed([chat(png())], PoolingParams())


async def test_response_resumes_only_with_the_same_image() -> None:
    async with seeing() as fake:
        async with fake.generate(chat(png(1)), TEN) as stream:
            whole = "".join([delta.text async for delta in stream])
        async with fake.generate(chat(png(1)), FOUR) as stream:
            begun = "".join([delta.text async for delta in stream])
            resume = stream.resume_state()
        resume = msgspec.structs.replace(resume, finished=(False,))
        async with fake.generate(chat(png(1)), TEN, resume=resume) as stream:
            rest = "".join([delta.text async for delta in stream])
        assert begun + rest == whole
        with pytest.raises(InvalidRequest, match="digest"):
            async with fake.generate(chat(png(2)), TEN, resume=resume) as stream:
                pass


async def test_several_choices_share_one_claim_on_image_memory() -> None:
    async with seeing() as fake:
        async with fake.generate(chat(png()), SamplingParams(max_tokens=5, n=3, temperature=1.0)) as stream:
            async for delta in stream:
                assert delta.finish_reason is None or fake.image_outputs.claimed_bytes in (0, IMAGE_BYTES)
        assert fake.image_encoder.tile_count == 5


async def test_image_url_is_fetched_inside_the_cancel_scope_of_the_request() -> None:
    class Media:
        def __init__(self) -> None:
            self.asked: list[str] = []
            self.gate: trio.Event | None = None

        async def fetch(self, url: str, place: str) -> bytes:
            self.asked.append(url)
            if self.gate is not None:
                await self.gate.wait()
            return png(8)

    media: Any = Media()
    elsewhere = ChatPrompt(
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}},
                    {"type": "text", "text": "What?"},
                ],
            }
        ]
    )
    async with seeing(media=media) as fake:
        assert await said(fake, elsewhere) == await said(fake, chat(png(8)))
        assert media.asked == ["https://a.example/b.png"]
        media.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(said, fake, elsewhere)
            while len(media.asked) < 2:
                await trio.lowlevel.checkpoint()
            assert fake.load().waiting == 1, "it has its place while it is fetched"
            nursery.cancel_scope.cancel()
    async with seeing() as fake:
        with pytest.raises(InvalidRequest, match="this server fetches no URLs"):
            await said(fake, elsewhere)


async def test_cached_embeddings_are_shared_only_under_the_same_salt() -> None:
    async with seeing() as fake:
        texts = [await said(fake, chat(png(7)), cache_salt=salt) for salt in ("a", "b", "a", None, "b", None)]
        assert fake.image_encoder.tile_count == 3 * 5, "once for each salt"
        assert fake.image_outputs.hit_count == 3
        assert len(set(texts)) == 1


async def test_slow_image_of_one_tenant_does_not_delay_other_tenants() -> None:
    async with seeing() as fake:
        decode = fake.image_decoder.tiles
        slow = trio.Event()

        async def tiles(content: bytes, *others: Any) -> Any:
            if content == png(1):
                await slow.wait()
            return await decode(content, *others)

        fake.image_decoder.tiles = tiles  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            for salt in ("1", "2", "3"):
                nursery.start_soon(lambda salt=salt: said(fake, chat(png(1)), cache_salt=salt, tenant="a"))
            await wait_all_tasks_blocked()
            assert await said(fake, chat(png(2)), tenant="b")
            slow.set()
