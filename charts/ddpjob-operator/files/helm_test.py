"""Run `helm test`: the operator is ready, a good DDPJob is accepted, and a bad one is refused.

It runs in a pod with the operator's image and needs only the standard library. Arguments: the URL
of the operator's /readyz, and the namespace of the jobs. Nothing is created: both jobs are dry
runs.
"""

import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

API = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# Seconds until new Endpoints and roles are known everywhere.
PATIENCE = 60


def post_job(namespace: str, name: str) -> tuple[int, str]:
    """Return the API server's HTTP status and message for a dry run of a DDPJob named `name`."""
    job = {
        "apiVersion": "ddpjob.dev/v1alpha1",
        "kind": "DDPJob",
        "metadata": {"name": name},
        "spec": {"image": "ddpjob-trainer:cpu", "args": ["-m", "ddp_trainer", "digits"]},
    }
    request = urllib.request.Request(
        f"{API}/apis/ddpjob.dev/v1alpha1/namespaces/{namespace}/ddpjobs?dryRun=All",
        data=json.dumps(job).encode(),
        headers={
            "Content-Type": "application/json",
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}",
        },
    )
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=10, context=trusted) as answer:
            return answer.status, "created"
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.load(refusal)["message"]


def readiness(url: str) -> tuple[int, str]:
    """Return the HTTP status and text of the operator's /readyz."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        return refusal.code, refusal.read().decode()


def main(readyz: str, namespace: str) -> None:
    """Repeat each check until it succeeds. Exit with a message if one does not."""
    checks = {
        "the operator is ready": (lambda: readiness(readyz), 200),
        "a good job is accepted": (lambda: post_job(namespace, "helm-test"), 201),
        "a job with a bad name is refused": (
            lambda: post_job(namespace, "9-helm-test"),
            422,
        ),
    }
    deadline = time.monotonic() + PATIENCE
    for what, (ask, expected) in checks.items():
        while True:
            try:
                status, message = ask()
            except OSError as problem:
                status, message = 0, str(problem)
            if status == expected:
                print(f"ok: {what} ({message.strip()})", flush=True)
                break
            if time.monotonic() > deadline:
                sys.exit(f"failed: {what}: expected {expected}, got {status}: {message.strip()}")
            time.sleep(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
