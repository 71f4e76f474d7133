"""Small faults are put into the code one by one, and the tests have to see each of them: `make mutants`.

`python tests/mutation.py losses sets` takes these groups only, `--again` those mutants that survived before, and
`--table` prints what is known. `cd runs/mutants/sets && mutmut show MUTANT` prints one of the faults.

What an error, a warning or a progress bar says is not mutated, only whether there is one: texts are asserted by tests
of their own, as patterns. Decorated functions are not either, because mutmut leaves them alone.
"""

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hypothesis import Phase, settings

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "runs" / "mutants"
TRAINER, MODEL = "avgk_hf.trainer.xǁAvgKTrainerǁ", "avgk_hf.modeling.xǁAvgKForImageClassificationǁ"
CARRIERS = {  # the functions that store, load, keep or drop a calibration, or match classes
    TRAINER: "_plan _store _load_calibration training_step",
    "avgk_hf.checkpoints.xǁCheckpointTrainerǁ": "_load_best_model _load_from_checkpoint",
    MODEL: "_keep_head _needed_heads drop_sccp_head drop_unused_head",
    "avgk_hf.weights.x_": "with_calibration take_calibration",
    "avgk_hf.classifiers.x_": "write_thresholds write_config _with_details",
    "avgk_hf.collecting.xǁEvaluationǁ": "__init__ store metrics lambdas best_head answering_head chosen_balance _part",
    "avgk_hf.scope.x_": "evaluated_sizes evaluated_levels stored_thresholds check_asked choices",
    "avgk_hf.model_card.xǁCardCallbackǁ": "__init__ on_train_begin record results",
    "avgk_hf.data.classes.x_": "align_labels match_classes _translated align_classes",
}
CARRIER_NAMES = "trainer checkpoints modeling weights classifiers collecting scope model_card data/classes"
CARRIER_FILES = [f"avgk_hf/{name}.py" for name in CARRIER_NAMES.split()]
CARRIER_TESTS = [
    f"tests/test_{name}.py" for name in "calibrate trainer modeling model_card balance classes carried".split()
]
CARRIED = """whole_calibration auto_keeps dropped calibration_stores stored stays drop_ matched_by best_evaluation
    one_pass gives_up kept_carried not_recorded best_head_is two_classes_of nobody_knows other_data one_head_is
    other_class_names every_head_is test_carried resume_restores does_not_fit with_an_adapter""".split()
# what is left out because it takes seconds: tests that ask other packages, train, or run commands
LONG = """mapie torchcp law rare_classes later leaves command picture door reports replaces card training_records
    recipe auto_head whole_way pipeline in_between many_classes no_score_matrix graph page no_counts comparison
    keeps_the_guarantee that_of_all_and_those about_k_classes"""
QUICK = ["-k", f"not ({' or '.join(LONG.split())})"]
# group: the files; the functions, where not the whole files are meant; the quick tests that are meant for these
GROUPS = {
    "losses": (["avgk_hf/losses/*.py"], [], ["tests/test_losses.py"]),
    "sets": (
        ["avgk_hf/sets.py", "avgk_hf/scores.py"],
        [],
        [f"tests/test_{name}.py" for name in ("sets", "conformal", "balance")] + QUICK,
    ),
    "conformal": (["avgk_hf/conformal.py"], [], ["tests/test_conformal.py", *QUICK]),
    "calibration": (
        [f"avgk_hf/{name}.py" for name in ("calibration", "questions", "records", "details")],
        [],
        [f"tests/test_{name}.py" for name in ("sets", "conformal", "configuration", "balance")] + QUICK,
    ),
    "statistics": (["avgk_hf/statistics.py"], [], ["tests/test_sets.py", "tests/test_balance.py", *QUICK]),
    "configuration": (["avgk_hf/configuration.py"], [], ["tests/test_configuration.py"]),
    "carried": (
        CARRIER_FILES,
        [f"{place}{name}__mutmut*" for place, names in CARRIERS.items() for name in names.split()],
        [*CARRIER_TESTS, "-k", " or ".join(["(any_classifier and vit)", *CARRIED])],
    ),
}
KILLED = {1, 3, 36, 24, -24, 152}  # a failing test, an error of pytest, or an endless loop


