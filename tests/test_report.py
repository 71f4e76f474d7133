"""Reports: intervals by hand, runs grouped by everything but the seed."""

import json
import math
import shlex

import pytest
from scipy import stats

from avgk_hf.cli import main
from avgk_hf.study.seeds import group_runs, groups_text, interval
from avgk_hf.trainer import AvgKTrainer


def test_interval_is_scipys():
    values = [0.91, 0.95, 0.93, 0.90, 0.97]
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = interval(values)
    assert (found["mean"] - found["half_width"], found["mean"] + found["half_width"]) == pytest.approx((low, high))
    assert found["half_width"] == pytest.approx(2.776445 * stats.tstd(values) / math.sqrt(5), rel=1e-6)
    assert interval([0.5]) == {"mean": 0.5, "half_width": None, "n": 1}


@pytest.mark.long
def test_seeds_through_the_command(recipe, tmp_path, capsys):
    """`avgk train --seeds 3`: three runs, a report over them, and the same from `avgk report`."""
    assert main(["train", str(recipe), "--seeds", "3", "--num_train_epochs", "1"]) == 0
    run = tmp_path / "run"
    results = [json.loads((run / f"seed-{seed}" / "results.json").read_text()) for seed in (1, 2, 3)]
    assert [result["seed"] for result in results] == [1, 2, 3]
    (group,) = json.loads((run / "report.json").read_text())
    for k in (1, 3):  # calibrate_k
        row = next(line for line in (run / "report.md").read_text().splitlines() if f", sets for K = {k} |" in line)
        mean = 100 * sum(result["test"][f"average_k_accuracy@{k}"] for result in results) / 3
        assert row.split("|")[3].startswith(f" {mean:.2f} ± ")
    for split in ("validation", "test"):
        for name in ("average_k_accuracy", "mean_set_size", "average_k_accuracy@3"):
            assert group["metrics"][split][name] == interval([result[split][name] for result in results])
    assert (run / "report.md").read_text() in capsys.readouterr().out
    assert len({result["validation"]["loss"] for result in results}) == 3

    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "report.md").read_text() == (run / "report.md").read_text()

    # one seed is missing: with resume the others stay as they are
    (run / "seed-2" / "results.json").unlink()
    kept = (run / "seed-1" / "results.json").stat().st_mtime_ns
    assert (
        main(["train", str(recipe), "--seeds", "3", "--num_train_epochs", "1", "--resume_from_checkpoint", "last"])
        == 0
    )
    assert json.loads((run / "seed-2" / "results.json").read_text()) == results[1]
    assert (run / "seed-1" / "results.json").stat().st_mtime_ns == kept


def write(folder, seed: int, accuracy: float, data: dict | None = None, **hyperparameters) -> None:
    folder.mkdir(parents=True)
    metrics = {"average_k_accuracy": accuracy, "mean_set_size": 2.0}
    values = {"alpha": 1.0, "seed": seed, **hyperparameters}
    results = {
        "dataset": "trees",
        "data": data or {},
        "objective": "avgk",
        "k": 2,
        "seed": seed,
        "hyperparameters": values,
    }
    (folder / "results.json").write_text(json.dumps({**results, "validation": {}, "test": metrics}))


def test_runs_are_grouped_by_everything_but_the_seed(tmp_path):
    for seed in range(3):
        write(tmp_path / f"a{seed}", seed, 0.9 + 0.01 * seed)
        write(tmp_path / f"b{seed}", seed, 0.8, alpha=5.0)
    groups = group_runs([tmp_path])
    assert [(group["name"], group["seeds"]) for group in groups] == [
        ("avgk, K = 2, alpha 1.0", [0, 1, 2]),
        ("avgk, K = 2, alpha 5.0", [0, 1, 2]),
    ]
    text = groups_text(groups)
    assert "| avgk, K = 2, alpha 1.0 | 3 | 91.00 ± 2.48 | 2.00 ± 0.00 |" in text
    assert "| avgk, K = 2, alpha 5.0 | 3 | 80.00 ± 0.00 | 2.00 ± 0.00 |" in text


def test_groups_of_different_data_have_different_names(tmp_path):
    for name in ("trees", "birds"):
        write(tmp_path / name, 0, 0.9, {"dataset": name, "split_seed": 0})
    names = [group["name"] for group in group_runs([tmp_path])]
    assert names == ["avgk, K = 2, dataset birds", "avgk, K = 2, dataset trees"]


def test_stopped_seeds_say_how_to_go_on(recipe, tmp_path, capsys, monkeypatch):
    """Ctrl-C in the second of two seeds."""
    evaluate = AvgKTrainer.evaluate

    def interrupted(self, *args, **kwargs):
        if self.args.seed == 2:
            raise KeyboardInterrupt
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(AvgKTrainer, "evaluate", interrupted)
    command = ["train", str(recipe), "--seeds", "2", "--num_train_epochs", "1"]
    assert main(command) == 130
    again = shlex.join(["avgk", *command, "--resume_from_checkpoint", "last"])
    assert f"are in {tmp_path / 'run'}; go on with `{again}`" in capsys.readouterr().err
    assert (tmp_path / "run" / "seed-1" / "results.json").is_file()


def test_runs_that_were_trained_differently_are_not_averaged(recipe, tmp_path):
    """Also where the card's table shows no difference: seed 0 with clipping, seed 1 without."""
    for seed, norm in ((0, "1"), (1, "0")):
        out = ["--seed", str(seed), "--max_grad_norm", norm, "--output_dir", str(tmp_path / f"run{seed}")]
        assert main(["train", str(recipe), "--num_train_epochs", "1", *out]) == 0
    groups = group_runs([tmp_path / "run0", tmp_path / "run1"])
    assert [group["seeds"] for group in groups] == [[0], [1]]
    assert [group["name"].rpartition(", ")[2] for group in groups] == ["max_grad_norm 1.0", "max_grad_norm 0.0"]


def test_bad_reports_are_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no results.json" in capsys.readouterr().err
    write(tmp_path / "a", 0, 0.9)
    write(tmp_path / "b", 0, 0.8)
    assert main(["report", str(tmp_path)]) == 2
    assert "same seed" in capsys.readouterr().err
    complete = json.loads((tmp_path / "a" / "results.json").read_text())
    damaged = [json.dumps({**complete, "hyperparameters": 3})]
    damaged += [json.dumps({n: v for n, v in complete.items() if n != name}) for name in ("seed", "k", "objective")]
    for text in ("{", "[]", "{}", *damaged):
        (tmp_path / "a" / "results.json").write_text(text)
        assert main(["report", str(tmp_path / "a")]) == 2
        assert "results.json" in capsys.readouterr().err
