"""What a setup installs with pip."""

import pytest

from ddpjob.core.api.requirements import code_advice, read_setup, version_advice

FILES = {
    "requirements.txt": b"tqdm\nnumpy==2.1  # pinned\n-r ./more.txt\n\n# a comment\ntimm[extra]\n",
    "more.txt": b"rich\n-r requirements.txt\n",
    "deep/list.txt": b"einops ; python_version > '3.8'\nsix>=1.16\n-r ../more.txt\n-rother.txt\n",
    "deep/other.txt": b"x @ https://host/x.whl\nattrs \\\n  --hash=sha256:0\nclick\n",
    "with-constraints.txt": b"-c versions.txt\ntqdm\n",
    "noise": b"\xff\xfe\x00",
}


@pytest.mark.parametrize(
    ("setup", "names"),
    [
        ("pip install tqdm numpy==2.1", ["tqdm"]),
        ("python3 -m pip install -q -U tqdm && python -c 'import tqdm'", ["tqdm"]),
        ("uv pip install --system tqdm\n/opt/bin/pip3.11 install timm", ["tqdm", "timm"]),
        ("pip --no-cache-dir install tqdm", ["tqdm"]),
        ("(pip install tqdm)", ["tqdm"]),
        ("pip install tqdm > log.txt 2>&1", ["tqdm"]),
        ("pip install \\\n  tqdm \\\n  timm[extra]", ["tqdm", "timm"]),
        ("pip install 'tqdm;python_version>\"3\"' rich", ["tqdm", "rich"]),
        ("pip install --upgrade pip setuptools wheel tqdm", ["tqdm"]),
        ("pip install -Ur requirements.txt", []),
        ("pip install -i https://index/simple tqdm==4.1", []),
        ("uv pip install --torch-backend auto -p 3.11 torch==2.5", []),
        ("pip install -c versions.txt tqdm", []),
        ("pip install -cversions.txt tqdm", []),
        ("uv pip install --constraints versions.txt tqdm", []),
        ("PIP_CONSTRAINT=versions.txt pip install tqdm", []),
        ("pip install --no-index --find-links wheels tqdm", []),
        ("pip install ./pkg git+https://host/x.git x-1.0.whl x-1.0.tar.bz2 x.tgz", []),
        ("pip install --progress-bar off --root-user-action ignore tqdm==4.1", []),
        ("pip install 'tqdm>=4' \"numpy<3\" six~=1.16", []),
        ("# old: apt-get update && pip install foo", []),
        ("apt-get install git", []),
        ("pip download tqdm", []),
        ("npm install left-pad && pip list", []),
        ("pip install 'not closed", []),
        ("true", []),
        ("", []),
    ],
)
def test_packages_without_a_version_are_found(setup, names):
    assert read_setup(setup).unpinned == names


def test_the_advice_names_some_packages_and_what_to_write():
    assert version_advice(["a", "b", "c", "d", "e"]) == (
        "spec.setup: a, b, c and 2 more have no version, so a pod that starts later may get "
        "another one; write a==VERSION"
    )
    assert version_advice(["a", "a"]).startswith("spec.setup: a has no version")
    assert version_advice([]) == ""


@pytest.mark.parametrize(
    ("setup", "advice"),
    [
        ("pip install -r requirements.txt tqdm", ["requirements.txt: tqdm, rich, timm have"]),
        ("pip install -Ur requirements.txt", ["requirements.txt: tqdm, rich, timm have"]),
        ("pip install --requirement=./more.txt", ["more.txt: rich, tqdm, timm have"]),
        ("pip install -r deep/list.txt", ["deep/list.txt: einops, rich, tqdm and 2 more have"]),
        ("pip install -r nowhere.txt", ["nowhere.txt is not among the files that are sent"]),
        ("pip install -r ./nowhere.txt", ["gitignore or .ddpjobignore leaves it out"]),
        ("pip install -r requirements.txt -c versions.txt", []),
        ("pip install -r with-constraints.txt", []),
        ("pip install -r noise", []),
        ("pip install -r /opt/list.txt", []),
        ("pip install -r https://host/list.txt", []),
        ("curl -sO https://x/list.txt && pip install -r list.txt", []),
        ("cat > l.txt <<EOF\ntqdm\nEOF\npip install -r l.txt", []),
        ("cd deep && pip install -r other.txt", []),
        ('pip install -r "$REQ"', []),
        ("pip install -r", []),
        ("pip install tqdm", []),
    ],
)
def test_the_advice_on_lists_comes_from_the_files(setup, advice):
    found = list(code_advice(setup, FILES))
    assert len(found) == len(advice), found
    assert all(part in text for part, text in zip(advice, found, strict=True)), found
