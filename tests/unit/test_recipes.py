"""The recipes of CONTRIBUTING.md, followed in a copy of the repository.

Each edits only the files listed in it. Then its tests pass, and the program knows what is new.
Recipes with the same commands share a copy.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ddpjob.core.api.yaml_text import load_all_yaml, load_yaml

ROOT = Path(__file__).parents[2]
CRD = "charts/ddpjob-operator/files/crd.yaml"

# What the recipes edit, generate and test.
COPIED = (
    "Makefile",
    "README.md",
    "charts",
    "docs/users",
    "examples",
    "operator/ddpjob",
    "pyproject.toml",
    "release",
    "tests/local",
    "tests/unit",
    "trainer/ddp_trainer",
)

# The copy uses the environment of this test.
STAMP = ".venv/.installed"


def read_recipes():
    """Return the lists of each recipe by its title: `by hand`, `then` and `tests`."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    _, *sections = re.split(r"^##+ ", text, flags=re.MULTILINE)
    recipes = {}
    for section in sections:
        lists = re.findall(r"^- (by hand|then|tests): (.*(?:\n  .*)*)", section, re.MULTILINE)
        if lists:
            title = section.partition("\n")[0]
            recipes[title] = {key: re.findall(r"`([^`]+)`", items) for key, items in lists}
    return recipes


RECIPES = read_recipes()


def copy_to(root):
    for path in COPIED:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        copy(ROOT / path, root / path)


def run(root, *command):
    """Run a program in a copy, and return its output."""
    paths = os.pathsep.join(str(root / path) for path in ("operator", "trainer"))
    # The number of random histories is the developer's.
    own = {"PYTHONPATH": paths, "COLUMNS": "100", "HYPOTHESIS_PROFILE": "dev"}
    env = {**os.environ, **own}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Recipe:
    """A recipe, followed in a copy of the repository. `name` takes the place of NAME."""

    def __init__(self, title, name, root):
        self.lists = RECIPES[title]
        self.name = name
        self.root = root
        self.edited = set()

    def insert(self, path, text, before=""):
        """Insert a text into a file, or at its end. The file may be a new one."""
        self.edited.add(path.replace(self.name, "NAME"))
        file = self.root / path
        old = file.read_text() if file.exists() else ""
        assert before in old, f"{path}: {before!r} not found"
        place = old.index(before) if before else len(old)
        file.write_text(old[:place] + text + old[place:])

    def ddpjob(self, *words):
        return run(self.root, sys.executable, "-m", "ddpjob.cli.main", *words)

    def text(self, path):
        return (self.root / path).read_text()


@pytest.mark.parametrize("title", RECIPES)
def test_the_files_of_a_recipe_exist(title):
    for paths in (RECIPES[title]["by hand"], RECIPES[title]["tests"]):
        for path in paths:
            file, _, test = path.partition("::")
            place = ROOT / file
            # A new file belongs into an existing folder.
            is_new = place.name.startswith("NAME.")
            assert place.parent.is_dir() if is_new else place.is_file(), path
            assert not test or f"def {test}(" in place.read_text(), path


def add_an_accelerator(recipe):
    row = {
        "description": "8 devices of a new kind",
        "backend": "nccl",
        "trainerImage": "ddpjob-trainer:x9",
        "devices": {"example.com/device": 8},
        "processes": 8,
        "processCounts": [4, 8],
        "oneNode": "has no network to another node",
    }
    path = "operator/ddpjob/core/api/profiles/x9.8xlarge.yaml"
    recipe.insert(path, yaml.safe_dump({"x9.8xlarge": row}))
    yield
    spec = load_yaml(recipe.ddpjob("init", "digits", "--accelerator", "x9.8xlarge"))["spec"]
    assert (spec["accelerator"], spec["nodes"]) == ("x9.8xlarge", 1)
    assert spec["image"] == "ddpjob-trainer:x9"
    assert "x9.8xlarge" in recipe.ddpjob("submit", "--help")
    assert "- x9.8xlarge\n" in recipe.text(CRD)
    assert "must be 4, 8 or auto with accelerator x9.8xlarge" in recipe.text(CRD)
    assert "| `x9.8xlarge` |" in recipe.text("docs/users/reference.md")


