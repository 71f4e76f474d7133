"""The published study of glyphs: its table follows from the stored runs, and a stored run from the code."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from avgk_hf.cli import main
from avgk_hf.compare import train_run
from avgk_hf.comparison import finished, num_epochs, plan, read_comparison
from avgk_hf.sets import k_key

ROOT = Path(__file__).parent.parent
STUDY = ROOT / "recipes" / "glyphs" / "compare.yaml"
RESULTS = ROOT / "results" / "glyphs"


@pytest.fixture
def comparison():
    return read_comparison(str(STUDY), output_dir=str(RESULTS))


def test_the_report_follows_from_the_runs(tmp_path, capsys, monkeypatch):
    """The published command finds every run finished, and writes the report that is published."""
    monkeypatch.chdir(ROOT)
    copy = tmp_path / "results"
    shutil.copytree(RESULTS, copy)
    published = (copy / "report.md").read_text()
    (copy / "report.md").unlink()
    assert main(["compare", str(STUDY), "--out", str(copy)]) == 0
    assert "training" not in capsys.readouterr().err
    assert (copy / "report.md").read_text() == published
    assert len(list((copy / "runs").iterdir())) == len(list((RESULTS / "runs").iterdir()))


def test_every_run_says_where_it_comes_from(comparison):
    runs, unknown = plan(comparison)
    assert not unknown and len(runs) == len(list((RESULTS / "runs").glob("*.json")))
    final = set()
    for run in runs:
        result = finished(comparison, run)
        assert result["seed"] == result["config"]["glyphs_seed"] == run.seed and result["versions"]["torch"]
        assert ("test" in result["images"]) == bool(result["kept"]) == (run.phase != "tune")
        for kept in result["kept"]:
            for k in kept["k"]:
                assert sum(kept["set_sizes"][k_key(k)]["all"]) == result["images"]["test"] == 4000
                if run.phase == "final":
                    final.add((run.loss, k, run.seed))
    assert final == {(loss, k, seed) for loss in comparison.losses for k in (2, 3, 5, 10) for seed in range(5)}


@pytest.mark.parametrize("page", ["README.md", "recipes/glyphs/README.md"])
def test_published_tables_are_those_of_the_report(page):
    """Every row with an interval stands in a report under results/ in the same words."""
    reports = "\n".join(path.read_text() for path in (ROOT / "results").rglob("*.md"))
    rows = [line for line in (ROOT / page).read_text().splitlines() if line.startswith("|") and " ± " in line]
    assert rows and not [row for row in rows if row not in reports]


def test_a_published_run_is_trained_again(comparison):
    """The shortest run that is reported, from nothing: the same seed, the same accuracies up to rounding."""
    final = [run for run in plan(comparison)[0] if run.phase == "final" and run.loss == comparison.baseline]
    run = min(final, key=lambda run: num_epochs(comparison, run.values))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        again = train_run(comparison, run)
    finally:
        torch.set_num_threads(threads)
    stored = finished(comparison, run)
    assert json.dumps(again["config"]) == json.dumps(stored["config"]) and again["images"] == stored["images"]
    for own, other in zip(stored["curve"], again["curve"], strict=True):
        for k, accuracy in own["average_k_accuracy"].items():
            assert other["average_k_accuracy"][k] == pytest.approx(accuracy, abs=0.05)
    for k in comparison.k:
        found = [
            next(kept["test"]["softmax"]["ml"][k_key(k)] for kept in result["kept"] if k in kept["k"])
            for result in (stored, again)
        ]
        assert found[1]["average_k_accuracy"] == pytest.approx(found[0]["average_k_accuracy"], abs=0.01)
        assert found[1]["mean_set_size"] == pytest.approx(found[0]["mean_set_size"], abs=0.1 * k)
