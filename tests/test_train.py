"""Recipes: how they are read, what they refuse, and the whole way of an image through one."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from transformers import pipeline

from avgk_hf import AvgKConfig, AvgKForImageClassification, load_splits, prepare
from avgk_hf.losses import every_hyperparameter
from avgk_hf.recipes import describe_fields, parse_recipe
from avgk_hf.scores import HEADS
from avgk_hf.train import main


def test_the_whole_way(recipe, image_folder, forks, tmp_path):
    """Recipe -> two epochs -> checkpoint -> from_pretrained in a new process -> the same sets."""
    main([str(recipe)])
    run = tmp_path / "run"
    model = AvgKForImageClassification.from_pretrained(run)
    test = load_splits(str(image_folder))["test"]
    pixels = torch.stack([row["pixel_values"] for row in prepare(test, model.config)])
    sets = model.predict_sets(pixels, min_size=1)
    results = json.loads((run / "results.json").read_text())
    assert results["test"]["mean_set_size"] == pytest.approx(
        sum(map(len, model.predict_sets(pixels))) / len(test), abs=1e-9
    )
    assert sum(results["set_sizes"]["all"]) == len(test)
    assert results["validation"]["lambda_val"] == model.config.thresholds["2"]
    assert "| K | average-K accuracy |" in (run / "README.md").read_text()
    assert (run / "set_sizes.png").read_bytes()[:4] == b"\x89PNG"

    folder, names = image_folder / "test", model.config.id2label
    images = [str(path) for name in names.values() for path in sorted((folder / name).glob("*.png"))]
    predict = "import sys\nfrom avgk_hf.cli import main\nsys.exit(main(['predict', *sys.argv[1:], '--json']))"
    status, output, error = forks.run(predict, run, *images, folder=tmp_path)
    assert status == 0, error
    by_name = {item["image"]: [found["label"] for found in item["set"]] for item in json.loads(output)}
    transform = prepare(test, model.config)
    paths = [row["image"]["path"] for row in test.cast_column("image", test.features["image"].__class__(decode=False))]
    assert len(transform) == len(paths)
    assert [by_name[path] for path in paths] == [[names[j] for j in classes] for classes in sets]


def test_overrides_win_and_types_hold(recipe):
    model_args, data_args, args = parse_recipe(
        [str(recipe), "--k", "1.5", "--learning-rate", "1e-3", "--calibrate_k", "1", "2", "--eval_on_start", "true"]
    )
    assert (model_args.k, model_args.model, data_args.train_split) == (1.5, "test_resnet", "train")
    assert (args.learning_rate, args.calibrate_k, args.eval_on_start, args.seed) == (1e-3, [1.0, 2.0], True, 1)
    assert args.metric_for_best_model == "average_k_accuracy" and args.load_best_model_at_end


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("aplha: 0.3", "unknown field 'aplha' in .*recipe.yaml. Did you mean 'alpha'"),
        ("learning_rat: 0.1", "Did you mean 'learning_rate'"),
        ("zzzzzz: 1", "unknown field 'zzzzzz'.*`avgk train --help` lists the fields"),
        ("k: many", "k: invalid float value: 'many'"),
        ("objective: hinge", "objective: invalid choice: 'hinge'"),
        ("k: [2, 3]", r"k=\[2, 3\] is a list, but takes one value"),
        ("model_args: nonsense", "model_args='nonsense' is not a mapping"),
        ("k: 6", r"k=6 must be a number in \[1, 6\) for 6 classes"),
        ("validation_split: dev", r"has no split 'dev', only \['train', 'validation', 'test'\].*`validation_split:`"),
        ("calibrate_k: [6]", r"k=6 must be a number in \[1, 6\)"),
        ("model: resnet81", "Did you mean resnet18"),
    ],
)
def test_bad_recipes_are_refused(recipe, line, message):
    key = line.split(":")[0]
    lines = [text for text in recipe.read_text().splitlines() if not text.startswith(f"{key}:")]
    recipe.write_text("\n".join([*lines, line]))
    with pytest.raises(ValueError, match=message):
        main([str(recipe)])


def test_hyperparameters_are_those_of_the_objective(recipe):
    """What the recipe sets for its own loss does not go over to another one; what is asked for does, or is refused."""
    path = str(recipe)
    recipe.write_text(recipe.read_text() + "alpha: 0.3\n")
    assert parse_recipe([path])[0].hyperparameters == {"alpha": 0.3, "candidate_scope": "global"}
    asked = ["--alpha", "2", "--candidate-scope", "local"]
    assert parse_recipe([path, *asked])[0].hyperparameters == {"alpha": 2.0, "candidate_scope": "local"}
    for objective, given in (("ce", {}), ("epr", {"beta": 0.5}), ("role", {"role_lambda": 0.5, "theta_lr": 1.0})):
        flags = [f"--{name}={value}" for name, value in given.items()]
        model_args, _, _ = parse_recipe([path, "--objective", objective, *flags])
        assert (model_args.objective, model_args.hyperparameters) == (objective, given)
        assert every_hyperparameter() & set(vars(model_args)) == set(given)
        assert vars(pickle.loads(pickle.dumps(model_args))) == vars(
            model_args
        )  # as it goes to the workers of a comparison
    refused = r"'{}' in {} is no hyperparameter of objective '{}', which has {}\."
    with pytest.raises(ValueError, match=refused.format("beta", "the command line", "avgk", "alpha, candidate_scope")):
        parse_recipe([path, "--beta", "1"])
    with pytest.raises(ValueError, match=refused.format("alpha", "the command line", "ce", "none")):
        parse_recipe([path, "--objective=ce", "--alpha", "1"])
    with pytest.raises(ValueError, match="unknown field 'hyperparameters' in the command line"):
        parse_recipe([path, "--hyperparameters", "1"])
    recipe.write_text(recipe.read_text() + "epsilon: 0.3\n")
    with pytest.raises(ValueError, match=refused.format("epsilon", ".*recipe.yaml", "avgk", "alpha, candidate_scope")):
        parse_recipe([path])


def test_bad_calls_are_refused(recipe, tmp_path):
    with pytest.raises(ValueError, match=r"unknown field 'aplha' in the command line. Did you mean 'alpha'"):
        parse_recipe([str(recipe), "--aplha", "2"])
    with pytest.raises(ValueError, match="name a recipe"):
        parse_recipe([])
    with pytest.raises(FileNotFoundError, match="there is no recipe"):
        parse_recipe([str(tmp_path / "none.yaml")])
    for text, message in (("- a\n- b", "must hold `key: value` pairs, but holds list"), ("a: [", "is not valid YAML")):
        recipe.write_text(text)
        with pytest.raises(ValueError, match=message):
            parse_recipe([str(recipe)])


def test_missing_required_field_is_named(recipe):
    recipe.write_text(recipe.read_text().replace("dataset:", "#"))
    with pytest.raises(ValueError, match="required: --dataset"):
        parse_recipe([str(recipe)])


def test_equal_seeds_give_equal_results(recipe, tmp_path):
    runs = []
    for name in ("a", "b"):
        main([str(recipe), "--output_dir", str(tmp_path / name), "--num_train_epochs", "1"])
        runs.append(json.loads((tmp_path / name / "results.json").read_text()))
    assert runs[0] == runs[1]


def test_early_stopping_field(recipe, tmp_path):
    main([str(recipe), "--learning_rate", "0", "--num_train_epochs", "6", "--early_stopping_patience", "1"])
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["epoch"] == 2


def test_the_best_head_answers_unless_the_recipe_names_one(recipe, image_folder, tmp_path):
    """In the results, the card and both pipelines."""
    recipe.write_text(recipe.read_text().replace("head: ml", "# head: auto, the default"))
    main([str(recipe), "--learning_rate", "0.3"])
    run = tmp_path / "run"
    found = json.loads((run / "results.json").read_text())["validation"]
    heads = {head: found[f"average_k_accuracy_{head}"] for head in HEADS}
    config = AvgKConfig.from_pretrained(run)
    assert config.head == "auto" and found["average_k_accuracy"] == max(heads.values()) == heads[config.heads["2"]]
    card = (run / "README.md").read_text()
    assert all(f"`{head}` for K in " in card for head in config.heads.values()) and "gets that of K = 2" in card
    images = [str(path) for path in sorted(image_folder.glob("test/*/0.png"))]
    sets = pipeline("average-k-image-classification", model=str(run))(images)
    best = pipeline("image-classification", model=str(run))(images, top_k=1)
    assert [[item["label"] for item in found[:1]] for found in sets] == [[found[0]["label"]] for found in best]


@pytest.mark.parametrize("folder", ["cifar100", "glyphs", "plantnet300k"])
def test_what_was_published_names_its_head(folder):
    """The paper's experiments and those whose results are kept: the ML head, whatever the default is."""
    recipes = [
        path
        for path in (Path(__file__).parent.parent / "recipes" / folder).glob("*.yaml")
        if "\nobjective:" in path.read_text()
    ]
    assert len(recipes) >= 5 and {parse_recipe([str(path)])[0].head for path in recipes} == {"ml"}


def test_help_names_every_own_field(capsys):
    main(["--help"])
    text = capsys.readouterr().out
    assert text.strip() == describe_fields().strip()
    for name in ("alpha", "dataset", "calibrate_k", "early_stopping_patience", "learning_rate"):
        assert name in text
