"""Small faults are put into the code one by one, and the tests have to see each of them: `make mutants`.

`python tests/mutation.py losses sets` takes these groups only, and `--table` prints what is known already. Each group has
a folder in runs/mutants; `cd runs/mutants/sets && mutmut show MUTANT` there prints a fault.

What an error says is not mutated, only whether there is one: texts are asserted by tests of their own, as patterns. Nor
are decorated functions, which mutmut leaves alone.
"""

import gc
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parent.parent
TRAINER = "avgk_hf.trainer.xǁAvgKTrainerǁ"
MODEL = "avgk_hf.modeling.xǁAvgKForImageClassificationǁ"
# tests of test_conformal.py that ask other packages, train, or run commands: they take seconds
LONG = "mapie torchcp law rare_classes later leaves command commands picture door reports says card training recipe"
LONG += " auto_head whole_way pipeline in_between many_classes no_score_matrix two_processes_at_once large_input do_not_mix"
QUICK = ["-k", f"not ({' or '.join(LONG.split())})"]
# group: the files; the functions, where not the whole file is meant; the tests that are meant for these, and quick
GROUPS = {
    "losses": (["avgk_hf/losses/*.py"], [], ["tests/test_losses.py"]),
    "sets": (["avgk_hf/sets.py"], [], ["tests/test_sets.py", "tests/test_conformal.py", *QUICK]),
    "conformal": (["avgk_hf/conformal.py"], [], ["tests/test_conformal.py", *QUICK]),
    "statistics": (["avgk_hf/set_statistics.py"], [], ["tests/test_sets.py", "tests/test_metric.py", *QUICK]),
    "configuration": (["avgk_hf/configuration.py"], [], ["tests/test_configuration.py"]),
    "carried": (
        ["avgk_hf/trainer.py", "avgk_hf/calibrate.py", "avgk_hf/modeling.py", "avgk_hf/model_card.py"]
        + ["avgk_hf/data/datasets.py"],
        [f"{TRAINER}{name}__mutmut*" for name in ("_store_calibration", "_calibration_record", "_load_calibration")]
        + [f"{TRAINER}{name}__mutmut*" for name in ("_load_best_model", "_load_from_checkpoint", "training_step")]
        + [f"{MODEL}{name}__mutmut*" for name in ("_keep_head", "_needed_heads", "drop_sccp_head", "drop_unused_head")]
        + ["avgk_hf.calibrate.x_write_thresholds__mutmut*", "avgk_hf.model_card.xǁCardCallbackǁ*"]
        + ["avgk_hf.data.datasets.x_align_labels__mutmut*"],
        ["tests/test_calibrate.py", "tests/test_trainer.py", "tests/test_modeling.py", "tests/test_model_card.py"]
        + ["-k", "calibration or matched_by_name or drop or head or best_evaluation or thresholds"],
    ),
}
KILLED = {1, 3, 36, 24, -24, 152, 255}  # a failing test, an error of pytest, or an endless loop


def pytest_configure():
    """As a plugin of pytest: what the workers inherit is never collected, and a failing example need not be small."""
    gc.freeze()
    settings.register_profile("mutants", deadline=None, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutants")


def pytest_collection_modifyitems(items):
    """The tests over generated examples take longest, so they come last."""
    items.sort(key=lambda item: hasattr(item.obj, "hypothesis"))


def run(group: str) -> None:
    """Test the mutants of one group."""
    files, functions, tests = GROUPS[group]
    folder = ROOT / "runs" / "mutants" / group
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("avgk_hf", "tests"):
        (folder / name).symlink_to(ROOT / name)
    plugins = ["mutation", "no:xdist", "no:cacheprovider", "no:unraisableexception"]  # the last collects all garbage
    options = {
        "source_paths": ["avgk_hf"],
        "only_mutate": files,
        "do_not_mutate_patterns": [r"^\s*raise ", r"^\s*logger\.warning"],
        "pytest_add_cli_args": [part for plugin in plugins for part in ("-p", plugin)],
        "pytest_add_cli_args_test_selection": tests,
        "process_isolation": "forkserver",  # torch is imported once, and no test has run where a mutant begins
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    project = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text("\n".join([project, "[tool.mutmut]", *lines, ""]))
    command = [Path(sys.executable).with_name("mutmut"), "run", "--max-children", "1", *functions]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")}, check=True)


def table(groups: list[str]) -> None:
    """Print the mutants that survived, and how many were made, killed and survived, by file."""
    counts = {}
    for group in groups:
        folder = ROOT / "runs" / "mutants" / group / "mutants"
        for path in sorted(folder.rglob("*.py.meta")):
            found = json.loads(path.read_text())["exit_code_by_key"]
            survived = [name for name, code in found.items() if code is not None and code not in KILLED]
            total = sum(code is not None for code in found.values())
            if total:
                print(*survived, sep="\n")
                name = str(path.relative_to(folder).with_suffix(""))
                counts[name] = Counter(made=total, survived=len(survived), killed=total - len(survived))
    counts["all"] = sum(counts.values(), Counter())
    print("\n| file | mutants | killed | survived |\n|---|---|---|---|")
    for name, found in counts.items():
        share = 100 * found["killed"] / max(found["made"], 1)
        print(f"| {name} | {found['made']} | {found['killed']} ({share:.1f}%) | {found['survived']} |")


if __name__ == "__main__":
    asked = [group for group in sys.argv[1:] if group != "--table"] or list(GROUPS)
    for group in asked if "--table" not in sys.argv else ():
        run(group)
    table(asked)
