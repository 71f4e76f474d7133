"""Attacks by data, recipes and records that others wrote: each is performed, and seen refused."""

import pytest

from archives import write_cifar, write_plantnet
from avgk_hf import load_splits
from avgk_hf.cli import main
from avgk_hf.data.cifar import MOST_INSTRUCTIONS
from avgk_hf.train import parse_recipe

GLOBALS = {"array": b"cnumpy.core.multiarray\n_reconstruct\n", "dtype": b"cnumpy\ndtype\n", "nd": b"cnumpy\nndarray\n"}


PLAIN = b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"


def array_pickle(dtype=b"U\x02u1", order=b"U\x01|", shape=b"K\x04", data=b"U\x04abcd", rest=PLAIN):
    """An array as CIFAR-100's files hold it, of which every part can be forged."""
    made = GLOBALS["array"] + GLOBALS["nd"] + b"K\x00\x85U\x01b\x87R"
    kind = GLOBALS["dtype"] + dtype + b"K\x00K\x01\x87R(K\x03" + order + rest + b"tb"
    return b"\x80\x02}U\x04data" + made + b"(K\x01(" + shape + b"t" + kind + b"\x89" + data + b"tbs."


FORGED = {
    "objects": array_pickle(dtype=b"U\x02O8", data=b"U\x08\x41\x41\x41\x41\x41\x41\x41\x41", shape=b"K\x01"),
    "objects by state": array_pickle(rest=b"NN(U\x01O)tJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3f"),
    "size by state": array_pickle(rest=b"NNNJ\xff\xff\xff\x7fJ\x01\x00\x00\x00K\x00"),
    "fields": array_pickle(rest=b"N(U\x01ft}U\x01f(NK\x7ftsJ\xff\xff\xff\x7fJ\x01\x00\x00\x00K\x00"),
    "text": array_pickle(dtype=b"U\x02S9"),
    "shape": array_pickle(shape=b"J\xff\xff\xff\x7f"),
    "negative shape": array_pickle(shape=b"J\xfc\xff\xff\xffJ\xff\xff\xff\xff"),
    "overflowing shape": array_pickle(shape=b"\x8a\x05\x00\x00\x00\x00\x01" * 2, data=b"U\x00"),
    "shape of text": array_pickle(shape=b"U\x014"),
    "no bytes": array_pickle(data=b"]"),
    "fortran": array_pickle().replace(b"\x89U\x04abcd", b"\x88U\x04abcd"),
    "state of a dtype for an array": b"\x80\x02}U\x04data" + GLOBALS["dtype"] + b"(K\x01(K\x04tNN)tbs.",
    "state of a class": b"\x80\x02}U\x04data" + GLOBALS["nd"] + b"N}U\x07__len__K\x01s\x86bs.",
    "a class called": b"\x80\x02}U\x04data" + GLOBALS["nd"] + b"(J\xff\xff\xff\x7ft\x85Rs.",
    "a new object": b"\x80\x02}U\x04data" + GLOBALS["nd"] + b"K\x04\x85\x81s.",
    "an extension": b"\x80\x02}U\x04data\x82\x01s.",
    "persistent": b"\x80\x02}U\x04dataK\x01Qs.",
    "an empty stack": b"\x80\x02RRR.",
    "a mark too many": b"\x80\x02}U\x04data((K\x01\x86s.",
    "a key that is a list": b"\x80\x02}(](tK\x01s.",
    "memory by a number in the memo": b"\x80\x02}r\xff\xff\xff\x7fU\x04dataNs.",
    "memory by a stated length": b"\x80\x04}\x8e\xff\xff\xff\xff\xff\xff\xff\x00.",
    "memory by instructions": b"\x80\x02" + b"(" * (MOST_INSTRUCTIONS + 1),
    "memory by calls": b"\x80\x02](X\x00\x00\x10\x00" + b"a" * 2**20 + b"q\x00c_codecs\nencode\nq\x01"
    + b"h\x01h\x00U\x06latin1\x86R" * 4_000 + b"e.",
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_forged_arrays_are_refused(case, tmp_path):
    """Believed, each ends the process by a signal, takes all memory, or runs what it names."""
    folder = tmp_path / "cifar-100-python"
    write_cifar(folder)
    (folder / "train").write_bytes(FORGED[case])
    with pytest.raises(ValueError, match=r"train (cannot be read as CIFAR-100|has no 'fine_labels')"):
        load_splits(str(folder))


def test_nested_names_of_classes_are_refused(tmp_path):
    """To write out one list that holds another twice, 60 times over, would never end."""
    folder = tmp_path / "cifar-100-python"
    write_cifar(folder)
    nested = b"]q\x00(U\x01aU\x01be" + b"](h\x00h\x00eq\x00" * 60
    (folder / "meta").write_bytes(b"\x80\x02}U\x10fine_label_names](" + nested + b"es.")
    with pytest.raises(ValueError, match="'fine_label_names' is no list of bytes"):
        load_splits(str(folder))


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
RECIPE = "model: test_resnet\ndataset: glyphs\noutput_dir: out\n"
BAD_YAML = {
    "nested aliases": (LAUGHS, "the alias *a is not followed; write the value out"),
    "nested aliases in a field": (RECIPE + LAUGHS + "model_args: {i: *i}\n", "the alias *a is not followed"),
    "a merge": ("model: &m {a: 1}\nmodel_args: {<<: *m}\n", "the alias *m is not followed"),
    "a list in itself": ("model: &m [*m]\n", "the alias *m is not followed"),
    "depth": ("model: " + "[" * 10_000, "not valid YAML"),
    "depth of mappings": ("model: " + "{a: " * 10_000, "not valid YAML"),
    "size": ("#" * 1_000_001, "are the most that is read"),
    "a number without end": (f"k: {'9' * 100_000}\n", "not valid YAML"),
    "a set": (RECIPE + "model_args: {a: !!set {x, y}}\n", "not valid YAML"),
    "bytes": (RECIPE + "model_args: {a: !!binary aGk=}\n", "not valid YAML"),
    "an object": ("model: !!python/object/apply:os.system ['touch RUN']\n", "not valid YAML"),
    "an object in a list": ("calibrate_k: [!!python/object/new:os.system ['touch RUN']]\n", "not valid YAML"),
    "a name": ("model: !!python/name:os.system\n", "not valid YAML"),
}


@pytest.mark.parametrize("command", ["train", "sweep", "compare"])
@pytest.mark.parametrize("case", BAD_YAML)
def test_yaml_that_unfolds_or_makes_objects_is_refused(case, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, reason = BAD_YAML[case]
    (tmp_path / "file.yaml").write_text(text)
    assert main([command, "file.yaml"]) == 2
    said = capsys.readouterr().err
    assert reason in said and said.count("\n") == 1 and len(said) < 1_000
    assert [path.name for path in tmp_path.iterdir()] == ["file.yaml"]


def test_dates_in_a_recipe_are_text(tmp_path):
    (tmp_path / "file.yaml").write_text(RECIPE + "run_name: 2024-05-01\nmodel_args: {a: 2024-05-01}\n")
    model_args, _, args = parse_recipe([str(tmp_path / "file.yaml")])
    assert (model_args.model_args, args.run_name) == ('{"a": "2024-05-01"}', "2024-05-01")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[1]", "9" * 100_000])
def test_absurd_json_is_one_line(text, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert main(["train", "recipe.yaml", "--dataset", str(image_folder), "--model_args", text]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "not a mapping in JSON" in said
    write_plantnet(tmp_path / "plants")
    (tmp_path / "plants" / "plantnet300K_species_id_2_name.json").write_text(text)
    with pytest.raises(ValueError, match=r"species_id_2_name\.json (is not valid JSON|holds a)"):
        load_splits(str(tmp_path / "plants"))


def test_searches_without_end_are_refused(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    fields = (
        "alpha",
        "beta",
        "epsilon",
        "role_lambda",
        "theta_lr",
        "learning_rate",
        "weight_decay",
        "num_train_epochs",
    )
    values = "{" + ", ".join(f"{name}: {list(range(1, 1000))}" for name in fields) + "}"
    (tmp_path / "sweep.yaml").write_text(f"recipe: recipe.yaml\nsearch: {values}\n")
    (tmp_path / "compare.yaml").write_text(f"recipe: recipe.yaml\nlosses: {{ce: {{}}}}\nk: [2]\nshared: {values}\n")
    for command in ("sweep", "compare"):
        assert main([command, str(tmp_path / f"{command}.yaml")]) == 2
        assert "combinations are more than" in capsys.readouterr().err
