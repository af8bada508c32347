"""A zygote without an agent, and scripts for its forks and for a Python of their own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import ddpjob.agent

from .kubelet import DEADLINE

PROGRAMS = str(Path(ddpjob.agent.__file__).parent)

Done = subprocess.CompletedProcess[str]


class Zygote:
    """A zygote with its socket in `folder`, beside the scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            "PATH": os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
            "DDP_AGENT_FOLDER": str(folder),
            "DDP_AGENT_PYTHON": sys.executable,
            "LOCAL_WORLD_SIZE": "4",
        }
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(folder / "zygote"))
            server.listen()
            words = [sys.executable, "-u", PROGRAMS, "zygote", str(server.fileno())]
            self.process = subprocess.Popen(
                words, env=self.env, cwd=folder, pass_fds=[server.fileno()]
            )

    def start(self, *arguments: str, rank: int = 0, **env: str) -> subprocess.Popen[str]:
        """Start a stand-in as torchrun does."""
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return self.popen(
            [sys.executable, "-IS", PROGRAMS, "launch", "worker"], arguments, **ranks, **env
        )

    def fork(self, *arguments: str, **settings: str) -> Done:
        return finish(self.start(*arguments, **settings))

    def plain(self, *arguments: str, rank: int = 0, **env: str) -> Done:
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return finish(self.popen([sys.executable], arguments, **ranks, **env))

    def popen(
        self, words: list[str], arguments: tuple[str, ...], **env: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*words, "-u", *arguments],
            env={**self.env, **env},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[str]) -> Done:
    try:
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        # The zygote then ends the fork.
        process.kill()
    return Done(process.args, process.returncode, out, err)
