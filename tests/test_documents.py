"""What the README says of the classifiers is true."""

from pathlib import Path

from gpuclassify.classifiers import FAMILIES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_table_names_each_classifier_with_its_model_and_licence():
    for name, family in FAMILIES.items():
        begins = f"| `{family.__qualname__}`<br>`{name}` |"
        (row,) = [line for line in README.splitlines() if line.startswith(begins)]
        assert family.licence in row or "model's" in row
        assert family.defaults.get("model", "model=") in row
        columns = [v for k, v in family.defaults.items() if k.endswith("label_field")]
        assert all(column.removesuffix("-score-label") in row for column in columns)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
