"""Answers in JSON: what counts as one, and its fields counted by hand."""

import json

import pytest

from litchi.errors import DataError, UsageError
from litchi.evaluate.json_answers import JsonRules, check_answer, compare_fields, judge_answers, load_schema
from litchi.evaluate.text import text_metrics

TEA = {"type": "茶", "brand": "竹叶青", "spec": {"weight": 250, "unit": "g"}, "tags": ["绿茶", "礼盒"]}  # 6 fields
CUP = {"type": "cup", "brand": "Lo", "spec": {"volume": 0.5}, "parts": [{"name": "lid", "n": 1}, {"name": "cup"}]}  # 6


def edited(reference, **changes):
    """The reference as an answer, with first-level values changed; None takes one out."""
    return json.dumps({k: v for k, v in {**reference, **changes}.items() if v is not None}, ensure_ascii=False)


# answer, reference, is JSON, bare, then fields: wanted, given, right, wrong
BY_HAND = [
    (edited(TEA), TEA, True, True, (6, 6, 6, 0)),
    (json.dumps(TEA), TEA, True, True, (6, 6, 6, 0)),  # \u escapes mean the same
    (f"```json\n{edited(TEA)}\n```", TEA, True, False, (6, 6, 6, 0)),
    (f"识别结果如下：{edited(TEA)} 以上。", TEA, True, False, (6, 6, 6, 0)),
    (f"First\n```\n{edited(TEA)}\n```\nthen {{more}}", TEA, True, False, (6, 6, 6, 0)),
    (edited(TEA, brand="龙井"), TEA, True, True, (6, 6, 5, 1)),
    (edited(TEA, brand=None), TEA, True, True, (6, 5, 5, 0)),  # missing
    (edited(TEA, colour="green"), TEA, True, True, (6, 7, 6, 0)),  # extra
    (edited(TEA, tags=["礼盒", "绿茶"]), TEA, True, True, (6, 6, 6, 0)),  # the order of a list
    (edited(TEA, tags=["绿茶", "绿茶"]), TEA, True, True, (6, 6, 5, 1)),  # one of the two was asked for once
    (edited(TEA, tags="绿茶"), TEA, True, True, (6, 5, 4, 0)),  # no list: 2 missing, 1 extra
    (edited(TEA, spec={"weight": "250", "unit": "g"}), TEA, True, True, (6, 6, 5, 1)),  # a text is no number
    (edited(TEA, spec={"weight": 251, "unit": "g"}), TEA, True, True, (6, 6, 6, 0)),  # within 1 %
    (edited(TEA, spec={"weight": 253, "unit": "g"}), TEA, True, True, (6, 6, 5, 1)),  # not within 1 %
    (edited(CUP, parts=[{"name": "cup"}, {"name": "lid", "n": 1.0}]), CUP, True, True, (6, 6, 6, 0)),
    (edited(CUP, parts=[{"name": "lid", "n": 2}]), CUP, True, True, (6, 5, 4, 1)),  # an item is missing
    (edited(CUP, parts=[{"name": "top", "n": 1}, {"name": "cup"}, 7]), CUP, True, True, (6, 7, 5, 1)),
    (edited(CUP)[:-1], CUP, False, False, (6, 0, 0, 0)),  # cut off
    (f"{edited(CUP)}\n{edited(CUP)}", CUP, False, False, (6, 0, 0, 0)),  # two answers
    ("It is a cup by Lo.", CUP, False, False, (6, 0, 0, 0)),
]


@pytest.mark.parametrize("answer, reference, is_json, bare, counts", BY_HAND)
def test_one_answer_by_hand(answer, reference, is_json, bare, counts):
    checked = check_answer(answer)
    assert (checked.is_json, checked.bare) == (is_json, bare)
    assert (checked.problem is None) == is_json
    found = judge_answers([answer], [json.dumps(reference)], JsonRules(tolerance=0.01)).fields
    assert (found.wanted, found.given, found.right, found.wrong) == counts
    assert (found.missing, found.extra) == (counts[0] - counts[2] - counts[3], counts[1] - counts[2] - counts[3])


def test_twenty_answers_by_hand():
    answers, references = [row[0] for row in BY_HAND], [json.dumps(row[1], ensure_ascii=False) for row in BY_HAND]
    names = ["json_valid", "json_exact", "json_accuracy", "json_precision", "json_recall", "json_f1"]
    found = text_metrics(answers, references, names, rules=JsonRules(tolerance=0.01))
    assert found == pytest.approx(
        {
            "json_valid": 17 / 20,
            "json_exact": 8 / 20,
            "json_accuracy": 60 / 80,
            "json_precision": 92 / 101,
            "json_recall": 92 / 120,
            "json_f1": 2 * 92 / 221,
        }
    )
    report = judge_answers(answers, references, JsonRules(tolerance=0.01)).to_json([f"r{n}" for n in range(20)])
    assert report["accuracy"]["parts"] == 1 / 6 and report["accuracy"]["brand"] == pytest.approx(15 / 20)
    assert [said["id"] for said in report["problems"]] == ["r17", "r18", "r19"]


