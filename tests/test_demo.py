"""The demo: a small one from end to end, its folder, when it says that it has failed, and what it refuses."""

from __future__ import annotations

import json

import pytest

from litchi.errors import UsageError, UserError
from litchi.prepare import demo
from litchi.prepare.demo import Places, Size, claim_folder, missed_targets, mrr, run_demo

SMALL = Size(rows=24, queries=24, steps=3)
GOOD = {"before": 0.25, "before_own_wording": 0.6, "after": 0.96, "control": 0.23, "chance": 0.293}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A demo that is far too short to learn anything: everything is written, and it says that it has failed."""
    places = Places(tmp_path_factory.mktemp("demo") / "out")
    with pytest.raises(UserError, match="after is 0") as error:
        run_demo(places.out, procs=1, size=SMALL)
    assert error.value.status == 1
    return places


def test_summary_holds_the_figures(small):
    summary = json.loads(small.summary.read_text())
    for name in ("before", "before_own_wording", "after", "control", "chance"):
        assert 0 < summary[f"mrr@10_{name}"] < 1
    for name, (low, high) in summary["intervals"].items():
        assert low <= summary[name] <= high
    assert set(summary["intervals"]) == {f"mrr@10_{n}" for n in ("before", "before_own_wording", "after", "control")}
    assert summary["mrr@10_chance"] == pytest.approx(sum(1 / n for n in range(1, 11)) / 10)
    assert summary["queries"] == SMALL.queries and summary["candidates"] == 10
    assert summary["export_difference"] < 1e-4
    assert 0 < summary["train_s"] < summary["total_s"]
    assert len(summary["missed"]) >= 1


def test_the_base_knows_more_in_its_own_words(small):
    """Not vacuous: scores differ between the prompts, and single attributes lift the right product above chance."""
    summary = json.loads(small.summary.read_text())
    assert summary["mrr@10_before_own_wording"] > summary["mrr@10_chance"]
    assert summary["mrr@10_before_own_wording"] > summary["mrr@10_before"]


def test_folder_holds_run_export_and_page(small):
    assert (small.export / "model.safetensors").is_file() and (small.run / "metrics.jsonl").is_file()
    page = small.page.read_text(encoding="utf-8")
    assert page.count("<section>") == demo.SHOWN and page.count('class="right"') == 2 * demo.SHOWN
    assert small.sheet.read_bytes().startswith(b"\x89PNG")


def test_training_data_is_drawn_apart_from_the_test(small):
    train, test = (path.read_text(encoding="utf-8").splitlines() for path in (small.train, small.test))
    assert len(train) == SMALL.rows and len(test) == SMALL.queries
    pictures = [{d["image"] for line in lines for d in documents(json.loads(line))} for lines in (train, test)]
    assert not pictures[0] & pictures[1]
    assert len(json.loads(train[0])["neg_docs"]) == 7 and len(json.loads(test[0])["neg_docs"]) == 9


def documents(row):
    return [row["pos_doc"], *row["neg_docs"]]


def test_a_second_demo_moves_the_first_aside(tmp_path, capsys):
    places = Places(tmp_path / "demo")
    claim_folder(places)
    demo.write_settings(places, SMALL)
    claim_folder(places)
    assert (tmp_path / "demo.1" / demo.SETTINGS).is_file() and not any(places.out.iterdir())
    assert "demo.1" in capsys.readouterr().out


def test_other_folders_are_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="something else"):
        claim_folder(Places(tmp_path))
    with pytest.raises(UsageError):
        claim_folder(Places(tmp_path / "thesis.txt"))
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_settings_are_read_strictly(tmp_path):
    """The file a demo writes is one a user could have written: no unknown key, odd folder names included."""
    from litchi.config import load_config

    places = Places(tmp_path / "de: mo {1} '#")
    claim_folder(places)
    demo.write_settings(places, Size())
    config = load_config(places.settings)
    assert config.output == str(places.run) and config.data.train[0].path == str(places.train)
    assert config.train.steps == 400 and config.train.global_batch_size == 8
    assert (config.trainable.language.mode, config.trainable.vision.mode) == ("full", "frozen")


@pytest.mark.parametrize(
    ("changed", "difference", "said"),
    [
        ({}, 0.0, []),
        ({"before": 0.36}, 0.0, ["before is 0.360"]),
        ({"before": 0.35, "after": 0.93, "control": 0.392}, 1e-4, []),
        ({"after": 0.929}, 0.0, ["after is 0.929"]),
        ({"control": 0.40}, 0.0, ["control is 0.400"]),
        ({"control": 0.19}, 0.0, ["control is 0.190"]),
        ({}, 2e-4, ["off by 2.0e-04"]),
        ({"after": float("nan")}, float("nan"), ["after is nan", "off by nan"]),
        ({"before": 0.9, "after": 0.3, "control": 0.9}, 1.0, ["before", "after", "control", "export"]),
    ],
)
def test_targets(changed, difference, said):
    missed = missed_targets({**GOOD, **changed}, difference)
    assert len(missed) == len(said)
    assert all(words in text for words, text in zip(said, missed, strict=True))


def test_mrr_counts_the_first_document_as_right():
    figure = mrr("x", {"a": [3.0, 1.0, 2.0], "b": [1.0, 3.0, 2.0], "c": [1.0, 1.0]})
    assert figure.value == pytest.approx((1 + 1 / 3 + 0.75) / 3)  # of a tie, the mean over both orders
    assert figure.low <= figure.value <= figure.high


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_demo_learns(tmp_path):
    """As `make demo` runs it, in two ranks."""
    summary = run_demo(tmp_path / "demo", procs=2)
    assert summary["missed"] == []
    assert summary["mrr@10_before"] <= 0.35 and summary["mrr@10_after"] >= 0.93
