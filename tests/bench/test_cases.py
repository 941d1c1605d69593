"""The list of cases: what identifies one, and what can be asked for."""

from __future__ import annotations

import pytest

from dithoist.bench.cases import CASES, FAMILIES, QUICK, Case, select, series, unique
from dithoist.models.small import DENOISERS


def test_every_case_has_an_id_of_its_own_and_comes_back_from_it() -> None:
    assert len({case.id for case in CASES}) == len(CASES)
    for case in (*CASES, QUICK, Case("flux", blocks=24, dtype="bfloat16"), Case("flux", dtype="bfloat16")):
        assert Case.from_id(case.id) == case


def test_an_id_says_what_is_not_the_default() -> None:
    assert Case("flux").id == "flux-256t-64p-20s"
    assert Case("flux", blocks=24, dtype="bfloat16").id == "flux-256t-64p-20s-24b-bfloat16"
    with pytest.raises(ValueError, match="no case id such as"):
        Case.from_id("flux")


def test_all_families_exist_and_have_a_case_at_256_tokens() -> None:
    assert set(FAMILIES) <= set(DENOISERS)
    assert {case.family for case in CASES if case.tokens == 256} == set(FAMILIES)


def test_selecting_filters_by_every_field_and_keeps_each_case_once() -> None:
    assert select((*CASES, *CASES)) == list(CASES)
    assert select(family=["flux"], tokens=[64], blocks=[24]) == [Case("flux", 64, 64, 4, 24)]
    assert {case.tokens for case in select(family=["flux"], steps=[20])} == {64, 256, 1024}


def test_an_unknown_value_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"family 'fluks'.*known: flux, glm-image"):
        select(family=["fluks"])
    with pytest.raises(ValueError, match=r"tokens 3 .*known: 64, 256, 1024"):
        select(tokens=[3])


def test_a_series_varies_one_thing() -> None:
    for along in ("tokens", "steps", "prompt", "blocks"):
        for group in series(CASES, along):
            assert len({getattr(case, along) for case in group}) == len(group) > 1
            assert len({(case.family, case.dtype) for case in group}) == 1
    assert [case.steps for case in series(select(family=["flux"]), "steps")[0]] == [4, 20, 50]
    assert unique([QUICK, QUICK]) == [QUICK]