@pytest.mark.parametrize(
    "text, problem",
    [
        ('{"a": 1, "a": 2}', "given twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1e999}', "too large"),
        ("[" * 200 + "]" * 200, "deeper than 100"),
        ("[" * 100_000, "deeper than 100"),
        ('{"a": {"b": 1}, "c"', "no JSON"),  # the whole part of one that is cut off is not the answer
        ("```a\n" * 20_000, "no JSON"),  # in no time
        ("} no {", "no JSON"),
        ("```\n1\n```\n```\n2\n```", "no JSON"),
        ("", "no JSON"),
    ],
)
def test_what_is_no_json(text, problem):
    checked = check_answer(text)
    assert not checked.is_json and checked.value is None
    assert problem in checked.problem


@pytest.mark.parametrize(
    "answer, reference, right",
    [
        (1, 1.0, True),
        (True, 1, False),
        (None, None, True),
        (None, False, False),
        ([], [], True),
        ({}, [], False),
        ("cafe\u0301 ", "café", True),
        ("Cup", "cup", False),
        (10**400, 1.5, False),
        (0.1, 0.0, False),
    ],
)
def test_equal_values(answer, reference, right):
    found = compare_fields(answer, reference, tolerance=0.5)
    assert (found.wanted, found.given, found.right) == (1, 1, int(right))


def test_a_missing_key_is_not_null():
    found = compare_fields({"a": 1}, {"a": 1, "b": None})
    assert (found.wanted, found.right, found.missing, found.wrong) == (2, 1, 1, 0)


SCHEMA = {
    "type": "object",
    "required": ["brand"],
    "properties": {"brand": {"type": "string"}, "weight": {"$ref": "#/$defs/amount"}},
    "additionalProperties": False,
    "$defs": {"amount": {"type": "number", "exclusiveMinimum": 0}},
}


def schema_at(folder, schema):
    path = folder / "schema.json"
    path.write_text(schema if isinstance(schema, str) else json.dumps(schema), encoding="utf-8")
    return path


def test_answers_are_held_against_a_schema(tmp_path):
    schema = load_schema(schema_at(tmp_path, SCHEMA))
    good = '{"brand": "Lo", "weight": 2}'
    broken = {
        '{"weight": 2}': "'brand' is a required property",
        '{"brand": "Lo", "weight": 0}': "$.weight: 0 is less than or equal to the minimum of 0",
        'It is {"brand": "Lo", "colour": 1}': "'colour' was unexpected",
    }
    assert check_answer(good, schema).problem is None
    for text, problem in broken.items():
        checked = check_answer(text, schema)
        assert checked.is_json and problem in checked.problem
    answers = [good, *broken, "no"]
    found = text_metrics(answers, [good] * 5, ["json_schema", "json_valid"], rules=JsonRules(schema))
    assert found == {"json_schema": 1 / 5, "json_valid": 4 / 5}


@pytest.mark.parametrize(
    "schema, problem",
    [("{", "not JSON"), ("[]", "not a JSON schema"), ({"type": "text"}, "'text' is not valid"), (None, "cannot read")],
)
def test_a_schema_that_cannot_be_used_is_named(tmp_path, schema, problem):
    path = tmp_path / "none.json" if schema is None else schema_at(tmp_path, schema)
    with pytest.raises(UsageError, match=problem) as error:
        load_schema(path)
    assert str(path) in error.value.line()


def test_nothing_is_fetched_for_a_schema(tmp_path):
    schema = load_schema(schema_at(tmp_path, {"$ref": "http://127.0.0.1:9/other.json"}))
    with pytest.raises(UsageError, match=r"other\.json"):
        check_answer("{}", schema)


def test_references_have_to_be_json():
    with pytest.raises(DataError, match="reference 2 is not JSON"):
        text_metrics(["{}", "{}"], ["{}", "a cup"], ["json_f1"])


# -------------------------------------------------------------------------------------------------- through the verbs


def product_rows(folder):
    rows = [
        {
            "id": f"r{n}",
            "messages": [
                {"role": "user", "content": f"product {n}"},
                {"role": "assistant", "content": json.dumps({"type": "cup", "n": n})},
            ],
            "shelf": "left" if n else "right",
        }
        for n in range(3)
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "words, problem",
    [
        (["eval.metrics=[json_schema]"], "needs a schema"),
        (["eval.json_schema=schema.json"], "is used by nothing"),
        (["eval.metrics=[json_f1]", "eval.json_schema=none.json"], "cannot read the schema"),
    ],
)
def test_a_run_is_refused_before_anything_is_loaded(tmp_path, ranks, words, problem):
    from runs import train

    with pytest.raises(UsageError, match=problem):
        train(ranks, tmp_path / "run", "task=chat", f"data.train={product_rows(tmp_path)}", *words)


@pytest.mark.slow
def test_evaluate_reports_fields(tmp_path, ranks):
    """The packaged model knows no JSON: all fields are missing, and it is said of which answers and why."""
    from litchi.train.measure import format_report, measure_target

    words = ["eval.metrics=[json_valid, json_schema, json_f1, anls]", "eval.slices=[shelf]", "eval.max_new_tokens=8"]
    words += [f"eval.json_schema={schema_at(tmp_path, {'type': 'object'})}"]
    report = measure_target("builtin:tiny", str(product_rows(tmp_path)), words, ranks)
    assert {"loss", "json_valid", "json_schema", "json_f1", "anls"} == set(report["metrics"])
    assert report["json"]["fields"] == {"wanted": 6, "given": 0, "right": 0, "wrong": 0, "missing": 6, "extra": 0}
    assert [said["id"] for said in report["json"]["problems"]] == ["r0", "r1", "r2"]
    assert report["slices"]["shelf"]["left"]["rows"] == 2 and "json_f1" in report["slices"]["shelf"]["left"]["metrics"]
    assert "field type: 0.0000" in format_report(report) and "r1: no JSON" in format_report(report)
