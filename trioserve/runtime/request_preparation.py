"""What a caller asks of an engine, checked before anything is held for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set, Sized
from typing import TypeVar

import msgspec

from trioserve.contracts.arguments import refuse, to_bool, to_str
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.prompt import ChatPrompt, Prompt

__all__ = ["checked_kv_transfer", "checked_prompt", "instance_of", "text_or_none"]

T = TypeVar("T")


def instance_of(kind: type[T], param: str, value: object, default: T) -> T:
    """The value, or the default for None. Raises InvalidRequest for one of another type."""
    if value is None:
        return default
    if not isinstance(value, kind):
        refuse(param, value, f"a {kind.__name__}, or None")
    return value


def text_or_none(param: str, value: object) -> str | None:
    """Raises InvalidRequest for anything but a text and None."""
    return None if value is None else to_str(param, value, "a text (str), or None")


def checked_prompt(prompt: object) -> Prompt:
    """The prompt, if it is one of those that there are. The token ids themselves are looked at where texts are
    tokenized, and what is in a message where it is rendered: both may be long. Raises InvalidRequest."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, ChatPrompt):
        _check_chat(prompt)
        return prompt
    is_other = isinstance(prompt, bytes | bytearray | memoryview | Mapping | Set)
    if is_other or not isinstance(prompt, Sized) or not isinstance(prompt, Iterable):
        refuse("prompt", prompt, "a text (str), a ChatPrompt, or a list of token ids (int)")
    return prompt  # type: ignore[return-value]  # an array of numpy, which is no Sequence, does as well


def _check_chat(prompt: ChatPrompt) -> None:
    _check_dicts("messages", prompt.messages)
    if prompt.tools is not None:
        _check_dicts("tools", prompt.tools)
    to_bool("add_generation_prompt", prompt.add_generation_prompt)
    to_bool("continue_final_message", prompt.continue_final_message)
    text_or_none("chat_template", prompt.chat_template)
    if not isinstance(prompt.template_arguments, dict):
        refuse("template_arguments", prompt.template_arguments, "a dict of names (str) and values")
    for name in prompt.template_arguments:
        to_str("template_arguments", name, "a dict of names (str) and values", verb="holds")


def _check_dicts(param: str, value: object) -> None:
    if not isinstance(value, list | tuple):
        refuse(param, value, "a list of dicts")
    for item in value:
        if not isinstance(item, dict):
            refuse(param, item, "a list of dicts", verb="holds")


def checked_kv_transfer(asked: object) -> KVTransferParams | None:
    """None where nothing is asked for. Raises InvalidRequest for a field of another type, too."""
    if asked is None:
        return None
    if not isinstance(asked, KVTransferParams):
        refuse("kv_transfer", asked, "a KVTransferParams, or None")
    try:
        return msgspec.convert(msgspec.structs.asdict(asked), KVTransferParams)
    except msgspec.ValidationError as error:
        refuse("kv_transfer", asked, f"a KVTransferParams whose fields have their types: {error}")
