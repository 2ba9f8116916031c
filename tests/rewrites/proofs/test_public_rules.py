"""Rules of public optimizers, held to values and to the compiler's proofs."""

import pytest

from bench.book import audit


@pytest.mark.parametrize(("name", "wrong"), [("clip of clip", False), ("clip of clip, apart", True)])
def test_a_rule_that_goes_wrong_is_seen_by_values_and_by_proof(name: str, wrong: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(audit, "FOLDER", tmp_path)
    row = audit.measure(name, "onnxscript")
    if row["verdict"] == "not applied":
        pytest.skip("this version of onnxscript leaves it alone")
    assert row["verdict"] == ("refuted" if wrong else "proved")
    assert bool(row["witness"]) is wrong and row["proof"].startswith("no:") is wrong


def test_zeros_before_a_maximum_pool_are_not_its_padding(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(audit, "FOLDER", tmp_path)
    row = audit.measure("zeros around a maximum pool", "onnxruntime basic")
    if row["verdict"] == "not applied":
        pytest.skip("this version of onnxruntime leaves it alone")
    assert row["verdict"] == "refuted" and row["witness"] == "at (0, 0, 0, 0): 0.0 became -0.5"
    assert row["proof"].startswith("no:")
