"""What a checkpoint says of its model, under the names of transformers' config.json, whichever file says it; and the
parts of a description that most families read in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import Fields
from trioserve.model.model_config import (
    LAYERS_MAX,
    Activation,
    AttentionConfig,
    Dtype,
    ExpertsConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    RopeScaling,
    RotaryConfig,
    Scoring,
    StateNorm,
    StateSpaceConfig,
)

__all__ = ["ModelFields", "RopeReader", "is_long", "windowed_layers"]

RopeReader = Callable[["ModelFields", str | None, float], tuple[float, RopeScaling | None]]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def is_long(served_tokens: int | None, context_tokens: int, original_tokens: int) -> bool:
    """Which of longrope's two lists of factors counts, for all texts that are served: where KV of earlier tokens is
    kept, it cannot depend on how long a text becomes.

    served_tokens: of the longest context that is served; None is what the model takes, context_tokens.
    original_tokens: of the longest one before scaling.
    """
    return (context_tokens if served_tokens is None else served_tokens) > original_tokens


class ModelFields(Fields):
    """Fields of one model. What a file does not keep as a field, its reader has found out and says here."""

    def __init__(
        self,
        values: Mapping[str, object],
        source: str,
        *,
        rope: RopeReader,
        eos_token_ids: Sequence[int],
        dtype_name: Dtype,
        spellings: Mapping[str, str] | None = None,
    ) -> None:
        """rope: the theta, with this default, and the scaling, of layers of one of the config's layer_types or of all
        (None)."""
        super().__init__(values, source, spellings)
        self._rope = rope
        self._eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self._dtype_name: Dtype = dtype_name

    def is_neutral(self, name: str, values: tuple[object, ...]) -> bool:
        """Whether the field has one of these values, or is a list of layers that are all the usual ones."""
        value = self._value(name)
        return value in values or (isinstance(value, list) and all(item == "full_attention" for item in value))

    def flag_or(self, name: str, default: bool) -> bool:
        """Read a flag. Null is false, as in transformers' models."""
        return False if self.is_null(name) else super().flag_or(name, default)

    def number_if_said(self, name: str, default: float) -> float | None:
        """None where the field is there and null."""
        return None if self.is_null(name) else self.number_or(name, default)

    def head_dim(self, default: int | None = None) -> int:
        """default: where the file does not say it; None divides the hidden size."""
        hidden_size, head_count = self.whole("hidden_size"), self.whole("num_attention_heads")
        if head_count < 1:
            raise self.wrong("num_attention_heads", "at least 1")
        return self.whole_or("head_dim", hidden_size // head_count if default is None else default)

    @property
    def layer_count(self) -> int:
        """At least 1, and no more than any model has: a damaged file must not make us build a tuple of a billion."""
        count = self.whole("num_hidden_layers")
        if not 1 <= count <= LAYERS_MAX:
            raise ModelLoadError(
                f"layer_count is {count}, allowed is 1 to {LAYERS_MAX}: the checkpoint's config is damaged"
            )
        return count

    def described(self, family: str, layers: Sequence[LayerConfig], **choices: Any) -> ModelConfig:
        """choices: what differs from the usual, by ModelConfig's names."""
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
        """head_dim: as the default of head_dim(). choices: what differs from the usual, by AttentionConfig's names."""
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
        """layer_type: of which layers, where a config may tell them apart. rotated_dims: None is all of a head's, and
        then a config that turns a part is refused. theta: where the file does not say it."""
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
        """What scores of latent attention are multiplied by, besides the usual: the temperature of YaRN (arXiv
        2309.00071), with the factor mscale_all_dim before the logarithm."""
        if (multiplier := self.number_or("yarn_log_multiplier", None)) is not None:  # as GGUF files have it
            return (multiplier * math.log(max(self.number_or("yarn_factor", 1.0), 1.0)) + 1.0) ** 2
        rope = self.group_or_none("rope_parameters") or self.group_or_none("rope_scaling")
        if rope is None or (rope.text_or("rope_type", None) or rope.text_or("type", None) or "default") == "default":
            return 1.0
        strength, factor = rope.number_or("mscale_all_dim", 0.0), rope.number_or("factor", 1.0)
        if not strength >= 0:
            raise rope.wrong("mscale_all_dim", "at least 0")
        return (0.1 * strength * math.log(factor) + 1.0) ** 2 if strength and factor > 1 else 1.0

    def part_of_head(self, head_dim: int, default: float) -> int:
        """How many numbers of each head are turned: partial_rotary_factor of them."""
        rope = self.group_or_none("rope_parameters") or self.group_or_none("rope_scaling")
        factor = self.number_or("partial_rotary_factor", default)
        if rope is not None:
            factor = rope.number_or("partial_rotary_factor", factor)
        if not (math.isfinite(factor) and 0 < factor <= 1):
            raise self.wrong("partial_rotary_factor", "above 0 and at most 1")
        return int(head_dim * factor)

    def mlp(self, *, has_bias: bool = False, activation: Activation | None = None) -> MlpConfig:
        """activation: where the family settles it; None reads hidden_act, for which only silu is allowed."""
        if activation is None and (name := self.text_or("hidden_act", "silu")) != "silu":
            raise ModelLoadError(f"{self.spelling('hidden_act')} in {self.source} is {name!r}; supported is silu")
        return MlpConfig(
            intermediate_size=self.whole("intermediate_size"), has_bias=has_bias, activation=activation or "silu"
        )

    def experts(self, count_field: str, intermediate_size: int, *, normalizes: bool, **choices: Any) -> ExpertsConfig:
        """count_field: the one that says how many experts there are. choices: by ExpertsConfig's names."""
        if (name := self.text_or("hidden_act", "silu")) != "silu":
            raise ModelLoadError(f"{self.spelling('hidden_act')} in {self.source} is {name!r}; supported is silu")
        if not choices.get("shared_size"):
            choices.pop("has_shared_gate", None)  # of a shared expert without any channels
        return ExpertsConfig(
            expert_count=self.whole(count_field),
            experts_per_token=self.whole("num_experts_per_tok"),
            intermediate_size=intermediate_size,
            normalizes=normalizes,
            **choices,
        )

    def mlps_by_layer(self, experts: ExpertsConfig) -> list[MlpConfig | ExpertsConfig]:
        """As Qwen's mixtures have them: some layers are dense, those that mlp_only_layers names, and all but every
        decoder_sparse_step-th."""
        dense, step = self.wholes("mlp_only_layers"), self.whole_or("decoder_sparse_step", 1)
        return [
            self.mlp() if layer in dense or step < 1 or (layer + 1) % step else experts
            for layer in range(self.layer_count)
        ]

    def routed_mlps(self, scoring: Scoring, dense_count: int = 0, **choices: Any) -> list[MlpConfig | ExpertsConfig]:
        """As DeepSeek's models have them, and those that took over their router: some dense layers first, then mixtures
        with experts that every token goes through besides.

        scoring, dense_count: where the file does not say it. choices: by ExpertsConfig's names.
        """
        said = self.text_or("scoring_func", scoring)
        if said != scoring:
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
        dense_count = self.whole_or("first_k_dense_replace", dense_count)
        dense = [self.mlp()] * min(max(dense_count, 0), self.layer_count)
        return [*dense, *[experts] * (self.layer_count - len(dense))]

    def routed_by_sigmoid(self, dense_count: int = 0) -> list[MlpConfig | ExpertsConfig]:
        """As those of DeepSeek-V3: chosen from groups, with a bias. dense_count: where the file does not say it."""
        if (method := self.text_or("topk_method", "noaux_tc")) != "noaux_tc":
            raise self.wrong("topk_method", f"'noaux_tc' for this family, and not {method!r}")
        leaders = 2 if self.whole_or("n_group", 1) > 1 else 1
        return self.routed_mlps("sigmoid", dense_count, has_score_bias=True, group_leaders=leaders)

    def activation(self, *names: str, default: str) -> Activation:
        """Which one the first of these fields that is there names."""
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
        """Every how many layers one is of the other kind: at least 1."""
        every = self.whole_or(name, default)
        if every < 1:
            raise self.wrong(name, "at least 1")
        return every

    def windows(self, window: int | None, pattern: Callable[[int], bool]) -> tuple[int | None, ...]:
        """One for each layer, by the config's layer_types, and by the pattern, which says of a layer's index whether it
        slides, where there are none."""
        layer_types = self.layer_types()
        if window is None:
            return (None,) * self.layer_count
        if layer_types is None:
            return tuple(window if pattern(layer) else None for layer in range(self.layer_count))
        return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)

    def attending_layers(self, other: str, indexes: Sequence[int]) -> list[bool]:
        """Of each layer whether it has attention, by the config's layer_types or layers_block_type, where those that do
        not are called `other` or "mamba"; and without such a list by the indexes of those that do."""
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
        """By the names that hybrids of attention and Mamba-2 have in common. inner_size: where it is not a multiple of
        the hidden size."""
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
    """Layers that differ in nothing but their windows."""
    return [LayerConfig(attention=msgspec.structs.replace(attention, window=window), mlp=mlp) for window in windows]
