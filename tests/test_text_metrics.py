"""Metrics of generated text, in Chinese and English."""

import math
import random
import unicodedata

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from litchi.errors import DataError, UsageError
from litchi.evaluate.text import _common, _edits, anls, rouge_l, text_metrics, token_f1

ENGLISH = ["a small red cup with a white handle", "the lamp stands on the table"]
CHINESE = ["红色的小杯子，白色把手", "台灯放在桌子上"]


def test_equal_texts_are_perfect():
    for texts in (ENGLISH, CHINESE):
        found = text_metrics(texts, texts)
        assert list(found) == ["exact_match", "bleu", "chrf", "rouge_l"]
        assert found == pytest.approx({"exact_match": 1, "bleu": 100, "chrf": 100, "rouge_l": 1})


def test_exact_match_ignores_white_space_around_and_unicode_form_only():
    decomposed = unicodedata.normalize("NFD", "café")
    assert text_metrics([f" {decomposed}\n", "Cup", "a  b"], ["café", "cup", "a b"])["exact_match"] == pytest.approx(
        1 / 3
    )


@pytest.mark.parametrize("references, tokenizer", [(ENGLISH, "13a"), (CHINESE, "zh"), (ENGLISH + CHINESE, "zh")])
def test_bleu_and_chrf_are_those_of_sacrebleu(references, tokenizer):
    predictions = [text[:-2] + "x." for text in references]
    found = text_metrics(predictions, references)
    assert found["bleu"] == sacrebleu.corpus_bleu(predictions, [references], tokenize=tokenizer).score > 0
    assert found["chrf"] == sacrebleu.corpus_chrf(predictions, [references]).score


def test_a_mixed_corpus_reports_each_language_too():
    predictions = [
        "a small red cup with a handle",
        "the lamp stands on a table",
        "红色小杯子，白色把手",
        "台灯在桌子上",
    ]
    found = text_metrics(predictions, ENGLISH + CHINESE)
    assert list(found) == ["exact_match", "bleu", "chrf", "rouge_l", "bleu_zh", "bleu_en"]
    assert found["bleu_en"] == text_metrics(predictions[:2], ENGLISH)["bleu"]
    assert found["bleu_zh"] == text_metrics(predictions[2:], CHINESE)["bleu"]


def test_rouge_l_counts_characters_in_chinese_and_words_elsewhere():
    assert rouge_l("红杯子", "红色杯子") == pytest.approx(2 * 3 / 7)
    assert rouge_l("The cat sat.", "the cat lay") == pytest.approx(2 / 3)
    assert rouge_l("iPhone手机", "iphone 手机") == 1
    assert rouge_l("cups", "cup") == 0
    assert rouge_l("police killed the gunman", "police kill the gunman") == pytest.approx(3 / 4)  # as in Lin 2004


@pytest.mark.parametrize("a, b, score", [("", "", 1), ("", "x", 0), ("x", "", 0), ("!", "!", 1), ("!", "?", 0)])
def test_rouge_l_without_tokens(a, b, score):
    assert rouge_l(a, b) == score


def lcs(a, b):
    row = [0] * (len(b) + 1)
    for x in a:
        before = row[:]
        for j, y in enumerate(b):
            row[j + 1] = before[j] + 1 if x == y else max(before[j + 1], row[j])
    return row[-1]


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=30), st.text("abcd", max_size=30))
def test_common_subsequence_is_that_of_the_table(a, b):
    assert _common(list(a), list(b)) == lcs(a, b)


def test_long_texts_are_quick():
    rng = random.Random(0)
    a, b = (rng.choices("甲乙丙丁戊", k=4000) for _ in range(2))
    assert 2000 < _common(a, b) < 4000


def test_wrong_use():
    with pytest.raises(DataError, match="no text to compare"):
        text_metrics([], [])
    with pytest.raises(ValueError, match="1 predictions for 2 references"):
        text_metrics(["a"], ["a", "b"])
    with pytest.raises(UsageError, match="Did you mean rouge_l"):
        text_metrics(["a"], ["a"], ["rouge"])
    assert list(text_metrics(["a"], ["a"], ["exact_match"])) == ["exact_match"]
    assert text_metrics([""], ["a b"])["bleu"] == 0


@pytest.mark.parametrize(
    "prediction, reference, score",
    [
        ("Main Street", "main  street", 1),
        ("main stret", "main street", 1 - 1 / 11),
        ("红色杯子", "红色盘子", 1 - 1 / 4),
        ("kitten", "sitting", 1 - 3 / 7),
        ("ab", "ax", 0),  # a half is too much
        ("", "", 1),
        ("", "x", 0),
    ],
)
def test_anls_by_hand(prediction, reference, score):
    assert anls(prediction, reference) == anls(reference, prediction) == pytest.approx(score)


def edits(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


@settings(max_examples=200, deadline=None)
@given(st.text("abc", max_size=30), st.text("abcd", max_size=30))
def test_edits_are_those_of_the_table(a, b):
    assert _edits(a, b) == edits(a, b)


@pytest.mark.parametrize(
    "prediction, reference, score",
    [
        ("The Eiffel Tower.", "eiffel tower", 1),  # as SQuAD's own script says
        ("in the year 1889", "1889", 2 * 1 / (3 + 1)),
        ("cat cat dog", "cat dog dog", 2 * 2 / 6),
        ("it's 3.5 m", "its 35 m", 1),  # SQuAD takes punctuation out before it cuts
        ("红色的小杯子。", "红色杯子", 2 * 4 / 10),
        ("iPhone手机", "手机 iphone", 1),
        ("the", "", 1),
        ("cup", "the", 0),
    ],
)
def test_token_f1_by_hand(prediction, reference, score):
    assert token_f1(prediction, reference) == pytest.approx(score)


def test_cider_by_hand():
    """Every token and pair of tokens is in one of two references, so all have the weight log 2, which cancels."""
    references = ["a b", "c d"]
    whole = 10 * (1 + 1 + 0 + 0) / 4  # the same words; no n-gram of three or four
    half = 10 * math.exp(-1 / 72) * (1 / math.sqrt(2)) / 4  # one of two words, a token shorter
    twice = 10 * (1 / (2 * math.sqrt(2))) / 4  # a word said twice counts once, and lengthens the answer
    assert text_metrics(["A b.", "c"], references, ["cider"])["cider"] == pytest.approx((whole + half) / 2)
    assert text_metrics(["a a", "x"], references, ["cider"])["cider"] == pytest.approx(twice / 2)
    assert text_metrics(["甲乙", "c d"], ["甲 乙", "c d"], ["cider"])["cider"] == pytest.approx(whole)


def test_cider_counts_rare_words_for_more():
    """`a` is in both references and weighs nothing; in three of four it weighs log 4/3."""
    assert text_metrics(["a", "a"], ["a b", "a c"], ["cider"])["cider"] == 0
    found = text_metrics(["a b", "", "", ""], ["a c", "a d", "a e", "b"], ["cider"])["cider"]
    common, rare = math.log(4 / 3), math.log(4)
    assert found == pytest.approx(10 / 4 / 4 * common**2 / (math.hypot(common, rare) * math.hypot(common, rare)))


def test_cider_of_a_single_row_is_zero():
    assert text_metrics(["a b"], ["a b"], ["cider"]) == {"cider": 0}
