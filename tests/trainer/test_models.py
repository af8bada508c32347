"""The networks: names, shapes and numbers of their parameters."""

import pytest
import torch

from ddp_trainer.workloads.shared.models import (
    DigitsNet,
    MnistNet,
    ToyModel,
    parameter_count,
    resnet18,
    resnet50,
)


def norm(name, channels):
    entries = {
        f"{name}.{entry}": (channels,)
        for entry in ("weight", "bias", "running_mean", "running_var")
    }
    return entries | {f"{name}.num_batches_tracked": ()}


def torchvision_resnet18(stem=7, classes=1000):
    """Return the keys and shapes of torchvision's `resnet18().state_dict()`, from its rule."""
    expected = {"conv1.weight": (64, 3, stem, stem)} | norm("bn1", 64)
    before = 64
    for layer, channels in enumerate((64, 128, 256, 512), start=1):
        for block, channels_in in enumerate((before, channels)):
            at = f"layer{layer}.{block}"
            expected |= {f"{at}.conv1.weight": (channels, channels_in, 3, 3)}
            expected |= norm(f"{at}.bn1", channels)
            expected |= {f"{at}.conv2.weight": (channels, channels, 3, 3)}
            expected |= norm(f"{at}.bn2", channels)
            if channels_in != channels:
                expected |= {f"{at}.downsample.0.weight": (channels, channels_in, 1, 1)}
                expected |= norm(f"{at}.downsample.1", channels)
        before = channels
    return expected | {"fc.weight": (classes, 512), "fc.bias": (classes,)}


def shapes(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_resnet18_has_the_keys_and_shapes_of_torchvision():
    model = resnet18(classes=1000, stem="torchvision")
    assert len(model.state_dict()) == 122
    assert list(model.state_dict()) == list(torchvision_resnet18())
    assert shapes(model) == torchvision_resnet18()
    assert parameter_count(model) == 11_689_512  # from torchvision's documentation


def test_the_3x3_stem_changes_only_the_first_convolution():
    assert shapes(resnet18(classes=10, stem="3x3")) == torchvision_resnet18(stem=3, classes=10)
    assert parameter_count(resnet18(classes=10, stem="3x3")) == 11_173_962


@pytest.mark.parametrize(("stem", "side"), [("torchvision", 1), ("3x3", 4)])
def test_the_stem_decides_how_far_resnet18_reduces_32_pixels(stem, side):
    model = resnet18(stem=stem).eval()
    seen = []
    model.layer4.register_forward_hook(
        lambda module, inputs, output: seen.append(tuple(output.shape))
    )
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert seen == [(2, 512, side, side)]


def test_the_toy_has_layers_10_10_5():
    assert shapes(ToyModel()) == {
        "net1.weight": (10, 10),
        "net1.bias": (10,),
        "net2.weight": (5, 10),
        "net2.bias": (5,),
    }
    assert ToyModel()(torch.zeros(3, 10)).shape == (3, 5)


def test_the_digits_net_documents_its_number_of_parameters():
    assert f"{parameter_count(DigitsNet()):,} parameters" in DigitsNet.__doc__
    assert DigitsNet()(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_resnet50_has_the_keys_and_the_stride_of_torchvision():
    model = resnet50(classes=1000)
    keys = list(model.state_dict())
    assert len(keys) == 320
    assert parameter_count(model) == 25_557_032  # from torchvision's documentation
    assert [key for key in keys if key.startswith("layer2.0.") and key.endswith("weight")] == [
        f"layer2.0.{part}.weight"
        for part in ["conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "downsample.0", "downsample.1"]
    ]
    # In the original paper the stride is in the 1x1 convolution before it.
    assert model.layer2[0].conv2.stride == (2, 2)


def test_the_mnist_net_has_two_batch_norms_and_21900_parameters():
    model = MnistNet()
    assert parameter_count(model) == 21_900
    norms = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.BatchNorm2d)
    ]
    assert norms == ["bn1", "bn2"]
    assert model.eval()(torch.zeros(3, 1, 28, 28)).shape == (3, 10)
