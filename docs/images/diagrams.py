"""Draw the diagrams of the documentation as SVG: a job's life, an attempt, and a pod.

    python docs/images/diagrams.py

A box is (x, y, text) in units of a grid. The first line of its text is bold.
"""

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent

UNIT = 10
WIDTH, LINE, PAD = 150, 17, 9
INK, PAPER, FILL, ACCENT = "#1b2a3a", "#ffffff", "#eaf1f8", "#1f4e79"


class Drawing:
    """Boxes with names, and arrows between them."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.size = width * UNIT, height * UNIT
        self.title = title
        self.boxes: dict[str, tuple[float, float, float, float]] = {}
        self.parts: list[str] = []

    def box(self, name: str, x: float, y: float, text: str, width: float = WIDTH) -> None:
        lines = text.split("\n")
        x, y = x * UNIT, y * UNIT
        height = 2 * PAD + LINE * len(lines) - 4
        self.boxes[name] = x, y, width, height
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{FILL}" '
            f'stroke="{ACCENT}"/>'
        )
        for number, line in enumerate(lines):
            weight = "bold" if number == 0 else "normal"
            place = y + PAD + LINE * (number + 0.7)
            self.text(x + width / 2, place, line, weight=weight)

    def text(
        self, x: float, y: float, text: str, *, weight: str = "normal", size: int = 12
    ) -> None:
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="middle" font-weight="{weight}" '
            f'font-size="{size}" fill="{INK}">{escape(text)}</text>'
        )

    def arrow(self, start: str, end: str, text: str = "", *, shift: float = 0) -> None:
        """Draw an arrow between the sides of two boxes that face each other.

        `shift` moves its text to the right.
        """
        (x1, y1), (x2, y2) = self._sides(self.boxes[start], self.boxes[end])
        self.parts.append(
            f'<path d="M {x1} {y1} L {x2} {y2}" fill="none" stroke="{INK}" '
            'marker-end="url(#head)"/>'
        )
        middle = (x1 + x2) / 2 + shift * UNIT, (y1 + y2) / 2 - 6
        for number, line in enumerate(filter(None, text.split("\n"))):
            self.text(middle[0], middle[1] + 14 * number, line, size=11)

    @staticmethod
    def _sides(one, other):
        (x1, y1, w1, h1), (x2, y2, w2, h2) = one, other
        if x1 + w1 <= x2:
            return (x1 + w1, y1 + h1 / 2), (x2 - 3, y2 + h2 / 2)
        if x2 + w2 <= x1:
            return (x1, y1 + h1 / 2), (x2 + w2 + 3, y2 + h2 / 2)
        # The ends are as near to each other as the boxes allow.
        start = min(max(x2 + w2 / 2, x1 + 25), x1 + w1 - 25)
        end = min(max(x1 + w1 / 2, x2 + 25), x2 + w2 - 25)
        if y1 < y2:
            return (start, y1 + h1), (end, y2 - 3)
        return (start, y1), (end, y2 + h2 + 3)

    def save(self, name: str) -> None:
        width, height = self.size
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{INK}"/>'
            "</marker></defs>"
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
            head,
            *self.parts,
            "</svg>",
        ]
        (FOLDER / name).write_text("\n".join(lines) + "\n")


def job_life() -> None:
    drawing = Drawing("The phases of a DDPJob", 98, 37)
    drawing.box("pending", 2, 4, "Pending\nno room, no image,\na quota, a queue")
    drawing.box("starting", 28, 4, "Starting\ncontainers start,\nranks meet")
    drawing.box("running", 54, 4, "Running\nall ranks have met\nand train")
    drawing.box("complete", 81, 4, "Complete\nall ended with 0,\nresult in the status")
    drawing.box("restarting", 41, 20, "Restarting\nattempt + 1")
    drawing.box("failed", 81, 20, "Failed\nno restart is left,\na deadline, wrong use")
    drawing.box("suspended", 2, 20, "Suspended\nspec.suspend, no pods")
    drawing.arrow("pending", "starting", "pods run")
    drawing.arrow("starting", "running", "all ready")
    drawing.arrow("running", "complete")
    drawing.arrow(
        "running", "restarting", "a rank fails, a pod is lost,\nit hangs, nodes change", shift=9
    )
    drawing.arrow("restarting", "starting", "survivors stay,\nlost pods are new", shift=-7)
    drawing.arrow("restarting", "failed", "the budget is used up")
    drawing.arrow("suspended", "pending", "resume", shift=4)
    drawing.text(
        490, 310, "spec.suspend ends the pods of any phase, with their grace period.", size=11
    )
    drawing.text(
        490, 326, "Deleting the job removes its pods. Checkpoints stay in both cases.", size=11
    )
    drawing.save("job-life.svg")


def attempt() -> None:
    drawing = Drawing("One attempt of a DDPJob with two nodes", 98, 42)
    drawing.box("operator", 40, 2, "operator\nobserve, decide, act", 180)
    drawing.box("pod0", 4, 16, "pod JOB-0-0\nagent\ntorchrun\nrank 0, rank 1", 200)
    drawing.box("pod1", 74, 16, "pod JOB-0-1\nagent\ntorchrun\nrank 2, rank 3", 200)
    drawing.box("claim", 40, 34, "claim\ncheckpoints of all attempts", 180)
    drawing.arrow(
        "operator", "pod0", "1. create all pods at once,\nwith their assignment", shift=-9
    )
    drawing.arrow("pod1", "operator", "2. ready, or ended\nwith a report", shift=8)
    drawing.arrow("pod0", "pod1", "rendezvous at node 0, then all-reduce")
    drawing.arrow("pod0", "claim", "rank 0 writes", shift=-6)
    drawing.arrow("claim", "pod1", "all ranks read", shift=6)
    drawing.save("attempt.svg")


def pod() -> None:
    drawing = Drawing("A pod of a DDPJob", 98, 45)
    drawing.box("assignment", 2, 2, "assignment\nattempt, endpoint, size", 190)
    drawing.box("agent", 39, 2, "agent, process 1\nstandard-library Python", 200)
    drawing.box("port", 76, 2, "port 29401\n/ready and /metrics", 190)
    drawing.box("zygote", 39, 14, "zygote (fastStart)\nhas imported torch", 200)
    drawing.box("report", 76, 14, "termination message\ncause, rank, exception", 190)
    drawing.box("torchrun", 39, 26, "torchrun\nstarts and watches ranks", 200)
    drawing.box("rank0", 16, 38, "rank 0\nyour script", 160)
    drawing.box("rank1", 66, 38, "rank 1\nyour script", 160)
    drawing.arrow("assignment", "agent", "a file")
    drawing.arrow("agent", "port")
    drawing.arrow("agent", "report", "at the end", shift=4)
    drawing.arrow("agent", "zygote", "start", shift=3)
    drawing.arrow("zygote", "torchrun", "fork", shift=3)
    drawing.arrow("torchrun", "rank0")
    drawing.arrow("torchrun", "rank1")
    drawing.save("pod.svg")


if __name__ == "__main__":
    job_life()
    attempt()
    pod()
