"""What a family of models says of itself: how its config is read into a description, and what its tensors are called.

A new family is a file beside this one and a line in registry.py. Whatever computes knows descriptions, and no families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.families.model_fields import ModelFields
from trioserve.model.model_config import ModelConfig

__all__ = ["SHARED_EXPERTS", "Family", "GgufNaming", "Naming"]

# How DeepSeek's models, and those that took over their mixtures, name what every token goes through.
SHARED_EXPERTS = {f"shared.{part}_proj": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How the files of a format write a family's tensors down.

    layers: what stands before a layer's index, where it is not the usual.
    modules: by the module's name in here (see loading/names.py), its name there, where it is not the usual one. Modules
    that share a name are the rows of one tensor, in the usual order: q, k, v; gate, up. alternating: modules that share
    one whose rows are theirs in turn. turned: modules whose matrices are [inputs, outputs] there. pairs_adjacent: what
    rotary positions turn together are the rows 2j and 2j + 1 of a head, not j and j + half. norm_offset: is added to
    norms' weights, but for that of what a state gives. grouped: projections of a delta rule that share tensors, in
    which all of one group of heads lies side by side.
    """

    layers: str | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    alternating: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()
    pairs_adjacent: bool = False
    norm_offset: float = 0.0
    grouped: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GgufNaming(Naming):
    """architecture: the file's general.architecture."""

    architecture: str


@dataclass(frozen=True, kw_only=True)
class Family:
    """classes: what config.json calls it in architectures; model_type: what it calls it where those are missing.
    gguf: None if llama.cpp does not write it. with_images: classes of models that see images, too, and whose part for
    texts, which text_config describes, is of this family. text_defaults: what such a text_config leaves out. spellings:
    by the usual name of a field, the one that config.json may have in its place. defaults: values of fields that a
    config.json lacks, as transformers' class of this family has them, where they differ from the usual. notes: fields
    of this family's config.json that change nothing here, besides those of all families (see loading/unread_fields.py).

    describe: reads the fields; it may raise ModelLoadError.
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
    notes: tuple[str, ...] = ()

    @property
    def headless_classes(self) -> tuple[str, ...]:
        """Class names that transformers writes for models that were saved without a head, for vectors only."""
        names = (name.removesuffix("ForCausalLM") for name in self.classes)
        return tuple(
            f"{name}TextModel" if f"{name}ForConditionalGeneration" in self.with_images else f"{name}Model"
            for name in names
        )

    def with_defaults(self, config: Mapping[str, object]) -> dict[str, object]:
        """Add the family's defaults to a config.json. A field that is null stays null: some say "none" with it."""
        present = {name for name, theirs in self.spellings.items() if theirs in config}
        if "rope_scaling" in config:  # what transformers 4 calls it
            present.add("rope_parameters")
        return {name: value for name, value in self.defaults.items() if name not in present} | dict(config)

    def config_from(self, fields: ModelFields) -> ModelConfig:
        """Describe the model.

        Raises:
            ModelLoadError: a field changes what is computed and is not read, or numbers are too large to compute with.
        """
        try:
            config = self.describe(fields)
        except ModelLoadError:
            raise
        except (ArithmeticError, ValueError) as error:
            raise ModelLoadError(
                f"numbers in {fields.source} belong to no model that can be computed: {error}"
            ) from error
        asked = {fields.spelling(name) for name in fields.asked}
        for name, neutral in MEANINGFUL_FIELDS.items():
            if fields.spelling(name) not in asked and name in fields and not fields.is_neutral(name, neutral):
                raise ModelLoadError(
                    f"{fields.spelling(name)} in {fields.source} is {fields.shown(name)}, which {self.name} with this "
                    "config has no place for: it is a variant that is not supported"
                )
        return config


# Fields that some family's models are computed by, with the values that change nothing. Other fields that nobody reads
# are named in a warning.
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
