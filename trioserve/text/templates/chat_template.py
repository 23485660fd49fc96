"""Renders the messages of a chat to a prompt with a chat template. Every error in a template fails only its request."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes

from trioserve.contracts.arguments import shown
from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.chat_messages import ContentFormat, prepared_messages
from trioserve.text.request_texts import RequestTexts
from trioserve.text.templates.template_sandbox import TemplateEnvironment, render_within_bounds
from trioserve.text.templates.template_support import (
    TemplateSupport,
    find_support,
    supports_tools_of,
    with_supported_parts,
)

__all__ = ["ChatTemplate", "template_flaw", "chat_template_text"]

# The limit is ten times the longest known template. Compiling takes about 1 ms per 1,000 characters.
TEMPLATE_CHARACTERS_MAX = 262_144
RESERVED_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message")

# These are the roles of OpenAI's API. A template may accept further roles.
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))

# This mark is appended to the final message to find the end of the message in the prompt. If the space of the mark is
# missing there, the template trims messages.
_END_MARK = "\U000f5e4d\U000f5e4e "


class ChatTemplate:
    """A Jinja template in the style of the Hugging Face hub.

    The module template_sandbox limits the objects that a template can reach, and its computation time and memory.

    Args:
        source: Text of the template. It is compiled at the first rendering, so a model with a broken template still
            serves completions.
        bos_token: Value of the template's variable bos_token. None leaves it undefined.
        eos_token: Value of the template's variable eos_token. None leaves it undefined.
        tool_source: Template for requests with tools. None to use `source` for them.
    """

    def __init__(
        self, source: str, *, bos_token: str | None, eos_token: str | None, tool_source: str | None = None
    ) -> None:
        self.source = source
        self._tool_source = tool_source
        self._special_tokens = {
            name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None
        }
        # The model's own compiled templates. Templates in requests are never stored.
        self._programs: dict[str, _Program] = {}

    @property
    def text(self) -> str:
        """Text of the template, followed by the template for tools.

        Both templates show in which format the model writes reasoning and calls.
        """
        return self.source if self._tool_source is None else f"{self.source}\n{self._tool_source}"

    @property
    def substitutions(self) -> tuple[tuple[str, str], ...]:
        """Pairs of old and new text that the templates rendered so far pass to `replace` as constants."""
        return tuple(pair for program in self._programs.values() for pair in program.substitutions)

    def render(self, prompt: ChatPrompt, *, tool_family: str | None = None, texts: RequestTexts | None = None) -> str:
        """Render a chat to the text of a prompt.

        Encode the returned text without adding special tokens, since the template writes them.

        Args:
            prompt: The chat. If the chat has a template, that template replaces the model's template.
            tool_family: Family of models whose format is used for tools and calls that the template cannot show. Such
                tools and calls become plain messages in this format. If None, they are left out.
            texts: Replaces parts of the chat's texts before any other change of the texts. None to replace nothing.

        Raises:
            InvalidRequest: A message is not text, or rendering fails.

        Cost: some milliseconds for a long chat.
        """
        source = prompt.chat_template
        if source is None:
            source = self._tool_source if self._tool_source is not None and prompt.tools else self.source
        for name in prompt.template_arguments:
            if name in RESERVED_ARGUMENTS:
                raise InvalidRequest(
                    f"template argument {name!r} is set by fields of the request: send it as a field",
                    param="chat_template_kwargs",
                )
        try:
            program = self._program(source)
            has_system, has_tools = _check_roles(prompt, program.roles)
            if texts is not None:
                are_text = has_tools and program.support.arguments_are_text
                if are_text and tool_family is not None:
                    are_text = supports_tools_of(prompt, program.support)
                prompt = texts.replaced_in(prompt, arguments_are_text=are_text)
            if has_tools or has_system:
                prompt = with_supported_parts(prompt, program.support, tool_family if has_tools else None)
        except InvalidRequest:
            raise
        except Exception as error:  # Compiling an untrusted template can raise any exception.
            raise _template_fault(prompt, "is not valid", error) from error
        messages = prepared_messages(
            prompt,
            program.content_format,
            final_end=_END_MARK,
            arguments_are_text=has_tools and program.support.arguments_are_text,
        )
        arguments = {
            "documents": None,
            **self._special_tokens,
            **prompt.template_arguments,
            "messages": messages,
            "tools": prompt.tools or None,
            "add_generation_prompt": prompt.add_generation_prompt and not prompt.continue_final_message,
        }
        try:
            text = render_within_bounds(program.template, arguments)
        except Exception as error:  # An untrusted template can raise any exception, such as MemoryError.
            raise _template_fault(prompt, "does not accept these messages", error) from error
        return _cut_at_final_end(text) if prompt.continue_final_message else text

    def _program(self, source: str) -> _Program:
        """Return a compiled template.

        A template in a request is compiled for each request. If it were cached, the time of a request would reveal
        which templates other API keys send.
        """
        if source not in (self.source, self._tool_source):
            return _Program(source, self._special_tokens)
        program = self._programs.get(source)
        if program is None:
            program = self._programs[source] = _Program(source, self._special_tokens)
        return program


class _Program:
    """A compiled template.

    Args:
        source: Text of the template.
        special_tokens: Values of the variables bos_token and eos_token.

    Attributes:
        roles: Roles that messages may have.
        substitutions: Pairs of old and new text that the template passes to `replace` as constants.
        template: The compiled template.
        content_format: Format that the template expects for the content of a message.

    Raises:
        Exception: The template is too long, or has any error.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > TEMPLATE_CHARACTERS_MAX:
            raise ValueError(f"it has {len(source)} characters, at most {TEMPLATE_CHARACTERS_MAX} are allowed")
        self._source = source
        self._special_tokens = special_tokens
        tree = _environment().parse(source)
        # The roles must be read before _substitutions, which folds lists of constants in the syntax tree.
        self.roles = ROLES | _named_roles(tree)
        self.substitutions = _substitutions(tree)
        self._variables = meta.find_undeclared_variables(tree)
        self.template = _environment().from_string(source)
        self.content_format = _content_format(tree)

    @functools.cached_property
    def support(self) -> TemplateSupport:
        """Parts of a chat that the template shows, found by rendering short chats."""

        def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
            arguments = {"documents": None, **self._special_tokens, "messages": messages, "tools": tools}
            return render_within_bounds(self.template, {**arguments, "add_generation_prompt": True})

        return find_support(render, variables=self._variables, source=self._source, content_format=self.content_format)


