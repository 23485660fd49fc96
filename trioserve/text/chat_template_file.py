"""A chat template that an operator names: a file, or the template itself, as in vLLM."""

from __future__ import annotations

from pathlib import Path

from trioserve.contracts.errors import StartupError
from trioserve.text.chat_template import template_flaw

__all__ = ["chat_template_text"]

TEMPLATE_BYTES_MAX = 2**20  # as of a model's own


def chat_template_text(named: str) -> str:
    """Reads a file unless `named` is a template already. Raises StartupError, in one sentence, also if a request could
    not be written with it."""
    if "{{" in named or "{%" in named:
        return _checked(named, "the template of --chat-template is not valid")
    return _checked(_read(named), f"--chat-template {named} is no valid template")


def _checked(source: str, complaint: str) -> str:
    reason = template_flaw(source)
    if reason is not None:
        raise StartupError(f"{complaint} ({reason}): mend it, or leave --chat-template out")
    return source


def _read(named: str) -> str:
    path = Path(named)
    try:
        if path.stat().st_size > TEMPLATE_BYTES_MAX:
            raise StartupError(f"--chat-template {named} has more than {TEMPLATE_BYTES_MAX} bytes: it is no template")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise StartupError(f"--chat-template {named} is no text in UTF-8: name a file with a Jinja template") from None
    except OSError as error:
        raise StartupError(
            f"--chat-template {named} cannot be read ({error.strerror}): name a file with a Jinja template"
        ) from None
