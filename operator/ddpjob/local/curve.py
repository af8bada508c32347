"""The loss curve as a picture."""

from pathlib import Path

from ddpjob.local.story import Story, number

INK, SECOND = "#1f4e79", "#c0561f"


def draw(story: Story, title: str, path: Path) -> bool:
    """Writes a PNG of loss and accuracy over steps; False where there is nothing to draw."""
    steps, losses = story.curve("train", "loss")
    if not steps:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes.plot(steps, losses, color=INK, label="training loss")
    axes.set(title=title, xlabel="optimizer step", ylabel="training loss", ylim=(0, None))
    axes.yaxis.label.set_color(INK)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for resumed in story.of("start")[1:]:
        axes.axvline(number(resumed.get("resumed_step")) or 0, color="grey", linestyle=":", label="restarted here")
    at, accuracies = story.curve("eval", "accuracy")
    if at:
        right = axes.twinx()
        right.plot(at, [100 * a for a in accuracies], color=SECOND, marker="o", markersize=3, label="test accuracy")
        right.set(ylabel="test accuracy, %", ylim=(None, 100))
        right.yaxis.label.set_color(SECOND)
        right.spines["top"].set_visible(False)
    figure.savefig(path)
    plt.close(figure)
    return True
