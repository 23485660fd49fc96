"""Address of the server and common test data for all scripts of this folder."""

import os

ROOT = os.environ["TRIOSERVE_URL"].rstrip("/")
BASE_URL = ROOT + "/v1"
MODEL = os.environ.get("TRIOSERVE_MODEL", "scripted")
KEY = os.environ.get("TRIOSERVE_API_KEY", "none")
USER = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
