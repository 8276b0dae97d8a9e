"""A script that `compare` trains in one process: it defines make()."""

SCRIPT = """
import random, sys
import torch
from torch import nn

WIDTH = int(sys.argv[1]) if len(sys.argv) > 1 else 4

def make():
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
    shift = random.random()

    def loss():
        x = torch.randn(8, WIDTH, dtype=next(model.parameters()).dtype)
        return (model(x).float() - x.float().sum(1, keepdim=True) - shift).square().mean()

    return model, optimizer, loss, scheduler
"""
