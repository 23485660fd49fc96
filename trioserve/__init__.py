"""trioserve: an LLM serving engine on Trio that can be trusted to stop.

Public names are loaded at their first use, so the import of the package is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioserve.asgi import asgi_app, cancel_on_disconnect
    from trioserve.assemble import open_engine
    from trioserve.assemble_engines import Engines, open_engines
    from trioserve.assemble_images import open_image_engine
    from trioserve.assemble_model import LoadProgress
    from trioserve.commands.serve import serve
    from trioserve.contracts.deadlines import Deadlines
    from trioserve.contracts.errors import (
        ContextTooLong,
        Draining,
        EngineFault,
        InvalidRequest,
        ModelLoadError,
        Overloaded,
        StartupError,
        TrioserveError,
        WrongLoop,
    )
    from trioserve.contracts.events import AbortOutcome, FinishReason
    from trioserve.contracts.image_generation import ImageDelta, ImageParams, RGBImage
    from trioserve.contracts.output import Delta
    from trioserve.contracts.pooling import LabelledPrompt, PoolingParams, PoolingResult, TextPair
    from trioserve.contracts.prompt import ChatPrompt
    from trioserve.contracts.request import KVTransferParams, Retention
    from trioserve.contracts.resume import Resume
    from trioserve.contracts.sampling import SamplingParams, Thinking
    from trioserve.contracts.structured_output import StructuredOutput
    from trioserve.contracts.weights import BroadcastWeights, SharedWeights, WeightGroup
    from trioserve.engine.engine import Engine
    from trioserve.engine.session import Reply, Session
    from trioserve.model.loading.default_model import find_default_model
    from trioserve.text.response_parts import ContentText, ReasoningText, ToolCallArguments, ToolCallBegin, ToolCallEnd

__all__ = [
    "AbortOutcome",
    "BroadcastWeights",
    "ChatPrompt",
    "ContentText",
    "ContextTooLong",
    "Deadlines",
    "Delta",
    "Draining",
    "Engine",
    "EngineFault",
    "Engines",
    "FinishReason",
    "ImageDelta",
    "ImageParams",
    "InvalidRequest",
    "KVTransferParams",
    "LabelledPrompt",
    "LoadProgress",
    "ModelLoadError",
    "Overloaded",
    "RGBImage",
    "PoolingResult",
    "PoolingParams",
    "ReasoningText",
    "Reply",
    "Resume",
    "Retention",
    "SamplingParams",
    "Session",
    "SharedWeights",
    "StartupError",
    "StructuredOutput",
    "TextPair",
    "Thinking",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolCallEnd",
    "TrioserveError",
    "WeightGroup",
    "WrongLoop",
    "__version__",
    "asgi_app",
    "cancel_on_disconnect",
    "find_default_model",
    "open_engine",
    "open_engines",
    "open_image_engine",
    "serve",
]

__version__ = "0.1.0"

_HOMES = {
    "asgi_app": "trioserve.asgi",
    "cancel_on_disconnect": "trioserve.asgi",
    "find_default_model": "trioserve.model.loading.default_model",
    "Engine": "trioserve.engine.engine",
    "Session": "trioserve.engine.session",
    **dict.fromkeys(("BroadcastWeights", "SharedWeights", "WeightGroup"), "trioserve.contracts.weights"),
    "LoadProgress": "trioserve.assemble_model",
    "open_engine": "trioserve.assemble",
    **dict.fromkeys(("Engines", "open_engines"), "trioserve.assemble_engines"),
    "open_image_engine": "trioserve.assemble_images",
    "serve": "trioserve.commands.serve",
    "ChatPrompt": "trioserve.contracts.prompt",
    "Deadlines": "trioserve.contracts.deadlines",
    "Delta": "trioserve.contracts.output",
    "ImageDelta": "trioserve.contracts.image_generation",
    "ImageParams": "trioserve.contracts.image_generation",
    "KVTransferParams": "trioserve.contracts.request",
    "LabelledPrompt": "trioserve.contracts.pooling",
    "RGBImage": "trioserve.contracts.image_generation",
    "PoolingResult": "trioserve.contracts.pooling",
    "PoolingParams": "trioserve.contracts.pooling",
    "Reply": "trioserve.engine.session",
    "Resume": "trioserve.contracts.resume",
    "Retention": "trioserve.contracts.request",
    "SamplingParams": "trioserve.contracts.sampling",
    "TextPair": "trioserve.contracts.pooling",
    "StructuredOutput": "trioserve.contracts.structured_output",
    "Thinking": "trioserve.contracts.sampling",
    **dict.fromkeys(
        ("ContentText", "ReasoningText", "ToolCallArguments", "ToolCallBegin", "ToolCallEnd"),
        "trioserve.text.response_parts",
    ),
    "AbortOutcome": "trioserve.contracts.events",
    "FinishReason": "trioserve.contracts.events",
}


def __getattr__(name: str) -> object:
    if name == "asyncio":
        return importlib.import_module("trioserve.asyncio")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "trioserve.contracts.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