COMMAND = '''
"""`ddpjob greet`: greet a person."""

from typing import Annotated

import typer


def command(person: Annotated[str, typer.Argument(help="Name of the person.")]) -> None:
    """Greet a person."""
    typer.echo(f"Hello {person}")
'''


def add_a_command(recipe):
    recipe.insert("operator/ddpjob/cli/commands/greet.py", COMMAND.lstrip())
    row = '        "greet": "Greet a person.",\n'
    recipe.insert("operator/ddpjob/cli/main.py", row, before='        "submit":')
    yield
    assert "| `ddpjob greet` | Greet a person |" in recipe.text("docs/users/command-line.md")
    assert "Greet a person." in recipe.ddpjob("--help")
    assert recipe.ddpjob("greet", "Ada") == "Hello Ada\n"


def add_a_reason(recipe):
    row = '    SNOWED = "Snowed", "snow covers the nodes", "remove the snow"\n'
    path = "operator/ddpjob/core/api/reasons.py"
    recipe.insert(path, row, before="    NODES_RUNNING =")
    health = "    Reason.SNOWED: (Phase.PENDING, PROGRESSING),\n"
    recipe.insert("tests/unit/test_gitops.py", health, before="    Reason.UNSCHEDULABLE:")
    yield
    page = recipe.text("docs/users/reasons.md")
    assert '| <a id="reason-snowed"></a>Snowed | snow covers the nodes | remove the snow |' in page


BUDGET = """
{# No more than one pod of a gang is evicted at once. #}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ job.name | tojson }}
  namespace: {{ job.namespace | tojson }}
  labels: {{ labels | tojson }}
  ownerReferences:
  - apiVersion: {{ api_version | tojson }}
    kind: {{ kind | tojson }}
    name: {{ job.name | tojson }}
    uid: {{ job.uid | tojson }}
    controller: true
spec:
  maxUnavailable: 1
  selector: {matchLabels: { {{ uid_label | tojson }}: {{ job.uid | tojson }} }}
"""
RULE = """- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create]
"""


def add_an_owned_object(recipe):
    row = '    BUDGET = "PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets"\n'
    recipe.insert("operator/ddpjob/core/plan.py", row, before='    POD = "Pod"')
    templates = "operator/ddpjob/core/render/templates"
    recipe.insert(f"{templates}/poddisruptionbudget.yaml.j2", BUDGET.lstrip())
    services = '- apiGroups: [""]\n  resources: [services]'
    recipe.insert("charts/ddpjob-operator/templates/_helpers.tpl", RULE, before=services)
    right = '    ("policy", "poddisruptionbudgets", "create get"),\n'
    recipe.insert("tests/unit/test_chart.py", right, before='    ("", "services",')
    yield
    job = recipe.ddpjob("render", "examples/digits.yaml")
    kinds = [document["kind"] for document in load_all_yaml(job)]
    assert kinds == ["Service", "PodDisruptionBudget", "Pod", "Pod"]
    assert "poddisruptionbudgets" in recipe.text("tests/unit/golden/chart-default.yaml")


FIELD = """
    thaw_time: Seconds | None = seconds(
        "The job waits so long for the snow to melt.", name="thawSeconds", change=Change.ALWAYS
    )
"""

DECISION = '''

def waits_for_thaw(spec: Spec) -> bool:
    """Return True if a job waits for the snow to melt."""
    return spec.lifecycle.thaw_time is not None
'''

FIELD_TEST = """

def test_a_job_waits_for_the_snow_to_melt(tmp_path):
    lifecycle = read_spec(tmp_path, "thawSeconds: 90").job.spec.lifecycle
    assert lifecycle.thaw_time == timedelta(seconds=90)
"""


