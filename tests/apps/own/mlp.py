"""A small network on digits."""

from torch import nn

from tests.apps.data import digit_rows as load_data

__all__ = ["Net", "load_data"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, rows):
        return self.layers(rows)
