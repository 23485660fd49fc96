"""The streams of a simulated router: their bytes from several endpoints, and the part that their client has.

An endpoint is a function: the next token depends only on the seed and the tokens before, and the visible text only on
the tokens so far. So the undisturbed stream is known. Wherever an endpoint breaks off, the client must have a beginning
of it, with each token, each text and usage exactly once. Streams are resumed with the real code of the proxy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from trioserve.proxy.continued_stream import ContinuedStream

__all__ = ["SimulatedStream"]

IDS_BYTES_MAX = 1 << 20
TOKENS_IN_A_GROUP_MAX = 3


def _token(seed: int, choice: int, before: Sequence[int]) -> int:
    last = before[-1] if before else 0
    return (last * 31 + len(before) * 17 + seed * 7 + choice * 5) % 997


def _length(seed: int, choice: int) -> int:
    return 4 + (seed * 13 + choice * 7) % 40


def _shown(tokens: Sequence[int], *, is_finished: bool) -> str:
    """Return the visible text.

    The text of some tokens is only visible after the next token, as at a possible stop string.
    """
    is_held = bool(tokens) and tokens[-1] % 3 == 0 and not is_finished
    return "".join(f" {token}" for token in (tokens[:-1] if is_held else tokens))


class _Endpoint:
    """One response at one endpoint: groups of events after the known tokens."""

    def __init__(self, seed: int, choice_count: int, resume: Mapping[str, object] | None) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(choice_count)]
        self.finished = [False] * choice_count
        self._seed = seed
        self._number = 0
        self._is_over = False
        if resume is not None:
            self._resume_from(resume)

    def _resume_from(self, resume: Mapping[str, object]) -> None:
        tokens, finished, seed, state = (resume[key] for key in ("token_ids", "finished", "seed", "state"))
        assert isinstance(tokens, list)
        assert isinstance(finished, list)
        assert isinstance(seed, int)
        assert isinstance(state, str)
        assert len(tokens) == len(finished) == len(self.tokens), (
            f"{len(tokens)} choices are known, but the request has {len(self.tokens)}"
        )
        assert resume["prompt_digest"] == "d", "the endpoint gets another prompt"
        self.tokens, self.finished, self._seed, self._number = tokens, finished, seed, int(state)

    def resume_header(self) -> str:
        return json.dumps({"prompt_digest": "d", "seed": self._seed})

    def next_group(self) -> tuple[bytes, int]:
        """Return the bytes of the next group and the number of its tokens.

        After the last group, the bytes are empty.
        """
        open_choices = [choice for choice, is_finished in enumerate(self.finished) if not is_finished]
        if self._is_over:
            return b"", 0
        if not open_choices:
            self._is_over = True
            usage = json.dumps({"usage": sum(map(len, self.tokens))})
            return f"data: {usage}\n\nid: .\ndata: [DONE]\n\n".encode(), 0
        choice = open_choices[sum(map(len, self.tokens)) % len(open_choices)]
        tokens = self.tokens[choice]
        before = _shown(tokens, is_finished=False)
        new: list[int] = []
        while len(new) < 1 + self._number % TOKENS_IN_A_GROUP_MAX and len(tokens) < _length(self._seed, choice):
            tokens.append(_token(self._seed, choice, tokens))
            new.append(tokens[-1])
        is_finished = self.finished[choice] = len(tokens) >= _length(self._seed, choice)
        text = _shown(tokens, is_finished=is_finished)[len(before) :]
        begin = ""
        if self._number % 4 == 0:
            begin = ": keep-alive\n\n"
        elif self._number % 4 == 1:
            begin, text = self._event(choice, text[:2]), text[2:]
        event = self._event(choice, text)
        id = f"{choice}:{','.join(map(str, new))}{'!' if is_finished else ''} {self._number}"
        return f"{begin}id: {id}\n{event}".encode(), len(new)

    def _event(self, choice: int, text: str) -> str:
        self._number += 1
        return f"data: {json.dumps({'index': choice, 'text': text, 'number': self._number})}\n\n"


class SimulatedStream:
    """One stream, from one or several endpoints.

    Args:
        seed: seed of the stream, from which all of it follows.
        choice_count: number of choices.
        count: counts occurrences.

    Attributes:
        token_count: tokens that the client has in whole groups.
    """

    def __init__(self, seed: int, choice_count: int, *, count: Callable[[str], None]) -> None:
        self.token_count = 0
        self._seed = seed
        self._choice_count = choice_count
        self._count = count
        self._kept = ContinuedStream(choice_count=choice_count, bytes_max=IDS_BYTES_MAX)
        self._endpoint: _Endpoint | None = None
        self._group, self._group_tokens = b"", 0  # rest of a group that has not come whole
        self._resume: Mapping[str, object] | None = None
        self._texts = [""] * choice_count
        self._number = 0
        self._usages: list[int] = []
        self._delivered: tuple[list[list[int]], list[bool]] = (
            [[] for _ in range(choice_count)],
            [False] * choice_count,
        )

    @property
    def is_over(self) -> bool:
        return self._kept.is_over

    def begin(self) -> None:
        """Begin the response at an endpoint."""
        self._endpoint = _Endpoint(self._seed, self._choice_count, self._resume)
        self._group, self._group_tokens = b"", 0
        self._kept.begin(self._endpoint.resume_header())

    def come(self, token_count: int, part: float) -> None:
        """Let tokens arrive, in whole groups, and then a part of the next group.

        Args:
            token_count: minimum number of tokens.
            part: share of the next group, 0 to 1.
        """
        endpoint = self._endpoint
        assert endpoint is not None
        came = 0
        while came < token_count or not self._kept.is_answered:
            if not self._group:
                self._group, self._group_tokens = endpoint.next_group()
            if not self._group:
                break
            self._pass_on(self._group)
            came += self._group_tokens
            self.token_count += self._group_tokens
            self._group, self._group_tokens = b"", 0
            self._delivered = ([list(tokens) for tokens in endpoint.tokens], list(endpoint.finished))
            self._check()
        if part and not self._group:
            self._group, self._group_tokens = endpoint.next_group()
        byte_count = min(int(len(self._group) * part), max(0, len(self._group) - 1))
        self._pass_on(self._group[:byte_count])
        self._group = self._group[byte_count:]

    def give_away(self) -> None:
        """Let the endpoint hand the stream over, after the groups that have come whole."""
        if not self._group or self._group_tokens == 0:
            self._pass_on(b'data: {"object":"hand_over","kv_transfer_params":null}\nid: >\n\n')

    def break_off(self) -> None:
        """Lose the group that has not come whole.

        Assert that the next endpoint gets exactly the tokens that the client has.
        """
        if not self.token_count and not self._kept.is_answered and self._resume is None:
            return
        field = self._kept.resume_field()
        assert field is not None, f"the stream cannot be resumed: {self._kept.why_not}"
        tokens, finished = self._delivered
        assert field["token_ids"] == tokens, f"the next endpoint gets {field['token_ids']}, but the client has {tokens}"
        assert field["finished"] == finished, f"the next endpoint gets {field['finished']}, not {finished}"
        reported = self._kept.token_count()
        assert reported == self.token_count, f"the client has {self.token_count} tokens, but {reported} are reported"
        self._resume = json.loads(json.dumps(field, default=lambda raw: json.loads(bytes(raw))))
        self._count("streams that go on from their ids")

    def _pass_on(self, piece: bytes) -> None:
        """Pass bytes through the proxy. The client reads the result: whole events without ids."""
        passed = self._kept.feed(piece) if piece else b""
        assert not passed or passed.endswith(b"\n\n"), f"the client gets half an event: {passed!r}"
        for event in passed.split(b"\n\n"):
            if not event or event.startswith(b":"):
                continue
            assert event.startswith(b"data: "), f"the client gets {event!r}"
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                continue
            self._read(json.loads(data))

    def _read(self, event: dict[str, object]) -> None:
        if "usage" in event:
            assert isinstance(event["usage"], int)
            self._usages.append(event["usage"])
            return
        choice, text, number = event["index"], event["text"], event["number"]
        assert isinstance(choice, int)
        assert number == self._number + 1, f"event {number} follows event {self._number}"
        self._number += 1
        self._texts[choice] += str(text)

    def _check(self) -> None:
        """Assert that the client has a beginning of the undisturbed stream."""
        for choice, (tokens, is_finished) in enumerate(zip(*self._delivered, strict=True)):
            expected: list[int] = []
            while len(expected) < len(tokens):
                expected.append(_token(self._seed, choice, expected))
            assert tokens == expected, (
                f"choice {choice} has the tokens {tokens}, but the undisturbed stream has {expected}"
            )
            text = _shown(tokens, is_finished=is_finished)
            assert self._texts[choice] == text, f"choice {choice} reads {self._texts[choice]!r}, expected {text!r}"
        if self.is_over:
            count = sum(map(len, self._delivered[0]))
            assert self._usages == [count], f"usage is {self._usages}, but the stream has {count} tokens"
            assert all(self._delivered[1]), "a stream is complete, but a choice is not"
            self._count("streams that came to their end")
        else:
            assert not self._usages, f"usage {self._usages} came before the end"
