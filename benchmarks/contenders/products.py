"""The machine's own limit: how fast it multiplies matrices of this size: python products.py PRECISION SIZE"""

import sys

import torch
from serving import serve


def main(precision, size):
    size = int(size)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = torch.randn(2, size, size).to(dtype), torch.randn(2, size, size).to(dtype)  # the two critics' hidden layers
    out = torch.empty_like(a)

    def take_steps(n):
        for _ in range(n):
            torch.matmul(a, b, out=out)

    serve(take_steps, flop=2 * 2 * size**3)


main(*sys.argv[1:])
