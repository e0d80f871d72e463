"""fastText classifiers: trained on two kinds of text, evaluated, loaded by the stages, repeatable."""

import json

import numpy as np
import pytest

from configs.errors import UserError
from configs.loader import compose_config
from data_processing.document import Document, write_documents
from data_processing.harmful_detect import HarmfulDetect, HarmfulDetectConfig
from data_processing.quality_classifier import QualityClassifier, QualityClassifierConfig
from data_processing.text_classifier import (
    ClassifierConfig,
    TextClassifier,
    area_under_curve,
    classifier_line,
    evaluate_scores,
    train_classifier,
)
from data_processing.text_hash import in_share
from data_processing.train_classifier import TrainClassifierConfig, body
from tests.data_processing.test_quality_filter_rules import prose
from tests.stories import make_stories

SMALL = ClassifierConfig(dimensions=8, epochs=10, buckets=2000, held_out_share=0.2)
STORIES = [story.text for story in make_stories(120, seed=1)]
NOISE = [prose(seed) for seed in range(120)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return path, train_classifier(STORIES, NOISE, path, SMALL)


def test_it_tells_two_kinds_apart_and_says_how_well(model):
    path, facts = model
    held_out = facts["held_out"]
    assert held_out["accuracy"] > 0.95 and held_out["area_under_curve"] > 0.98
    assert held_out["positives"] + facts["trained_on"]["positives"] == 120
    assert facts == json.loads((path / "model.json").read_text())
    classifier = TextClassifier(path)
    fresh = [story.text for story in make_stories(20, seed=99)]
    scores = classifier.score_all([*fresh, *(prose(seed) for seed in range(900, 920))])
    assert (scores >= 0).all() and (scores <= 1).all() and scores[:20].min() > scores[20:].max()
    assert 0 <= classifier.score("") <= 1


def test_training_twice_gives_the_same_scores(model, tmp_path):
    train_classifier(STORIES, NOISE, tmp_path, SMALL)
    texts = [STORIES[0], NOISE[0], "something else"]
    assert np.array_equal(TextClassifier(model[0]).score_all(texts), TextClassifier(tmp_path).score_all(texts))


def test_kept_share_is_a_threshold_on_random_web(model):
    classifier = TextClassifier(model[0])
    held_out = [text for text in NOISE if in_share(text, SMALL.held_out_share)]
    for share in (0.1, 0.5):
        kept = (classifier.score_all(held_out) >= classifier.threshold_for(share)).mean()
        assert abs(kept - share) <= 1 / len(held_out) + 1e-9
    assert classifier.threshold_for(0.5) <= classifier.threshold_for(0.1)


def test_the_stages_drop_by_score_and_name_the_reason(model):
    path = str(model[0])
    documents = [Document(str(i), "s", text) for i, text in enumerate([STORIES[0], NOISE[0]])]
    kept, dropped = QualityClassifier(QualityClassifierConfig(model=path, threshold=0.5)).run(documents)
    assert [d.id for d in kept] == ["0"] and dropped[0].reason == "low_quality" and kept[0].meta["quality"] > 0.5
    documents[1].text = min(NOISE, key=TextClassifier(path).score)
    share = QualityClassifier(QualityClassifierConfig(model=path, kept_share=0.1))
    assert [d.id for d in share.run(documents)[0]] == ["0"]
    harmful = HarmfulDetect(HarmfulDetectConfig(models={"toxicity": path, "nsfw": path}, thresholds={"nsfw": 1.0}))
    kept, dropped = harmful.run(documents)
    assert [d.id for d in kept] == ["1"] and dropped[0].reason == "toxicity"
    assert set(kept[0].meta["harmful"]) == {"toxicity", "nsfw"}


def test_the_script_trains_from_documents(tmp_path):
    for name, texts in (("good", STORIES), ("web", NOISE)):
        write_documents(tmp_path / f"{name}.jsonl", [Document(str(i), name, t) for i, t in enumerate(texts)])
    overrides = [f"positives='{tmp_path}/good.jsonl'", f"negatives='{tmp_path}/web.jsonl'", f"output='{tmp_path}/m'"]
    small = ["classifier.dimensions=8", "classifier.buckets=2000", "max_documents=100"]
    facts = body(compose_config(TrainClassifierConfig, "train_classifier", [*overrides, *small]))
    assert sum(facts["trained_on"].values()) < 200 and (tmp_path / "m/model.bin").exists()
    with pytest.raises(UserError, match="negatives is empty"):
        compose_config(TrainClassifierConfig, "train_classifier", ["positives=x"])


def test_scores_by_hand():
    positives, negatives = np.array([0.9, 0.6, 0.4]), np.array([0.1, 0.6])
    assert area_under_curve(positives, negatives) == (2 + 1.5 + 1) / 6
    found = evaluate_scores(positives, negatives, 0.5)
    assert found["precision"] == found["recall"] == 2 / 3 and found["accuracy"] == 3 / 5
    assert classifier_line("A b__label__x, C!\nD", 100) == "a bx , c ! d"


def test_what_is_missing_is_one_line(tmp_path, model):
    with pytest.raises(UserError, match=r"model\.bin does not exist; train one: python -m"):
        TextClassifier(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"not a model")
    with pytest.raises(UserError, match="is no fastText model"):
        TextClassifier(tmp_path)
    with pytest.raises(UserError, match=r"quality_classifier\.model is empty"):
        QualityClassifier(QualityClassifierConfig())
    with pytest.raises(UserError, match=r"harmful_detect\.models is empty"):
        HarmfulDetect(HarmfulDetectConfig())
    with pytest.raises(UserError, match="both decide"):
        QualityClassifierConfig(model="x", threshold=0.5, kept_share=0.5)
    with pytest.raises(UserError, match=r"which harmful_detect\.models lacks"):
        HarmfulDetectConfig(models={"nsfw": "x"}, thresholds={"hate": 0.5})
    with pytest.raises(UserError, match="positives give 0 to train on"):
        train_classifier([], NOISE, tmp_path / "m", SMALL)
