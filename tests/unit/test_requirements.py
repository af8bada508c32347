"""Packages without a version in the setup of a job."""

import pytest

from ddpjob.sources.requirements import unpinned, unpinned_advice

FILES = {
    "requirements.txt": b"tqdm\nnumpy==2.1  # pinned\n-r more.txt\n\n# a comment\ntimm[extra]\n",
    "deep/list.txt": b"einops ; python_version > '3.8'\nsix>=1.16\nx @ https://host/x.whl\n",
    "noise": b"\xff\xfe\x00",
}


@pytest.mark.parametrize(
    ("setup", "names"),
    [
        ("pip install tqdm numpy==2.1", ["tqdm"]),
        ("pip install -r requirements.txt", ["tqdm", "timm"]),
        ("pip install --requirement=./requirements.txt tqdm", ["tqdm", "timm"]),
        ("python3 -m pip install -q -U tqdm && python -c 'import tqdm'", ["tqdm"]),
        ("uv pip install --system tqdm\n/opt/bin/pip3.11 install timm", ["tqdm", "timm"]),
        ("pip install \\\n  tqdm \\\n  timm[extra]", ["tqdm", "timm"]),
        ("pip install -r deep/list.txt", ["einops"]),
        ("pip install -i https://index/simple tqdm==4.1", []),
        ("pip install -c tqdm.txt ./pkg -e . git+https://host/x.git x-1.0.whl", []),
        ("pip install 'tqdm>=4' \"numpy<3\" six~=1.16", []),
        ("pip install -r nowhere.txt -r noise", []),
        ("apt-get install git", []),
        ("pip download tqdm", []),
        ("npm install left-pad && pip list", []),
        ("pip install 'not closed", []),
        ("true", []),
        ("", []),
    ],
)
def test_packages_without_a_version_are_found(setup, names):
    assert unpinned(setup, FILES) == names


def test_the_advice_names_some_packages_and_what_to_write():
    advice = unpinned_advice("pip install a b c d e", {})
    assert advice == (
        "spec.setup: a, b, c and 2 more have no version, so a pod that starts later may get "
        "another one; write a==VERSION"
    )
    assert unpinned_advice("pip install a", {}).startswith("spec.setup: a has no version")
    assert unpinned_advice("pip install a==1", {}) == ""
