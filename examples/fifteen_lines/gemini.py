"""torchrun --nproc-per-node 2 examples/fifteen_lines/gemini.py examples/fifteen_lines/gpt2"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastfold import Gemini

torch.distributed.init_process_group("gloo")  # "nccl" on GPUs
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
manager = Gemini(model, optimizer, budget="1MiB", group=torch.distributed.group.WORLD)
tokens = torch.arange(64).view(4, 16)[torch.distributed.get_rank() :: 2]
for _ in range(3):
    with manager.device.running():  # counts memory of a simulated device; a GPU needs no such line
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    manager.step()
    manager.zero_grad()
