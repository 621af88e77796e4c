"""Predictions: kept on disk, compared with the answer, never lost."""

import pytest

from lessonlib.practice import compare, predict, progress


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LESSONLIB_DATA", str(tmp_path / "data"))


def ask():
    return predict("t/speed", "How fast?", "token/s", "10 tokens/s")


def test_a_prediction_is_kept_and_shown_again():
    box = ask()
    assert repr(box) == "How fast? (type your prediction, for example 10 tokens/s)"
    box.box.value = "100 tokens/s"
    assert "Kept: 100 tokens/s" in box._status.value
    assert ask().box.value == "100 tokens/s"
    said = compare("t/speed", 142.857, "token/s")
    assert said == "You predicted 100 tokens/s. It is 142.9 tokens/s. Yours is 1.43 times too small."
    assert progress.recall("predictions", "t/speed")["actual"] == 142.857


@pytest.mark.parametrize("typed", ["100", "100 GB", "nan", "", "lots", "1" * 5000, "<script>alert(1)</script>"])
def test_what_is_no_answer_is_explained_and_not_kept(typed):
    box = ask()
    box.box.value = "7 tokens/s"
    box.box.value = typed
    assert progress.recall("predictions", "t/speed")["text"] == "7 tokens/s"
    assert "<script>" not in box._status.value


def test_a_mistyped_answer_says_what_is_still_kept():
    box = ask()
    box.box.value = "7 tokens/s"
    box.box.value = "lots"
    assert "(Still kept: 7 tokens/s.)" in box._status.value
    box.box.value = "-5 tokens/s"
    assert "negative" in box._status.value


@pytest.mark.parametrize("typed", ["1e308 Mtoken/s", "1e-320 tokens/s"])
def test_numbers_beyond_all_sense(typed):
    ask().box.value = typed
    assert "It is 5 tokens/s." in compare("t/speed", 5, "token/s")


@pytest.mark.parametrize("entry", [5, None, {"unit": "token/s"}, {"unit": "token/s", "text": "x", "value": None}])
def test_a_damaged_entry_is_no_prediction(entry):
    progress.keep("predictions", "t/speed", entry)
    assert ask().box.value == ""
    assert "No prediction kept" in compare("t/speed", 5, "token/s")


def test_a_disk_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("LESSONLIB_DATA", str(tmp_path / "file"))
    box = ask()
    box.box.value = "7 tokens/s"
    assert "could not be kept" in box._status.value
    assert "It is 5 tokens/s." in compare("t/speed", 5, "token/s")


def test_without_a_prediction_the_answer_is_given():
    assert "No prediction kept" in compare("t/none", 3, "s")
    ask().box.value = "0 tokens/s"
    assert compare("t/speed", 5, "token/s") == "You predicted 0 tokens/s. It is 5 tokens/s. That is far off."
    ask().box.value = "5.1 tokens/s"
    assert compare("t/speed", 5, "token/s").endswith("Right on.")


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"predictions": 3}', "\x00" * 100])
def test_a_damaged_file_is_set_aside(damage):
    progress.keep("predictions", "a", 1)
    path = progress.progress_path()
    path.write_text(damage, encoding="utf-8")
    assert progress.load() == {}
    [aside] = path.parent.glob("progress-damaged-*")
    assert aside.read_text(encoding="utf-8") == damage
    progress.keep("predictions", "b", 2)
    assert progress.load() == {"predictions": {"b": 2}}
    assert not list(path.parent.glob("*.tmp"))
