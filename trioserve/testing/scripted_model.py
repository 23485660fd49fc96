"""Fake models whose output a test determines: a text, a function of the prompt or of the token ids, or a preferred text
that the model writes as far as a grammar allows it.

`ScriptedChat` writes text, reasoning and tool calls in the format of a model family. It reads the conversation from its
prompt, which its own chat template writes as JSON. It finds the first rule of its script that matches, and writes the
response in the format of the family. If no rule matches, it calls the tool that the last message mentions, repeats the
result of a tool, or repeats the last message. So the result of a test depends on the server, and not on the quality of
a small model.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from trioserve.contracts.request import EngineRequest
from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID
from trioserve.testing.fake_executor import FakeExecutor, FakeModel

__all__ = [
    "FAMILIES",
    "Call",
    "NextToken",
    "PreferringModel",
    "Response",
    "Rule",
    "ScriptedChat",
    "UncheckedExecutor",
    "answering",
    "chat_template",
    "following",
]


Response = str | Callable[[str], str]
"""The text of every response, or a function from the prompt's text to it. A chat's prompt is its rendered template."""

NextToken = Callable[[Sequence[int]], int]
"""Function from the token ids of prompt and output so far to the next token id.

It must depend on nothing else, since a preempted request is computed again.
"""

PROMPTS_MAX = 1024  # The responses of so many prompts are remembered. So a function is called only once per prompt.


def answering(response: Response) -> FakeModel:
    """Return a model that writes a text in UTF-8, one token per byte, and then the end token.

    Args:
        response: the text, or a function that returns the text for a prompt.
    """

    @lru_cache(maxsize=PROMPTS_MAX)
    def response_bytes(prompt_token_ids: tuple[int, ...]) -> bytes:
        if isinstance(response, str):
            return response.encode()
        return response(
            bytes(token_id for token_id in prompt_token_ids if token_id < 256).decode(errors="replace")
        ).encode()

    def choose(request: EngineRequest, tokens: Sequence[int]) -> int:
        text = response_bytes(request.prompt_token_ids)
        position = len(tokens) - len(request.prompt_token_ids)
        return text[position] if position < len(text) else END_TOKEN_ID

    return _ScriptedModel(choose)


def following(next_token: NextToken) -> FakeModel:
    """Return a model that chooses each token with a function.

    Args:
        next_token: the function. If its result is not a token id, the engine has a fault.
    """

    def choose(request: EngineRequest, tokens: Sequence[int]) -> int:
        token_id = next_token(tokens)
        assert 0 <= token_id < BYTE_VOCAB_SIZE, (
            f"next_token returned {token_id}, allowed are 0 to {BYTE_VOCAB_SIZE - 1}"
        )
        return token_id

    return _ScriptedModel(choose)


class _ScriptedModel(FakeModel):
    """A model that ignores all sampling parameters except parameters that end a response."""

    def __init__(self, choose: Callable[[EngineRequest, Sequence[int]], int]) -> None:
        super().__init__(vocab_size=BYTE_VOCAB_SIZE)
        self._choose = choose

    def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int:
        return self._choose(request, tokens)


REQUESTS_KEPT_MAX = 256  # The texts of so many requests are remembered. For older requests, the drafts are made again.
SPACE = b" \n\t\r"
# Tokens that end a value, an object or an array come first, and tokens that begin an array or an object come last. So
# the output ends soon.
OUTSIDE_TEXTS = b'}],:"tfn1234567890-{[ \n'
INSIDE_TEXTS = b'"aeinorstlcdu1024-.:/ @ATZx'
FILLING = b"text"
REASONING_MARKS = ((b"<think>", b"</think>"), (b"[THINK]", b"[/THINK]"))


class PreferringModel(FakeModel):
    """A model with preferred texts. Without a grammar, it writes the first preferred text.

    Args:
        drafts: returns the preferred texts for a prompt, best first.
    """

    def __init__(self, drafts: Callable[[str], Sequence[str]]) -> None:
        super().__init__(vocab_size=BYTE_VOCAB_SIZE)
        self._drafts_of = drafts
        self._drafts: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()

    def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int:
        return self.chosen_token_id(request, tokens, digest, None) or 0

    def chosen_token_id(
        self, request: EngineRequest, tokens: Sequence[int], digest: int, is_allowed: Callable[[int], bool] | None
    ) -> int | None:
        """Return the most preferred token that is allowed, or None if no token is allowed.

        Args:
            request: request with a prompt, and perhaps a grammar.
            tokens: prompt and output so far.
            digest: ignored.
            is_allowed: returns True for an allowed token id. None allows all ids.
        """
        written = bytes(token_id for token_id in tokens[len(request.prompt_token_ids) :] if token_id < 256)
        for token_id in self._by_preference(request, written):
            if is_allowed is None or is_allowed(token_id):
                return token_id
        return None

    def _by_preference(self, request: EngineRequest, written: bytes) -> Iterator[int]:
        """Yield every token, the most preferred token first."""
        for draft in self._drafts_for(request):
            if draft.startswith(written):
                yield draft[len(written)] if len(written) < len(draft) else END_TOKEN_ID
        for begin, end in REASONING_MARKS:
            _before, opening, reasoning = written.rpartition(begin)
            if opening and end not in reasoning:  # The grammar forced the model to begin reasoning, so end it.
                yield from _rest_of(end, reasoning)
            written = written.rpartition(end)[2]
        for draft in self._drafts_for(request):
            yield from _beside(draft, written)
        is_inside, text = _open_text(written)
        if is_inside:
            if len(text) < len(FILLING) and FILLING.startswith(text):
                yield FILLING[len(text)]
            yield from INSIDE_TEXTS
        yield END_TOKEN_ID
        yield from OUTSIDE_TEXTS
        yield from range(256)

    def _drafts_for(self, request: EngineRequest) -> tuple[bytes, ...]:
        if request.id not in self._drafts:
            prompt = bytes(token_id for token_id in request.prompt_token_ids if token_id < 256)
            self._drafts[request.id] = tuple(
                draft.encode() for draft in self._drafts_of(prompt.decode(errors="replace"))
            )
            if len(self._drafts) > REQUESTS_KEPT_MAX:
                self._drafts.popitem(last=False)
        return self._drafts[request.id]


class UncheckedExecutor(FakeExecutor):
    """An executor that does not check the content of KV blocks.

    With a prompt of 50,000 tokens, the check takes longer than a client waits.
    """

    def _check_plan(self, plan: StepPlan, chunks: object) -> None:
        pass

    def _write(self, chunk: ScheduledChunk) -> None:
        pass

    def _spoil(self, chunk: ScheduledChunk) -> None:
        pass

    def _read(self, chunk: ScheduledChunk) -> list[int]:
        # Log probabilities depend on this result. With this executor, they depend only on the previous token.
        return [*chunk.tokens[: chunk.start + chunk.count], *chunk.draft]


def _rest_of(text: bytes, written: bytes) -> Iterator[int]:
    """Yield the next byte of a text, if the output so far is a prefix of the text."""
    for length in range(len(text) - 1, -1, -1):
        if written.endswith(text[:length]):
            yield text[length]
            return


def _beside(draft: bytes, written: bytes) -> Iterator[int]:
    """Yield the next byte of a draft, if the output so far is a prefix of the draft, except for white space.

    A grammar may require other white space between the same words.
    """
    position = 0
    for byte in written.translate(None, SPACE):
        while position < len(draft) and draft[position] in SPACE:
            position += 1
        if position == len(draft) or draft[position] != byte:
            return
        position += 1
    while position < len(draft) and draft[position] in SPACE:
        if written[-1:] not in (b" ", b"\n"):
            yield draft[position]
        position += 1
    yield draft[position] if position < len(draft) else END_TOKEN_ID


def _open_text(written: bytes) -> tuple[bool, bytes]:
    """Return True and the string so far if the output ends inside of quotation marks. Otherwise, return False and an
    empty text.
    """
    is_inside, begin, position = False, 0, 0
    while position < len(written):
        if is_inside and written[position] == ord("\\"):
            position += 1
        elif written[position] == ord('"'):
            is_inside, begin = not is_inside, position + 1
        position += 1
    return is_inside, written[begin:] if is_inside else b""


MESSAGE_MARK = "<|message|>"
TOOLS_MARK = "<|tools|>"
_WORD = re.compile(r"[a-z]+")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of a script.

    Attributes:
        name: name of the tool. In a list of names, the first tool that the request offers is called.
        arguments: arguments of the call.
    """

    name: str | list[str]
    arguments: dict[str, Any] = {}


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule of a script: a condition and a response. Calls of tools that the request does not offer are left out.

    Attributes:
        says: regular expression that the user's last message must contain. Upper and lower case are not distinguished.
        after: number of tool results that must follow the user's last message.
        reasoning: reasoning of the response.
        content: text of the response.
        calls: tool calls of the response.
    """

    says: str
    after: int = 0
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = []


def chat_template(family: str) -> str:
    """Return a chat template with one line for the tools and one line for each message.

    A comment in the template contains the marks that show the family to a server.

    Args:
        family: key of FAMILIES.
    """
    marks = FAMILIES[family].marks
    return (
        f"{{# {marks} #}}"
        f"{{% if tools %}}{TOOLS_MARK}{{{{ tools | tojson }}}}\n{{% endif %}}"
        f"{{% for message in messages %}}{MESSAGE_MARK}{{{{ message | tojson }}}}\n{{% endfor %}}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )


class ScriptedChat:
    """A scripted chat model.

    Args:
        family: key of FAMILIES, which determines the format of tool calls and reasoning.
        rules: rules of the script. The first rule that matches is used.
        thinks: if True, every response begins with reasoning.
    """

    def __init__(self, family: str = "hermes", rules: Sequence[Rule] = (), *, thinks: bool = False) -> None:
        self._family = FAMILIES[family]
        self._rules = [(re.compile(rule.says, re.IGNORECASE | re.DOTALL), rule) for rule in rules]
        self._thinks = thinks

    def drafts(self, prompt: str) -> tuple[str, ...]:
        """Return responses to a prompt, the best response first.

        The other responses are for requests whose response must follow a grammar: the tool calls without the text
        before the calls, the arguments alone, and the content alone.

        Args:
            prompt: text of the prompt.
        """
        messages, tools = _conversation(prompt)
        reasoning, content, calls = self._turn(messages, tools)
        if self._thinks and not reasoning:
            reasoning = "Let me think."
        write = self._family.write_calls
        reasoning_part = self._family.write_reasoning(reasoning) if reasoning else ""
        text_part = self._family.write_content(content) if content else ""
        written = write(calls) if calls else ""
        drafts = [reasoning_part + text_part + written]
        if calls:
            drafts += [written, *(_json(arguments) for _name, arguments in calls)]
        if content:
            drafts += [text_part, content]
        return tuple(dict.fromkeys(drafts))

    def _turn(
        self, messages: list[dict[str, Any]], tools: Mapping[str, Mapping[str, Any]]
    ) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
        last_user = next((_text(message) for message in reversed(messages) if message.get("role") == "user"), "")
        results = _results(messages)
        for pattern, rule in self._rules:
            if rule.after == len(results) and pattern.search(last_user):
                calls = [(name, call.arguments) for call in rule.calls if (name := _offered(call.name, tools))]
                if calls or rule.content or not rule.calls:
                    return rule.reasoning, rule.content, calls
        if results:
            return "", "The tool says: " + results[-1], []
        named = _mentioned(last_user, tools)
        if named is not None:
            return "", "", [(named, _arguments(tools[named], last_user))]
        return "", f"You said: {last_user}", []


def _conversation(prompt: str) -> tuple[list[dict[str, Any]], dict[str, Mapping[str, Any]]]:
    """Return the messages, and the tools by name. A prompt that is not a chat becomes one message."""
    messages: list[dict[str, Any]] = []
    tools: dict[str, Mapping[str, Any]] = {}
    for line in prompt.split("\n"):
        if line.startswith(MESSAGE_MARK):
            messages.append(json.loads(line.removeprefix(MESSAGE_MARK)))
        elif line.startswith(TOOLS_MARK):
            for tool in json.loads(line.removeprefix(TOOLS_MARK)):
                function = tool.get("function", tool)
                tools[function["name"]] = function
    return messages or [{"role": "user", "content": prompt}], tools


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


def _results(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the results of tools since the user's last message."""
    results: list[str] = []
    for message in messages:
        if message.get("role") == "user":
            results = []
        elif message.get("role") == "tool":
            results.append(_text(message))
    return results


