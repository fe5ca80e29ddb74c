"""torchrun --nproc-per-node 2 examples/fifteen_lines/sequence_parallel.py examples/fifteen_lines/gpt2"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastfold.parallel import parallelize

torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
parallel = parallelize(model, {"sp": 2}, sequence="auto")
optimizer = parallel.optimizer(lambda named: torch.optim.AdamW(named.values(), lr=1e-2, eps=1e-6))
own, labels = (parallel.sequence.shard(torch.arange(i, 64 + i).view(4, 16)) for i in (0, 1))
for step in range(3):
    loss = parallel(input_ids=own, labels=labels, shift_labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
