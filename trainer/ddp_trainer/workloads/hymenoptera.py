"""Fine-tuning: a ResNet-18 that has seen other images learns to tell ants from bees from 244 photographs.

python -m ddp_trainer hymenoptera --data FOLDER --weights resnet18.pth
torchrun --standalone --nproc-per-node 2 -m ddp_trainer hymenoptera --data FOLDER --weights https://…/resnet18.pth --frozen
"""

import hashlib
import sys
import zipfile
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from ddp_trainer.checkpoint import find_damage
from ddp_trainer.cli.options import HymenopteraOptions
from ddp_trainer.errors import UserError
from ddp_trainer.progress import Progress
from ddp_trainer.runtime import Runtime
from ddp_trainer.sampler import Shard
from ddp_trainer.workloads.datasets import photographs
from ddp_trainer.workloads.shared.classification import Task, train_classifier
from ddp_trainer.workloads.shared.models import ResNet, resnet18

MEAN, DEVIATION = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)  # of ImageNet, whose weights one usually begins with
EPOCHS_PER_RATE = 7  # after so many the learning rate is a tenth


def train(options: HymenopteraOptions, runtime: Runtime) -> None:
    """Train, evaluate after every epoch, report. Raises UserError on wrong use, Interrupted after a signal."""
    progress = Progress(runtime, options.log_every)
    if options.frozen and not options.weights:
        raise UserError("--frozen keeps weights that were trained before: give them with --weights")
    with progress.timed("setup"):
        train_set, test_set = runtime.together(lambda: photographs.load(options.data))
        model = resnet18(len(train_set.classes))
        if options.weights:
            source = options.weights
            runtime.node_by_node(lambda: load_weights(model, source))
        begun_with = fingerprint(model) if options.weights else "none"
        if options.frozen:
            freeze_all_but_the_last_layer(model)
        model = model.to(runtime.device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        fused = runtime.hardware.fused_optimizers
        optimizer = torch.optim.SGD(trained, lr=options.learning_rate, momentum=0.9, fused=fused)
        mean = torch.tensor(MEAN, device=runtime.device).view(3, 1, 1) * 255
        deviation = torch.tensor(DEVIATION, device=runtime.device).view(3, 1, 1) * 255

    def normalised(pixels: Tensor) -> Tensor:
        return (pixels.to(runtime.device) - mean) / deviation

    def fetch(shard: Shard) -> tuple[Tensor, Tensor]:
        pixels = train_set.random_crops(shard, options.image_size, seed=options.seed)
        return normalised(pixels), torch.from_numpy(train_set.labels[shard.indices]).to(
            runtime.device
        )

    def a_tenth_every_seven_epochs(done: float) -> float:
        return 0.1 ** (int(done * options.epochs) // EPOCHS_PER_RATE)

    task = Task(
        name="hymenoptera",
        samples=len(train_set),
        test_samples=len(test_set),
        image_shape=(3, options.image_size, options.image_size),
        fetch=fetch,
        fetch_test=lambda chosen: (
            normalised(test_set.middles(chosen, options.image_size)),
            torch.from_numpy(test_set.labels[chosen]).to(runtime.device),
        ),
        model=model,
        optimizer=optimizer,
        learning_rate=options.learning_rate,
        schedule=a_tenth_every_seven_epochs,
        keep_best=True,
        identity={
            "frozen": str(options.frozen),
            "image_size": options.image_size,
            "weights": begun_with,
        },
    )
    train_classifier(task, options, progress)


def load_weights(model: ResNet, source: str) -> None:
    """Load all but the last layer from a file or a URL, in torchvision's format. Raises UserError where they do not fit.

    The last layer tells the classes of the data that the weights were trained on; that of `model` is a new one.
    """
    try:
        file = downloaded(source) if source.startswith(("https://", "http://")) else Path(source)
        damage = (
            find_damage(file) if zipfile.is_zipfile(file) else None
        )  # before PyTorch 1.6 it was no archive
        state = None if damage else torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, ValueError, HTTPException) as error:  # ValueError: no URL
        raise UserError(f"the weights {source} cannot be read: {error}") from error
    except Exception as error:  # what pickle raises is not documented
        raise UserError(
            f"the weights in {file} cannot be read ({error}): give a state dict saved by torch.save, whole"
        ) from error
    if damage:
        raise UserError(
            f"the weights in {file} are damaged ({damage}): remove the file and get it again"
        )
    if not isinstance(state, dict):
        raise UserError(
            f"{source} holds a {type(state).__name__}, no state dict: save model.state_dict()"
        )
    if inner := [str(name) for name, value in state.items() if isinstance(value, dict)]:
        raise UserError(
            f"{source} holds more than weights ({', '.join(inner)}): save model.state_dict() alone"
        )
    if any(str(name).startswith("module.") for name in state):
        raise UserError(f"{source} was saved from the DDP wrapper: save ddp.module.state_dict()")
    kept = {str(name): tensor for name, tensor in state.items() if not str(name).startswith("fc.")}
    try:
        missing = model.load_state_dict(kept, strict=False)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(
            f"the weights {source} do not fit a ResNet-18 with torchvision's stem: {reason}"
        ) from error
    lacks = [name for name in missing.missing_keys if not name.startswith("fc.")]
    if lacks or missing.unexpected_keys:
        odd = (lacks + missing.unexpected_keys)[0]
        raise UserError(
            f"the weights {source} are not a ResNet-18's: {odd} is {'missing' if lacks else 'too much'}"
        )


def downloaded(url: str) -> Path:
    """The file at `url`, among those that torch has downloaded. Raises OSError, HTTPException, and ValueError where it is no URL."""
    # Under a name of this URL's own: torch goes by the file's name alone, and many are a model.pth.
    name = f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{Path(urlsplit(url).path).name}"
    file = Path(torch.hub.get_dir()) / "checkpoints" / name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        print(f"ddp-trainer: downloading {url} to {file}", file=sys.stderr, flush=True)
        torch.hub.download_url_to_file(url, str(file))  # which appears when the download has ended
    return file


def fingerprint(model: nn.Module) -> str:
    """What tells the weights below the last layer from others, wherever they are from."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if not name.startswith("fc."):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:12]


def freeze_all_but_the_last_layer(model: ResNet) -> None:
    """Leave only `fc` to be trained. Below it BatchNorm's running statistics still follow the new images."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    nn.Module.requires_grad_(model.fc, True)