def _offered(names: str | list[str], tools: Mapping[str, object]) -> str | None:
    return next((name for name in ([names] if isinstance(names, str) else names) if name in tools), None)


def _mentioned(text: str, tools: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the tool whose name has the most words in common with the text, or None if no words are common."""
    words = set(_WORD.findall(text.lower()))
    counts = {name: len(words & set(_WORD.findall(name.lower().replace("_", " ")))) for name in tools}
    best = max(counts, key=lambda name: counts[name], default=None)
    return best if best is not None and counts[best] > 0 else None


def _arguments(tool: Mapping[str, Any], text: str) -> dict[str, Any]:
    schema = tool.get("parameters") or {}
    return {
        name: value_of(part, text)
        for name, part in (schema.get("properties") or {}).items()
        if name in (schema.get("required") or ())
    }


def value_of(schema: Any, text: str, depth: int = 0) -> Any:
    """Return a value that most schemas of this kind accept.

    Args:
        schema: a JSON schema.
        text: source of the value: the last capitalized word for a string, the first number for a number.
        depth: depth of this schema in the outermost schema. Below depth 8, the value is "x".
    """
    if not isinstance(schema, dict) or depth > 8:
        return "x"
    for word in ("const", "default"):
        if word in schema:
            return schema[word]
    if schema.get("enum"):
        return schema["enum"][0]
    for word in ("anyOf", "oneOf", "allOf"):
        if schema.get(word):
            return value_of(schema[word][0], text, depth + 1)
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        required = schema.get("required") or ()
        parts = (schema.get("properties") or {}).items()
        return {name: value_of(part, text, depth + 1) for name, part in parts if name in required}
    if kind == "array":
        return [value_of(schema.get("items"), text, depth + 1)] * max(1, int(schema.get("minItems") or 0))
    if kind in ("integer", "number"):
        numbers = re.findall(r"\d+", text)
        return int(numbers[0]) if numbers else 1
    if kind in ("boolean", "null"):
        return True if kind == "boolean" else None
    names = re.findall(r"(?<!^)\b[A-Z]\w+", text)
    return names[-1] if names else text[:40]


# --- model families ---

_Calls = Sequence[tuple[str, dict[str, Any]]]


class _Family(msgspec.Struct, frozen=True, kw_only=True):
    """Format of a model family. Its key in FAMILIES is the name of its --tool-call-parser.

    Attributes:
        marks: text by which a server recognizes chat templates of this family.
        write_calls: writes tool calls.
        write_reasoning: writes reasoning.
        write_content: writes content.
    """

    marks: str
    write_calls: Callable[[_Calls], str]
    write_reasoning: Callable[[str], str] = "<think>\n{}\n</think>\n\n".format
    write_content: Callable[[str], str] = str


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _each(template: str, between: str = "") -> Callable[[_Calls], str]:
    """Return a function that writes tool calls with a template.

    Args:
        template: text in which `NAME`, `ARGUMENTS` and `INDEX` are replaced by the values of the call.
        between: text between two calls.
    """

    def write(calls: _Calls) -> str:
        return between.join(
            template.replace("NAME", name).replace("INDEX", str(index)).replace("ARGUMENTS", _json(arguments))
            for index, (name, arguments) in enumerate(calls)
        )

    return write


def _within(opening: str, write: Callable[[_Calls], str], closing: str) -> Callable[[_Calls], str]:
    return lambda calls: opening + write(calls) + closing


def _qwen_xml(calls: _Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{_raw(value)}\n</parameter>\n" for key, value in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _glm(calls: _Calls) -> str:
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n" for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def _pythonic(calls: _Calls) -> str:
    return (
        "["
        + ", ".join(
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
        )
        + "]"
    )


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

FAMILIES: dict[str, _Family] = {
    "hermes": _Family(
        marks="<tool_call> </think>",
        write_calls=_each('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', "\n"),
    ),
    "qwen3_coder": _Family(marks="<tool_call> <function= </think>", write_calls=_qwen_xml),
    "llama3_json": _Family(
        marks="<|python_tag|> </think>", write_calls=_each('{"name": "NAME", "parameters": ARGUMENTS}', "; ")
    ),
    "pythonic": _Family(marks="[func_name1( </think>", write_calls=_pythonic),
    "mistral": _Family(
        marks="[TOOL_CALLS] [THINK]",
        write_calls=_each("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
        write_reasoning="[THINK]{}[/THINK]".format,
    ),
    "deepseek_v3": _Family(
        marks="<｜tool▁calls▁begin｜> ```json </think>",
        write_calls=_within(
            _DEEPSEEK[0],
            _each("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>", "\n"),
            _DEEPSEEK[1],
        ),
    ),
    "deepseek_v31": _Family(
        marks="<｜tool▁calls▁begin｜> </think>",
        write_calls=_within(
            _DEEPSEEK[0], _each("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"), _DEEPSEEK[1]
        ),
    ),
    "glm45": _Family(marks="<arg_key> \\n<arg_key> </think>", write_calls=_glm),
    "kimi_k2": _Family(
        marks="<|tool_calls_section_begin|> </think>",
        write_calls=_within(
            "<|tool_calls_section_begin|>",
            _each("<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"),
            "<|tool_calls_section_end|>",
        ),
    ),
    "openai": _Family(
        marks="<|channel|> <|start|>",
        write_calls=_each(
            "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>",
            "<|start|>assistant",
        ),
        write_reasoning="<|channel|>analysis<|message|>{}<|end|><|start|>assistant".format,
        write_content="<|channel|>final<|message|>{}".format,
    ),
}
