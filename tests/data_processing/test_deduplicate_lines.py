"""deduplicate_lines and deduplicate_paragraphs against a plain set of lines, in blocks of any size and after a kill."""

import random

import numpy as np
import pytest

from configs.errors import UserError
from data_processing.deduplicate_lines import UNITS, DeduplicateUnits, SeenHashes, UnitConfig
from data_processing.document import Document


def documents(unit: str, seed: int) -> list[Document]:
    rng, separator = random.Random(seed), UNITS[unit]
    pool = [f"the {unit} that says {n} and a few words besides" for n in range(300)] + ["short", "", "  "]
    return [Document(str(i), "s", separator.join(rng.choices(pool, k=rng.randint(1, 30)))) for i in range(120)]


def plain(items: list[Document], unit: str, config: UnitConfig) -> tuple[dict[str, str], dict[str, str]]:
    """({id: text} kept, {id: text} dropped) by the definition."""
    seen, kept, dropped = set(), {}, {}
    for item in items:
        left = []
        for part in item.text.split(UNITS[unit]):
            bare = part.strip()
            if len(bare) < config.min_characters or bare not in seen:
                left.append(part)
            if len(bare) >= config.min_characters:
                seen.add(bare)
        text = UNITS[unit].join(left)
        if text == item.text:
            kept[item.id] = item.text
        elif len(text.strip()) < config.min_kept_share * len(item.text):
            dropped[item.id] = item.text
        else:
            kept[item.id] = text.strip("\n")
    return kept, dropped


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("block", [1, 13, 1000])
@pytest.mark.parametrize("restart", [False, True], ids=["unbroken", "restarted"])
def test_units_match_the_plain_definition(unit, block, restart):
    config, expected = UnitConfig(min_characters=20), plain(documents(unit, 1), unit, UnitConfig(min_characters=20))
    stage, journals, kept, dropped = DeduplicateUnits(unit, config), [], {}, {}
    items = documents(unit, 1)
    for start in range(0, len(items), block):
        if restart:
            stage = DeduplicateUnits(unit, config)
            for journal in journals:
                stage.replay_journal(journal)
        good, bad = stage.run(items[start : start + block])
        journals.append(stage.take_journal())
        kept |= {d.id: d.text for d in good}
        dropped |= {d.document.id: d.document.text for d in bad}
        assert {d.reason for d in bad} <= {f"repeated_{unit}s"}
    assert (kept, dropped) == expected and len(kept) > 20 < len(dropped)


def test_seen_hashes_match_a_set_and_stay_few_arrays():
    rng, seen, plain_set = np.random.default_rng(0), SeenHashes(), set()
    for size in [1, 1000, 3, 500, 2, 2, 4000, *([7] * 40)]:
        asked = rng.integers(0, 20_000, size=size).astype(np.uint64)
        assert seen.contains(asked).tolist() == [value in plain_set for value in asked.tolist()]
        new = np.array(sorted(set(asked.tolist()) - plain_set), dtype=np.uint64)
        seen.add(new)
        plain_set |= set(new.tolist())
        assert len(seen) == len(plain_set) and len(seen.runs) <= 14
    assert all(np.all(run[1:] > run[:-1]) for run in seen.runs)


def test_counts_and_refused_settings():
    stage = DeduplicateUnits("line", UnitConfig(min_characters=5))
    stage.run(
        [Document("1", "s", "a line here\nand another"), Document("2", "s", "a line here\nsomething else entirely")]
    )
    assert stage.take_counts() == {"lines_removed": 1, "characters_removed": 12} and not stage.take_counts()
    with pytest.raises(UserError, match="min_characters=0"):
        UnitConfig(min_characters=0)
