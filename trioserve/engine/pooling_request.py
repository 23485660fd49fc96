"""The engine's state of a request whose inputs become vectors or scores.

A request may have thousands of inputs. The core has only a limited number of its sequences at a time, and the next
sequence is added when another one has ended. So one request cannot fill the core's queue or block other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trioserve.admission.prompt_encoder import PromptEncoder
from trioserve.contracts.arguments import check_count, is_list, refuse, to_items, to_str
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import ContextTooLong, InvalidRequest
from trioserve.contracts.pooling import (
    INPUTS_MAX,
    TOKEN_TASKS,
    LabelledPrompt,
    Pooling,
    PoolingInput,
    PoolingParams,
    TextPair,
)
from trioserve.contracts.prompt import ChatPrompt, Cut
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.engine.model_description import ModelDescription, PoolingModel
from trioserve.engine.open_request import Choice, OpenRequest
from trioserve.engine.request_preparation import checked_prompt
from trioserve.text.tokenizer import EncodedInput

__all__ = [
    "PoolingRequest",
    "check_can_be_pooled",
    "check_can_generate",
    "checked_inputs",
    "name_of_input",
    "pooling_sequences",
]


NO_SAMPLING = SamplingParams(max_tokens=0)  # A pooled request samples no token.


class PoolingRequest(OpenRequest):
    """A pooled request. `Engine.embed` and `Engine.generate` document all arguments that are not listed in this
    docstring.

    Args:
        inputs: the inputs. Each becomes one sequence and one choice, in this order.
        params: options that define which vectors or scores are computed.
        name_of: returns the name of an input for error messages, by its index.
        cut: how to shorten an input that is too long. None: the request is refused.
        sequence_count_max: highest number of the request's sequences that are in the core at the same time.

    Attributes:
        encoded: the tokenized inputs, until the sequences are created.
        input_token_counts: number of tokens of each input. Set when the inputs are tokenized.
    """

    generates = False

    def __init__(
        self,
        inputs: Sequence[PoolingInput],
        params: PoolingParams,
        *,
        name_of: Callable[[int], str],
        cut: Cut | None,
        sequence_count_max: int,
        request_id: str,
        priority: int,
        cache_salt: str | None,
        add_special_tokens: bool,
        deadlines: Deadlines,
        owner: str | None,
        tenant: str,
        part_of: Span = NO_SPAN,
        adapter: str | None = None,
    ) -> None:
        super().__init__(
            (),
            NO_SAMPLING,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            deadlines=deadlines,
            owner=owner,
            tenant=tenant,
            part_of=part_of,
            adapter=adapter,
        )
        self.inputs = tuple(inputs)
        self.params = params
        self.name_of = name_of
        self.cut = cut
        self.sequence_count = min(len(self.inputs), sequence_count_max)
        self.encoded: list[EncodedInput] = []
        self.input_token_counts: tuple[int, ...] = ()
        self._unfinished_count = len(self.inputs)

    @property
    def choice_count(self) -> int:
        return len(self.inputs)

    @property
    def prompts(self) -> tuple[PoolingInput, ...]:
        return self.inputs

    async def tokenize(self, encoder: PromptEncoder) -> None:
        self.encoded = await encoder.encode_inputs(
            self.inputs, name_of=self.name_of, add_special_tokens=self.add_special_tokens, cut=self.cut
        )
        self.input_token_counts = tuple(len(one.token_ids) for one in self.encoded)

    @property
    def prompt_token_count(self) -> int:
        return sum(self.input_token_counts)

    def prompt_token_count_of(self, choice: Choice) -> int:
        return self.input_token_counts[choice.index]

    def note_cached(self, choice: Choice, token_count: int) -> None:
        self.cached_token_count += token_count

    @property
    def completion_token_count(self) -> int:
        return 0


# Highest number of labels in one prompt. The step that ends the prompt computes one row of logits for each label.
LABELS_MAX = 128
TOKEN_RESULTS_BYTES_MAX = 64 * 2**20  # Results of one request that have a row for each token.


def checked_inputs(inputs: object) -> tuple[PoolingInput, ...]:
    """Check the inputs of a pooled request, and return them as a tuple. A list of integers is one prompt.

    Args:
        inputs: one input or a list of inputs.

    Raises:
        InvalidRequest: an input has a wrong type, or there are no inputs or too many.
    """
    if isinstance(inputs, str | ChatPrompt | TextPair | LabelledPrompt):
        return (_checked_input(inputs),)
    if not is_list(inputs):
        refuse("input", inputs, "a text (str), token ids, a ChatPrompt, a TextPair, a LabelledPrompt, or a list")
    if not len(inputs):
        raise InvalidRequest("input is an empty list, at least one is needed", param="input")
    if not isinstance(inputs[0], str | ChatPrompt | TextPair | LabelledPrompt) and not is_list(inputs[0]):
        return (checked_prompt(inputs),)
    check_count("input", inputs, INPUTS_MAX)
    return tuple(map(_checked_input, inputs))


def _checked_input(one: object) -> PoolingInput:
    if isinstance(one, TextPair):
        to_str("first", one.first)
        to_str("second", one.second)
        return one
    if isinstance(one, LabelledPrompt):
        if not isinstance(one.prompt, str | ChatPrompt):
            refuse("prompt", one.prompt, "a text (str) or a ChatPrompt")
        checked_prompt(one.prompt)
        labels = to_items("labels", one.labels, "a list of texts (str)", count_max=LABELS_MAX)
        if not labels:
            raise InvalidRequest("labels is empty, at least one is needed", param="labels")
        for label in labels:
            to_str("labels", label, verb="holds")
        return one
    return checked_prompt(one)


def name_of_input(count: int) -> Callable[[int], str]:
    """Return a function that names an input for error messages, by its index.

    Args:
        count: number of inputs.
    """
    return (lambda index: "input") if count == 1 else "input[{}]".format


def check_can_generate(model: ModelDescription) -> None:
    """Check that a model can generate text.

    Args:
        model: description of the model.

    Raises:
        InvalidRequest: the model cannot generate.
    """
    if model.pooled is not None and not model.pooled.continues_texts:
        what = "scores of pairs of texts" if model.pooled.scores_pairs else "embeddings"
        kind = "is an encoder" if model.pooled.is_encoder else "was saved without a head"
        raise InvalidRequest(
            f"{model.name} {kind} and does not generate text: ask it for {what}, or use another model",
            param="model",
        )


def check_can_be_pooled(model: ModelDescription, params: PoolingParams, inputs: Sequence[object]) -> PoolingModel:
    """Check that a model can compute the vectors or scores that a request needs.

    Args:
        model: description of the model.
        params: pooling options.
        inputs: texts, token ids or pairs of texts.

    Returns:
        The model's pooling abilities.

    Raises:
        InvalidRequest: the model cannot compute these results.
    """
    pooled = model.pooled
    if pooled is None:
        raise InvalidRequest(f"{model.name} computes no embeddings here", param="model")
    if params.task == "score":
        if not pooled.scores_pairs:
            raise InvalidRequest(f"{model.name} has no head that scores pairs of texts", param="model")
        if not all(isinstance(one, TextPair) for one in inputs):
            raise InvalidRequest("only pairs of texts (TextPair) can be scored", param="input")
        return pooled
    if params.task == "labels":
        if not pooled.continues_texts:
            kind = "is an encoder" if pooled.is_encoder else "was saved without a head"
            raise InvalidRequest(f"{model.name} {kind}: it has no probabilities of next tokens", param="model")
        if not all(isinstance(one, LabelledPrompt) for one in inputs):
            raise InvalidRequest("labels need prompts with labels (LabelledPrompt)", param="input")
        return pooled
    if pooled.scores_pairs:
        raise InvalidRequest(
            f"{model.name} scores pairs of texts and computes no embeddings: ask it for scores, or to rerank",
            param="model",
        )
    _check_token_task(model, pooled, params)
    if any(isinstance(one, TextPair | LabelledPrompt) for one in inputs):
        raise InvalidRequest(
            'pairs of texts are for the task "score" and labels for "labels": a vector is computed from one text',
            param="input",
        )
    if params.method == "cls" and not pooled.is_encoder:
        raise InvalidRequest(
            f'the pooling method is "cls", but {model.name} is a decoder, whose first token attends to no other: '
            'allowed are "last" and "mean"',
            param="pooling",
        )
    if params.dimensions is not None and params.dimensions > pooled.embedding_size:
        raise InvalidRequest(
            f"dimensions is {params.dimensions}, but vectors of {model.name} have {pooled.embedding_size}: "
            f"allowed is 1 to {pooled.embedding_size}",
            param="dimensions",
        )
    return pooled


def _check_token_task(model: ModelDescription, pooled: PoolingModel, params: PoolingParams) -> None:
    if params.task in TOKEN_TASKS and not pooled.is_encoder:
        raise InvalidRequest(
            f"{model.name} is a decoder: only encoders compute a result for each token. Ask it for embeddings",
            param="task",
        )
    if params.task == "token_classify" and not pooled.label_count:
        raise InvalidRequest(f"{model.name} has no head that labels tokens: ask it for embeddings", param="task")
    if params.task == "embed" and pooled.label_count:
        raise InvalidRequest(
            f"{model.name} labels tokens and computes no embeddings of texts: ask /pooling for the task token_classify",
            param="model",
        )


def pooling_sequences(model: ModelDescription, request: PoolingRequest) -> list[tuple[Choice, EngineRequest]]:
    """Create one sequence per choice of a pooled request.

    Args:
        model: description of the model.
        request: a request whose inputs are tokenized.

    Returns:
        The choices in order, each with its sequence.

    Raises:
        InvalidRequest: an input is empty, or has a label that the model does not know. The first such input is named.
        ContextTooLong: an input is too long. The first such input is named.
    """
    pooled, params = model.pooled, request.params
    assert pooled is not None, "checked before the request was admitted"
    method = params.method or pooled.method
    is_whole = pooled.is_whole(params)
    tokens_max = model.pooling_tokens_max(params)
    for index, count in enumerate(request.input_token_counts):
        _check_length(request.name_of(index), count, tokens_max, model.context_tokens_max)
    if params.task in TOKEN_TASKS:
        width = params.dimensions or pooled.embedding_size if params.task == "token_embed" else pooled.label_count
        size = 4 * width * request.prompt_token_count
        if size > TOKEN_RESULTS_BYTES_MAX:
            raise InvalidRequest(
                f"the inputs have {request.prompt_token_count} tokens with {width} numbers each, which are {size:,} "
                f"bytes: {TOKEN_RESULTS_BYTES_MAX:,} are allowed. Send fewer inputs at a time",
                param="input",
            )
    for index, one in enumerate(request.encoded):
        if one.label_token_ids and max(one.label_token_ids) >= model.vocab_size:
            name = request.name_of(index)
            raise InvalidRequest(f"{name}: a label is a token that {model.name} does not know", param=name)
    encoded, request.encoded = request.encoded, []
    normalize = pooled.normalize if params.normalize is None else params.normalize
    sequences = []
    for choice, one in zip(request.choices, encoded, strict=True):
        pooling = Pooling(
            task=params.task,
            method=method,
            normalize=normalize,
            dimensions=params.dimensions,
            is_whole=is_whole,
            first_segment_tokens=one.first_segment_tokens,
            label_token_ids=one.label_token_ids,
        )
        sequence = EngineRequest(
            id=choice.sequence_id,
            prompt_token_ids=tuple(one.token_ids),
            sampling=request.sampling,
            output_tokens_max=0,
            stop_token_ids=frozenset(),
            seed=0,
            priority=request.priority,
            cache_salt=request.block_salt,
            adapter=request.adapter_ref,
            pooling=pooling,
        )
        sequences.append((choice, sequence))
    return sequences


def _check_length(name: str, count: int, tokens_max: int, context_tokens_max: int) -> None:
    if count == 0:
        raise InvalidRequest(f"{name} has no tokens: send at least one", param=name)
    if count <= tokens_max:
        return
    if tokens_max == context_tokens_max:
        raise ContextTooLong(
            f"This model's maximum context length is {context_tokens_max} tokens, and {name} has {count}: shorten it, "
            "truncate it with truncate_prompt_tokens, or raise max_model_len",
            param=name,
        )
    raise ContextTooLong(
        f"This model's maximum context length is {tokens_max} tokens for inputs that are computed in one step, as "
        f"here, and {name} has {count}: shorten it, truncate it with truncate_prompt_tokens, or raise "
        "max_num_batched_tokens",
        param=name,
    )
