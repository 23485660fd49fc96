"""Detects the formats of calls and reasoning from a chat template, which itself writes their marks."""

from __future__ import annotations

__all__ = ["families_of_template"]

# Texts to search for in a template, and the family that they show. The first line whose texts all occur wins.
_TOOL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|start|>"), "openai"),
    (("<|tool_call>", "call:"), "gemma4"),
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("\uff5cDSML\uff5c ",), "deepseek_v41"),
    (("\uff5cDSML\uff5c", "tool_calls>"), "deepseek_v4"),
    (("\uff5cDSML\uff5c",), "deepseek_v32"),
    (("<\uff5ctool\u2581calls\u2581begin\uff5c>", "```json"), "deepseek_v3"),
    (("<\uff5ctool\u2581calls\u2581begin\uff5c>",), "deepseek_v31"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("List of tools: [",), "lfm2"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<tool_calls>[",), "jamba"),
    (("<arg_key>", "\\n<arg_key>"), "glm45"),
    (("<arg_key>", "\n<arg_key>"), "glm45"),
    (("<arg_key>",), "glm47"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("<function_calls>",), "olmo3"),
    (("<tool_calls>",), "jamba"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<|tool_call|>", "functools"), "phi4_mini_json"),
    (("functools[",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("[func_name1(",), "pythonic"),
    (("<|python_start|>",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary of argument name and its value',), "llama3_json"),
)
_REASONING_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|start|>"), "openai_gptoss"),
    (("<|channel>thought",), "gemma4"),
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("</think>", "<|tool_calls_section_begin|>"), "kimi_k2"),
    (("</think>", "<minimax:tool_call>"), "minimax_m2"),
    (("</think>", "\uff5cDSML\uff5c"), "deepseek_v3"),
    (("</think>", "<\uff5cAssistant\uff5c>", "thinking is defined"), "deepseek_v3"),
    (("</think>", "<\uff5cAssistant\uff5c>"), "deepseek_r1"),
    (("</think>", "<arg_key>"), "glm45"),
    (("</think>",), "qwen3"),
)


def families_of_template(template: str) -> tuple[str | None, str | None]:
    """Return the families of tool calls and of reasoning that a chat template is written for. None if it shows none.

    Args:
        template: Text of the template.
    """
    return _family_by(template, _TOOL_SIGNS), _family_by(template, _REASONING_SIGNS)


def _family_by(template: str, signs: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
    return next((family for texts, family in signs if all(text in template for text in texts)), None)
