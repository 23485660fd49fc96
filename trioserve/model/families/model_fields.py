"""Typed fields of a checkpoint's config. In every file format, they have the names of transformers' config.json.

`ModelFields` also builds the parts of a model description that are equal in most families.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.layer_config import (
    Activation,
    AttentionConfig,
    ExpertsConfig,
    LayerConfig,
    MlpConfig,
    RopeScaling,
    RotaryConfig,
    Scoring,
    StateNorm,
    StateSpaceConfig,
)
from trioserve.model.loading.fields import Fields
from trioserve.model.model_config import LAYERS_MAX, Dtype, ModelConfig

__all__ = ["ModelFields", "RopeReader", "is_long", "windowed_layers", "with_axes"]

RopeReader = Callable[["ModelFields", str | None, float], tuple[float, RopeScaling | None]]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def is_long(served_tokens: int | None, context_tokens: int, original_tokens: int) -> bool:
    """Return True if longrope's factors for long contexts apply.

    All requests of a server use the same list of factors. The choice cannot depend on the length of one sequence,
    because cached keys were already rotated with the chosen factors.

    Args:
        served_tokens: longest context that is served. None is `context_tokens`.
        context_tokens: longest context of the model.
        original_tokens: longest context before scaling.
    """
    return (context_tokens if served_tokens is None else served_tokens) > original_tokens


class ModelFields(Fields):
    """Fields of one model.

    Args:
        values: the fields by name.
        source: name of the file, for error texts.
        rope: function that reads theta and scaling. Its arguments are the fields, a layer type (None for all layers)
            and a default theta.
        eos_token_ids: end tokens that the reader of the file format found. Duplicates are dropped.
        dtype_name: dtype of the weights that the reader of the file format found.
        served_tokens: longest context to be served, in tokens. None is the longest context of the model.
        spellings: names of fields in the file that differ from the usual names, by the usual names.
    """

    def __init__(
        self,
        values: Mapping[str, object],
        source: str,
        *,
        rope: RopeReader,
        eos_token_ids: Sequence[int],
        dtype_name: Dtype,
        served_tokens: int | None = None,
        spellings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(values, source, spellings)
        self.served_tokens = served_tokens
        self._rope = rope
        self._eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self._dtype_name: Dtype = dtype_name

    def is_neutral(self, name: str, values: tuple[object, ...]) -> bool:
        """Return True if the field's value is one of `values`, or a list that contains only "full_attention".

        Args:
            name: usual name of the field.
            values: values that do not change the computation.
        """
        value = self._value(name)
        return value in values or (isinstance(value, list) and all(item == "full_attention" for item in value))

    def flag_or(self, name: str, default: bool) -> bool:
        """Read a flag.

        Args:
            name: usual name of the field.
            default: value if the field is missing. A null field is False, as in transformers.
        """
        return False if self.is_null(name) else super().flag_or(name, default)

    def number_unless_null(self, name: str, default: float) -> float | None:
        """Read a number.

        Args:
            name: usual name of the field.
            default: value if the field is missing.

        Returns:
            The number, or None if the field is null.
        """
        return None if self.is_null(name) else self.number_or(name, default)

    def head_dim(self, default: int | None = None) -> int:
        """Return the size of one head.

        Args:
            default: value if the field is missing. None divides the hidden size by the number of heads.
        """
        hidden_size, head_count = self.whole("hidden_size"), self.whole("num_attention_heads")
        if head_count < 1:
            raise self.wrong("num_attention_heads", "at least 1")
        return self.whole_or("head_dim", hidden_size // head_count if default is None else default)

    @property
    def layer_count(self) -> int:
        """Number of layers, from 1 to LAYERS_MAX. The limit prevents a huge tuple of layers for a damaged file."""
        count = self.whole("num_hidden_layers")
        if not 1 <= count <= LAYERS_MAX:
            raise ModelLoadError(
                f"layer_count is {count}, allowed is 1 to {LAYERS_MAX}: the checkpoint's config is damaged"
            )
        return count

    def described(self, family: str, layers: Sequence[LayerConfig], **choices: Any) -> ModelConfig:
        """Build the description of the model.

        Args:
            family: name of the family.
            layers: the layers in order.
            choices: fields of ModelConfig that are not read in the usual way.
        """
        context_tokens = choices.get("context_tokens_max") or self.whole("max_position_embeddings")
        rotaries = (layer.attention.rotary for layer in layers if isinstance(layer.attention, AttentionConfig))
        scalings = {rotary.scaling for rotary in rotaries if rotary is not None}
        reach = (context_tokens if scaling is None else scaling.context_tokens(context_tokens) for scaling in scalings)
        parts: dict[str, Any] = {
            "vocab_size": self.whole("vocab_size"),
            "hidden_size": self.whole("hidden_size"),
            "context_tokens_max": max(reach, default=context_tokens),
            "tie_word_embeddings": self.flag_or("tie_word_embeddings", False),
            "bos_token_id": self.whole_or("bos_token_id", None),
            "eos_token_ids": self._eos_token_ids,
            "dtype_name": self._dtype_name,
            **choices,
        }
        if "norm_eps" not in parts:
            parts["norm_eps"] = self.number_or("rms_norm_eps", 1e-6)
        return ModelConfig(family=family, layers=tuple(layers), **parts)

    def attention(self, *, head_dim: int | None = None, **choices: Any) -> AttentionConfig:
        """Build the description of one attention layer.

        Args:
            head_dim: default size of a head, see `head_dim()`.
            choices: fields of AttentionConfig that are not read in the usual way.
        """
        head_dim = self.head_dim(head_dim)
        head_count = self.whole("num_attention_heads")
        parts: dict[str, Any] = {
            "head_count": head_count,
            "kv_head_count": self.whole_or("num_key_value_heads", head_count),
            "head_dim": head_dim,
            **choices,
        }
        if "rotary" not in parts:
            parts["rotary"] = self.rotary(head_dim)
        return AttentionConfig(**parts)

    def rotary(
        self,
        head_dim: int,
        *,
        layer_type: str | None = None,
        rotated_dims: int | None = None,
        theta: float = 10_000.0,
    ) -> RotaryConfig:
        """Read the parameters of rotary position embeddings.

        Args:
            head_dim: size of one head.
            layer_type: entry of layer_types whose parameters are read. None reads the parameters of all layers.
            rotated_dims: number of rotated dimensions of each head. None rotates all dimensions, and rejects a config
                that rotates fewer.
            theta: value if the file does not contain theta.
        """
        theta, scaling = self._rope(self, layer_type, theta)
        if rotated_dims is None:
            rotated_dims = head_dim
            if (part := self.part_of_head(head_dim, 1.0)) != head_dim:
                raise ModelLoadError(
                    f"{self.source} rotates {part} of {head_dim} dimensions of each head (partial_rotary_factor); "
                    "supported for this family is rotating all of them"
                )
        return RotaryConfig(theta=theta, rotated_dims=rotated_dims, scaling=scaling)

    def latent_score_factor(self) -> float:
        """Return the additional factor on the scores of latent attention.

        The factor is the temperature of YaRN (arXiv 2309.00071), with mscale_all_dim as a factor on the logarithm.
        """
        # Only GGUF files have this field.
        if (multiplier := self.number_or("yarn_log_multiplier", None)) is not None:
            return (multiplier * math.log(max(self.number_or("yarn_factor", 1.0), 1.0)) + 1.0) ** 2
        rope = self.group_or_none("rope_parameters") or self.group_or_none("rope_scaling")
        if rope is None or (rope.text_or("rope_type", None) or rope.text_or("type", None) or "default") == "default":
            return 1.0
        strength, factor = rope.number_or("mscale_all_dim", 0.0), rope.number_or("factor", 1.0)
        if not strength >= 0:
            raise rope.wrong("mscale_all_dim", "at least 0")
        return (0.1 * strength * math.log(factor) + 1.0) ** 2 if strength and factor > 1 else 1.0

    def layers_with_positions(self) -> list[bool]:
        """Return True for each layer with position embeddings. Used by families in which some layers have none."""
        every = self.interval("no_rope_layer_interval", 4)
        named = self.wholes("no_rope_layers")  # Despite the field's name, 1 means that a layer has position embeddings.
        if not named:
            return [(layer + 1) % every != 0 for layer in range(self.layer_count)]
        if len(named) != self.layer_count:
            raise ModelLoadError(
                f"no_rope_layers in {self.source} has {len(named)} entries, the model has {self.layer_count} layers: "
                "the checkpoint's config is damaged"
            )
        return [flag != 0 for flag in named]

    def part_of_head(self, head_dim: int, default: float) -> int:
        """Return the number of rotated dimensions of each head.

        Args:
            head_dim: size of one head.
            default: rotated fraction of a head if partial_rotary_factor is missing, above 0 and at most 1.
        """
        rope = self.group_or_none("rope_parameters") or self.group_or_none("rope_scaling")
        factor = self.number_or("partial_rotary_factor", default)
        if rope is not None:
            factor = rope.number_or("partial_rotary_factor", factor)
        if not (math.isfinite(factor) and 0 < factor <= 1):
            raise self.wrong("partial_rotary_factor", "above 0 and at most 1")
        return int(head_dim * factor)

    def mlp(self, *, has_bias: bool = False, activation: Activation | None = None) -> MlpConfig:
        """Build the description of a dense MLP.

        Args:
            has_bias: True if the MLP's projections have biases.
            activation: activation that the family defines. None reads hidden_act, which must be silu.
        """
        if activation is None and (name := self.text_or("hidden_act", "silu")) != "silu":
            raise ModelLoadError(f"{self.spelling('hidden_act')} in {self.source} is {name!r}; supported is silu")
        return MlpConfig(
            intermediate_size=self.whole("intermediate_size"), has_bias=has_bias, activation=activation or "silu"
        )

    def plain_mlp(self, activation: str, *, has_bias: bool, size: int | None = None) -> MlpConfig:
        """Build the description of an MLP without a gate.

        Args:
            activation: name of the activation if hidden_act is missing.
            has_bias: True if the MLP's projections have biases.
            size: intermediate size of the MLP. None reads intermediate_size.
        """
        return MlpConfig(
            intermediate_size=self.whole("intermediate_size") if size is None else size,
            activation=self.activation("hidden_act", default=activation),
            has_bias=has_bias,
            has_gate=False,
        )

    def experts(self, count_field: str, intermediate_size: int, *, normalizes: bool, **choices: Any) -> ExpertsConfig:
        """Build the description of a mixture of experts.

        Args:
            count_field: name of the field with the number of experts.
            intermediate_size: channels of one expert.
            normalizes: True if the weights of a token's experts are scaled to sum 1.
            choices: further fields of ExpertsConfig.
        """
        if (name := self.text_or("hidden_act", "silu")) != "silu":
            raise ModelLoadError(f"{self.spelling('hidden_act')} in {self.source} is {name!r}; supported is silu")
        if not choices.get("shared_size"):
            choices.pop("has_shared_gate", None)  # Without a shared expert, there is no gate.
        return ExpertsConfig(
            expert_count=self.whole(count_field),
            experts_per_token=self.whole("num_experts_per_tok"),
            intermediate_size=intermediate_size,
            normalizes=normalizes,
            **choices,
        )

    def mlps_by_layer(self, experts: ExpertsConfig) -> list[MlpConfig | ExpertsConfig]:
        """Return the MLP of each layer, as Qwen's mixtures arrange them.

        Layers that mlp_only_layers lists are dense. With N = decoder_sparse_step, only every Nth layer has experts.

        Args:
            experts: description of the layers with experts.
        """
        dense, step = self.wholes("mlp_only_layers"), self.whole_or("decoder_sparse_step", 1)
        return [
            self.mlp() if layer in dense or step < 1 or (layer + 1) % step else experts
            for layer in range(self.layer_count)
        ]

    def routed_mlps(self, scoring: Scoring, dense_count: int = 0, **choices: Any) -> list[MlpConfig | ExpertsConfig]:
        """Return the MLP of each layer, as DeepSeek's mixtures arrange them.

        The first layers are dense. All later layers have routed experts, and shared experts that compute every token.

        Args:
            scoring: how the router turns scores into weights. A different value in the file is rejected.
            dense_count: number of dense layers if the file does not contain it.
            choices: further fields of ExpertsConfig.
        """
        found = self.text_or("scoring_func", scoring)
        if found != scoring:
            raise self.wrong("scoring_func", f"{scoring!r} for this family")
        if (every := self.whole_or("moe_layer_freq", 1)) != 1:
            raise self.wrong("moe_layer_freq", f"1, and not every {every}th layer")
        middle = self.whole("moe_intermediate_size")
        group_count = self.whole_or("n_group", 1)
        if group_count > 1 and "topk_group" not in self:
            raise self.wrong("topk_group", f"1 to {group_count}, of so many groups (n_group)")
        experts = self.experts(
            "n_routed_experts",
            middle,
            normalizes=self.flag_or("norm_topk_prob", False),
            **{
                "scoring": scoring,
                "scale": self.number_or("routed_scaling_factor", 1.0),
                "group_count": group_count,
                "groups_per_token": self.whole_or("topk_group", group_count),
                "shared_size": middle * self.whole_or("n_shared_experts", 0),
                **choices,
            },
        )
        is_sparse = self.sparse_layers(dense_count)
        dense = experts if all(is_sparse) else self.mlp()
        return [experts if sparse else dense for sparse in is_sparse]

    def sparse_layers(self, dense_count: int) -> list[bool]:
        """Return True for each layer with experts: those that mlp_layer_types calls sparse, or all but the first ones.

        Args:
            dense_count: number of dense layers if the file contains neither mlp_layer_types nor first_k_dense_replace.
        """
        dense_count = self.whole_or("first_k_dense_replace", dense_count)
        kinds = self.strings_or("mlp_layer_types", None)
        if kinds is None:
            return [layer >= dense_count for layer in range(self.layer_count)]
        if len(kinds) != self.layer_count or not {"dense", "sparse"}.issuperset(kinds):
            raise self.wrong("mlp_layer_types", f"a list of {self.layer_count} times 'dense' or 'sparse'")
        return [kind == "sparse" for kind in kinds]

    def routed_by_sigmoid(self, dense_count: int = 0, **choices: Any) -> list[MlpConfig | ExpertsConfig]:
        """Return the MLP of each layer, with DeepSeek-V3's router: sigmoid scores with a bias, and groups of experts.

        Args:
            dense_count: number of dense layers if the file does not contain it.
            choices: further fields of ExpertsConfig.
        """
        if (method := self.text_or("topk_method", "noaux_tc")) != "noaux_tc":
            raise self.wrong("topk_method", f"'noaux_tc' for this family, and not {method!r}")
        leaders = 2 if self.whole_or("n_group", 1) > 1 else 1
        return self.routed_mlps("sigmoid", dense_count, **{"has_score_bias": True, "group_leaders": leaders, **choices})

    def activation(self, *names: str, default: str) -> Activation:
        """Read an activation function.

        Args:
            names: names of fields. The first field that is present is read.
            default: value if all these fields are missing.
        """
        for name in names:
            found = self.text_or(name, None)
            if found is not None:
                break
        else:
            name, found = names[0], default
        if found not in _ACTIVATIONS:
            raise ModelLoadError(
                f"{self.spelling(name)} in {self.source} is {found!r}; supported are {', '.join(_ACTIVATIONS)}"
            )
        return _ACTIVATIONS[found]

    def interval(self, name: str, default: int) -> int:
        """Read the distance between two layers of a special kind.

        Args:
            name: usual name of the field.
            default: value if the field is missing.

        Returns:
            The distance in layers, at least 1.
        """
        every = self.whole_or(name, default)
        if every < 1:
            raise self.wrong(name, "at least 1")
        return every

    def windows(self, window: int | None, pattern: Callable[[int], bool]) -> tuple[int | None, ...]:
        """Return the sliding window of each layer, None for layers with full attention.

        Args:
            window: tokens that a layer with a sliding window attends to. None gives all layers full attention.
            pattern: returns True for the index of a layer with a sliding window. Only used if the file has no
                layer_types.
        """
        layer_types = self.layer_types()
        if window is None:
            return (None,) * self.layer_count
        if layer_types is None:
            return tuple(window if pattern(layer) else None for layer in range(self.layer_count))
        return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)

    def attending_layers(self, other: str, indexes: Sequence[int]) -> list[bool]:
        """Return True for each layer that has attention, and False for each other layer.

        The config's list layer_types or layers_block_type defines these layers. Without a list, `indexes` defines them.

        Args:
            other: name that the list uses for layers without attention. The list may also use "mamba".
            indexes: indexes of the layers with attention, for files without a list.
        """
        types = self.strings_or("layer_types", None) or self.strings_or("layers_block_type", None)
        if types is None:
            return [index in indexes for index in range(self.layer_count)]
        allowed = {"full_attention": True, "attention": True, other: False, "mamba": False}
        for name in types:
            if name not in allowed:
                raise ModelLoadError(
                    f"layer_types in {self.source} holds {name!r}; supported are full_attention and {other}"
                )
        if len(types) != self.layer_count:
            raise ModelLoadError(
                f"layer_types in {self.source} has {len(types)} entries, but the model has {self.layer_count} layers: "
                "the checkpoint's config is damaged"
            )
        return [allowed[name] for name in types]

    def state_space(self, inner_size: int | None = None, norm: StateNorm = "gated") -> StateSpaceConfig:
        """Build the description of a state-space layer, from the fields of models that combine attention and Mamba-2.

        Args:
            inner_size: channels of all heads. None is mamba_expand times the hidden size.
            norm: how the layer normalizes its output.
        """
        if (name := self.text_or("hidden_act", "silu")) != "silu":
            raise ModelLoadError(f"{self.spelling('hidden_act')} in {self.source} is {name!r}; supported is silu")
        if inner_size is None:
            inner_size = self.whole_or("mamba_expand", 2) * self.whole("hidden_size")
        head_count = self.interval("mamba_n_heads", 128)
        head_dim = inner_size // head_count
        if not self.is_one_of("mamba_d_head", ("auto",)):
            head_dim = self.whole_or("mamba_d_head", head_dim)
        if head_dim * head_count != inner_size:
            raise ModelLoadError(
                f"{self.source} has {head_count} heads of {head_dim} in its state spaces (mamba_n_heads, "
                f"mamba_d_head), but mamba_expand or mamba_d_ssm makes {inner_size}: the checkpoint's config is damaged"
            )
        limits = self.time_step_limits()
        return StateSpaceConfig(
            head_count=head_count,
            head_dim=head_dim,
            group_count=self.whole_or("mamba_n_groups", 1),
            vector_size=self.whole_or("mamba_d_state", 256),
            kernel_size=self.whole_or("mamba_d_conv", 4),
            has_bias=self.flag_or("mamba_proj_bias", False),
            has_conv_bias=self.flag_or("mamba_conv_bias", True),
            time_step_min=limits[0],
            time_step_max=limits[1],
            norm=norm,
        )

    def time_step_limits(self) -> tuple[float, float]:
        limits = self.numbers("time_step_limit") if "time_step_limit" in self else (0.0, math.inf)
        if len(limits) != 2:
            raise self.wrong("time_step_limit", "a list of two numbers")
        return limits[0], limits[1]

    def layer_types(self) -> list[str] | None:
        layer_types = self.strings_or("layer_types", None)
        for layer_type in layer_types or ():
            if layer_type not in ("full_attention", "sliding_attention"):
                raise ModelLoadError(
                    f"layer_types in {self.source} holds {layer_type!r}; supported are full_attention and "
                    "sliding_attention"
                )
        if layer_types is not None and len(layer_types) != self.layer_count:
            raise ModelLoadError(
                f"layer_types in {self.source} has {len(layer_types)} entries, but the model has {self.layer_count} "
                "layers: the checkpoint's config is damaged"
            )
        return layer_types


def windowed_layers(
    attention: AttentionConfig, mlp: MlpConfig | ExpertsConfig, windows: Sequence[int | None]
) -> list[LayerConfig]:
    """Build layers that differ only in their sliding windows.

    Args:
        attention: description of the attention of all layers.
        mlp: description of the MLP of all layers.
        windows: window of each layer in tokens, or None for full attention.
    """
    return [LayerConfig(attention=msgspec.structs.replace(attention, window=window), mlp=mlp) for window in windows]


def with_axes(
    fields: ModelFields, attention: AttentionConfig, default: tuple[int, int, int], *, alternates: bool = False
) -> AttentionConfig:
    """Return the attention with the axes of M-RoPE (arXiv 2409.12191).

    Without mrope_section, the attention has axes only if the default fits its heads. Otherwise it reads only texts.

    Args:
        fields: fields of the language model.
        attention: attention whose rotary embedding was read.
        default: value of a missing mrope_section.
        alternates: the positions in time, row and column rotate pairs in turn, and time also rotates the last pairs.
            False: each position rotates a range of pairs.
    """
    rope = fields.group_or_none("rope_parameters") or fields.group_or_none("rope_scaling")
    named = () if rope is None else rope.wholes("mrope_section")
    sections = named or default
    assert attention.rotary is not None, "the rotary embedding was read"
    pairs = attention.rotary.rotated_dims // 2
    if not named and sum(sections) != pairs:
        return attention
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != pairs:
        raise ModelLoadError(
            f"mrope_section in {fields.source} is {list(sections)}, but must be three numbers with sum {pairs}, which "
            "is half of the rotated part of a head"
        )
    axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if alternates:
        axes = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(pairs)]
    rotary = msgspec.structs.replace(attention.rotary, axes=tuple(axes))
    return msgspec.structs.replace(attention, rotary=rotary)
