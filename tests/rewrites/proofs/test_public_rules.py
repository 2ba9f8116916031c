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
