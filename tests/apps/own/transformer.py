"""A small Transformer on digits."""

import torch
from torch import nn

from tests.apps.data import digit_rows as load_data

__all__ = ["Net", "load_data"]


class Net(nn.Module):
    """A digit is a sentence of eight words, its rows of eight pixels."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.place = nn.Parameter(0.02 * torch.randn(8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, rows):
        return self.head(self.encoder(self.embed(rows) + self.place).mean(1))
