"""Describes a model family: how its config is read, and how its checkpoints name tensors.

To add a family, write one file in this folder and one line in registry.py. The code that computes a model reads only
the resulting `ModelConfig`, and does not depend on families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import ModelConfig

__all__ = ["SHARED_EXPERTS", "Family", "GgufNaming", "Naming"]

# DeepSeek's names for the shared experts, which compute every token. Families with the same mixtures use these names.
SHARED_EXPERTS = {f"shared.{part}_proj": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How one file format names and stores the tensors of a family.

    Attributes:
        layers: prefix before a layer's index. None is the usual prefix of the format.
        modules: name in the file for each module with an unusual name, by the module's name in this project (see
            loading/names.py). If several modules have the same name in the file, they share one tensor. Their rows are
            then in the usual order: q, k, v or gate, up.
        alternating: modules that share a tensor in which their rows alternate.
        turned: modules whose matrices are transposed in the file, as [inputs, outputs].
        pairs_adjacent: True if rotary embeddings rotate rows 2j and 2j + 1 of a head together. False if they rotate
            rows j and j + half.
        norm_offset: added to the weights of all norms except the norm of a recurrent layer's output.
        grouped: projections of a delta-rule layer, or queries, keys and values of attention, that share tensors. All
            rows of one group of heads are adjacent.
        shards: number of shards of the heads in which grouped projections are stored, each with queries, values and
            keys. 0: each group of heads has queries, keys and values.
        unread: names of tensors of a layer that some files have, but no model needs.
        sublayers: number of consecutive layers that the file stores as one layer. Names of modules contain the place
            "{sublayer}" for the index of a layer among them.
    """

    layers: str | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    alternating: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()
    pairs_adjacent: bool = False
    norm_offset: float = 0.0
    grouped: tuple[str, ...] = ()
    shards: int = 0
    unread: tuple[str, ...] = ()
    sublayers: int = 1