def template_flaw(source: str) -> str | None:
    """Return the reason why a template cannot be compiled, or None if it compiles.

    If the line of the error is known, the reason names it.

    Args:
        source: Text of the template.
    """
    try:
        _Program(source, {})
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except Exception as error:  # Compiling an untrusted template can raise any exception.
        return str(error) or type(error).__name__
    return None


def _check_roles(prompt: ChatPrompt, roles: frozenset[str]) -> tuple[bool, bool]:
    """Refuse a message with a role that the template does not know. Most templates would drop the message silently.

    Returns:
        True if a message has instructions for the model, in the role system or developer. And True if the chat offers
        tools, calls them, or has their results.
    """
    has_system, has_tools = False, bool(prompt.tools)
    messages: Sequence[object] = prompt.messages  # They are not checked yet, so they may have any shape.
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        role = message.get("role")
        has_tools = has_tools or "tool_calls" in message or role == "tool"
        if not isinstance(role, str):
            continue
        if role not in roles:
            place = f"messages[{index}].role"
            raise InvalidRequest(f"{place} is {shown(role)}, allowed are {', '.join(sorted(roles))}", param=place)
        has_system = has_system or role in ("system", "developer")
    return has_system, has_tools


def _named_roles(tree: nodes.Template) -> frozenset[str]:
    """Return all roles with which a template compares the role of a message."""
    named: set[str] = set()
    for comparison in tree.find_all(nodes.Compare):
        if _is_key(comparison.expr, "role"):
            for operand in comparison.ops:
                named.update(
                    constant.value
                    for constant in (_unfiltered(operand.expr), *operand.expr.find_all(nodes.Const))
                    if isinstance(constant, nodes.Const) and isinstance(constant.value, str) and constant.value
                )
    return frozenset(named)


