"""The forms of requests and replies for /openapi.json. They describe; what is accepted is decided in `requests.py`."""

from __future__ import annotations

from typing import Any

PICTURE = {"type": "string", "description": "A data URL: data:image/png;base64,..."}
CONTENT: dict[str, Any] = {
    "oneOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "image": {"oneOf": [PICTURE, {"type": "array", "items": PICTURE}]},
            },
        },
    ]
}
PIXEL = {"type": "integer", "minimum": 0}
PART = {
    "oneOf": [
        {
            "type": "object",
            "required": ["type", "text"],
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        },
        {
            "type": "object",
            "required": ["type", "image_url"],
            "properties": {
                "type": {"const": "image_url"},
                "image_url": {"type": "object", "required": ["url"], "properties": {"url": PICTURE}},
                "regions": {"type": "array", "items": {"type": "array", "items": PIXEL, "minItems": 4, "maxItems": 4}},
            },
        },
    ]
}
COUNT = {"type": "integer", "minimum": 1}
MODEL = {"type": "string", "description": "One of /v1/models; with any other name the first of them answers."}
INSTRUCTION = {"type": "string", "description": "Replaces the instruction the model was trained with."}

RERANK = {
    "type": "object",
    "required": ["query", "documents"],
    "properties": {
        "model": MODEL,
        "query": CONTENT,
        "documents": {"type": "array", "minItems": 1, "items": CONTENT},
        "top_n": COUNT,
        "return_documents": {"type": "boolean", "default": False},
        "instruction": INSTRUCTION,
    },
}
SCORE = {
    "type": "object",
    "properties": {
        "model": MODEL,
        "pairs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["query", "document"],
                "properties": {"query": CONTENT, "document": CONTENT},
            },
        },
        "text_1": {"oneOf": [CONTENT, {"type": "array", "items": CONTENT}]},
        "text_2": {"oneOf": [CONTENT, {"type": "array", "items": CONTENT}]},
        "instruction": INSTRUCTION,
    },
}
CHAT = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "model": MODEL,
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["role", "content"],
                "properties": {
                    "role": {"enum": ["system", "developer", "user", "assistant"]},
                    "content": {"oneOf": [{"type": "string"}, {"type": "array", "items": PART}]},
                },
            },
        },
        "max_tokens": COUNT,
        "max_completion_tokens": COUNT,
        "stop": {"oneOf": [{"type": "string"}, {"type": "array", "maxItems": 4, "items": {"type": "string"}}]},
        "stream": {"type": "boolean", "default": False},
        "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
        "boxes": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}},
            "description": "One for each <box> in the texts: [x0, y0, x1, y1] in pixels of the only picture.",
        },
        "restore_boxes": {
            "type": "boolean",
            "default": False,
            "description": "Boxes of the answer come in pixels of the only picture as it was sent.",
        },
        "temperature": {"const": 0, "description": "Answers are greedy."},
    },
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
REFUSED = {
    400: "The request cannot be answered as it is.",
    401: "A key is needed.",
    408: "The request did not arrive in time.",
    413: "The request is larger than allowed.",
    429: "More requests than this key may send; see Retry-After.",
    500: "The model gave no usable answer.",
    503: "Not ready, overloaded or stopping; see Retry-After.",
}
ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": ERROR}}}
    for status, text in REFUSED.items()
}


def body(schema: dict[str, Any]) -> dict[str, Any]:
    """What FastAPI is told of a body that it does not read itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