def pytest_configure():
    """As a plugin of pytest: what the workers inherit is never collected, and a failing example need not be small."""
    gc.freeze()
    settings.register_profile("mutants", deadline=None, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutants")


def pytest_collection_modifyitems(items):
    """Quick tests come first, since one that fails is enough; mutmut has noted how long each takes."""
    noted = Path("mutmut-stats.json")
    seconds = json.loads(noted.read_text())["duration_by_test"] if noted.exists() else {}
    items.sort(key=lambda item: seconds.get(item.nodeid, 0))


def run(group: str) -> None:
    """Make the mutants of one group, and test them."""
    folder = FOLDER / group
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "temporary").mkdir(parents=True)
    for name in ("avgk_hf", "tests"):
        (folder / name).symlink_to(ROOT / name)
    mutmut(group, GROUPS[group][1])


def mutmut(group: str, names: list[str]) -> None:
    """Test the mutants of these names, or all."""
    files, _, tests = GROUPS[group]
    folder = FOLDER / group
    plugins = ["mutation", "no:xdist", "no:cacheprovider", "no:unraisableexception"]  # the last collects all garbage
    options = {
        "source_paths": ["avgk_hf"],
        "only_mutate": files,
        "do_not_mutate_patterns": [r"^\s*raise ", r"^\s*logger\.warning", r"\btqdm\("],
        "pytest_add_cli_args": [part for plugin in plugins for part in ("-p", plugin)],
        "pytest_add_cli_args_test_selection": tests,
        "timeout_multiplier": 8,  # of the time that the tests take without a fault
        "process_isolation": "forkserver",  # torch is imported once, and no test has run where a mutant begins
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    project = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text("\n".join([project, "[tool.mutmut]", *lines, ""]))
    own = {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    own["PYTEST_DEBUG_TEMPROOT"] = str(folder / "temporary")  # each run of tests removes what those before it left
    command = [Path(sys.executable).with_name("mutmut"), "run", "--max-children", "2", *names]
    subprocess.run(command, cwd=folder, env={**os.environ, **own}, check=True)


def results(group: str) -> dict[str, dict[str, bool]]:
    """Whether each mutant that was tested survived, by file."""
    found = {}
    for path in sorted((FOLDER / group / "mutants").rglob("*.py.meta")):
        codes = json.loads(path.read_text())["exit_code_by_key"]
        name = str(path.relative_to(FOLDER / group / "mutants").with_suffix(""))
        found[name] = {mutant: code not in KILLED for mutant, code in codes.items() if code is not None}
    return {name: mutants for name, mutants in found.items() if mutants}


def survivors(group: str) -> list[str]:
    """The names of those that survived."""
    return [mutant for mutants in results(group).values() for mutant, survived in mutants.items() if survived]


def table(groups: list[str]) -> None:
    """Print the mutants that survived, and how many were made, killed and survived, by file."""
    counts = {}
    for group in groups:
        print("", *survivors(group), sep="\n")
        counts |= {name: (len(mutants), sum(mutants.values())) for name, mutants in results(group).items()}
    counts["all"] = [sum(column) for column in zip((0, 0), *counts.values(), strict=True)]
    print("\n| file | mutants | killed | survived |\n|---|---|---|---|")
    for name, (made, survived) in counts.items():
        print(f"| {name} | {made} | {made - survived} ({100 * (made - survived) / max(made, 1):.1f}%) | {survived} |")


if __name__ == "__main__":
    asked = [name for name in sys.argv[1:] if not name.startswith("--")] or list(GROUPS)
    for group in asked:
        if "--again" in sys.argv:
            (FOLDER / group / "mutants" / "mutmut-stats.json").unlink()  # which test runs what may have changed
            mutmut(group, survivors(group))
        elif "--table" not in sys.argv:
            run(group)
    table(asked)
