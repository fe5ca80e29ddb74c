"""torchrun --nproc-per-node 2 examples/fifteen_lines/pipeline.py examples/fifteen_lines/gpt2"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastfold.parallel import Pipeline, parallelize

torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
pipeline = Pipeline(parallelize(model, {"pp": 2}, stages="auto"))
optimizer = pipeline.parallel.optimizer(lambda named: torch.optim.AdamW(named.values(), lr=1e-2, eps=1e-6))
parts = torch.arange(64).view(4, 16).chunk(2)  # microbatches
for step in range(3):
    losses = pipeline.step([(x,) for x in parts], lambda out, _: out[0] / 2, [{"labels": x} for x in parts])
    pipeline.parallel.reduce_gradients()
    optimizer.step()
    optimizer.zero_grad()
    print(step, sum(x.item() for x in losses))  # losses are on the last stage's process
