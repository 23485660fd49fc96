"""A GRPO loop: SmolLM2 learns to respond with digits.

Each iteration samples groups of rollouts, cancels half of the rollouts before they end, trains, and replaces the
weights. The next iteration resumes the cancelled rollouts with the new weights.

python examples/grpo.py                    engine in the trainer's own Trio program, weights through shared memory
python examples/grpo.py --http             server on 127.0.0.1, weights through a directory
python examples/grpo.py --url URL --admin-key KEY     a running server on this machine, started with --dtype float32
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")  # This must be set before transformers is imported.

import httpx
import torch
import trio
from transformers import AutoModelForCausalLM, PreTrainedModel

import trioserve
from trioserve.rollouts import publish_weights

PROMPTS = ("The first numbers are 1, 2, 3,", "Call me at +49 30", "Pi is about 3.14", "Born in 19")
ENGINE = {"model": "smollm2", "dtype": "float32", "batch_invariant": True, "kv_cache_memory": 0.25}  # GiB
# Log-probabilities in float32 may differ by this number, because server and trainer sum in different orders.
DIFFERENCE_MAX = 1e-3
CLIP, LEARNING_RATE, LAYERS_TRAINED = 0.2, 1e-4, 6


@dataclass
class Rollout:
    """One response to train on.

    Attributes:
        prompt: the prompt.
        seed: seed of the sampling.
        cut_at: number of tokens after which the request is cancelled once. None: the request is not cancelled.
        versions: for each token, the version of the weights that sampled it.
        state: state to resume from, or None.
    """

    prompt: str
    seed: int
    cut_at: int | None
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    text: str = ""
    is_finished: bool = False
    state: trioserve.Resume | None = None

    @property
    def reward(self) -> float:
        """The fraction of digits in the response, from 0 to 1."""
        text = self.text.strip()
        return sum(letter.isdigit() for letter in text) / max(1, len(text))


class EmbeddedSampler:
    """Samples rollouts with an engine in this program."""

    def __init__(self, engine: trioserve.Engine, tokens_max: int) -> None:
        self.engine = engine
        self.tokens_max = tokens_max

    async def sample(self, rollout: Rollout) -> None:
        """Generate until the response ends or the rollout's limit cancels it."""
        sampling = trioserve.SamplingParams(max_tokens=self.tokens_max, seed=rollout.seed, logprobs=0)
        with trio.CancelScope() as scope:
            async with self.engine.generate(rollout.prompt, sampling, resume=rollout.state) as stream:
                async for delta in stream:
                    rollout.ids += delta.token_ids
                    rollout.logprobs += [entry.logprob for entry in delta.logprobs or ()]
                    for version, count in delta.weight_versions or (("default", len(delta.token_ids)),):
                        rollout.versions += [version] * count
                    rollout.text += delta.text
                    rollout.is_finished = delta.finish_reason is not None
                    if rollout.cut_at is not None and len(rollout.ids) >= rollout.cut_at:
                        scope.cancel()  # The end of the `async with` block aborts the request.
        rollout.prompt_ids, rollout.state = list(stream.prompt_token_ids), stream.resume_state()

    async def score(self, rollout: Rollout) -> list[float]:
        """Compute the log-probabilities of a rollout's tokens again. Now the tokens are a prompt."""
        sampling = trioserve.SamplingParams(max_tokens=1, prompt_logprobs=0)
        async with self.engine.generate(rollout.prompt_ids + rollout.ids, sampling) as stream:
            async for _ in stream:
                pass
        return [entry.logprob for entry in stream.prompt_logprobs[len(rollout.prompt_ids) :]]

    async def swap(self, model: PreTrainedModel, version: str) -> None:
        published = await trio.to_thread.run_sync(publish_weights, model.state_dict())
        with published:
            await self.engine.update_weights(trioserve.SharedWeights(published.name), version=version)

    async def used_blocks(self) -> int:
        return self.engine.stats().blocks_used


