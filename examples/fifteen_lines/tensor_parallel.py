"""torchrun --nproc-per-node 2 examples/fifteen_lines/tensor_parallel.py examples/fifteen_lines/gpt2"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastfold.parallel import parallelize

torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
parallel = parallelize(model, {"tp": 2}, layers="auto")
optimizer = parallel.optimizer(lambda named: torch.optim.AdamW(named.values(), lr=1e-2, eps=1e-6))
tokens = torch.arange(64).view(4, 16)  # the same samples on both processes
for step in range(3):
    loss = parallel(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