@dataclass(frozen=True, kw_only=True)
class GgufNaming(Naming):
    """Names of a family's tensors in GGUF files.

    Attributes:
        architecture: value of the metadata key general.architecture.
        mixture: value of this key for the family's mixtures of experts. None: the same value.
    """

    architecture: str
    mixture: str | None = None

    @property
    def architectures(self) -> tuple[str, ...]:
        """All values of the metadata key general.architecture."""
        return (self.architecture,) if self.mixture is None else (self.architecture, self.mixture)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family.

    Attributes:
        name: `ModelConfig.family`.
        classes: names in config.json's `architectures`.
        model_type: config.json's `model_type`, used if `architectures` is missing.
        describe: function that creates a `ModelConfig` from the fields. It may raise ModelLoadError.
        transformers: names in safetensors files of transformers.
        gguf: names in GGUF files. None if llama.cpp does not write this family.
        with_images: classes of vision models whose language model, described by `text_config`, is of this family.
        text_defaults: values of fields that are missing in the `text_config` of a vision model.
        spellings: names of fields in this family's config.json, by the usual names.
        defaults: values of fields that are missing in config.json. Lists only fields for which transformers has an
            unusual default in this family.
        saved_as: name of a family with the same models, whose names transformers writes when it saves a checkpoint
            again. None: transformers writes this family's names.
        notes: fields of this family's config.json that do not change the computation, in addition to the fields that
            loading/fields.py lists for all families.
    """

    name: str
    classes: tuple[str, ...]
    model_type: str
    describe: Callable[[ModelFields], ModelConfig]
    transformers: Naming = field(default=Naming())
    gguf: GgufNaming | None = None
    with_images: tuple[str, ...] = ()
    text_defaults: Mapping[str, object] = field(default_factory=dict)
    spellings: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    saved_as: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def headless_classes(self) -> tuple[str, ...]:
        """Class names that transformers writes for models without an output head, which compute only embeddings."""
        names = (name.removesuffix("ForCausalLM") for name in self.classes)
        headless = (
            f"{name}TextModel" if f"{name}ForConditionalGeneration" in self.with_images else f"{name}Model"
            for name in names
        )
        return tuple(name for name in headless if name not in self.classes)

    def with_defaults(self, config: Mapping[str, object]) -> dict[str, object]:
        """Add the family's defaults to a config.json.

        Args:
            config: the fields of the file. A null field stays null, because for some fields null means "none".

        Returns:
            A new dictionary.
        """
        present = {name for name, theirs in self.spellings.items() if theirs in config}
        if "rope_scaling" in config:  # transformers 4 uses this name for rope_parameters.
            present.add("rope_parameters")
        return {name: value for name, value in self.defaults.items() if name not in present} | dict(config)

    def config_from(self, fields: ModelFields) -> ModelConfig:
        """Read the fields into the description of a model.

        Args:
            fields: the fields of the checkpoint.

        Raises:
            ModelLoadError: a field that changes the computation is not supported, or a number is out of range.
        """
        try:
            config = self.describe(fields)
        except ModelLoadError:
            raise
        except (ArithmeticError, ValueError) as error:
            raise ModelLoadError(
                f"numbers in {fields.source} describe no model that can be computed: {error}"
            ) from error
        asked = {fields.spelling(name) for name in fields.asked}
        for name, neutral in MEANINGFUL_FIELDS.items():
            if fields.spelling(name) not in asked and name in fields and not fields.is_neutral(name, neutral):
                raise ModelLoadError(
                    f"{fields.spelling(name)} in {fields.source} is {fields.shown(name)}, which {self.name} with this "
                    "config has no place for: it is a variant that is not supported"
                )
        return config


# Fields that change the computation of at least one family, each with the values that have no effect. A family that
# does not read such a field rejects any other value. For unread fields that are not in this table, there is only a
# warning.
MEANINGFUL_FIELDS: dict[str, tuple[object, ...]] = {
    "activation_sparsity_pattern": (0, 0.0),
    "alibi": (False,),
    "altup_num_inputs": (),
    "attention_chunk_size": (0,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (0, 0.0),
    "attn_temperature_tuning": (False, 0),
    "clip_qkv": (0, 0.0),
    "decoder_sparse_step": (1,),
    "embedding_multiplier": (1, 1.0),
    "first_k_dense_replace": (0,),
    "final_logit_softcapping": (0, 0.0),
    "hidden_act": ("silu",),
    "hidden_activation": ("silu",),
    "hidden_size_per_layer_input": (0,),
    "is_causal": (True,),
    "kv_lora_rank": (0,),
    "laurel_rank": (0,),
    "layer_types": (),
    "linear_key_head_dim": (0,),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "mlp_only_layers": ([],),
    "moe_layer_freq": (1,),
    "n_group": (0, 1),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "no_rope_layer_interval": (0,),
    "no_rope_layers": (),
    "num_experts": (0, 1),
    "num_kv_shared_layers": (0,),
    "num_local_experts": (0, 1),
    "num_shared_experts": (0,),
    "parallel_attn": (False,),
    "param_sink_number": (0,),
    "partial_rotary_factor": (1, 1.0),
    "qk_layernorm": (False,),
    "qk_norm": (False,),
    "q_lora_rank": (0,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1, 1.0),
    "rope_interleave": (False,),
    "rope_interleaved": (False,),
    "rotary_pct": (1, 1.0),
    "routed_scaling_factor": (0, 0.0, 1, 1.0),
    "scale_depth": (),
    "scale_emb": (1, 1.0),
    "scoring_func": ("softmax",),
    "shared_expert_intermediate_size": (0,),
    "shared_intermediate_size": (0,),
    "swiglu_alpha": (),
    "swiglu_limit": (),
    "topk_group": (0, 1),
    "topk_method": ("greedy",),
    "use_bidirectional_attention": (False,),
    "use_parallel_residual": (False,),
    "use_post_norm": (False,),
    "use_qk_norm": (False,),
}
