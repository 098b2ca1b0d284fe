"""Metrics of generated text against one reference each.

Everything is compared after NFC and without surrounding white space. `exact_match` and `rouge_l` are fractions
(0..1); `bleu` and `chrf` are sacrebleu's, on its scale of 0..100.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Callable, Sequence

from sacrebleu.metrics import BLEU, CHRF

from litchi.errors import DataError, UsageError

_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
_KANA = "\u3040-\u30ff\u31f0-\u31ff"
_CHINESE = re.compile(f"[{_HAN}]")
# A character where no spaces part the words, else a run of letters and digits.
_TOKEN = re.compile(rf"[{_HAN}{_KANA}]|[^\W_{_HAN}{_KANA}]+")


def text_metrics(
    predictions: Sequence[str], references: Sequence[str], metrics: Sequence[str] | None = None
) -> dict[str, float]:
    """Compare answers with their references.

    Args:
        predictions: one answer for each reference.
        references: the expected answers.
        metrics: of METRICS; None: all.

    bleu is sacrebleu's corpus BLEU: with the tokeniser `zh` (each Chinese character a token) when a reference holds a
    Chinese character, else `13a`. A corpus of both kinds gets `bleu_zh` and `bleu_en` too, over the pairs whose
    reference is and is not Chinese. rouge_l is the mean F1 of the longest common subsequence: of characters in
    Chinese and Japanese, of words elsewhere, without case and punctuation.

    Raises:
        DataError: nothing to compare.
        UsageError: an unknown metric.
    """
    names = list(METRICS if metrics is None else metrics)
    _check_names(names)
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references")
    if not references:
        raise DataError("no text to compare", why="there are no predictions and no references")
    answers, expected = [_normal(text) for text in predictions], [_normal(text) for text in references]
    found = {name: METRICS[name](answers, expected) for name in names}
    if "bleu" in names:
        found.update(_bleu_by_language(answers, expected))
    return found


def text_signatures(references: Sequence[str]) -> dict[str, str]:
    """How sacrebleu computed `bleu` and `chrf`: its signatures, to be quoted with the figures."""
    expected = [_normal(text) for text in references]
    signatures = {}
    for name, metric in (("bleu", BLEU(tokenize=_tokenizer(expected))), ("chrf", CHRF())):
        metric.corpus_score([""], [[""]])  # the number of references is part of a signature
        signatures[name] = str(metric.get_signature())
    return signatures


def _exact_match(predictions: Sequence[str], references: Sequence[str]) -> float:
    return sum(a == b for a, b in zip(predictions, references, strict=True)) / len(references)


def _bleu(predictions: Sequence[str], references: Sequence[str]) -> float:
    # force: a warning that text "looks tokenized" is about machine translation sets
    return float(BLEU(tokenize=_tokenizer(references), force=True).corpus_score(predictions, [references]).score)


def _bleu_by_language(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    parts: dict[str, tuple[list[str], list[str]]] = {"bleu_zh": ([], []), "bleu_en": ([], [])}
    for answer, expected in zip(predictions, references, strict=True):
        answers, wanted = parts["bleu_zh" if _CHINESE.search(expected) else "bleu_en"]
        answers.append(answer)
        wanted.append(expected)
    if not all(wanted for _, wanted in parts.values()):
        return {}
    return {name: _bleu(*part) for name, part in parts.items()}


def _chrf(predictions: Sequence[str], references: Sequence[str]) -> float:
    return float(CHRF().corpus_score(predictions, [references]).score)


def _rouge_l(predictions: Sequence[str], references: Sequence[str]) -> float:
    return sum(map(rouge_l, predictions, references)) / len(references)


def rouge_l(prediction: str, reference: str) -> float:
    """F1 of the longest common subsequence of tokens (Lin 2004, with beta = 1), 0..1.

    Where one side has no token (nothing, or only punctuation): 1 if both texts are equal, else 0.
    """
    a, b = _TOKEN.findall(_normal(prediction).casefold()), _TOKEN.findall(_normal(reference).casefold())
    if not a or not b:
        return float(_normal(prediction) == _normal(reference))
    return 2 * _common(a, b) / (len(a) + len(b))


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, a row of the table at a time as the bits of one integer.

    Hyyrö, "Bit-parallel LCS-length computation revisited", 2004: each 0 bit of `row` is a step up in length.
    """
    places: dict[str, int] = {}
    for i, token in enumerate(a):
        places[token] = places.get(token, 0) | 1 << i
    full = (1 << len(a)) - 1
    row = full
    for token in b:
        match = row & places.get(token, 0)
        row = ((row + match) | (row - match)) & full
    return len(a) - row.bit_count()


METRICS: dict[str, Callable[[Sequence[str], Sequence[str]], float]] = {
    "exact_match": _exact_match,
    "bleu": _bleu,
    "chrf": _chrf,
    "rouge_l": _rouge_l,
}


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        if name not in METRICS:
            near = difflib.get_close_matches(name, METRICS, n=1)
            raise UsageError(
                f"unknown metric {name!r}",
                why=f"the metrics of text are {', '.join(METRICS)}",
                remedy=f"Did you mean {near[0]}?" if near else None,
            )


def _tokenizer(references: Sequence[str]) -> str:
    return "zh" if any(_CHINESE.search(text) for text in references) else "13a"


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()