def add_a_field(recipe):
    path = "operator/ddpjob/core/api/policy.py"
    recipe.insert(path, FIELD.lstrip("\n"), before="    time_to_live: Seconds")
    recipe.insert("operator/ddpjob/core/decide/rules.py", DECISION)
    path = "tests/local/test_manifest.py"
    recipe.insert(path, '    "thawSeconds",\n', before='    "nodes",\n    "nprocPerNode"')
    recipe.insert(path, FIELD_TEST)
    yield
    assert "thawSeconds: int" in recipe.text("operator/ddpjob/jobs/spec_fields.py")
    assert "| `thawSeconds` | integer |" in recipe.text("docs/users/reference.md")
    field = load_yaml(recipe.text(CRD))["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    field = field["properties"]["spec"]["properties"]["thawSeconds"]
    assert (field["type"], field["minimum"]) == ("integer", 1)


METRIC = '    "ddpjob_snowflakes": Family("Snowflakes that fell on nodes"),\n'


def add_a_metric(recipe):
    recipe.insert(
        "operator/ddpjob/controller/families.py", METRIC, before='    "ddpjob_reconciles":'
    )
    count = '        counted["ddpjob_snowflakes"].inc(0)\n'
    path = "operator/ddpjob/controller/metrics.py"
    recipe.insert(path, count, before="        # A counter that begins at 0")
    yield
    page = recipe.text("docs/users/operations.md")
    assert "| `ddpjob_snowflakes_total` | Snowflakes that fell on nodes |" in page


SNOWED_IN = """
def nodes_are_snowed_in(obs: Observation, spec: Spec, now: datetime) -> Plan | None:
    return snowed_in(obs) if obs.job.generation == 77 else None


"""

WAIT_FOR_THAW = '''

def snowed_in(obs: Observation) -> Plan:
    """Wait for the snow to melt."""
    return Plan(replace(obs.status, message="the nodes are snowed in"))
'''

SNOW_TEST = """

def test_a_job_on_nodes_that_are_snowed_in_waits():
    job = a_running_job()
    plan = plan_for(replace(job, generation=77), a_pod(0, running()), a_pod(1, running()))
    assert plan.status.message == "the nodes are snowed in"
    assert nothing_changes(plan)
"""


def add_a_rule(recipe):
    path = "operator/ddpjob/core/decide/rules.py"
    recipe.insert(path, SNOWED_IN.lstrip(), before="RULES: tuple[Rule")
    row = "    nodes_are_snowed_in,  # Nothing can be done before it thaws.\n"
    recipe.insert(path, row, before="    attempt_failed,  #")
    imported = "from ddpjob.core.decide.transitions import snowed_in\n"
    recipe.insert(path, imported, before="from ddpjob.core.decide.transitions import")
    recipe.insert("operator/ddpjob/core/decide/transitions.py", WAIT_FOR_THAW)
    path = "tests/unit/test_decide.py"
    recipe.insert(path, '        "nodes_are_snowed_in",\n', before='        "attempt_failed",')
    recipe.insert(path, SNOW_TEST)
    yield


# For each recipe, what takes the place of NAME, and the generator that follows it: it edits files,
# and after what the recipe runs, it checks the result.
FOLLOWED = {
    "Add an accelerator": ("x9.8xlarge", add_an_accelerator),
    "Add a command": ("greet", add_a_command),
    "Add a reason": ("Snowed", add_a_reason),
    "Add an object that a job owns": ("poddisruptionbudget", add_an_owned_object),
    "Add a field to the spec": ("thawSeconds", add_a_field),
    "Add a metric": ("snowflakes", add_a_metric),
    "Add a rule": ("nodes_are_snowed_in", add_a_rule),
}


# The commands of recipes.
COMMANDS = ([], ["make generate"])


def test_each_recipe_is_followed_but_two():
    assert RECIPES.keys() - FOLLOWED == {"Add a workload", "Add a field to the status"}
    assert all(RECIPES[title].get("then", []) in COMMANDS for title in FOLLOWED)


@pytest.mark.parametrize("then", COMMANDS, ids=["no-command", "generate"])
def test_the_recipes_are_complete(tmp_path, then):
    """Follow the recipes with the same commands in one copy, to run these and the tests once."""
    copy_to(tmp_path)
    to_check, tests = [], set()
    for title, (name, follow) in FOLLOWED.items():
        recipe = Recipe(title, name, tmp_path)
        if recipe.lists.get("then", []) == then:
            steps = follow(recipe)
            next(steps)
            assert recipe.edited == set(recipe.lists["by hand"])
            tests.update(recipe.lists["tests"])
            to_check.append(steps)
    for command in then:
        program, target = command.split()
        run(tmp_path, program, "-o", STAMP, f"BIN={Path(sys.executable).parent}", target)
    run(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *sorted(tests))
    for steps in to_check:
        # The rest of a generator checks the result.
        list(steps)
