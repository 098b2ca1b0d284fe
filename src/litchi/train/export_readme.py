"""The README.md beside an export: what it is, what it lost, and the commands that serve it as it was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from litchi.data.templates import RerankTemplate

ALONE = "Vision tower, merger, embedding and head are as trained."
PACKED = "Linears of the language layers in 4 bits (compressed-tensors W4A16, packed, a scale per group)"
WHAT = {
    "merged": "The whole model, with what was learnt folded in.",
    "int8": "Linears of the language layers in int8 (compressed-tensors W8A8: a scale per row, inputs rounded per "
    f"token as they come), by rounding to the nearest. {ALONE}",
    "int4": f"{PACKED}, by rounding to the nearest. {ALONE}",
    "int4-gptq": f"{PACKED}, by GPTQ on samples of the training rows. {ALONE}",
    "int4-awq": f"{PACKED}, by AWQ on samples of the training rows, which scales norms too. {ALONE}",
    "nf4": f"Linears of the language layers in nf4 with double quantisation (bitsandbytes). {ALONE}",
    "score": "The model as a classifier of one label: `score.weight` is the head's row of the word yes less that of "
    "no, so its logit is Litchi's score. It has no language head and cannot chat.",
}
NEEDS = {
    **dict.fromkeys(("int8", "int4", "int4-gptq", "int4-awq"), "compressed-tensors"),
    "nf4": "bitsandbytes",
}


def write_readme(
    form: str, facts: Mapping[str, Any], figures: Mapping[str, Any] | None, template: RerankTemplate | None, kind: str
) -> str:
    """The text.

    Args:
        facts: of the manifest.
        figures: from `compare`, or None where no row was there to compare on.
        template: of a reranker; None for chat.
        kind: the class in transformers.
    """
    parts = [f"# {facts['task'] or 'A'} model, {form}", WHAT[form], _measured(figures)]
    limits = f"Pictures have {facts['pixels']['min']} to {facts['pixels']['max']} pixels, as `preprocessor_config.json`"
    parts += ["## With Litchi", "    litchi serve . --port 8000\n    litchi evaluate . --data FILE"]
    parts += [f"{limits} says: with other limits scores are others."]
    if form in NEEDS:
        parts.append(f"`transformers` reads this folder where {NEEDS[form]} is installed.")
    parts += ["## With other engines", "These commands follow the engines' documentation and were **not run here**."]
    parts += _chat_commands(form) if template is None else _rerank_commands(form, template, facts, kind)
    return "\n\n".join(parts) + "\n"


def _measured(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "It was not compared with the trained model: there were no rows to compare on."
    largest = figures["largest_difference"]
    apart = "" if largest is None else f", {figures['of']} at most {largest:.2g} apart"
    return (
        f"Read again from this folder and compared with the trained model on {figures['rows']} rows: "
        f"{figures['metric']} {figures['before']:.4f} before, {figures['after']:.4f} after{apart}."
    )


def _chat_commands(form: str) -> list[str]:
    loader = " --quantization bitsandbytes" if form == "nf4" else ""
    return [
        "The chat template is in `chat_template.jinja`; both take it from this folder.",
        f"    vllm serve .{loader}\n    python -m sglang.launch_server --model-path .{loader}",
    ]


def _rerank_commands(form: str, template: RerankTemplate, facts: Mapping[str, Any], kind: str) -> list[str]:
    words = {"no": template.no, "yes": template.yes}
    overrides = {
        "architectures": [kind.replace("ForConditionalGeneration", "ForSequenceClassification")],
        "classifier_from_token": [words["no"], words["yes"]],
        "method": "from_2_way_softmax",
    }
    said = "" if form == "score" else f" --hf-overrides '{json.dumps(overrides, ensure_ascii=False)}'"
    loader = " --quantization bitsandbytes" if form == "nf4" else ""
    out = [
        f"    vllm serve . --runner pooling{said}{loader}",
        "Send the whole prompt, as below, to `/classify`; its probability is the sigmoid of Litchi's score.",
    ]
    if form == "score":
        out.append("SGLang knows no such class of this family: give it the merged export.")
    else:
        out += [
            f"    python -m sglang.launch_server --model-path .{loader}",
            f"With SGLang ask for one token, and for the log-probabilities of `{words['yes']}` and `{words['no']}`: "
            "their difference is the score.",
            "Or keep Litchi's API, limits and playground in front of either, which then ask it so:",
            f"    vllm serve . --max-logprobs 20 --port 8001{loader}\n"
            "    litchi serve . --engine-url http://127.0.0.1:8001",
        ]
    shown = "\n".join(f"    {line}" for line in template.text.rstrip("\n").split("\n"))
    default = facts["instruction"] or template.instruction
    return [
        *out,
        f"The prompt ({template.name}); a picture stands before the text, as "
        "`<|vision_start|><|image_pad|><|vision_end|>`:",
        shown,
        *([f"`{{instruction}}` is: {default}"] if "{instruction}" in template.text else []),
    ]
