"""Rerank prompts as data: named, versioned, golden-tested token by token; used by train, evaluate and serve alike.

A template is the whole prompt with three slots. `{query}` and `{document}` stand for pictures first, then text.
Control tokens count only in a template: the same letters typed by a user are text.
To add a template: one entry here and one golden row in `tests/golden/templates.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from litchi.errors import UsageError


@dataclass(frozen=True)
class RerankTemplate:
    """`score = logit(yes) - logit(no)` at the last token of `text`; both words must be one token."""

    name: str
    text: str
    instruction: str  # the default for {instruction}
    yes: str
    no: str
    source: str


_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}<Query>:{query}\n<Document>:{document}<|im_end|>\n"
    "<|im_start|>assistant\n"
)

TEMPLATES = {
    "lychee": RerankTemplate(
        name="lychee",
        text=_JUDGE,
        instruction="Given a web search query, retrieve relevant passages that answer the query",
        yes="yes",
        no="no",
        source="vec-ai/lychee-rerank-mm, arXiv 2510.14824",
    ),
    "qwen3_vl_reranker": RerankTemplate(
        name="qwen3_vl_reranker",
        text=_JUDGE,
        instruction="Given a search query, retrieve relevant candidates that answer the query.",
        yes="yes",
        no="no",
        source="Qwen/Qwen3-VL-Reranker-8B",
    ),
    "mono_qwen2_vl": RerankTemplate(
        name="mono_qwen2_vl",
        text=(
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{document}"
            "Assert the relevance of the previous image document to the following query, answer True or False. "
            "The query is: {query}<|im_end|>\n<|im_start|>assistant\n"
        ),
        instruction="",
        yes="True",
        no="False",
        source="lightonai/MonoQwen2-VL-v0.1",
    ),
}


def find_template(name: str) -> RerankTemplate:
    """Return the template called `name`; UsageError names the ones there are."""
    if name not in TEMPLATES:
        raise UsageError(f"data.template is {name!r}", why=f"known templates: {', '.join(TEMPLATES)}")
    return TEMPLATES[name]
