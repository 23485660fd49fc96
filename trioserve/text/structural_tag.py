"""Converts structural tags to a Lark grammar: free text in which triggers begin texts that follow a schema or pattern.

Two notations are supported. One has `structures` and `triggers`, as OpenAI-compatible servers introduced it. The other
has `format`, a tree of formats as in xgrammar (github.com/mlc-ai/xgrammar, docs/tutorials/structural_tag). If a text of
a structural tag contains the spelling of a special token, it means this token. All other text means its characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from trioserve.contracts.errors import InvalidRequest
from trioserve.text.grammar_bounds import check_fixed_text, check_lark, check_pattern, check_schema
from trioserve.text.schema_keywords import KeptSchema

__all__ = ["JSON_OPTIONS", "StructuralTagGrammar", "with_json_options"]

# JSON is written in the style of Python's json module. If all white space were allowed, no token would be forced, and
# small models might write white space forever.
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
TEXT = "TEXT"
PARTS_MAX = 1000
DEPTH_MAX = 32
FORMATS = (
    "const_string, json_schema, regex, grammar, any_text, sequence, or, tag, triggered_tags and tags_with_separator"
)


def with_json_options(schema: Any) -> Any:
    """Return a schema that also specifies the white space of its JSON. Options that the schema already has are kept."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**JSON_OPTIONS, **(own if isinstance(own, dict) else {})}}


