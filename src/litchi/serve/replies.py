"""What a client gets back: scores as Cohere, Jina and vLLM shape them, answers as OpenAI does, whole or in pieces."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from litchi.serve.jobs import Answer, Scores
from litchi.serve.requests import ChatRequest, RerankRequest, ScoreRequest


def sigmoid(logit: float) -> float:
    """In double precision: half of it turns different scores into exactly 1.0. Rank by the logit all the same."""
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


def rerank_reply(request: RerankRequest, scores: Scores, name: str, number: str) -> dict[str, Any]:
    """Documents by falling logit, equal ones in the order they were sent."""
    (found,) = scores.logits
    logits = [found[place] for place in request.places]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: request.top_n]
    results: list[dict[str, Any]] = [
        {"index": i, "relevance_score": sigmoid(logits[i]), "logit": logits[i]} for i in order
    ]
    if request.documents is not None:
        for result in results:
            document = request.documents[result["index"]]
            result["document"] = {"text": document} if isinstance(document, str) else document
    return _said({"id": number, "model": name, "results": results, "usage": _usage(scores)}, request.warnings)


def score_reply(request: ScoreRequest, scores: Scores, name: str, number: str) -> dict[str, Any]:
    """A score for each pair, in the order they were sent."""
    logits = [scores.logits[group][document] for group, document in request.places]
    data = [{"index": i, "object": "score", "score": sigmoid(z), "logit": z} for i, z in enumerate(logits)]
    body = {"id": number, "object": "list", "created": int(time.time()), "model": name, "data": data}
    return _said(body | {"usage": _usage(scores)}, request.warnings)


def _usage(scores: Scores) -> dict[str, int]:
    """Tokens that were computed: those a query shares with its documents count once."""
    return {"prompt_tokens": scores.tokens, "total_tokens": scores.tokens}


def chat_reply(request: ChatRequest, answer: Answer, name: str, number: str) -> dict[str, Any]:
    """An answer in one piece."""
    message = {"role": "assistant", "content": answer.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": answer.reason}
    body = _head(name, number, "chat.completion") | {"choices": [choice], "usage": chat_usage(answer)}
    return _said(body, request.warnings)


def chat_usage(answer: Answer) -> dict[str, int]:
    """Tokens of a prompt and its answer, as OpenAI counts them."""
    total = answer.prompt_tokens + answer.new_tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.new_tokens, "total_tokens": total}


def chat_chunk(name: str, number: str, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    """A piece of an answer."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return _head(name, number, "chat.completion.chunk") | {"choices": [choice]}


def usage_chunk(name: str, number: str, answer: Answer) -> dict[str, Any]:
    """The last piece, for a client that wants to know what it took."""
    return _head(name, number, "chat.completion.chunk") | {"choices": [], "usage": chat_usage(answer)}


def event(value: dict[str, Any] | str) -> str:
    """A server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n\n"


def _head(name: str, number: str, kind: str) -> dict[str, Any]:
    return {"id": number, "object": kind, "created": int(time.time()), "model": name}


def _said(body: dict[str, Any], warnings: tuple[str, ...]) -> dict[str, Any]:
    return body | ({"warnings": list(warnings)} if warnings else {})