class HttpSampler:
    """Samples rollouts with a server."""

    def __init__(self, client: httpx.AsyncClient, tokens_max: int) -> None:
        self.client = client
        self.tokens_max = tokens_max

    async def sample(self, rollout: Rollout) -> None:
        body = {"prompt": rollout.prompt, "max_tokens": self.tokens_max, "seed": rollout.seed, "temperature": 1.0}
        body |= {"top_p": 1.0, "top_k": 0, "logprobs": 0, "return_token_ids": True, "stream": True}
        if rollout.ids:
            body["resume"] = {"token_ids": [rollout.ids], "finished": [False]}
        with trio.CancelScope() as scope:
            async with self.client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(rollout, json.loads(line[6:])["choices"][0])
                    if rollout.cut_at is not None and len(rollout.ids) >= rollout.cut_at:
                        scope.cancel()  # This closes the connection, so the server aborts the request.

    def _take(self, rollout: Rollout, choice: dict) -> None:
        rollout.prompt_ids = choice.get("prompt_token_ids") or rollout.prompt_ids
        token_ids = choice.get("token_ids", [])
        rollout.ids += token_ids
        rollout.logprobs += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
        for version, count in choice.get("weight_versions", [("default", len(token_ids))]):
            rollout.versions += [version] * count
        rollout.text += choice["text"]
        rollout.is_finished = choice["finish_reason"] is not None

    async def swap(self, model: PreTrainedModel, version: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            await trio.to_thread.run_sync(model.save_pretrained, directory)
            body = {"model_path": directory, "weight_version": version}
            response = await self.client.post("/update_weights_from_disk", json=body, timeout=600)
            response.raise_for_status()

    async def used_blocks(self) -> int:
        load = (await self.client.get("/load")).json()
        return load["running"] + load["waiting"] + (load["kv_usage"] > 0)


class Trainer:
    """The policy in float32. Only its last layers are trained."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        del self.model.config.quantization_config, self.model.hf_quantizer  # The weights are no longer quantized.
        self.model.requires_grad_(False)
        self.model.model.layers[-LAYERS_TRAINED:].requires_grad_(True)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)

    def logprobs(self, rollouts: list[Rollout]) -> torch.Tensor:
        """Compute the log-probabilities of the tokens of all rollouts, in order, float32 [tokens]."""
        rows = [torch.tensor(rollout.prompt_ids + rollout.ids) for rollout in rollouts]
        inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # Padding after the tokens has no effect.
        hidden = self.model.model(inputs).last_hidden_state
        places = [slice(len(rollout.prompt_ids) - 1, len(row) - 1) for rollout, row in zip(rollouts, rows, strict=True)]
        logits = self.model.lm_head(torch.cat([row[place] for row, place in zip(hidden, places, strict=True)]))
        drawn = torch.tensor([token_id for rollout in rollouts for token_id in rollout.ids])
        return torch.log_softmax(logits, dim=-1).gather(1, drawn[:, None])[:, 0]

    def train(self, rollouts: list[Rollout], version: str) -> float:
        """Train one step.

        Returns:
            The largest difference between the server's and the trainer's log-probabilities, for tokens that the current
            weights sampled.
        """
        rewards = torch.tensor([rollout.reward for rollout in rollouts])
        groups = torch.tensor([PROMPTS.index(rollout.prompt) for rollout in rollouts])
        advantages = torch.empty_like(rewards)
        for group in groups.unique():
            own = rewards[groups == group]
            advantages[groups == group] = (own - own.mean()) / (own.std(correction=0) + 1e-4)
        advantages = advantages.repeat_interleave(torch.tensor([len(rollout.ids) for rollout in rollouts]))
        sampled = torch.tensor([logprob for rollout in rollouts for logprob in rollout.logprobs])
        is_own = torch.tensor([drawn_by == version for rollout in rollouts for drawn_by in rollout.versions])

        logprobs = self.logprobs(rollouts)
        difference = (logprobs - sampled)[is_own].abs().max().item()
        ratio = torch.exp(logprobs - sampled)
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return difference


async def learn(sampler: EmbeddedSampler | HttpSampler, trainer: Trainer, options: argparse.Namespace) -> None:
    seeds, version, partial = iter(range(1_000_000)), "default", []
    for iteration in range(options.iterations):
        rollouts = [*partial]
        for prompt in PROMPTS[: options.prompts]:
            for number in range(options.group):
                rollouts.append(Rollout(prompt, next(seeds), options.tokens // 2 if number % 2 else None))
        began_at, continued_count = trio.current_time(), len(partial)
        async with trio.open_nursery() as nursery:
            for rollout in rollouts:
                nursery.start_soon(sampler.sample, rollout)
        seconds = trio.current_time() - began_at
        finished = [rollout for rollout in rollouts if rollout.is_finished]
        partial = [rollout for rollout in rollouts if not rollout.is_finished]
        for rollout in partial:
            rollout.cut_at = None

        if isinstance(sampler, EmbeddedSampler):  # Equal weights must give equal bits.
            own = next(rollout for rollout in finished if {*rollout.versions} == {version})
            assert await sampler.score(own) == own.logprobs

        difference = await trio.to_thread.run_sync(trainer.train, finished, version)
        version = f"step-{iteration + 1}"
        await sampler.swap(trainer.model, version)
        leaked = await sampler.used_blocks()
        print(
            f"iteration {iteration + 1}: reward {sum(rollout.reward for rollout in finished) / len(finished):.3f}, "
            f"{len(finished)} finished, {len(partial)} cut off, {continued_count} continued, "
            f"{len(rollouts) / seconds:.1f} rollouts/s, logprobs differ by {difference:.1e}, leaked blocks: {leaked}",
            flush=True,
        )
        assert not leaked
        assert difference < DIFFERENCE_MAX


@asynccontextmanager
async def opened_sampler(options: argparse.Namespace) -> AsyncIterator[EmbeddedSampler | HttpSampler]:
    if not (options.http or options.url):
        async with trioserve.open_engine(**ENGINE) as engine:
            yield EmbeddedSampler(engine, options.tokens)
        return
    async with AsyncExitStack() as scopes:
        if options.http:
            options.admin_key = secrets.token_hex()
            engine = await scopes.enter_async_context(trioserve.open_engine(**ENGINE))
            nursery = await scopes.enter_async_context(trio.open_nursery())
            scopes.callback(nursery.cancel_scope.cancel)
            keys = {"api_key": (secrets.token_hex(),), "admin_api_key": options.admin_key}
            [options.url] = await nursery.start(functools.partial(trioserve.serve, engine, port=0, **keys))
        headers = {"Authorization": f"Bearer {options.admin_key}"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=options.url, headers=headers, limits=limits, timeout=60) as client:
            yield HttpSampler(client, options.tokens)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--url", default="")
    parser.add_argument("--admin-key", default="")
    for name, default in {"iterations": 14, "prompts": len(PROMPTS), "group": 8, "tokens": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.manual_seed(0)
    async with opened_sampler(options) as sampler:
        path = trioserve.find_default_model("smollm2")
        assert path is not None
        trainer = await trio.to_thread.run_sync(Trainer, path)
        await learn(sampler, trainer, options)


if __name__ == "__main__":
    trio.run(main)
