"""Fine-tuning: a pretrained ResNet-18 learns to tell ants from bees from 244 photographs.

`--weights` may also be a URL, such as https://download.pytorch.org/models/resnet18-f37072fd.pth:

python -m ddp_trainer hymenoptera --data FOLDER --weights resnet18.pth
torchrun --standalone --nproc-per-node 2 -m ddp_trainer hymenoptera --data FOLDER --weights URL
"""

import hashlib
import sys
import zipfile
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ddp_trainer.checkpoint.file import find_damage
from ddp_trainer.cli.options import HymenopteraOptions
from ddp_trainer.data.sampler import Shard
from ddp_trainer.errors import UserError
from ddp_trainer.ranks.runtime import Runtime
from ddp_trainer.run.progress import Progress
from ddp_trainer.workloads.datasets import photographs
from ddp_trainer.workloads.shared.batches import Normaliser
from ddp_trainer.workloads.shared.classification import train_classifier
from ddp_trainer.workloads.shared.models import ResNet, resnet18
from ddp_trainer.workloads.shared.task import Task

# Of ImageNet, for each colour, because the pretrained weights usually come from there.
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)

# The learning rate is divided by ten after every EPOCHS_PER_RATE epochs.
EPOCHS_PER_RATE = 7


def train(options: HymenopteraOptions, runtime: Runtime) -> None:
    """Train, evaluate after every epoch, and report the last and the best accuracy.

    Raises UserError on wrong use, and Interrupted after a signal.
    """
    if options.frozen and not options.weights:
        message = "--frozen: pretrained weights are required; give them with --weights"
        raise UserError(message, is_common=True)
    progress = Progress(runtime, options.log_every)

    with progress.timed("setup"):
        train_set, test_set = runtime.run_on_all(lambda: photographs.load(options.data))
        model, weights_hash = pretrained_model(len(train_set.classes), options, runtime)
        if options.frozen:
            freeze_all_but_the_last_layer(model)
        # The optimizer of a frozen network has the last layer only.
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        fused = runtime.hardware.fused_optimizers
        optimizer = torch.optim.SGD(trained, lr=options.learning_rate, momentum=0.9, fused=fused)
        normalise = Normaliser(MEAN, DEVIATION, runtime.device)

    def fetch(shard: Shard) -> tuple[Tensor, Tensor]:
        crops = train_set.random_crops(shard, options.image_size, seed=options.seed)
        return normalise(crops), normalise.labels(train_set.labels[shard.indices])

    def fetch_test(indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        crops = test_set.center_crops(indices, options.image_size)
        return normalise(crops), normalise.labels(test_set.labels[indices])

    def tenth_every_seven_epochs(done: float) -> float:
        epoch = int(done * options.epochs)
        return 0.1 ** (epoch // EPOCHS_PER_RATE)

    task = Task(
        name="hymenoptera",
        samples=len(train_set),
        test_samples=len(test_set),
        image_shape=(3, options.image_size, options.image_size),
        fetch=fetch,
        fetch_test=fetch_test,
        model=model,
        optimizer=optimizer,
        learning_rate=options.learning_rate,
        schedule=tenth_every_seven_epochs,
        keep_best=True,
        identity={
            "frozen": str(options.frozen),
            "image_size": options.image_size,
            "weights": weights_hash,
        },
    )
    train_classifier(task, options, progress)


def pretrained_model(
    classes: int, options: HymenopteraOptions, runtime: Runtime
) -> tuple[ResNet, str]:
    """Return a ResNet-18 on the device, with --weights if given, and the hash of those weights."""
    model = resnet18(classes)
    weights_hash = "none"
    if options.weights:
        source = options.weights
        # The first process of a node downloads the file for the others.
        runtime.node_by_node(lambda: load_weights(model, source))
        weights_hash = fingerprint(model)
    return model.to(runtime.device), weights_hash


def freeze_all_but_the_last_layer(model: ResNet) -> None:
    """Leave only `fc` trainable. BatchNorm's running statistics still follow the new images."""
    for parameter in model.parameters():
        parameter.requires_grad = False
    nn.Module.requires_grad_(model.fc, True)


# --- Weights from elsewhere.


def load_weights(model: ResNet, source: str) -> None:
    """Load all layers but the last from a state dict in torchvision's format.

    `source` is a file or a URL. The last layer, `fc`, belongs to the classes of other data, so the
    new one of `model` stays. Raises UserError if the weights cannot be read or do not fit.
    """
    state = read_weights(source)
    check_is_state_dict(state, source)
    kept = {str(name): tensor for name, tensor in state.items() if not _is_last_layer(name)}
    try:
        found = model.load_state_dict(kept, strict=False)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(
            f"weights {source}: do not fit a ResNet-18 with torchvision's stem: {reason}"
        ) from error

    missing = [name for name in found.missing_keys if not _is_last_layer(name)]
    if missing:
        raise UserError(f"weights {source}: not those of a ResNet-18, {missing[0]} is missing")
    if found.unexpected_keys:
        name = found.unexpected_keys[0]
        raise UserError(f"weights {source}: not those of a ResNet-18, {name} is unexpected")


def read_weights(source: str) -> Any:
    """Return what torch.save wrote to the file or URL `source`.

    Raises UserError if it cannot be read or is damaged.
    """
    try:
        file = downloaded(source) if source.startswith(("https://", "http://")) else Path(source)
        # Only archives have checksums. Before PyTorch 1.6, torch.save wrote a plain pickle.
        damage = find_damage(file) if zipfile.is_zipfile(file) else None
        if not damage:
            return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, ValueError, HTTPException) as error:
        # ValueError: `source` is not a valid URL.
        raise UserError(f"weights {source}: cannot be read: {error}") from error
    except Exception as error:
        # The exceptions that pickle raises on damaged bytes are not documented.
        raise UserError(
            f"weights {file}: cannot be read ({error}); use a complete state dict from torch.save"
        ) from error
    raise UserError(f"weights {file}: damaged ({damage}); remove the file and get it again")


def check_is_state_dict(state: Any, source: str) -> None:
    """Raise UserError if `state` is something else than the state dict of a bare model."""
    if not isinstance(state, dict):
        kind = type(state).__name__
        raise UserError(
            f"weights {source}: expected a state dict, got a {kind}; save model.state_dict()"
        )
    inner = [str(name) for name, value in state.items() if isinstance(value, dict)]
    if inner:
        raise UserError(
            f"weights {source}: contain more than weights ({', '.join(inner)}); "
            "save only model.state_dict()"
        )
    if any(str(name).startswith("module.") for name in state):
        raise UserError(
            f"weights {source}: saved from the DDP wrapper; save ddp.module.state_dict()"
        )


def downloaded(url: str) -> Path:
    """Return the file of `url`, in torch's download folder. Download it if it is not there.

    Raises OSError or HTTPException if the download fails, and ValueError if `url` is not valid.
    """
    # torch names downloads after the file only, and many are called model.pth. The hash of the URL
    # keeps them apart.
    url_hash = hashlib.sha256(url.encode()).hexdigest()[:16]
    name = f"{url_hash}-{Path(urlsplit(url).path).name}"
    file = Path(torch.hub.get_dir()) / "checkpoints" / name
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        print(f"ddp-trainer: downloading {url} to {file}", file=sys.stderr, flush=True)
        # The file appears only after the download has finished.
        torch.hub.download_url_to_file(url, str(file))
    return file


def fingerprint(model: nn.Module) -> str:
    """Return a hash of the weights below the last layer, as a name for them in checkpoints."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if not _is_last_layer(name):
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:12]


def _is_last_layer(name: object) -> bool:
    return str(name).startswith("fc.")