class StructuralTagGrammar:
    """Grammar of one structural tag.

    Args:
        tag: The structural tag, a JSON value.
        special_ids: Ids of the model's special tokens by their text.
        end_token_ids: End tokens of the model.
        param: Field of the request, for error messages.
        lenient: True to leave out keywords of schemas that cannot be enforced.

    Attributes:
        lark: The main grammar in Lark.
        ignored: Paths of the keywords that were left out.

    Raises:
        InvalidRequest: The tag is not valid or exceeds a bound. `param` names the place.
    """

    def __init__(
        self,
        tag: object,
        special_ids: Mapping[str, int],
        end_token_ids: Collection[int],
        *,
        param: str,
        lenient: bool = False,
    ) -> None:
        self._param = param
        self._is_lenient = lenient
        self.ignored: list[str] = []
        self._rules: list[str] = []
        self._side_grammars: list[dict[str, str]] = []
        special = sorted(special_ids, key=len, reverse=True)
        self._special_ids = special_ids
        self._end_token_ids = end_token_ids
        self._special = re.compile("|".join(map(re.escape, special))) if special else None
        tag = self._dict(tag, param)
        if "format" in tag:
            start = self._format(tag["format"], f"{param}.format", 0)
        else:
            start = self._structures(tag, param)
        self.lark = "\n".join(("%llguidance {}", f"start: {start}", *self._rules, f"{TEXT}: /(.|\\n)*/", ""))

    @property
    def grammar(self) -> str:
        """Source text for llguidance: the Lark grammar, or JSON that contains several grammars."""
        if not self._side_grammars:
            return self.lark
        return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": self.lark}, *self._side_grammars]})

    # --- the two notations ---

    def _structures(self, tag: dict[str, Any], param: str) -> str:
        structures = self._list(tag, "structures", param)
        triggers = self._texts(tag, "triggers", param)
        tags = []
        for index, structure in enumerate(structures):
            place = f"{param}.structures[{index}]"
            structure = self._dict(structure, place)
            content = self._json(structure.get("schema", True), f"{place}.schema")
            tags.append((self._text(structure, "begin", place), content, self._text(structure, "end", place), place))
        return self._triggered(triggers, tags)

    def _format(self, node: Any, param: str, depth: int) -> str:
        if depth > DEPTH_MAX:
            raise InvalidRequest(f"the structural tag nests deeper than {DEPTH_MAX} formats", param=param)
        node = self._dict(node, param)
        match node.get("type"):
            case "const_string":
                return self._literal(self._text(node, "value", param))
            case "json_schema":
                return self._json(node.get("json_schema", True), f"{param}.json_schema")
            case "regex":
                pattern = self._text(node, "pattern", param)
                check_pattern(pattern, param=param)
                return self._terminal(pattern)
            case "grammar":
                grammar = self._text(node, "grammar", param)
                check_lark(grammar, param=param)
                return self._side_grammar(grammar)
            case "any_text":
                return TEXT
            case "sequence":
                elements = self._list(node, "elements", param)
                return self._sequence(elements, f"{param}.elements", depth)
            case "or":
                elements = self._list(node, "elements", param)
                parts = [
                    self._format(element, f"{param}.elements[{index}]", depth + 1)
                    for index, element in enumerate(elements)
                ]
                return self._rule(" | ".join(parts))
            case "tag":
                return self._rule(self._tag(node, param, depth))
            case "triggered_tags":
                return self._triggered_tags(node, param, depth)
            case "tags_with_separator":
                return self._separated_tags(node, param, depth)
            case kind:
                raise InvalidRequest(f'the type of a format is "{kind}", there are {FORMATS}', param=f"{param}.type")

    def _sequence(self, elements: list[Any], param: str, depth: int) -> str:
        parts = []
        index = 0
        while index < len(elements):
            node = self._dict(elements[index], f"{param}[{index}]")
            after = elements[index + 1] if index + 1 < len(elements) else None
            if node.get("type") == "any_text" and isinstance(after, dict) and after.get("type") == "const_string":
                parts.append(self._text_until(self._text(after, "value", f"{param}[{index + 1}]")))
                index += 2
            else:
                parts.append(self._format(node, f"{param}[{index}]", depth + 1))
                index += 1
        return self._rule(" ".join(parts))

    def _tag(self, node: dict[str, Any], param: str, depth: int) -> str:
        begin, content, end = self._tag_parts(node, param, depth)
        return " ".join(part for part in (self._literal(begin), content, end) if part)

    def _tag_parts(self, node: dict[str, Any], param: str, depth: int) -> tuple[str, str, str]:
        """Return the parts of a tag: its first text, and Lark expressions for its content and its end."""
        begin = self._text(node, "begin", param)
        ends = (
            self._texts(node, "end", param) if isinstance(node.get("end"), list) else [self._text(node, "end", param)]
        )
        content = self._dict(node.get("content", {"type": "any_text"}), f"{param}.content")
        if content.get("type") == "any_text" and all(ends):
            return begin, self._rule(" | ".join(map(self._text_until, ends))), ""
        end = self._rule(" | ".join(self._literal(end) or '""' for end in ends)) if any(ends) else ""
        return begin, self._format(content, f"{param}.content", depth + 1), end

    def _triggered_tags(self, node: dict[str, Any], param: str, depth: int) -> str:
        tags = []
        for index, tag in enumerate(self._list(node, "tags", param)):
            place = f"{param}.tags[{index}]"
            begin, content, end = self._tag_parts(self._dict(tag, place), place, depth)
            tags.append((begin, content, end, place))
        return self._triggered(
            self._texts(node, "triggers", param),
            [(begin, f"{content} {end}", "", place) for begin, content, end, place in tags],
            at_least_one=bool(node.get("at_least_one")),
            stop_after_first=bool(node.get("stop_after_first")),
        )

    def _separated_tags(self, node: dict[str, Any], param: str, depth: int) -> str:
        tags = [
            self._rule(self._tag(self._dict(tag, f"{param}.tags[{index}]"), f"{param}.tags[{index}]", depth))
            for index, tag in enumerate(self._list(node, "tags", param))
        ]
        one = self._rule(" | ".join(tags))
        separator = self._literal(self._text(node, "separator", param))
        several = one if node.get("stop_after_first") else self._rule(f"{one} ({separator} {one})*")
        return several if node.get("at_least_one") else self._rule(f"{several}?")

    # --- free text with triggers in it ---

    def _triggered(
        self,
        triggers: list[str],
        tags: Iterable[tuple[str, str, str, str]],
        *,
        at_least_one: bool = False,
        stop_after_first: bool = False,
    ) -> str:
        """Return the rule for free text that contains tags.

        Args:
            triggers: Texts. Each tag begins with one of them.
            tags: For each tag, the text with which it begins, its content as Lark, the text with which it ends, and its
                path in the request.
            at_least_one: True if the text begins with a tag.
            stop_after_first: True if the response ends after the first tag.
        """
        by_trigger: dict[str, list[str]] = {}
        whole = []
        for begin, content, end, place in tags:
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise InvalidRequest(f'"{begin}" begins with none of the triggers {triggers}', param=f"{place}.begin")
            body = " ".join(part for part in (content, self._literal(end)) if part)
            rest = self._literal(begin[len(trigger) :])
            by_trigger.setdefault(trigger, []).append(self._rule(f"{rest} {body}"))
            whole.append(self._rule(f"{self._literal(begin)} {body}"))
        parts = [
            self._rule(f"{self._text_until(trigger)} ({' | '.join(bodies)})") for trigger, bodies in by_trigger.items()
        ]
        one = self._rule(" | ".join(parts))
        first = self._rule(" | ".join(whole)) if at_least_one else None
        if stop_after_first:
            return first or self._rule(f"{one} | {TEXT}")
        return self._rule(f"{first or ''} {one}* {TEXT}")

    def _text_until(self, end: str) -> str:
        """Return the rule for free text up to and including the first occurrence of a given text."""
        match = None if self._special is None else self._special.match(end)
        if match is not None:
            # Free text contains no special tokens, so it ends at this token.
            return self._rule(f"{TEXT} {self._literal(end)}")
        return self._rule(f"{TEXT} {_quoted(end)}", attributes="[lazy]")

    # --- pieces of Lark ---

    def _rule(self, body: str, *, attributes: str = "") -> str:
        if len(self._rules) >= PARTS_MAX:
            raise InvalidRequest(f"the structural tag has more than {PARTS_MAX} parts")
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _terminal(self, pattern: str) -> str:
        name = f"PART_{len(self._rules)}"
        self._rules.append(f"{name}: /{_slashes_escaped(pattern)}/")
        return name

    def _json(self, schema: Any, param: str) -> str:
        if not isinstance(schema, dict) and schema is not True:
            raise InvalidRequest("a schema must be an object, or true", param=param)
        check_schema(schema, param=param)
        kept = KeptSchema(schema, param=param, lenient=self._is_lenient)
        self.ignored += kept.ignored
        check_schema(kept.schema, param=param)
        return self._rule(f"%json {json.dumps(with_json_options(kept.schema))}")

    def _side_grammar(self, grammar: str) -> str:
        name = f"grammar_{len(self._side_grammars)}"
        self._side_grammars.append({"name": name, "lark_grammar": grammar})
        return f"@{name}"

    def _literal(self, text: str) -> str:
        """Return the expression for a text, or "" for an empty text. Spelled special tokens become tokens."""
        check_fixed_text(text, "a text of the structural tag", param=self._param)
        if self._special is None:
            return _quoted(text) if text else ""
        parts = []
        end = 0
        for match in self._special.finditer(text):
            if match.start() > end:
                parts.append(_quoted(text[end : match.start()]))
            token_id = self._special_ids[match[0]]
            if token_id not in self._end_token_ids:  # Where the grammar ends, an end token is always allowed.
                parts.append(f"<[{token_id}]>")
            end = match.end()
        if end < len(text):
            parts.append(_quoted(text[end:]))
        return " ".join(parts)

    # --- reading JSON ---

    def _dict(self, value: Any, param: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InvalidRequest("it must be a JSON object", param=param)
        return value

    def _list(self, node: dict[str, Any], name: str, param: str) -> list[Any]:
        value = node.get(name)
        if not isinstance(value, list) or not value:
            raise InvalidRequest("it must be a list with at least one entry", param=f"{param}.{name}")
        return value

    def _texts(self, node: dict[str, Any], name: str, param: str) -> list[str]:
        for index, value in enumerate(self._list(node, name, param)):
            if not isinstance(value, str) or not value:
                raise InvalidRequest("it must be a string that is not empty", param=f"{param}.{name}[{index}]")
        return list(node[name])

    def _text(self, node: dict[str, Any], name: str, param: str) -> str:
        value = node.get(name)
        if not isinstance(value, str):
            raise InvalidRequest("it must be a string", param=f"{param}.{name}")
        return value


def _quoted(text: str) -> str:
    return json.dumps(text)


def _slashes_escaped(pattern: str) -> str:
    """Escape slashes, since a slash ends a pattern in Lark unless a backslash precedes it."""
    return re.sub(
        r"\\.|/|\n", lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), pattern, flags=re.DOTALL
    )
