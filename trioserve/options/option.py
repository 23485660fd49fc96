"""Declaration of an option: its names, type, bounds, default and description, and the check of its values."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union

import msgspec
from msgspec import Meta

from trioserve.contracts.arguments import closest_name
from trioserve.contracts.errors import StartupError

__all__ = [
    "ENVIRONMENT_PREFIX",
    "Option",
    "about",
    "checked",
    "checked_parameters",
    "in_python",
    "options_of",
    "parameters_of",
]

ENVIRONMENT_PREFIX = "TRIOSERVE_"

TOKEN_COUNTS = frozenset({"max_model_len", "max_num_batched_tokens"})
"""Options with large numbers of tokens, which may end in k or K."""

P = ParamSpec("P")
T = TypeVar("T")
OptionsT = TypeVar("OptionsT")


def about(description: str, unit: str | None = None, **bounds: float) -> Meta:
    """Describe an option, in the annotation of its field.

    Args:
        description: text for help and documents. It describes the default if the value alone is not clear.
        unit: placeholder of the value in help texts. None for an option with choices or without a value.
        bounds: ge, gt and le, as in msgspec.Meta.
    """
    # mypy does not accept a Meta whose bounds come from a dict. At run time, Meta checks the bounds itself.
    return Meta(title=unit, description=description, **bounds)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class Option:
    """One option. It is a field of a class of options.

    Attributes:
        name: name of the field, which is also the key in a config file.
        hint: annotation of the field.
        default: value if the option is not given. MISSING if it must be given.
        is_positional: True if a Python function may take it without its name.
    """

    name: str
    hint: Any
    default: Any
    is_positional: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def type(self) -> Any:
        return self.hint.__origin__

    @property
    def description(self) -> str:
        """Description of the option, which may end with `; default: WORDS`."""
        description: str = self.hint.__metadata__[-1].description
        return description

    @property
    def unit(self) -> str | None:
        unit: str | None = self.hint.__metadata__[-1].title
        return unit

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def is_switch(self) -> bool:
        """True if the option is on or off, or has neither value by default."""
        return self.type is bool or set(typing.get_args(self.type)) == {bool, types.NoneType}

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed texts of the option, or () if its type is not an enumeration."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    def convert(self, spelling: str, value: object, *, strict: bool) -> Any:
        """Convert a value to the option's type.

        Args:
            spelling: the option as the user wrote it, for the error message.
            value: the received value.
            strict: True to refuse a text for a number.

        Raises:
            StartupError: the value has a wrong type or is out of range.
        """
        try:
            if self.name in TOKEN_COUNTS and isinstance(value, str):
                value = _token_count(value)
            return msgspec.convert(value, self.hint, strict=strict)
        except msgspec.ValidationError:
            raise StartupError(f"{spelling} is {value!r}, allowed is {_allowed(self.hint)}") from None


_OPTIONS: dict[type, Mapping[str, Option]] = {}  # options by name, for each class of options


def options_of(kind: type) -> Mapping[str, Option]:
    """Return the options of a class by name: first the options of the class itself, then the options of its bases.

    Args:
        kind: a class of options, which is a dataclass.
    """
    if kind not in _OPTIONS:
        hints = typing.get_type_hints(kind, include_extras=True)
        found = {
            field.name: Option(field.name, hints[field.name], field.default, is_positional=not field.kw_only)
            for field in fields(kind)
        }
        names = dict.fromkeys(name for owner in kind.__mro__ for name in vars(owner).get("__annotations__", ()))
        _OPTIONS[kind] = {name: found[name] for name in names}
    return _OPTIONS[kind]


def checked(kind: type[OptionsT], values: Mapping[str, tuple[str, object]], *, strict: bool) -> OptionsT:
    """Create options from unchecked values.

    Args:
        kind: class of the options.
        values: values by the names of the options, each with the option as the user wrote it.
        strict: True to refuse a text for a number.

    Raises:
        StartupError: an option is unknown or has a wrong value, or options contradict each other.
    """
    known = options_of(kind)
    converted: dict[str, Any] = {}
    for name, (spelling, value) in values.items():
        if name not in known:
            closest = closest_name(name, known)
            hint = f": did you mean {closest}?" if closest else f"; options are: {', '.join(sorted(known))}"
            raise StartupError(f"{spelling} is not an option{hint}")
        converted[name] = known[name].convert(spelling, value, strict=strict)
    return kind(**converted)


def checked_parameters(kind: type[OptionsT], values: Mapping[str, object]) -> OptionsT:
    """Create options from the arguments of a Python function.

    Args:
        kind: class of the options.
        values: arguments by name.

    Raises:
        StartupError: an option is unknown or has a wrong value, or options contradict each other.
    """
    return checked(kind, {name: (name, value) for name, value in values.items()}, strict=True)


def parameters_of(kind: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Decorator that gives a function the parameters of a class of options.

    Editors and type checkers see the names, types and defaults of the options. Their descriptions replace the section
    `Args:` of the docstring.

    Args:
        kind: class of the options.
    """
    assert isinstance(kind, type), "options are a class"
    options, hints = options_of(kind), typing.get_type_hints(kind)  # These hints do not contain the bounds.
    parameters = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD if option.is_positional else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if option.default is MISSING else option.default,
            annotation=hints[option.name],
        )
        for option in sorted(options.values(), key=lambda option: not option.is_positional)
    ]
    described = "".join(f"\n        {option.name}: {in_python(option.description)}." for option in options.values())

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        signature = inspect.Signature(parameters, return_annotation=inspect.signature(function).return_annotation)

        @functools.wraps(function)
        def with_parameters(*args: P.args, **kwargs: P.kwargs) -> T:
            return function(**signature.bind(*args, **kwargs).arguments)

        with_parameters.__signature__ = signature  # type: ignore[attr-defined]
        summary, _, rest = (function.__doc__ or "").partition("    Args:")
        with_parameters.__doc__ = f"{summary}    Args:{described}\n\n    Raises:{rest.partition('    Raises:')[2]}"
        return with_parameters

    return decorate


def in_python(description: str) -> str:
    """Return a description with the names of parameters instead of flags.

    Args:
        description: description of an option, with names of flags.
    """
    return re.sub(r"--([a-z][a-z-]*[a-z])", lambda found: found[1].replace("-", "_"), description)


def _token_count(text: str) -> object:
    """Parse a number such as 32k (32,000) or 32K (32,768), as vLLM does. auto and -1 become None. Other texts stay."""
    if text in ("auto", "-1"):
        return None
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([kKmMgG])", text)
    if match is None:
        return text
    base = 1000 if match[2].islower() else 1024
    return int(float(match[1]) * base ** (1 + "kmg".index(match[2].lower())))


def _allowed(hint: Any) -> str:
    """Describe the allowed values of a type for an error message."""
    if typing.get_origin(hint) is Annotated:
        low = next((f"{bound:g}" for meta in hint.__metadata__ if (bound := meta.ge) is not None), None)
        above = next((f"{bound:g}" for meta in hint.__metadata__ if (bound := meta.gt) is not None), None)
        high = next((f"{bound:g}" for meta in hint.__metadata__ if (bound := meta.le) is not None), None)
        inner = _allowed(hint.__origin__)
        parts = [
            f"of at least {low}" if low else "",
            f"above {above}" if above else "",
            f"up to {high}" if high else "",
        ]
        return " ".join([inner, " and ".join(filter(None, parts))]).strip()
    if typing.get_origin(hint) in (types.UnionType, Union):
        return next(_allowed(kind) for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return "a list of texts"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[hint]
