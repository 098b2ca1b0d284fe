"""Metrics of generated text against one reference each.

Everything is compared after NFC and without surrounding white space. `bleu` and `chrf` are sacrebleu's, on its scale
of 0..100, `cider` goes to 10, and all others are fractions (0..1). Those that begin with `json_` are json_answers.py's.
"""

from __future__ import annotations

import difflib
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

from sacrebleu.metrics import BLEU, CHRF

from litchi.errors import DataError, UsageError
from litchi.evaluate.cider import cider_d
from litchi.evaluate.json_answers import JSON_METRICS, JsonRules, judge_answers

DEFAULT_METRICS = ("exact_match", "bleu", "chrf", "rouge_l")
ARTICLES = ("a", "an", "the")  # which SQuAD leaves out
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
_KANA = "\u3040-\u30ff\u31f0-\u31ff"
_CHINESE = re.compile(f"[{_HAN}]")
# A character where no spaces part the words, else a run of letters and digits, or of anything but white space.
_TOKEN = re.compile(rf"[{_HAN}{_KANA}]|[^\W_{_HAN}{_KANA}]+")
_PIECE = re.compile(rf"[{_HAN}{_KANA}]|[^\s{_HAN}{_KANA}]+")


def text_metrics(
    predictions: Sequence[str],
    references: Sequence[str],
    metrics: Sequence[str] | None = None,
    *,
    rules: JsonRules | None = None,
) -> dict[str, float]:
    """Compare answers with their references.

    Args:
        predictions: one answer for each reference.
        references: the expected answers.
        metrics: of METRICS and JSON_METRICS; None: DEFAULT_METRICS.
        rules: how answers that are to be JSON are judged.

    bleu is sacrebleu's corpus BLEU: with the tokeniser `zh` (each Chinese character a token) when a reference holds a
    Chinese character, else `13a`. A corpus of both kinds gets `bleu_zh` and `bleu_en` too, over the pairs whose
    reference is and is not Chinese. rouge_l is the mean F1 of the longest common subsequence: of characters in
    Chinese and Japanese, of words elsewhere, without case and punctuation; cider has the same tokens.

    Raises:
        DataError: nothing to compare; a reference that is to be JSON is not.
        UsageError: an unknown metric.
    """
    names = list(DEFAULT_METRICS if metrics is None else metrics)
    _check_names(names)
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references")
    if not references:
        raise DataError("no text to compare", why="there are no predictions and no references")
    answers, expected = [_normal(text) for text in predictions], [_normal(text) for text in references]
    found = {name: METRICS[name](answers, expected) for name in names if name in METRICS}
    if len(found) < len(set(names)):
        judged = judge_answers(answers, expected, rules or JsonRules())
        found |= {name: JSON_METRICS[name](judged) for name in names if name in JSON_METRICS}
    if "bleu" in names:
        found.update(_bleu_by_language(answers, expected))
    return found


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


def _anls(predictions: Sequence[str], references: Sequence[str]) -> float:
    return sum(map(anls, predictions, references)) / len(references)


def _token_f1(predictions: Sequence[str], references: Sequence[str]) -> float:
    return sum(map(token_f1, predictions, references)) / len(references)


def _cider(predictions: Sequence[str], references: Sequence[str]) -> float:
    return sum(cider_d([_tokens(t) for t in predictions], [_tokens(t) for t in references])) / len(references)


def rouge_l(prediction: str, reference: str) -> float:
    """F1 of the longest common subsequence of tokens (Lin 2004, with beta = 1), 0..1.

    Where one side has no token (nothing, or only punctuation): 1 if both texts are equal, else 0.
    """
    a, b = _tokens(prediction), _tokens(reference)
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


def anls(prediction: str, reference: str) -> float:
    """1 - the share of characters to edit, 0 from a half on (Biten et al. 2019), without case and extra white space."""
    a, b = (" ".join(_normal(text).casefold().split()) for text in (prediction, reference))
    longer = max(len(a), len(b))
    apart = _edits(a, b) / longer if longer else 0.0
    return 1 - apart if apart < 0.5 else 0.0


def _edits(a: str, b: str) -> int:
    """Levenshtein's distance, a row of the table at a time as the bits of integers (Hyyrö 2003, after Myers 1999)."""
    if not a:
        return len(b)
    places: dict[str, int] = {}
    for i, character in enumerate(a):
        places[character] = places.get(character, 0) | 1 << i
    full, last = (1 << len(a)) - 1, 1 << len(a) - 1
    distance, more, less = len(a), full, 0  # bits: places at which the row rises, and falls
    for character in b:
        match = places.get(character, 0)
        flat = match | less
        same = (((match & more) + more) ^ more) | match
        rises, falls = less | ~(same | more) & full, more & same
        distance += bool(rises & last) - bool(falls & last)
        rises, falls = (rises << 1 | 1) & full, falls << 1 & full
        more, less = falls | ~(flat | rises) & full, rises & flat
    return distance


def token_f1(prediction: str, reference: str) -> float:
    """F1 of the tokens two answers share, in any order, as SQuAD has it: without case, punctuation and articles;
    characters in Chinese and Japanese, words elsewhere. Where one side has no token: 1 if both have none, else 0."""
    a, b = _words(prediction), _words(reference)
    if not a or not b:
        return float(a == b)
    return 2 * (a & b).total() / (a.total() + b.total())


def _words(text: str) -> Counter[str]:
    bare = "".join(c for c in _normal(text).casefold() if not _is_punctuation(c))
    return Counter(token for token in _PIECE.findall(bare) if token not in ARTICLES)


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or unicodedata.category(character).startswith("P")


METRICS: dict[str, Callable[[Sequence[str], Sequence[str]], float]] = {
    "exact_match": _exact_match,
    "bleu": _bleu,
    "chrf": _chrf,
    "rouge_l": _rouge_l,
    "anls": _anls,
    "token_f1": _token_f1,
    "cider": _cider,
}


def _check_names(names: Sequence[str]) -> None:
    known = (*METRICS, *JSON_METRICS)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UsageError(
                f"unknown metric {name!r}",
                why=f"the metrics of text are {', '.join(known)}",
                remedy=f"Did you mean {near[0]}?" if near else None,
            )


def _tokenizer(references: Sequence[str]) -> str:
    return "zh" if any(_CHINESE.search(text) for text in references) else "13a"


def _tokens(text: str) -> list[str]:
    return _TOKEN.findall(_normal(text).casefold())


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()
