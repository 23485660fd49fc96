"""Chat template that an operator names: the path of a file, or the template itself, as in vLLM."""

from __future__ import annotations

from pathlib import Path

from trioserve.contracts.errors import StartupError
from trioserve.text.chat_template import template_flaw

__all__ = ["chat_template_text"]

TEMPLATE_BYTES_MAX = 2**20  # the same limit as for a model's own template


def chat_template_text(named: str) -> str:
    """Return the text of a chat template, and check that it compiles.

    Args:
        named: The template itself if it has "{{" or "{%", otherwise the path of a file.

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