def _substitutions(tree: nodes.Template) -> tuple[tuple[str, str], ...]:
    found = [
        call.args
        for call in tree.find_all(nodes.Call)
        if isinstance(call.node, nodes.Getattr) and call.node.attr == "replace"
    ]
    found += [replacing.args for replacing in tree.find_all(nodes.Filter) if replacing.name == "replace"]
    pairs = [[part.value for part in args[:2] if isinstance(part, nodes.Const)] for args in found]
    return tuple(
        (pair[0], pair[1])
        for pair in pairs
        if len(pair) == 2 and pair[0] and all(isinstance(part, str) for part in pair)
    )


def _unfiltered(expression: nodes.Node) -> nodes.Node:
    while isinstance(expression, nodes.Filter) and expression.node is not None:
        expression = expression.node
    return expression


def _is_key(expression: nodes.Node, key: str) -> bool:
    expression = _unfiltered(expression)
    if isinstance(expression, nodes.Getattr):
        return expression.attr == key
    return (
        isinstance(expression, nodes.Getitem)
        and isinstance(expression.arg, nodes.Const)
        and expression.arg.value == key
    )


@functools.cache
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


def _content_format(tree: nodes.Template) -> ContentFormat:
    """Return the format that a template expects for message content.

    If it loops over the content, that is a list of parts.
    """
    names = {"content"}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, set()):
            names.add(assignment.target.name)
    if not any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)):
        return ContentFormat.STRING
    if any(test.name == "string" for test in tree.find_all(nodes.Test)):
        return ContentFormat.STRING_OR_PARTS
    return ContentFormat.PARTS


def _is_content(expression: nodes.Node, names: set[str]) -> bool:
    expression = _unfiltered(expression)
    return _is_key(expression, "content") or (isinstance(expression, nodes.Name) and expression.name in names)


def _cut_at_final_end(text: str) -> str:
    """Cut a prompt at the end mark of the final message, and remove the space if the template would have trimmed it."""
    end = text.rfind(_END_MARK.strip())
    if end < 0:
        raise InvalidRequest(
            "continue_final_message is set, but the end of the final message cannot be found in the output of the chat "
            "template: omit it for this model",
            param="continue_final_message",
        )
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()


def _template_fault(prompt: ChatPrompt, what: str, error: Exception) -> InvalidRequest:
    own = prompt.chat_template is not None
    reason = str(error) or type(error).__name__
    if not isinstance(error, jinja2.TemplateError | ValueError):
        reason = f"{type(error).__name__}: {reason}"
    return InvalidRequest(
        f"the {'request' if own else 'model'}'s chat template {what}: {reason}",
        param="chat_template" if own else "messages",
    )


TEMPLATE_BYTES_MAX = 2**20  # The file of a model's own template has the same limit.


def chat_template_text(named: str) -> str:
    """Return the text of a chat template, and check that it compiles.

    Args:
        named: The template itself if the text contains "{{" or "{%", otherwise the path of a file.

    Raises:
        StartupError: The file cannot be read, or the template does not compile. The message is one sentence.
    """
    if "{{" in named or "{%" in named:
        return _checked(named, "the template of --chat-template is not valid")
    return _checked(_read(named), f"--chat-template {named} is not a valid template")


def _checked(source: str, complaint: str) -> str:
    reason = template_flaw(source)
    if reason is not None:
        raise StartupError(f"{complaint} ({reason}): correct it, or omit --chat-template")
    return source


def _read(named: str) -> str:
    path = Path(named)
    try:
        if path.stat().st_size > TEMPLATE_BYTES_MAX:
            raise StartupError(f"--chat-template {named} has more than {TEMPLATE_BYTES_MAX} bytes: name a template")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise StartupError(f"--chat-template {named} is not UTF-8 text: name a file with a Jinja template") from None
    except OSError as error:
        raise StartupError(
            f"--chat-template {named} cannot be read ({error.strerror}): name a file with a Jinja template"
        ) from None
