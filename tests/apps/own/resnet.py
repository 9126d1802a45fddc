"""torchvision's ResNet-18, with batch norm, on images of CIFAR-10."""

from torchvision.models import resnet18

from tests.apps.data import cifar_pairs as load_data

__all__ = ["Net", "load_data"]


def Net():
    return resnet18(num_classes=10)
