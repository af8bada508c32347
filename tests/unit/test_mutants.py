"""`make mutants` tries each small change with all tests of the decisions."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]

# Tests of the decisions use these.
OF_DECISIONS = re.compile(r"\bplan_for\b|ddpjob\.core\.(decide|observe)")

# They take too long for each small change.
LONG = {"test_properties.py", "test_recipes.py", "test_mutants.py"}


def test_the_mutants_are_tried_with_each_test_of_the_decisions():
    command = (TESTS / "mutants.toml").read_text()
    tried = set(re.findall(r"tests/unit/(test_\w+\.py)", command))
    files = [file for file in (TESTS / "unit").glob("test_*.py") if file.name not in LONG]
    of_decisions = {file.name for file in files if OF_DECISIONS.search(file.read_text())}
    assert of_decisions <= tried
    assert tried <= {file.name for file in files}
